"""The HTTP process against a loop played by hand: OpenAI's forms, bad input, streams, hang-ups, the
engine's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend import request_builder as calls
from pensieve.runtime.frontend.bodies import ChatBody, parse
from pensieve.runtime.frontend.chat_messages import Message
from pensieve.runtime.messages import Abort, Finish, Submit
from pensieve.scheduler.types import FinishReason, Request, RowResult

from ..fake_loop import EOS, FakeLoop, byte_tokens, eventually, say

Work = Callable[[httpx.AsyncClient], Awaitable[Any]]


def post(path: str, body: dict[str, Any]) -> Work:
    return lambda http: http.post(path, json=body)


def complete(**body: Any) -> Work:
    return post("/v1/completions", body)


def chat(*contents: str, **body: Any) -> Work:
    messages = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return post("/v1/chat/completions", {"messages": messages, **body})


def events(response: httpx.Response) -> list[Any]:
    """The JSON objects of a stream, whose end is checked."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(chunks: list[Any]) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


# Whole answers


def test_completion_of_text(ask: Callable[..., Any]) -> None:
    answer = ask(complete(prompt="héllo", max_tokens=50, model="fake")).json()
    assert (
        answer["id"].startswith("cmpl-")
        and answer["object"] == "text_completion"
        and answer["model"] == "fake"
    )
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "héllo",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 7,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_completion_of_token_ids_returns_token_ids(ask: Callable[..., Any]) -> None:
    prompt = byte_tokens("abc")
    (choice,) = ask(complete(prompt=prompt, return_token_ids=True)).json()["choices"]
    assert choice["text"] == "abc"
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == [*prompt, EOS]  # the end belongs to the ids, not to the text


def test_default_length_is_openais_and_no_more_than_the_context_leaves(
    ask: Callable[..., Any],
) -> None:
    answer = ask(complete(prompt=[5] * 30)).json()
    assert (
        answer["usage"]["completion_tokens"] == 16
        and answer["choices"][0]["finish_reason"] == "length"
    )
    assert ask(complete(prompt=[5] * 250)).json()["usage"]["completion_tokens"] == 6
    assert ask(chat("x"), FakeLoop(say("y" * 1000))).json()["usage"]["total_tokens"] == 256


def test_several_prompts(ask: Callable[..., Any]) -> None:
    answer = ask(complete(prompt=["one", "three"])).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "one"),
        (1, "three"),
    ]
    assert answer["usage"]["completion_tokens"] == 10
    answer = ask(complete(prompt=[byte_tokens("one"), byte_tokens("three")], stream=True))
    texts = {0: "", 1: ""}
    for chunk in events(answer):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "one", 1: "three"}


def test_chat(ask: Callable[..., Any]) -> None:
    answer = ask(chat("hi", return_token_ids=True), FakeLoop(say("well"))).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["prompt_token_ids"] == [1, *byte_tokens("user: hi\nassistant: ")]
    (choice,) = answer["choices"]
    message = {"role": "assistant", "content": "well", "refusal": None, "annotations": []}
    assert choice["message"] == message and choice["finish_reason"] == "stop"
    assert choice["token_ids"] == [*byte_tokens("well"), EOS]


def test_message_content_in_parts_and_a_reply_sent_back_as_it_came(ask: Callable[..., Any]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    reply = {
        "role": "assistant",
        "content": "c",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
    }
    messages = [{"role": "user", "content": parts}, reply]
    loop = FakeLoop()
    assert ask(
        post("/v1/chat/completions", {"messages": messages, "return_token_ids": True}), loop
    ).is_success
    ((request,),) = loop.messages(Submit)
    assert request.prompt.tolist() == [1, *byte_tokens("user: a\nb\nassistant: c\nassistant: ")]


def test_an_engine_without_a_tokenizer_completes_token_ids(ask: Callable[..., Any]) -> None:
    answer = ask(complete(prompt=[7, 8], return_token_ids=True), directory=None).json()
    assert answer["choices"][0]["token_ids"] == [7, 8, EOS] and answer["choices"][0]["text"] == ""
    for work in (complete(prompt="x"), chat("x"), complete(prompt=[7], stop="x")):
        assert "no tokenizer" in ask(work, directory=None).json()["error"]["message"]


def test_what_is_asked_for_reaches_the_loop(ask: Callable[..., Any]) -> None:
    loop = FakeLoop()
    body = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "seed": 7,
        "min_tokens": 2,
        "max_tokens": 9,
    }
    ask(complete(prompt=[9], **body, stop_token_ids=[5], conversation={"id": "c"}), loop)
    ((request,),) = loop.messages(Submit)
    assert (request.max_tokens, request.min_tokens, request.conversation) == (9, 2, "c")
    assert request.stop_ids == {5, EOS} and not request.confirm
    assert (request.sampling.temperature, request.sampling.top_k) == (0, 0)
    assert (request.sampling.top_p, request.sampling.seed) == (0.5, 7)


