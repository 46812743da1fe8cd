"""From Triton's tensors to a completion's body, without Triton."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pensieve.runtime.frontend.engine_client import OutputStream
from pensieve.runtime.frontend.reply import Reply
from pensieve.runtime.text.tokenizer import StopMatcher, Tokenizer
from pensieve.runtime.triton.llmapi import LlmapiTensors
from pensieve.runtime.triton.tensors import NewPiece
from pensieve.scheduler.types import (
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RequestId,
    RowResult,
    Usage,
)

from ..fake_loop import byte_tokenizer, byte_tokens

EOS = 2
TENSORS = LlmapiTensors(chunk_tokens=4)


def tensor(name, *values):
    kinds = {
        "STRING": np.object_,
        "BOOL": np.bool_,
        "INT32": np.int32,
        "UINT64": np.uint64,
        "FP32": np.float32,
    }
    return np.array(values, dtype=kinds[TENSORS.INPUTS[name].type])


def request_body(sequence="", **inputs):
    values = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return TENSORS.read({name: tensor(name, *value) for name, value in values.items()}, sequence)


def test_every_input_reaches_its_field():
    body = request_body(
        input_ids=[3, 1, 2],
        conversation_id=b"mine",
        history=b"server",
        streaming=True,
        sampling_param_best_of=1,
        sampling_param_temperature=0.5,
        sampling_param_top_k=7,
        sampling_param_top_p=0.75,
        sampling_param_min_p=0.125,
        sampling_param_frequency_penalty=0.25,
        sampling_param_presence_penalty=-0.5,
        sampling_param_repetition_penalty=1.5,
        sampling_param_max_tokens=9,
        sampling_param_min_tokens=2,
        sampling_param_stop=["ä".encode(), b"b"],
        sampling_param_bad_words=[b"c", b"d"],
        sampling_param_stop_token_ids=[5, 6],
        sampling_param_ignore_eos=True,
        sampling_param_seed=2**40,
    )
    assert (body.prompt, body.conversation_id, body.server_history, body.stream) == (
        [3, 1, 2],
        "mine",
        True,
        True,
    )
    assert (body.temperature, body.top_k, body.top_p, body.min_p) == (0.5, 7, 0.75, 0.125)
    assert (body.frequency_penalty, body.presence_penalty, body.repetition_penalty) == (
        0.25,
        -0.5,
        1.5,
    )
    assert (body.max_tokens, body.min_tokens, body.seed, body.ignore_eos) == (9, 2, 2**40, True)
    assert (body.stop, body.stop_token_ids) == (["ä", "b"], [5, 6])
    assert body.bad_words == ["c", "d"]


def test_a_bare_prompt_asks_for_nothing_else():
    request = request_body(text_input=b"hello")
    assert (request.prompt, request.stream, request.echo, request.logprobs) == (
        "hello", False, False, None
    )  # fmt: skip
    assert not (
        request.return_finish_reason
        or request.return_stop_reason
        or request.return_cumulative_logprob
        or request.return_perf_metrics
    )


def test_what_is_to_be_said_of_the_reply():
    request = request_body(
        text_input=b"hello",
        sampling_param_exclude_input_from_output=False,
        sampling_param_return_perf_metrics=True,
        return_finish_reason=True,
        return_stop_reason=True,
        return_cumulative_logprob=True,
    )
    assert (request.echo, request.logprobs) == (True, 0)
    assert (
        request.return_finish_reason
        and request.return_stop_reason
        and request.return_cumulative_logprob
        and request.return_perf_metrics
    )


@pytest.mark.parametrize(
    ("inputs", "conversation"),
    [({}, "7"), ({"conversation_id": b"mine"}, "mine")],
    ids=["sequence", "both"],
)
def test_a_sequence_names_the_conversation_unless_its_id_does(inputs, conversation):
    assert request_body("7", text_input=b"hello", **inputs).conversation_id == conversation


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ({}, "text_input"),
        ({"text_input": b"hello", "input_ids": [1]}, "input_ids"),
        ({"text_input": b"\xff"}, "text_input"),
        ({"text_input": b"hello", "history": b"elsewhere"}, "history"),
        ({"text_input": b"hello", "history": b"server"}, "history"),
        ({"text_input": b"hello", "sampling_param_best_of": 2}, "best_of"),
        ({"text_input": b"hello", "sampling_param_stop": [b""]}, "stop"),
    ],
)
def test_what_cannot_be_asked_is_refused(inputs, param):
    with pytest.raises(RequestError) as caught:
        request_body(**inputs)
    assert (caught.value.kind, caught.value.subject) == (ErrorKind.INVALID, param)


def test_one_value_or_several():
    assert TENSORS.value("stop", tensor("stop", True)) is True
    assert TENSORS.value("sampling_param_stop", tensor("sampling_param_stop", b"a")) == ["a"]


class Call:
    arrived = 0.0


def told(inputs, tokens, finish):
    """The last response's stop and finish reasons for a reply of these tokens, ended by the engine,
    to a prompt of 9 tokens."""
    wanted = request_body(
        text_input=b"x", return_stop_reason=True, return_finish_reason=True, **inputs
    )
    stops = wanted.stop
    ids = frozenset([EOS, *wanted.stop_token_ids])
    request = Request(RequestId(1), [5] * 9, 8, stop_ids=ids, confirm=bool(stops))
    stream = OutputStream(SimpleNamespace(finish=lambda request, tokens: None), [request])
    matcher = StopMatcher(stops) if stops else None
    reply = Reply(
        request,
        stream,
        Tokenizer(byte_tokenizer()),
        matcher,
        continues_prompt=True,
        stop_token_ids=wanted.stop_token_ids,
    )
    reply.add(RowResult(request.id, tuple(tokens), finish, usage=Usage(gpu=8, new=1)))
    tensors = TENSORS.response(wanted, Call, reply, NewPiece("", (), 1.0))
    assert all(value.ndim == 1 and name in TENSORS.OUTPUTS for name, value in tensors.items())
    del tensors["output_ids"]
    return {name: value.item() for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("inputs", "tokens", "finish", "reason"),
    [
        ({"sampling_param_stop": [b"c", b"ab"]}, byte_tokens("xab"), FinishReason.LENGTH, b"ab"),
        ({"sampling_param_stop_token_ids": [7, 9]}, [6, 9], FinishReason.STOP, b"9"),
        ({"sampling_param_stop_token_ids": [7, 9]}, [6, EOS], FinishReason.STOP, None),
        ({"sampling_param_stop_token_ids": [9]}, [9, 6], FinishReason.LENGTH, None),
        ({"sampling_param_stop": [b"c"]}, byte_tokens("xab"), FinishReason.LENGTH, None),
    ],
    ids=["string", "token", "end of sequence", "length", "no match"],
)
def test_the_stop_reason_is_the_request_s_own_stop(inputs, tokens, finish, reason):
    end = told(inputs, tokens, finish)
    assert end.get("stop_reason") == reason
    assert end["finish_reason"] == (
        b"length" if finish is FinishReason.LENGTH and reason is None else b"stop"
    )


def test_blocks_are_chunks():
    """9 tokens, 8 of which were there, and 4 more, of which the last one has no KV: 2 chunks of 4
    reused, 3 in all."""
    end = told({"sampling_param_return_perf_metrics": True}, [6, 6, 6, 6], FinishReason.LENGTH)
    blocks = {
        name.removeprefix("kv_cache_"): end[name]
        for name in end
        if name.endswith(("block", "blocks"))
    }
    assert blocks == {
        "reused_block": 2,
        "missed_block": 1,
        "alloc_new_blocks": 1,
        "alloc_total_blocks": 3,
    }
