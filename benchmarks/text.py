"""Plays real conversations against a server's chat completions, at fixed numbers of streams.

    python -m benchmarks.text --url URL --data mtbench101_text.jsonl.gz --streams 1,16,64

Closed loop: each stream plays one conversation after the other, and sends the next turn as soon as
the reply has ended. A turn sends the whole history with the server's own earlier replies, and asks
for a fixed number of tokens (`ignore_eos`).

Each level starts at other conversations of the file. Large levels play the whole file more than
once, so the first user message of each play begins with eight random hexadecimal digits: no play
meets the KV of another one, but for what stands before that message.

A server may put several tokens into one event. The tokens of a reply that has ended are those of
its `usage`; each of its events counts as an equal share of them. A reply that is still open at the
window's end counts its events, each with the mean tokens of an event in the replies that have
ended. Only what arrives inside the window counts. Special tokens that the model goes on with have
no text and no events: where a reply has no event at all, its tokens count when it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.scheduler.types import SettingError
from pensieve.scripts.chat import ServerError
from pensieve.scripts.command import (
    check_above_0,
    check_least,
    exit_status,
    numbers,
    result_line,
    title_line,
)
from pensieve.scripts.simulation.traces import message_text, parse_json, read_lines

from .clients import (
    PATIENCE_SECONDS,
    Failed,
    LoadTally,
    StreamedReply,
    Target,
    answer,
    clock,
    open_session,
)
from .report import milliseconds

PAUSE_SECONDS = 1.0  # of a stream after a failed request: a server that refuses gets no flood


class ChatScript(NamedTuple):
    """A recorded conversation: its system message, if it has one, and the user's messages."""

    system: str | None
    users: tuple[str, ...]


class StreamLevel(NamedTuple):
    """What the streams of a level do.

    first         the conversation of the first stream; the others follow
    reply_tokens  of each turn
    warm_up_s     not measured
    measure_s     the window behind it
    """

    streams: int
    first: int
    reply_tokens: int
    warm_up_s: float
    measure_s: float


@dataclass(frozen=True, slots=True)
class TextReport:
    """One level's measurement. None: nothing to tell it from.

    requests_per_s      replies that ended
    ms_per_token_*      from a request to the end of its reply, over the reply's tokens
    inter_token_ms_*    between two events of a reply
    tokens_per_event    1 where each token has an event of its own
    prompt_tokens, cached_tokens
                        of the replies that ended, as the server's `usage` tells
    client_busy         share of a core that the busiest client process used: near 1 the client
                        measures its own limit
    """

    streams: int
    seconds: float
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    ttft_ms_p95: float | None
    ttft_ms_p99: float | None
    ms_per_token_mean: float | None
    ms_per_token_p90: float | None
    inter_token_ms_p50: float | None
    inter_token_ms_p99: float | None
    tokens_per_event: float | None
    prompt_tokens: int
    cached_tokens: int | None
    client_busy: float
    errors: dict[str, int]


