"""From Triton's tensors to a completion's body, without Triton."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.runtime.triton_tensors import INPUTS, read_inputs, read_value
from pensieve.scheduler.types import RequestError


def tensor(name, *values):
    kinds = {"STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    return np.array(values, dtype=kinds[INPUTS[name].type])


def asked(sequence="", **inputs):
    values = {name: value if isinstance(value, list) else [value] for name, value in inputs.items()}
    return read_inputs({name: tensor(name, *value) for name, value in values.items()}, sequence)


def test_every_input_reaches_its_field():
    body = asked(
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
        sampling_param_stop_token_ids=[5, 6],
        sampling_param_ignore_eos=True,
        sampling_param_seed=2**40,
    ).body
    assert (body.prompt, body.conversation_id, body.server_history, body.stream) == ([3, 1, 2], "mine", True, True)
    assert (body.temperature, body.top_k, body.top_p, body.min_p) == (0.5, 7, 0.75, 0.125)
    assert (body.frequency_penalty, body.presence_penalty, body.repetition_penalty) == (0.25, -0.5, 1.5)
    assert (body.max_tokens, body.min_tokens, body.seed, body.ignore_eos) == (9, 2, 2**40, True)
    assert (body.stop, body.stop_token_ids) == (["ä", "b"], [5, 6])


def test_a_bare_prompt_asks_for_nothing_else():
    request = asked(text_input=b"hello")
    assert (request.body.prompt, request.body.stream, request.body.echo, request.body.logprobs) == (
        "hello", False, False, None
    )  # fmt: skip
    assert not (request.finish_reason or request.cumulative_logprob or request.perf_metrics)


def test_what_is_to_be_said_of_the_reply():
    request = asked(
        text_input=b"hello",
        sampling_param_exclude_input_from_output=False,
        sampling_param_return_perf_metrics=True,
        return_finish_reason=True,
        return_cumulative_logprob=True,
    )
    assert (request.body.echo, request.body.logprobs) == (True, 0)
    assert request.finish_reason and request.cumulative_logprob and request.perf_metrics


@pytest.mark.parametrize(
    ("inputs", "conversation"), [({}, "7"), ({"conversation_id": b"mine"}, "mine")], ids=["sequence", "both"]
)
def test_a_sequence_names_the_conversation_unless_its_id_does(inputs, conversation):
    assert asked("7", text_input=b"hello", **inputs).body.conversation_id == conversation


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
        asked(**inputs)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_one_value_or_several():
    assert read_value("stop", tensor("stop", True)) is True
    assert read_value("sampling_param_stop", tensor("sampling_param_stop", b"a")) == ["a"]
