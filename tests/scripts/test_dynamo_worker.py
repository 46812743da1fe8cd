"""Dynamo's requests and replies, without Dynamo: tests/end_to_end/test_dynamo.py has it."""

from __future__ import annotations

import asyncio
import json

import pytest

from pensieve.scripts.dynamo_worker import completion, reply_chunks, until

SAMPLING = {"n": None, "temperature": 0.0, "top_p": None, "guided_decoding": None}
STOPS = {"max_tokens": 24, "stop": ["tea"], "stop_token_ids_hidden": [2, 0], "ignore_eos": None}


def request(sampling=None, stops=None, **further):
    return {
        "model": "demo",
        "token_ids": [1, 5, 9],
        "sampling_options": SAMPLING | (sampling or {}),
        "stop_conditions": STOPS | (stops or {}),
        "output_options": {"logprobs": None, "skip_special_tokens": True},
        **further,
    }


def test_a_request_becomes_a_completion():
    body = completed(request({"seed": 0, "n": 1}, agent_context={"session_id": "s"}))
    assert body == {
        "model": "demo",
        "prompt": [1, 5, 9],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": 24,
        "session_id": "s",
    }


def test_a_grammar_is_passed_on():
    body = completed(request({"guided_decoding": {"choice": ["yes", "no"], "backend": None}}))
    assert body["structured_outputs"] == {"choice": ["yes", "no"]}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (dict(sampling={"n": 2}), "n"),
        (dict(sampling={"use_beam_search": True}), "use_beam_search"),
        (dict(stops={"max_thinking_tokens": 5}), "max_thinking_tokens"),
        (dict(output_options={"logprobs": 0}), "logprobs"),
        (dict(multi_modal_data={"image_url": ["x"]}), "multi_modal_data"),
        (dict(sampling={"guided_decoding": {"structural_tag": {}}}), "structural_tag"),
    ],
)
def test_what_cannot_be_passed_on_is_refused(changed, name):
    with pytest.raises(ValueError, match=f"cannot pass on {name}"):
        completed(request(**changed))


def completed(body):
    return completion(body, 4096)


def test_a_reply_without_a_limit_may_fill_the_context():
    assert completed(request(stops={"max_tokens": None}))["max_tokens"] == 4096


@pytest.mark.parametrize(
    "further",
    [{"routing": {"cache_salt": "a"}}, {"extra_args": {"nvext": {"cache_salt": "a"}}}],
)
def test_the_salt_is_passed_on(further):
    assert completed(request(**further))["cache_salt"] == "a"


def event(tokens, reason=None):
    choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": tokens}
    return {"choices": [choice], "usage": None}


def lines(*events):
    return [b"data: " + json.dumps(event).encode() + b"\n" for event in events]


def chunks(*events, stop_after=None):
    async def collect():
        stopped = asyncio.get_running_loop().create_future()

        async def stream():
            for number, line in enumerate(lines(*events)):
                if number == stop_after:
                    stopped.set_result(True)
                    await asyncio.Event().wait()
                yield line
                yield b"\n"
            yield b"data: [DONE]\n"

        return [chunk async for chunk in reply_chunks(until(stopped, stream()))]

    return asyncio.run(collect())


def test_the_usage_comes_with_the_reason_of_the_end():
    usage = {"prompt_tokens": 3, "completion_tokens": 3}
    reply = chunks(event([]), event([7]), event([8, 9], "length"), {"choices": [], "usage": usage})
    end = {"token_ids": [8, 9], "finish_reason": "length", "completion_usage": usage}
    assert reply == [{"token_ids": [7]}, end]


def test_a_stopped_request_ends():
    assert chunks(event([7]), event([8]), stop_after=1) == [{"token_ids": [7]}]


def test_an_error_in_the_stream_fails_the_request():
    with pytest.raises(RuntimeError, match="no room"):
        chunks(event([7]), {"error": {"message": "no room"}})
