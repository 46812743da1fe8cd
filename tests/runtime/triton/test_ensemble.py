"""The tensors of the ensemble, without Triton: requests as TensorRT-LLM's scripts send them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pensieve.runtime.frontend.engine_client import OutputStream
from pensieve.runtime.frontend.reply import Reply
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.runtime.triton.ensemble import UNSERVED, EnsembleTensors
from pensieve.runtime.triton.tensors import NewPiece
from pensieve.scheduler.types import (
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RequestId,
    RowResult,
    TokenLogprobs,
    Usage,
)

from ..fake_loop import byte_tokenizer, byte_tokens

TENSORS = EnsembleTensors(chunk_tokens=4)
DTYPES = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}
CLIENT = dict(
    text_input=b"hello",
    max_tokens=9,
    stream=False,
    beam_width=1,
    temperature=1.0,
    exclude_input_in_output=False,
)
"""What the client script sends without options."""


def read(**inputs):
    return TENSORS.read(
        {
            name: np.array(value if isinstance(value, list) else [value]).astype(
                DTYPES[TENSORS.INPUTS[name].type]
            )
            for name, value in inputs.items()
        },
        "",
    )


def test_the_client_script_gets_a_greedy_reply_after_its_prompt():
    body = read(**CLIENT)
    assert (body.prompt, body.max_tokens, body.temperature) == ("hello", 9, 0.0)
    assert body.after_prompt and not body.stream and not body.ignore_eos


def test_every_input_reaches_its_field():
    body = read(
        **CLIENT
        | dict(
            stream=True,
            min_tokens=2,
            stop_words=[b"a", b"b"],
            bad_words=[b"c"],
            end_id=7,
            pad_id=2,
            temperature=0.5,
            top_k=3,
            top_p=0.75,
            length_penalty=0.0,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            seed=2**40,
            return_log_probs=True,
            return_perf_metrics=True,
            conversation_id=b"mine",
            history=b"server",
        )
    )
    assert (body.min_tokens, body.stop, body.bad_words) == (2, ["a", "b"], ["c"])
    assert (body.stop_token_ids, body.ignore_eos, body.seed) == ([7], True, 2**40)
    assert (body.temperature, body.top_k, body.top_p) == (0.5, 3, 0.75)
    penalties = (body.repetition_penalty, body.presence_penalty, body.frequency_penalty)
    assert penalties == (1.5, 0.25, -0.5)
    assert (body.logprobs, body.return_perf_metrics) == (0, True)
    assert (body.conversation_id, body.server_history) == ("mine", True)
    assert not body.after_prompt  # of a streamed reply the prompt is never a part


def test_names_of_older_releases():
    body = read(**CLIENT, min_length=3, random_seed=5)
    assert (body.min_tokens, body.seed) == (3, 5)


def test_empty_words_ask_for_nothing():
    body = read(text_input=b"hello", max_tokens=20, bad_words=b"", stop_words=b"")
    assert (body.stop, body.bad_words) == ([], [])


@pytest.mark.parametrize(
    ("inputs", "sampling"),
    [
        ({}, (0.0, None, None)),
        ({"temperature": 0.5}, (0.0, None, None)),
        ({"top_k": 0, "top_p": 0.0}, (0.0, None, None)),
        ({"top_k": 5}, (1.0, 5, None)),
        ({"top_p": 0.5, "temperature": 0.75}, (0.75, None, 0.5)),
    ],
)
def test_without_top_k_and_top_p_a_reply_is_greedy(inputs, sampling):
    body = read(text_input=b"hello", **inputs)
    assert (body.temperature, body.top_k, body.top_p) == sampling


def test_no_end_id_but_a_negative_one_ends_nothing():
    body = read(**CLIENT, end_id=-1)
    assert (body.ignore_eos, body.stop_token_ids) == (True, [])


@pytest.mark.parametrize(
    ("kind", "guide", "form"),
    [
        (b"json", None, ("response_format", None)),
        (b"json_schema", b'{"type": "object"}', ("guided_json", '{"type": "object"}')),
        (b"regex", b"a+", ("guided_regex", "a+")),
        (b"ebnf_grammar", b'root ::= "a"', ("guided_grammar", 'root ::= "a"')),
    ],
)
def test_a_guide_is_the_reply_s_form(kind, guide, form):
    guides = {} if guide is None else {"guided_decoding_guide": guide}
    body = read(**CLIENT, guided_decoding_guide_type=kind, **guides)
    field, value = form
    assert body.generate().form is not None
    assert value is None or getattr(body, field) == value


WANTED = {"STRING": b"x", "BOOL": True, "INT32": 2, "UINT64": 2, "FP16": 1.0, "FP32": 1.0}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_cannot_be_served_is_refused_by_name(name):
    with pytest.raises(RequestError, match=name) as caught:
        read(text_input=b"hello", **{name: WANTED[TENSORS.INPUTS[name].type]})
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        ({"max_tokens": 3}, "text_input"),
        ({"text_input": b"x", "guided_decoding_guide_type": b"regex"}, "guided_decoding_guide"),
        ({"text_input": b"x", "guided_decoding_guide": b"a"}, "guided_decoding_guide_type"),
    ],
)
def test_wrong_requests_are_refused(inputs, name):
    with pytest.raises(RequestError, match=name):
        read(**inputs)


class Call:
    arrived = 0.0


def reply_of(tokens):
    """A reply of these tokens, ended by the engine, to a prompt of 9 tokens of which 8 had KV."""
    request = Request(RequestId(1), [5] * 9, 8)
    stream = OutputStream(SimpleNamespace(finish=lambda request, tokens: None), [request])
    reply = Reply(request, stream, Tokenizer(byte_tokenizer()), continues_prompt=True)
    logprobs = tuple(TokenLogprobs(-0.5 * number, 1, ()) for number in range(len(tokens)))
    reply.add(
        RowResult(
            request.id,
            tuple(tokens),
            FinishReason.LENGTH,
            usage=Usage(gpu=8, new=1),
            logprobs=logprobs,
        )
    )
    return reply


def test_a_response_has_the_shapes_that_the_client_script_reads():
    everything = dict(
        return_log_probs=True,
        return_perf_metrics=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    reply = reply_of(byte_tokens("abcd"))
    piece = NewPiece("abcd", reply.tokens, 1.0)
    tensors = TENSORS.response(read(**CLIENT, **everything), Call, reply, piece)
    assert tensors.keys() == TENSORS.OUTPUTS.keys()
    assert tensors.pop("text_output").tolist() == [b"helloabcd"]
    logprobs = tensors.pop("output_log_probs")
    assert logprobs.shape == (1, 1, 4) and logprobs.sum() == tensors["cum_log_probs"][0][0] == -3.0
    assert {value.shape for value in tensors.values()} == {(1, 1)}
    assert tensors["num_input_tokens"][0][0] == 9 and tensors["num_output_tokens"][0][0] == 4
    blocks = [
        tensors[f"kv_cache_{name}_blocks"][0][0] for name in ("reused", "alloc_new", "alloc_total")
    ]
    assert blocks == [2, 1, 3]


def test_a_streamed_piece_has_its_own_log_probabilities():
    reply = reply_of(byte_tokens("abcd"))
    body = read(**CLIENT | {"stream": True, "return_log_probs": True})
    tensors = TENSORS.response(body, Call, reply, NewPiece("d", reply.tokens[-1:], 1.0))
    assert tensors["text_output"].tolist() == [b"d"]
    assert tensors["output_log_probs"].tolist() == [[[-1.5]]]


def test_a_bare_request_gets_the_text_and_its_place():
    body = read(**CLIENT | {"exclude_input_in_output": True})
    tensors = TENSORS.response(body, Call, reply_of(byte_tokens("a")), NewPiece("a", (1,), 1.0))
    assert tensors.keys() == {"text_output", "batch_index", "sequence_index"}
    assert tensors["text_output"].tolist() == [b"a"]
