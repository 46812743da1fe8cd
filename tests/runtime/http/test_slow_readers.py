"""Clients that do not read their streams: a reply goes on to its end without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from pensieve.runtime.http import app as application
from pensieve.runtime.http.event_sender import PIECE_BYTES, EventSender
from pensieve.runtime.messages import Abort, Finish
from pensieve.scheduler.types import ErrorKind, RequestError, RowResult

from ..fake_loop import step_message
from ..served import CHAT, Served, run, serve, spell

__all__ = ["serve"]

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"
HELLO = [{"role": "user", "content": "hi"}]


class SlowReader:
    """A client that has sent a request for a stream and reads nothing of its answer before
    `read`."""

    def __init__(self, served: Served, path: str, **body: Any):
        self._body = json.dumps({"stream": True, **body}).encode()
        self._reads, self._left = asyncio.Event(), asyncio.Event()
        self.pieces: list[bytes] = []
        self.status = 0
        headers = [(b"host", b"test"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("test", 1),
            "server": ("test", 80),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        self._answering = asyncio.create_task(served.app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def read(self) -> str:
        """Reads the whole answer."""
        self._reads.set()
        await self._answering
        return b"".join(self.pieces).decode()

    async def leave(self) -> None:
        """Hangs up, and waits for the end of the call."""
        self._left.set()
        self._reads.set()  # as the server does it: nothing is sent any more, and nothing waits
        await self._answering

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body = self._body
            self._body = b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._reads.wait()
        if self._left.is_set():
            return
        self.status = message.get("status", self.status)
        self.pieces.append(message.get("body", b""))


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.001)


STOPPED = [
    (COMPLETIONS, {"prompt": "hi", "n": 20, "stop": "wor", "max_tokens": 50}, 20),
    (COMPLETIONS, {"prompt": "hi", "n": 5, "stop": "never", "max_tokens": 50, "logprobs": 20}, 5),
    (CHAT, {"messages": HELLO, "n": 3, "stop": ["never", "wor"]}, 3),
    (
        MESSAGES,
        {"messages": HELLO, "stop_sequences": ["wor"], "max_tokens": 50, "model": "fake"},
        1,
    ),
    (RESPONSES, {"input": "hi", "stop": "wor"}, 1),
]


@pytest.mark.parametrize(("path", "body", "replies"), STOPPED)
def test_replies_are_confirmed_though_the_client_reads_nothing(
    serve: Callable[..., Any], path: str, body: dict[str, Any], replies: int
) -> None:
    async def work() -> None:
        async with serve() as served:
            slow = SlowReader(served, path, **body)
            await until(lambda: len(served.loop.confirmed) == replies)
            assert slow.pieces == []
            end = (await slow.read()).split("\n\n")[-2]
            assert end == "data: [DONE]" or "message_stop" in end or "response.completed" in end
            lengths = {len("hello wor")} if "wor" in str(body) else {len(spell(served.requests[0]))}
            assert set(served.loop.confirmed.values()) == lengths
            assert not served.loop.messages(Abort)

    run(work())


def test_a_conversation_goes_on_while_the_client_of_its_last_turn_reads_nothing(
    serve: Callable[..., Any],
) -> None:
    """The turn is committed, and another one with the server's history may begin."""

    async def work() -> None:
        async with serve() as served:
            await served.chat("hi", conversation="c")
            body = {"messages": HELLO, "conversation": "c", "history": "server"}
            slow = SlowReader(served, CHAT, **body)
            await until(lambda: len(served.requests) == 2)
            async with asyncio.timeout(60):
                while len((await served.ask("GET", "/v1/conversations/c"))["messages"]) < 4:
                    await asyncio.sleep(0.001)
            await served.chat("more", conversation="c", history="server")
            assert (await slow.read()).endswith("data: [DONE]\n\n")

    run(work())


def test_a_turn_whose_client_leaves_before_its_end_is_not_committed(
    serve: Callable[..., Any],
) -> None:
    async def work() -> None:
        async with serve() as served:
            served.loop.pauses_behind = 3
            slow = SlowReader(served, CHAT, messages=HELLO, conversation="c", stop="never")
            await until(lambda: served.requests)
            await slow.leave()
            await until(lambda: served.loop.messages(Abort))
            assert not served.loop.messages(Finish)
            served.loop.go_on()
            await served.ask("GET", "/v1/conversations/c", status=404)

    run(work())