def test_defaults_are_openais_and_seeds_differ(ask: Callable[..., Any]) -> None:
    async def twice(http: httpx.AsyncClient) -> None:
        for name in ("c", {"id": "c"}):
            body = {"prompt": [9], "ignore_eos": True, "user": "me", "n": 1, "conversation": name}
            await http.post("/v1/completions", json=body)

    loop = FakeLoop()
    ask(twice, loop)
    (first,), (second,) = loop.messages(Submit)
    assert (
        first.sampling.temperature == first.sampling.top_p == 1.0 and first.stop_ids == frozenset()
    )
    assert first.conversation == second.conversation == "c"
    assert first.sampling.seed != second.sampling.seed and first.id != second.id


def test_prompts_of_one_call_have_seeds_of_their_own_unless_one_is_asked_for(
    ask: Callable[..., Any],
) -> None:
    for seed, count in ((None, 2), (-5, 1)):
        loop = FakeLoop()
        ask(complete(prompt=["x", "x"], seed=seed), loop)
        seeds = {request.sampling.seed for (request,) in loop.messages(Submit)}
        assert len(seeds) == count and all(0 <= own < 2**63 for own in seeds)


# Stops


def stop_after(request: Request) -> list[int]:
    return byte_tokens("one END two END")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_reply_and_its_length_is_confirmed(
    ask: Callable[..., Any], stream: bool, include: bool
) -> None:
    loop = FakeLoop(stop_after, step_seconds=0.001)
    body = {"stop": ["END", "nothing"], "include_stop_str_in_output": include, "max_tokens": 99}
    response = ask(complete(prompt="x", stream=stream, return_token_ids=True, **body), loop)
    chunks = events(response) if stream else [response.json()]
    assert joined(chunks) == ("one END" if include else "one ")
    ids = [
        token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]
    ]
    assert ids == byte_tokens("one END")  # the log holds exactly these
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (
        loop.messages(Finish, 1)
        and list(loop.confirmed.values()) == [7]
        and not loop.messages(Abort)
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "make", [partial(complete, prompt="x"), partial(chat, "x")], ids=["completion", "chat"]
)
def test_the_reason_for_the_stop_is_said_as_in_vllm(
    ask: Callable[..., Any], make: Any, stream: bool
) -> None:
    end = byte_tokens("!")[0]
    for stop, reason in (
        ({"stop": ["no", "ey"]}, "ey"),
        ({"stop": ["no"], "stop_token_ids": [7, end]}, end),
        ({"stop": ["no"], "stop_token_ids": [7]}, None),  # the end of the sequence
        ({"stop_token_ids": [end], "max_tokens": 2}, None),
    ):
        response = ask(make(**{"max_tokens": 50} | stop, stream=stream), FakeLoop(say("hey!you")))
        *others, last = [
            chunk["choices"][0] for chunk in (events(response) if stream else [response.json()])
        ]
        assert last["stop_reason"] == reason and not any(
            "stop_reason" in choice for choice in others
        )
        assert last["finish_reason"] == ("length" if stop.get("max_tokens") else "stop")


def test_the_length_is_confirmed_where_nothing_matched(ask: Callable[..., Any]) -> None:
    loop = FakeLoop()
    answer = ask(complete(prompt="abE", stop="END"), loop).json()
    assert answer["choices"][0]["text"] == "abE" and answer["choices"][0]["finish_reason"] == "stop"
    assert [finish.tokens for finish in loop.messages(Finish, 1)] == [4]


def test_a_stop_string_in_the_last_token_wins_over_length(ask: Callable[..., Any]) -> None:
    loop = FakeLoop(stop_after)
    (choice,) = ask(complete(prompt="x", stop="END", max_tokens=7), loop).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert [finish.tokens for finish in loop.messages(Finish, 1)] == [7]