COLUMNS = {
    "streams": ("streams", "7d"),
    "output_tokens_per_s": ("out tok/s", "9.0f"),
    "requests_per_s": ("req/s", "8.2f"),
    "ttft_ms_p50": ("TTFT p50", "9.0f"),
    "ttft_ms_p90": ("p90", "7.0f"),
    "ttft_ms_p95": ("p95", "7.0f"),
    "ttft_ms_p99": ("p99", "7.0f"),
    "ms_per_token_mean": ("ms/token", "9.2f"),
    "ms_per_token_p90": ("p90", "7.2f"),
    "inter_token_ms_p50": ("ITL p50", "8.2f"),
    "inter_token_ms_p99": ("p99", "7.2f"),
    "tokens_per_event": ("tok/event", "9.2f"),
    "client_busy": ("client", "6.2f"),
}
"""Times in ms."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.text", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    option("--model", metavar="NAME", help="(default: the server's first)")
    option(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="(default: $OPENAI_API_KEY)",
    )
    option(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="a conversation a line, `messages: [{role, content}]`; may be gzipped",
    )
    option(
        "--streams",
        default="1,16,64,256,512",
        metavar="LEVELS",
        help="at once, comma between (default %(default)s)",
    )
    option(
        "--reply-tokens", type=int, default=128, metavar="N", help="a turn (default %(default)s)"
    )
    option(
        "--warm-up-s",
        type=float,
        default=5.0,
        metavar="S",
        help="of a level, not measured (default %(default)s)",
    )
    option(
        "--seconds",
        type=float,
        default=14.0,
        metavar="S",
        help="of a level, measured (default %(default)s)",
    )
    option(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="between pieces of a reply (default %(default)s)",
    )
    option(
        "--processes", type=int, default=8, metavar="N", help="of the client (default %(default)s)"
    )
    option("--json", type=Path, metavar="FILE", help="a JSON line a level")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 if a client process is lost, 2 for a wrong option."""
    args = parser().parse_args(argv)
    try:
        return exit_status("benchmarks.text", lambda: run(args))
    except BrokenExecutor as error:
        print(f"benchmarks.text: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> None:
    # imported here: they load torch, which takes a second and which client processes do not need
    from .servers import MetricsServer
    from .serving import ask_model

    check_above_0(args, ("reply_tokens", "seconds", "timeout_s", "processes"))
    check_least(args, warm_up_s=0)
    streams = numbers(args.streams, "--streams", int)
    if min(streams) < 1:
        raise SettingError("--streams", f"must be at least 1, not {min(streams)}")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise SettingError("--json", f"there is no directory {args.json.resolve().parent}")
    texts = read_texts(args.data)
    try:
        server = MetricsServer(args.url, args.api_key)
    except ServerError as error:
        raise SettingError("--url", str(error)) from error
    model, _ = ask_model(server, args.model)
    target = Target(server.url, model, args.api_key, timeout_s=args.timeout_s)
    settings = {
        "bench": "text",
        "model": model,
        "data": args.data.name,
        "reply_tokens": args.reply_tokens,
        "warm_up_s": args.warm_up_s,
        "processes": args.processes,
        "time": int(time.time()),
    }
    if args.json is not None:
        args.json.write_text("")
    levels = plan_levels(
        streams,
        len(texts),
        reply_tokens=args.reply_tokens,
        warm_up_s=args.warm_up_s,
        measure_s=args.seconds,
    )
    print(f"{model} at {target.url}, {args.data.name}: {len(texts)} conversations; times in ms")
    print(f"{title_line(COLUMNS)}    prompt tokens; errors", flush=True)
    for measured in measure_levels(target, texts, levels, args.processes):
        print(level_line(measured), flush=True)
        if args.json is not None:
            with args.json.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(settings | asdict(measured)) + "\n")


def read_texts(path: Path) -> list[ChatScript]:
    """The conversations in which the user says something. SettingError."""
    if not path.is_file():
        raise SettingError("--data", f"there is no file {path}")
    texts = []
    for where, line in read_lines(path):
        value = parse_json(line, where)
        if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
            raise SettingError("--data", f"{where}: needs an object with messages")
        spoken: dict[str, list[str]] = {}
        for message in value["messages"]:
            text = message_text(message, where)
            spoken.setdefault(message["role"], []).append(text)
        system = "\n\n".join(spoken.get("system", ()))
        if "user" in spoken:
            texts.append(ChatScript(system or None, tuple(spoken["user"])))
    if not texts:
        raise SettingError("--data", f"{path} holds no conversations")
    return texts


