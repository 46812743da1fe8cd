"""The events of a stream: pieces of a reply that wait become one event."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.runtime.frontend.logprobs import LogprobsWriter
from pensieve.runtime.frontend.reply import ChatWriter, Piece, Reply, Style
from pensieve.runtime.frontend.reply_reader import ToolCall
from pensieve.runtime.http.reply_events import MOST_STEPS, MOST_UNREAD_STEPS, ReplyEvents
from pensieve.runtime.text.tokenizer import StopMatcher, Tokenizer
from pensieve.scheduler.types import FinishReason, Request, RequestId, RowResult

from ..fake_loop import byte_tokens, fake_logprobs, save_tokenizer
from ..served import CHAT, serve
from ..served import run as run_served
from .test_slow_readers import HELLO, MESSAGES, RESPONSES, STOPPED, SlowReader, until

__all__ = ["serve"]

ONE = RequestId(1)
CALL = ToolCall(0, "call_1", "look", "{}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Client:
    """Reads the events of one reply as soon as they are sent, unless it waits."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None = None):
        self.pieces: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        request = Request(id=ONE, prompt=array("i", [5]), max_tokens=999, confirm=stop is not None)
        stream: Any = SimpleNamespace(finish=lambda request, tokens: None)
        matcher = StopMatcher([stop]) if stop is not None else None
        self.reply = Reply(request, stream, tokenizer, matcher, continues_prompt=False)
        style = Style("m", True, False, logprobs=LogprobsWriter(tokenizer, 1, None))
        replies = {ONE: self.reply}
        self.events = ReplyEvents(ChatWriter(style), replies, self._send, [], self._write)

    def add(self, text: str, finish: FinishReason | None = None) -> None:
        """A step's result of one or more tokens."""
        tokens = tuple(byte_tokens(text))
        logprobs = tuple(fake_logprobs(token, 1) for token in tokens)
        self.events.add(RowResult(ONE, tokens, finish, logprobs=logprobs))

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Of the events so far, without the opening and the end."""
        events = [
            event.removeprefix("data: ")
            for event in b"".join(self.pieces).decode().split("\n\n")[1:-1]
        ]
        return [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]

    @property
    def texts(self) -> list[str]:
        return [choice["delta"].get("content", "") for choice in self.choices]

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        self.pieces.append(message.get("body", b""))

    def _write(self, piece: bytes) -> bool:
        if self.reads.is_set():
            self.pieces.append(piece)
        return self.reads.is_set()


def run(tokenizer: Tokenizer, work: Callable[[Client], Any], stop: str | None = None) -> None:
    async def main() -> None:
        client = Client(tokenizer, stop)
        client.events.send()
        await until(lambda: len(client.pieces) == 2)  # the answer's start and the opening
        try:
            await work(client)
        finally:
            client.events.close()

    asyncio.run(main())


def test_a_reading_client_gets_the_tokens_of_two_steps_at_most_in_an_event(
    tokenizer: Tokenizer,
) -> None:
    """Ids and log probabilities stay whole. A step may have several tokens."""

    async def work(client: Client) -> None:
        assert MOST_STEPS == 2
        for text in ("a", "b", "cd", "e", "f"):
            client.add(text)
        client.events.send()
        client.add("g")
        client.events.send()
        assert client.texts == ["ab", "cde", "f", "g"]
        ids = [choice["token_ids"] for choice in client.choices]
        assert ids == [byte_tokens(text) for text in client.texts]
        for choice, text in zip(client.choices, client.texts, strict=True):
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == list(text)
            assert [entry["logprob"] for entry in entries] == [
                -float(at) for at in byte_tokens(text)
            ]

    run(tokenizer, work)


def test_a_closed_stream_is_freed_without_the_garbage_collector() -> None:
    async def send(message: Any) -> None:
        """A client that reads everything."""

    async def work() -> weakref.ref[ReplyEvents]:
        replies: dict[RequestId, Reply] = {}
        events = ReplyEvents(ChatWriter(Style("m", False, False)), replies, send, [])
        events.send()
        await asyncio.sleep(0)
        events.close()
        return weakref.ref(events)

    gc.disable()
    try:
        assert asyncio.run(work())() is None
    finally:
        gc.enable()


def test_a_client_that_does_not_read_gets_fewer_and_larger_events(tokenizer: Tokenizer) -> None:
    async def work(client: Client) -> None:
        client.reads.clear()
        client.add("!")
        client.events.send()  # waits for the client from here on
        for _ in range(MOST_UNREAD_STEPS + 3):
            client.add("a")
            client.events.send()
        client.reads.set()
        await until(lambda: len("".join(client.texts)) == MOST_UNREAD_STEPS + 4)
        assert client.texts == ["!", "a" * MOST_UNREAD_STEPS, "aaa"]
        client.add("b")
        client.events.send()
        assert client.texts[3:] == ["b"]

    run(tokenizer, work)


def test_the_end_waits_for_the_commit(tokenizer: Tokenizer) -> None:
    """Also if the client reads again between the last token and the commit."""

    async def work(client: Client) -> None:
        client.reads.clear()
        client.add("!")
        client.events.send()
        client.add("a")
        client.events.send()
        client.add("b", FinishReason.LENGTH)
        assert not client.events.unfinished
        client.reads.set()
        await until(lambda: client.texts == ["!"])
        for _ in range(5):
            await asyncio.sleep(0)
        assert client.texts == ["!"]
        client.events.put_end()
        await client.events.end()
        *events, end, _ = b"".join(client.pieces).decode().split("\n\n")
        assert end == "data: [DONE]"
        last = json.loads(events[-1].removeprefix("data: "))["choices"][0]
        assert last["delta"] == {"content": "ab"}
        assert last["finish_reason"] == "length"

    run(tokenizer, work)


def test_a_stop_string_across_steps_of_one_event(tokenizer: Tokenizer) -> None:
    async def work(client: Client) -> None:
        for text in ("a", "b", "<", "e"):
            client.add(text)
        client.add("n")
        client.events.send()
        client.add("d")
        client.add(">x", FinishReason.LENGTH)
        client.events.put_end()
        assert "".join(client.texts) == "ab"
        assert client.choices[-1]["finish_reason"] == "stop"
        assert client.choices[-1]["stop_reason"] == "<end>"
        ids = [token for choice in client.choices for token in choice["token_ids"]]
        assert ids == byte_tokens("ab<end>")

    run(tokenizer, work, stop="<end>")


@pytest.mark.parametrize(
    ("first", "later", "order"),
    [
        (Piece("a", RowResult(ONE)), Piece("b", RowResult(ONE)), True),
        (Piece("", RowResult(ONE), thought="a"), Piece("b", RowResult(ONE)), True),
        (Piece("a", RowResult(ONE)), Piece("", RowResult(ONE), calls=[CALL]), True),
        (Piece("a", RowResult(ONE)), Piece("", RowResult(ONE), thought="b"), False),
        (Piece("", RowResult(ONE), calls=[CALL]), Piece("b", RowResult(ONE)), False),
        (Piece("", RowResult(ONE), calls=[CALL]), Piece("", RowResult(ONE), thought="b"), False),
    ],
)
def test_pieces_are_joined_in_the_order_of_thoughts_text_and_calls(
    first: Piece, later: Piece, order: bool
) -> None:
    joined = first.joined(later)
    assert (joined is not None) == order
    if joined is not None:
        assert joined.thought + joined.text == "".join(
            piece.thought + piece.text for piece in (first, later)
        )
        assert [*joined.calls] == [*first.calls, *later.calls]


def test_pieces_of_different_kinds_become_events_of_their_own(tokenizer: Tokenizer) -> None:
    async def work(client: Client) -> None:
        pieces = [Piece("", RowResult(ONE), calls=[CALL]), Piece("behind", RowResult(ONE))]
        client.reply.add = lambda result: pieces.pop(0)  # type: ignore[method-assign]
        client.add("a")
        client.add("b")
        client.events.send()
        called, behind = client.choices
        assert called["delta"]["tool_calls"][0]["id"] == CALL.id
        assert behind["delta"] == {"content": "behind"}

    run(tokenizer, work)


EQUAL = [
    *((path, body) for path, body, _ in STOPPED),
    (CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 3}),
    (
        CHAT,
        {"messages": HELLO, "return_token_ids": True, "stream_options": {"include_usage": True}},
    ),
    (MESSAGES, {"messages": HELLO, "max_tokens": 50, "model": "fake"}),
    (RESPONSES, {"input": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), EQUAL)
def test_a_slow_reader_reads_the_same_in_fewer_events(
    serve: Callable[..., Any], path: str, body: dict[str, Any]
) -> None:
    async def work() -> None:
        async with serve(step_seconds=0.001) as served:
            prompt = SlowReader(served, path, **body)
            read = contents(await prompt.read())
            replies = len(served.requests)
            slow = SlowReader(served, path, **body)
            await until(lambda: len(served.requests) == 2 * replies and served.answered)
            late = contents(await slow.read())
            assert late["events"] < read["events"]
            assert {**late, "events": 0} == {**read, "events": 0}

    run_served(work())


def contents(streamed: str) -> dict[str, Any]:
    """The parts of a stream that do not depend on its division, and the number of its events."""
    lines = [line.removeprefix("data: ") for line in streamed.splitlines() if line[:5] == "data:"]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    parts: dict[str, Any] = {"events": len(events)}

    def add(key: str, value: Any) -> None:
        if value:
            parts[key] = parts[key] + value if key in parts else value

    for event in events:
        for choice in event.get("choices", ()):
            at = choice["index"]
            add(f"text {at}", choice.get("text") or choice.get("delta", {}).get("content"))
            add(f"ids {at}", choice.get("token_ids"))
            add(f"finish {at}", choice["finish_reason"])
            add(f"stop {at}", choice.get("stop_reason"))
            for name, values in (choice.get("logprobs") or {}).items():
                add(f"{name} {at}", values)
        if event.get("type") == "content_block_delta":
            add("text", event["delta"]["text"])
        if event.get("type") == "response.output_text.delta":
            add("text", event["delta"])
        if event.get("type") in ("message_delta", "response.completed"):
            whole = event.get("response", event)
            add("usage", [whole["usage"]])
        elif event.get("usage"):
            add("usage", [event["usage"]])
    return parts