def test_the_text_of_a_stop_token_is_left_out(ask: Callable[..., Any]) -> None:
    stop = {"stop_token_ids": byte_tokens("!"), "max_tokens": 9}
    for include, text in ((False, "hey"), (True, "hey!")):
        work = complete(
            prompt="x", **stop, include_stop_str_in_output=include, return_token_ids=True
        )
        (choice,) = ask(work, FakeLoop(say("hey!you"))).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["token_ids"] == byte_tokens("hey!")


class LateEnds(FakeLoop):
    """The end comes a step after the last token, as with `--save sync`."""

    ends: tuple[RowResult, ...] = ()

    def _step(self) -> Iterator[RowResult]:
        late = self.ends
        self.ends = ()
        yield from late
        for output in super()._step():
            if output.finish is not None:
                self.ends += (RowResult(output.request, finish=output.finish),)
            yield output._replace(finish=None)


def test_the_text_of_a_stop_token_is_left_out_though_the_end_comes_later(
    ask: Callable[..., Any],
) -> None:
    work = complete(prompt="x", stop_token_ids=byte_tokens("!"), return_token_ids=True)
    (choice,) = ask(work, LateEnds(say("hey!you"))).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "stop")
    assert choice["token_ids"] == byte_tokens("hey!")


# Streams


def test_streamed_completion(ask: Callable[..., Any]) -> None:
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = events(
        ask(complete(prompt="aé世", stream=True, **options), FakeLoop(step_seconds=0.002))
    )
    *pieces, last = chunks
    assert joined(pieces) == "aé世" and "é" in [piece["choices"][0]["text"] for piece in pieces]
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [1, *byte_tokens("aé世")]
    ids = [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert ids == [*byte_tokens("aé世"), EOS]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "stop"]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 7
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert all(piece["usage"] is None and piece["id"] == last["id"] for piece in pieces)


def test_streamed_chat_begins_with_the_role(ask: Callable[..., Any]) -> None:
    first, *rest = events(ask(chat("hi", stream=True), FakeLoop(say('"well"\n'))))
    assert first["object"] == "chat.completion.chunk" and "usage" not in first
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in rest) == '"well"\n'
    assert rest[-1]["choices"][0]["finish_reason"] == "stop"


# Bad input

BAD = [
    ({"prompt": "x", "model": 3}, "model"),
    ({}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5, 260]}, "prompt"),
    ({"prompt": [-1, 5]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a", "b"], "conversation": "c"}, "prompt"),
    ({"prompt": ["a"] * 129, "n": 128}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -3}, "max_tokens"),
    # a larger one could not be written any more
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens"),
    ({"prompt": "x", "min_tokens": -1}, "min_tokens"),
    ({"prompt": "x", "temperature": -0.1}, "temperature"),
    ({"prompt": "x", "temperature": 1e300}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": 0}, "top_p"),
    ({"prompt": "x", "top_p": 1.1}, "top_p"),
    ({"prompt": "x", "top_k": -2}, "top_k"),
    ({"prompt": "x", "seed": -(2**63) - 1}, "seed"),
    ({"prompt": "x", "seed": 2**63}, "seed"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "x", "stop": [3]}, "stop"),
    ({"prompt": "x", "stop_token_ids": [260]}, "stop_token_ids"),
    ({"prompt": "x", "stream": "yes"}, "stream"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 129}, "n"),
    ({"prompt": "x", "n": 2, "best_of": 3}, "best_of"),
    ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt": "x", "min_p": 1.1}, "min_p"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "x", "frequency_penalty": -2.5}, "frequency_penalty"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"260": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"five": 1}}, "logit_bias"),
    ({"prompt": "x", "response_format": {"type": "yaml"}}, "response_format"),
    ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format"),
    (
        {
            "prompt": "x",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}},
        },
        "response_format",
    ),
    ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "(", "choice": ["a"]}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
    (
        {
            "prompt": "x",
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs",
    ),
    ({"prompt": "x", "conversation": 7}, "conversation"),
    ({"prompt": "x", "conversation": {"name": "c"}}, "conversation"),
    ({"prompt": "x", "conversation_params": {"conversation_id": ""}}, "conversation_params"),
    ({"prompt": "x", "session_id": 5}, "session_id"),
    ({"prompt": "x", "guided_regex": "("}, "guided_regex"),
    ({"prompt": "x", "guided_choice": []}, "guided_choice"),
    ({"prompt": "x", "guided_json": "{"}, "guided_json"),
    ({"prompt": "x", "guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"prompt": "x", "guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
    (
        {"prompt": "x", "guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
    ),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "x", "bad_words": "x"}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x", ""]}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x"] * 513}, "bad_words"),
    ({"prompt": "x", "bad_words": ["x" * 201]}, "bad_words"),
    ({"prompt": "x", "converation": "c"}, "converation"),
]