def plan_levels(
    streams: Sequence[int],
    num_texts: int,
    *,
    reply_tokens: int,
    warm_up_s: float,
    measure_s: float,
) -> list[StreamLevel]:
    """Levels that start at conversations evenly spread over the file."""
    return [
        StreamLevel(count, index * num_texts // len(streams), reply_tokens, warm_up_s, measure_s)
        for index, count in enumerate(streams)
    ]


def measure_levels(
    target: Target, texts: Sequence[ChatScript], levels: Sequence[StreamLevel], processes: int
) -> Iterator[TextReport]:
    """Plays one level after the other in `processes` client processes, and yields each one's
    measurement when it has ended. Raises BrokenExecutor if a process is lost."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _remember, (barrier,)) as pool:
        for level in levels:
            shares = [range(index, level.streams, processes) for index in range(processes)]
            work = [pool.submit(_play_streams, target, texts, level, share) for share in shares]
            whole = LoadTally()
            for each in work:
                whole.add(each.result())
            yield summarise(whole, level)


def summarise(tally: LoadTally, level: StreamLevel) -> TextReport:
    seconds = level.measure_s
    events = len(tally.first_token) + len(tally.gaps)
    per_token = tally.per_token
    return TextReport(
        streams=level.streams,
        seconds=seconds,
        output_tokens_per_s=tally.output_tokens / seconds,
        requests_per_s=tally.completed / seconds,
        ttft_ms_p50=milliseconds(tally.first_token, 0.5),
        ttft_ms_p90=milliseconds(tally.first_token, 0.9),
        ttft_ms_p95=milliseconds(tally.first_token, 0.95),
        ttft_ms_p99=milliseconds(tally.first_token, 0.99),
        ms_per_token_mean=1e3 * sum(per_token) / len(per_token) if per_token else None,
        ms_per_token_p90=milliseconds(per_token, 0.9),
        inter_token_ms_p50=milliseconds(tally.gaps, 0.5),
        inter_token_ms_p99=milliseconds(tally.gaps, 0.99),
        tokens_per_event=tally.output_tokens / events if events else None,
        prompt_tokens=tally.prompt_tokens,
        cached_tokens=tally.cached_tokens if tally.num_cache_reports else None,
        client_busy=tally.busy,
        errors={kind: count for kind, count in sorted(tally.errors.items()) if count},
    )


def level_line(level: TextReport) -> str:
    """A row below `COLUMNS`, with the cached share and the errors behind it."""
    cached = "cached unknown"
    if level.cached_tokens is not None:
        cached = f"cached {level.cached_tokens / (level.prompt_tokens or 1):.1%}"
    errors = ", ".join(f"{kind}: {count}" for kind, count in level.errors.items())
    words = "; ".join(filter(None, (cached, errors)))
    return f"{result_line(COLUMNS, asdict(level))}    {words}"


# -- a client process

_barrier: Barrier | None = None


def _remember(barrier: Barrier) -> None:
    """A barrier cannot be sent with a task, only when the process starts."""
    global _barrier
    _barrier = barrier


def _play_streams(
    target: Target, texts: Sequence[ChatScript], level: StreamLevel, streams: Sequence[int]
) -> LoadTally:
    """Plays some of a level's streams, or none. All processes begin together, after their imports;
    so each of them has one share."""
    assert _barrier is not None
    _barrier.wait(PATIENCE_SECONDS)
    return asyncio.run(TextClient(target, texts, level).run(streams))


class ChatReply(StreamedReply):
    """A reply of chat completions. `tokens` counts its events with text, `measured_events` those
    inside the window."""

    def __init__(self) -> None:
        super().__init__()
        self.measured_events = 0

    @property
    def prompt_tokens(self) -> int:
        return int((self.usage or {}).get("prompt_tokens", 0))

    def _event(self, event: dict[str, Any]) -> int:
        if "error" in event:
            raise Failed("error in the stream")
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:  # one at most: n is 1
            self.text.append(choice["delta"].get("content") or "")
            return 1 if self.text[-1] else 0
        return 0


class TextClient:
    """One process's streams over one connection pool."""

    def __init__(self, target: Target, texts: Sequence[ChatScript], level: StreamLevel):
        """The level's time begins now."""
        self.tally = LoadTally()
        self._target = target
        self._texts = texts
        self._level = level
        self._begin = clock() + level.warm_up_s
        self._end = self._begin + level.measure_s
        self._ended_tokens = 0
        self._ended_events = 0
        self._open_events = 0  # in the window, of replies that have not ended

    async def run(self, streams: Sequence[int]) -> LoadTally:
        """Plays until the window ends; requests that are open then are cut off."""
        async with open_session(self._target) as self._session:
            tasks = [asyncio.create_task(self._play_stream(stream)) for stream in streams]
            await until(self._begin)
            used = time.process_time()
            await until(self._end)
            self.tally.busy = (time.process_time() - used) / self._level.measure_s
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):  # a fault of this program; cancellations are none
                    raise result
        per_event = self._ended_tokens / self._ended_events if self._ended_events else 1.0
        self.tally.output_tokens += round(self._open_events * per_event)
        return self.tally

    async def _play_stream(self, stream: int) -> None:
        place = self._level.first + stream
        while True:
            if not await self._play(self._texts[place % len(self._texts)]):
                await asyncio.sleep(PAUSE_SECONDS)
            place += self._level.streams

    async def _play(self, text: ChatScript) -> bool:
        """Plays one turn after the other. False: a request failed, which ends the conversation."""
        messages = [{"role": "system", "content": text.system}] if text.system else []
        salt = secrets.token_hex(4)
        for index, content in enumerate(text.users):
            spoken = content if index else f"{salt} {content}"
            messages.append({"role": "user", "content": spoken})
            reply = await self._ask(messages)
            if reply is None:
                return False
            messages.append({"role": "assistant", "content": "".join(reply.text)})
        return True

    async def _ask(self, messages: Sequence[dict[str, str]]) -> ChatReply | None:
        """The whole reply; None if the request failed."""
        reply = ChatReply()
        sent = clock()
        self.tally.sent += self._measured(sent)
        try:
            await self._receive(messages, reply, sent)
            if reply.length < self._level.reply_tokens:
                raise Failed("short reply")
        except Failed as error:
            self.tally.errors[str(error)] += self._measured(clock())
            return None
        self._count_ended(reply, sent, clock())
        return reply

    async def _receive(
        self, messages: Sequence[dict[str, str]], reply: ChatReply, sent: float
    ) -> None:
        """Raises Failed with the kind of the failure."""
        content = chat_body(self._target.model, messages, self._level.reply_tokens)
        last = sent
        url = f"{self._target.url}/v1/chat/completions"
        async with aclosing(answer(self._session, url, content)) as pieces:
            async for data in pieces:
                now = clock()
                begins = not reply.tokens
                events = len(reply.read(data))
                if events and self._measured(now):
                    self._count_events(reply, events, now - last, begins)
                if events:
                    last = now

    def _count_events(self, reply: ChatReply, events: int, waited: float, begins: bool) -> None:
        """Events that came together, `waited` seconds after those before, or after the request."""
        (self.tally.first_token if begins else self.tally.gaps).append(waited)
        self.tally.gaps.extend([0.0] * (events - 1))
        reply.measured_events += events
        self._open_events += events

    def _count_ended(self, reply: ChatReply, sent: float, now: float) -> None:
        tally = self.tally
        self._open_events -= reply.measured_events
        self._ended_tokens += reply.length
        self._ended_events += reply.tokens
        inside = self._measured(now)
        share = reply.measured_events / reply.tokens if reply.tokens else float(inside)
        tally.output_tokens += round(reply.length * share)
        if inside:
            tally.completed += 1
            tally.per_token.append((now - sent) / reply.length)
            tally.prompt_tokens += reply.prompt_tokens
            if reply.cached is not None:
                tally.cached_tokens += reply.cached
                tally.num_cache_reports += 1

    def _measured(self, now: float) -> bool:
        return self._begin <= now < self._end


async def until(moment: float) -> None:
    """By `clock`."""
    await asyncio.sleep(max(0.0, moment - clock()))


def chat_body(model: str, messages: Sequence[dict[str, str]], reply_tokens: int) -> bytes:
    """Standard fields, and `ignore_eos`, which Pensieve, vLLM and SGLang know."""
    fields = {
        "model": model,
        "messages": messages,
        "max_tokens": reply_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


if __name__ == "__main__":
    sys.exit(main())