def test_a_failed_choice_ends_the_others_though_the_client_reads_nothing(
    serve: Callable[..., Any],
) -> None:
    """The conversation is free too."""

    async def work() -> None:
        async with serve() as served:
            await served.chat("hi", conversation="c")
            served.loop.pauses_behind = 3
            body = {
                "messages": HELLO,
                "conversation": "c",
                "history": "server",
                "n": 3,
                "stop": "never",
            }
            slow = SlowReader(served, CHAT, **body)
            await until(lambda: len(served.requests) == 4)
            stuck = RowResult(
                served.requests[1].id,
                error=RequestError(ErrorKind.INTERNAL, "the grammar is stuck"),
            )
            served.loop.say(step_message(stuck))
            await until(lambda: len(served.loop.messages(Abort)) == 2)
            served.loop.go_on()
            await served.chat("more", conversation="c", history="server")
            assert "the grammar is stuck" in await slow.read()

    run(work())


def test_the_end_of_a_reply_that_cannot_be_stored_is_sent_with_the_error(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def store_turn(*_: Any) -> None:
        raise RequestError(ErrorKind.STORAGE_FULL, "the disk is full")

    async def work() -> None:
        async with serve() as served:
            monkeypatch.setattr(served.histories, "store_turn", store_turn)
            streamed = await SlowReader(served, CHAT, messages=HELLO, conversation="c").read()
            chunks = streamed.split("\n\n")[:-2]
            *pieces, error = (json.loads(chunk.removeprefix("data: ")) for chunk in chunks)
            assert (
                "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)[:11]
                == "hello world"
            )
            assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
            assert "the disk is full" in error["error"]["message"]

    run(work())


def test_a_client_that_leaves_too_much_unread_loses_its_requests(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(application, "MOST_UNREAD_BYTES", 10_000)

    async def work() -> None:
        async with serve(answers=lambda _: [5] * 500) as served:
            served.loop.pauses_behind = 50
            body = {"prompt": "hi", "n": 4, "stop": "never", "max_tokens": 500, "logprobs": 20}
            slow = SlowReader(served, COMPLETIONS, **body)
            await until(lambda: len(served.loop.messages(Abort)) == 4)
            streamed = await slow.read()
            assert len(streamed) > 10_000
            *_, error, done, _ = streamed.split("\n\n")
            assert "has not read" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert done == "data: [DONE]"

    with caplog.at_level("WARNING"):
        run(work())
    assert "has not read" in caplog.text


def test_a_finished_reply_is_kept_at_any_length(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit ends replies that still grow."""
    monkeypatch.setattr(application, "MOST_UNREAD_BYTES", 0)

    async def work() -> None:
        async with serve(answers=lambda _: [5]) as served:
            slow = SlowReader(served, COMPLETIONS, prompt="hi", max_tokens=1, stop="never")
            await until(lambda: served.loop.confirmed)
            assert (await slow.read()).endswith("data: [DONE]\n\n")

    run(work())


def test_an_error_of_the_server_s_send_ends_the_stream() -> None:
    async def work() -> None:
        async def send(message: Any) -> None:
            raise RuntimeError("the send is broken")

        sender = EventSender(send, [])
        sender.put("before it is known")
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the send is broken"):
            sender.put("after")

    asyncio.run(work())


def test_no_task_sends_to_a_client_that_reads() -> None:
    """One is made again when the connection's buffer is full."""

    async def work() -> None:
        sent = []
        written = []
        reads = True

        async def send(message: Any) -> None:
            sent.append(message)

        def write(piece: bytes) -> bool:
            if reads:
                written.append(piece)
            return reads

        sender = EventSender(send, [], write)
        await until(lambda: not sender.waits)
        sender.put("one")
        sender.put("")  # as a chunk it would end the answer
        sender.put("two")
        assert written == [b"one", b"two"]
        assert len(asyncio.all_tasks()) == 1
        reads = False
        sender.put("three")
        assert sender.waits
        await until(lambda: not sender.waits)
        reads = True
        sender.put("four")
        await sender.end()
        assert written == [b"one", b"two", b"four"]
        assert [message.get("body") for message in sent] == [None, b"three", b""]
        assert not sent[-1]["more_body"]

    asyncio.run(work())


def test_closing_cancels_a_send_that_waits() -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def send(message: Any) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        sender = EventSender(send, [])
        await asyncio.sleep(0)
        sender.close()
        await ended.wait()

    asyncio.run(work())


def test_unread_events_are_sent_in_pieces() -> None:
    """A client that reads steadily gets its time for each piece."""

    async def work() -> None:
        reads = asyncio.Event()
        sent = []

        async def send(message: Any) -> None:
            await reads.wait()
            sent.append(message)

        sender = EventSender(send, [])
        for _ in range(5):
            sender.put("é" * (PIECE_BYTES // 2))
        sender.put("the end")
        await asyncio.sleep(0)
        assert sender.unread_bytes == 5 * PIECE_BYTES + 7
        reads.set()
        await sender.end()
        start, *pieces = sent
        assert start["status"] == 200
        assert [len(piece["body"]) for piece in pieces] == [*5 * [PIECE_BYTES], 7, 0]
        assert [piece["more_body"] for piece in pieces] == [*6 * [True], False]

    asyncio.run(work())