def test_bad_completions_are_refused_by_name(ask: Callable[..., Any]) -> None:
    async def all_of_them(http: httpx.AsyncClient) -> list[httpx.Response]:
        return [await http.post("/v1/completions", json=body) for body, _ in BAD]

    loop = FakeLoop()
    for (body, param), response in zip(BAD, ask(all_of_them, loop), strict=True):
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), body
        assert (
            error["type"] == "invalid_request_error" and param.split(".")[-1] in error["message"]
        ), error
    assert not loop.log


def test_what_is_written_to_the_logits_at_every_step_is_limited(
    ask: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setattr("pensieve.runtime.frontend.request_builder.MOST_BIASES", 3)
    body = dict(prompt="x", stop_token_ids=[5, 6, 7])
    many = {str(token): 1 for token in range(4)}
    assert ask(complete(**body)).is_success  # and the model's own
    assert ask(complete(**body, min_tokens=1, ignore_eos=True)).is_success
    for refused, param in (
        (body | {"min_tokens": 1}, "stop_token_ids"),
        ({"logit_bias": many}, "logit_bias"),
    ):
        response = ask(complete(**{"prompt": "x", **refused}))
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b"null", b"\xff", b'{"seed": ' + b"9" * 9999],
)
def test_malformed_json(ask: Callable[..., Any], body: bytes) -> None:
    response = ask(lambda http: http.post("/v1/completions", content=body))
    assert (
        response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
            "tools",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "logprobs": 1}, "logprobs"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 1}, "top_logprobs"),
        (
            {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
            "tool_choice",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
            "max_completion_tokens",
        ),
        (
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_completion_tokens": 2,
                "max_tokens": 3,
            },
            "max_tokens",
        ),
    ],
)
def test_bad_chats_are_refused_by_name(
    ask: Callable[..., Any], body: dict[str, Any], param: str
) -> None:
    response = ask(post("/v1/chat/completions", body))
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == param


def test_parts_that_are_no_text_are_named(ask: Callable[..., Any]) -> None:
    chat = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}
        ]
    }
    image = {"type": "input_image", "image_url": "http://a/b"}
    response = {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}
        ]
    }
    for path, body, kind, param in (
        ("/v1/chat/completions", chat, "image_url", "messages.0.content"),
        ("/v1/responses", response, "input_image", "input.0.message.content"),
    ):
        error = ask(post(path, body)).json()["error"]
        assert (
            error["message"]
            == f"this server reads text only; it has no use for a part of type '{kind}'"
        )
        assert error["param"] == param


