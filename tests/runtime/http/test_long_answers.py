"""Long answers do not hold the event loop: another thread writes them, in pieces."""

from __future__ import annotations

import json
import threading
from random import Random
from typing import Any

import pytest

from pensieve.runtime.frontend.logprobs import LogprobsWriter
from pensieve.runtime.frontend.reply import CompletionWriter
from pensieve.runtime.http import json_response as json_module
from pensieve.runtime.http.json_response import (
    LONGEST_LIST,
    SLICE,
    json_response,
    pieces,
)
from pensieve.runtime.text.tokenizer import Tokenizer

from ..served import CHAT, run, serve

__all__ = ["serve"]  # a fixture

COMPLETIONS = "/v1/completions"
PROMPT = [65 + at % 20 for at in range(50)]


class Threads:
    """The threads that call a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str):
        self.seen: list[threading.Thread] = []
        function = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            self.seen.append(threading.current_thread())
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, watched)

    @property
    def is_another(self) -> bool:
        """Whether none of the calls was in this thread; then forgets them."""
        seen, self.seen = self.seen, []
        assert seen
        return threading.current_thread() not in seen


@pytest.mark.parametrize(
    ("path", "body", "is_long"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "n": 3}, False),
        (COMPLETIONS, {"prompt": PROMPT, "logprobs": 0}, True),
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 2}, True),
        (COMPLETIONS, {"prompt": PROMPT * 30, "n": 12, "return_token_ids": True}, True),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, False),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}, True),
    ],
)
def test_another_thread_writes_a_long_answer(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], is_long: bool
) -> None:
    async def work() -> None:
        async with serve() as server:
            written = Threads(monkeypatch, CompletionWriter, "whole")
            await server.post(path, **body)
            assert written.is_another is is_long

    run(work())


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
        ("/detokenize", {"tokens": [65, 66]}),
        (f"{COMPLETIONS}/render", {"prompt": "hello"}),
        (f"{CHAT}/render", {"messages": MESSAGES}),
        ("/v1/messages/render", {"model": "fake", "messages": MESSAGES, "max_tokens": 5}),
        ("/v1/conversations/c/items", {"items": MESSAGES}),
    ],
)
def test_another_thread_writes_what_may_be_long(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post("/v1/conversations", id="c")
            written = Threads(monkeypatch, json_module, "pieces")
            named = Threads(monkeypatch, Tokenizer, "pieces")
            answer = await server.post(path, **body)
            assert written.is_another
            if "token_strs" in answer:
                assert named.is_another
            if "items" in path:
                assert await server.ask("GET", path) == answer
                assert written.is_another

    run(work())


def test_what_choices_share_is_made_once_for_each_prompt(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [
        Threads(monkeypatch, LogprobsWriter, name) for name in ("offsets", "prompt", "completion")
    ]

    async def work() -> None:
        async with serve() as server:
            prompts = [PROMPT, PROMPT[1:], PROMPT[2:]]
            body = dict(echo=True, logprobs=2, prompt_logprobs=1, return_token_ids=True)
            answer = await server.post(COMPLETIONS, prompt=prompts, n=4, **body)
            assert [len(calls.seen) for calls in counted] == [3, 3, 3 + 12]
            for at, prompt in enumerate(prompts):
                alone = await server.post(COMPLETIONS, prompt=prompt, **body)
                choices = answer["choices"][4 * at : 4 * at + 4]
                assert choices == [
                    {**alone["choices"][0], "index": index} for index in range(4 * at, 4 * at + 4)
                ]

    run(work())


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def test_a_long_answer_has_the_bytes_of_a_short_one() -> None:
    random = Random(1)

    def value(levels: int) -> Any:
        kind = random.randrange(8 if levels else 4)
        if kind < 4:
            return (None, random.random(), 'a"é\u2028', random.randrange(9))[kind]
        count = random.choice((0, 1, 2, 5))
        if kind == 4:
            count = random.choice((SLICE, LONGEST_LIST, LONGEST_LIST + 1))
            return [random.randrange(99) for _ in range(count)]
        if kind == 5:
            return [value(levels - 1) for _ in range(count)]
        return {f'"{at}é': value(levels - 1) for at in range(count)}

    for _ in range(300):
        given = value(7)
        assert "".join(pieces(given)) == written(given)
        assert json_response(given).body.decode() == written(given)
    with pytest.raises(ValueError, match="JSON"):
        json_response([float("nan")])


def test_no_piece_of_an_answer_is_long() -> None:
    top = {str(token): {"logprob": -1.0, "rank": 1, "decoded_token": "a"} for token in range(21)}
    tops = [None] + [top] * 5000
    logprobs = {"tokens": ["a"] * 900, "top_logprobs": [{"a": -1.0}] * 900}
    for answer in (
        {"choices": [{"prompt_logprobs": tops}]},
        {"prompt_logprobs": tops},
        {"choices": [{"logprobs": logprobs} for _ in range(128)]},
        {"tokens": list(range(100_000))},
    ):
        longest = max(map(len, pieces(answer)))
        assert longest <= max(SLICE * len(written(top)) + SLICE, len(written(logprobs)))