def test_images_that_tools_return_do_not_end_a_session(ask: Callable[..., Any]) -> None:
    """An agent sends them in every later turn too."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "http://a/b"}}
    chat = {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [image]},
        ]
    }
    response = {
        "input": [
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": "http://a/b"}],
            },
        ]
    }
    for path, body, named in (
        ("/v1/chat/completions", chat, "tool.image_url"),
        ("/v1/responses", response, "function_call_output.input_image"),
    ):
        answer = ask(post(path, {**body, "model": "fake"}))
        assert answer.is_success, answer.text
        assert answer.headers["x-pensieve-ignored-fields"] == named


@pytest.mark.parametrize(
    ("reply", "own"),
    [
        (
            {
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "Z"},
                    {"type": "text", "text": "ok"},
                ]
            },
            {"content": "ok", "reasoning_content": "hm"},
        ),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
            {"content": "", "reasoning_content": "hm"},
        ),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "ok", "refusal": ""}, {"content": "ok"}),
        ({"content": "ok. ", "refusal": "No."}, {"content": "ok. No."}),
        (
            {
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}],
                "reasoning_content": None,
            },
            {"content": "ok", "reasoning_content": "hm"},
        ),
        (
            {"content": "ok", "annotations": [], "audio": None, "function_call": {}},
            {"content": "ok"},
        ),
    ],
)
def test_parts_of_other_servers_replies_are_read(reply: Any, own: Any) -> None:
    def told(message: Any) -> Any:
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", **message},
            {"role": "user", "content": "y"},
        ]
        (_, told, _) = parse(ChatBody, json.dumps({"messages": messages}).encode()).messages
        content = told.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return content, told.reasoning_content

    assert told(reply) == told(own)


def test_what_a_reply_has_beside_its_text_is_named(ask: Callable[..., Any]) -> None:
    """What models that search or speak return, sent back."""
    citation = {"type": "url_citation", "url_citation": {"url": "http://a", "title": "a"}}
    for field, value in (("annotations", [citation]), ("audio", {"id": "a1"})):
        reply = {"role": "assistant", "content": "ok", field: value}
        messages = [{"role": "user", "content": "x"}, reply, {"role": "user", "content": "y"}]
        answer = ask(post("/v1/chat/completions", {"messages": messages}))
        assert answer.is_success, answer.text
        assert answer.headers["x-pensieve-ignored-fields"] == f"messages.{field}"


def test_calls_in_the_old_form_are_read() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    messages = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "b"},
    ]
    calling, answered = (Message.model_validate(message).for_template() for message in messages)
    assert calling == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_f",
                "type": "function",
                "function": {"name": "f", "arguments": {"a": 1}},
            }
        ],
    }
    assert answered == {"role": "tool", "name": "f", "tool_call_id": "call_f", "content": "b"}
    both = {**messages[0], "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    ignored: list[str] = []
    (kept,) = Message.model_validate(both, context=ignored).tool_calls
    assert (kept.id, ignored) == ("c", ["messages.function_call"])


def test_too_long_is_refused_with_both_numbers(ask: Callable[..., Any]) -> None:
    for work, param in (
        (complete(prompt=[5] * 300), "prompt"),
        (complete(prompt=[5] * 300, max_tokens=1), "prompt"),
    ):
        error = ask(work).json()["error"]
        assert error["param"] == param and "300" in error["message"] and "256" in error["message"]
    assert ask(complete(prompt=[5] * 200, max_tokens=57)).is_success


def test_nulls_and_neutral_values_ask_for_nothing(ask: Callable[..., Any]) -> None:
    neutral = {
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "echo": False,
    }
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "logprobs": None,
        "temperature": None,
    }
    assert ask(complete(prompt="x", **neutral, **ignored)).is_success
    more = {
        "tools": [],
        "logprobs": False,
        "top_logprobs": 0,
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
    }
    assert ask(chat("x", **more, max_completion_tokens=4)).is_success


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_has_its_status_in_streams_too(ask: Callable[..., Any], stream: bool) -> None:
    response = ask(complete(prompt="x", stream=stream), FakeLoop(queue=0))
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "rate_limit_error"


def test_one_refused_prompt_of_several_aborts_the_others(ask: Callable[..., Any]) -> None:
    loop = FakeLoop(say("y" * 200), queue=1)
    loop.pause()

    async def both(http: httpx.AsyncClient) -> httpx.Response:
        response = await complete(prompt=["a", "b"])(http)
        await asyncio.to_thread(eventually, lambda: loop.messages(Abort))
        return response

    assert ask(both, loop).status_code == 429
    assert [abort.request for abort in loop.messages(Abort)] == [
        loop.messages(Submit)[0].request.id
    ]


def test_unknown_paths_and_methods_have_openais_form(ask: Callable[..., Any]) -> None:
    response = ask(lambda http: http.get("/v1/nothing"))
    assert (
        response.status_code == 404
        and response.json()["error"]["message"] == "there is no /v1/nothing here"
    )
    response = ask(lambda http: http.get("/v1/completions"))
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "/v1/completions takes POST, not GET"


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "/v1/v1/chat/completions", "/v1/chat/completions/chat/completions"],
)
def test_a_wrong_base_url_is_told_the_path(ask: Callable[..., Any], path: str) -> None:
    response = ask(lambda http: http.post(path, json={}))
    assert response.status_code == 404
    assert (
        response.json()["error"]["message"]
        == f"there is no {path} here; did you mean /v1/chat/completions?"
    )


# The rest of the surface


def test_models_health_and_metrics(ask: Callable[..., Any]) -> None:
    async def all_three(http: httpx.AsyncClient) -> list[httpx.Response]:
        await http.post("/v1/completions", json={"prompt": [9, 9, 9]})
        return [await http.get(path) for path in ("/v1/models", "/health", "/metrics")]

    models, health, metrics = ask(all_three)
    (model,) = models.json()["data"]
    assert model["id"] == "fake" and model["max_model_len"] == 256
    assert health.status_code == 200
    assert 'pensieve:prompt_tokens_total{source="gpu"} 2.0' in metrics.text
    assert "pensieve:generation_tokens_total 4.0" in metrics.text
    assert "pensieve:time_to_first_token_seconds_count 1.0" in metrics.text
    assert "pensieve:inter_token_latency_seconds_count 3.0" in metrics.text


# The engine's end


@pytest.mark.parametrize("stream", [False, True])
def test_a_fatal_engine_ends_every_open_request(ask: Callable[..., Any], stream: bool) -> None:
    loop = FakeLoop(say("y" * 200), dies_with=2)
    loop.pause()

    async def two_and_one_more(http: httpx.AsyncClient) -> list[httpx.Response]:
        body = {"prompt": "x", "max_tokens": 100, "stream": stream}
        both = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        await asyncio.to_thread(loop.messages, Submit, 2)
        loop.go_on()
        return [
            *await asyncio.gather(*both),
            await http.post("/v1/completions", json=body),
            await http.get("/health"),
        ]

    first, second, late, health = ask(two_and_one_more, loop)
    for response in (first, second):
        if stream:
            *pieces, last = events(response)
            assert response.status_code == 200 and 0 < len(joined(pieces)) < 100
            assert "the books disagree" in last["error"]["message"]
        else:
            assert (
                response.status_code == 500
                and "the books disagree" in response.json()["error"]["message"]
            )
    assert (late.status_code, health.status_code) == (500, 503)


def test_a_closed_pipe_ends_every_open_request(ask: Callable[..., Any]) -> None:
    loop = FakeLoop(say("y" * 200))
    loop.pause()

    async def cut(http: httpx.AsyncClient) -> httpx.Response:
        answer = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 100})
        )
        await asyncio.to_thread(eventually, lambda: loop.messages(Submit))
        await asyncio.to_thread(loop.close)
        return await answer

    response = ask(cut, loop)
    assert response.status_code == 503 and response.json()["error"]["type"] == "server_error"


def test_a_drained_request_is_an_error_not_a_short_reply(ask: Callable[..., Any]) -> None:
    class Draining(FakeLoop):
        def _step(self) -> Iterator[Any]:
            yield from (RowResult(request, (), FinishReason.ABORT) for request in self._running)
            self._running.clear()

    assert ask(complete(prompt="x", stop="y"), Draining()).status_code == 503


# Forms of replies


class Checker:
    """Never done with a grammar."""

    def __init__(self) -> None:
        self.checks: list[Future[None]] = []

    def begin_check(self, grammar: str, param: str, owner: str) -> Future[None]:
        self.checks.append(Future())
        return self.checks[-1]


def test_a_grammar_is_not_checked_for_a_client_that_has_gone(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise others of its owner would wait for it: they are checked one after another."""
    checker = Checker()
    monkeypatch.setattr(calls, "open_checker", lambda *_: checker)

    async def hang_up(http: httpx.AsyncClient) -> None:
        gone = asyncio.Event()
        body = json.dumps({"prompt": "x", "structured_outputs": {"regex": "a"}}).encode()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            if (message := next(messages, None)) is None:
                await gone.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [],
        }
        request = asyncio.create_task(http._transport.app(scope, receive, send))  # type: ignore[attr-defined]
        while not checker.checks:
            await asyncio.sleep(0.001)
        gone.set()
        await asyncio.wait_for(request, 60)

    ask(hang_up)
    assert checker.checks[0].cancelled()


def test_a_tokenizer_that_no_grammar_works_with_is_opened_once(
    ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[None] = []
    monkeypatch.setattr(calls, "open_checker", lambda *_: opened.append(None))

    async def twice(http: httpx.AsyncClient) -> None:
        for _ in range(2):
            refused = await complete(prompt="x", structured_outputs={"regex": "a"})(http)
            assert refused.status_code == 400 and "not supported with this model" in refused.text

    ask(twice)
    assert len(opened) == 1
