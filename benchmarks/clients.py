"""Clients of a completions endpoint, in several processes, that play conversations and time the
answers.

Every event is counted when it happens, and only inside the measured window: a request when it is
sent, a first token, a gap between two events, a token when it arrives, a whole reply when it ends.
So the window's edges cut nothing off, and an overloaded server does not look better because its
unfinished replies are left out.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import aiohttp

from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.traces import Encode

from .workload import Words

CONNECT_SECONDS = 10
# less than servers' (5 s): a connection is not used while the server closes it
KEEPALIVE_SECONDS = 2
START_SECONDS = 0.2  # for the word to reach every process
PATIENCE_SECONDS = 60  # for a process to import its modules, or to return its measurements

clock = time.monotonic  # the same in all processes of a machine

TURNS = ("first", "later", "joined")
"""A conversation's first turn; a turn after others of this server; and the first request of a
conversation that is in its middle when the run begins, whose history the server has not seen."""


class Target(NamedTuple):
    """The server and its request settings.

    conversations  bodies name their conversation (Pensieve's fields)
    timeout_s      most seconds between two pieces of an answer
    tokenizer      a tokenizer file, for servers that do not return token ids
    """

    url: str
    model: str
    api_key: str | None = None
    conversations: bool = False
    timeout_s: float = 120.0
    tokenizer: str | None = None


class Window(NamedTuple):
    """What is measured, seconds after the run's start; the run ends with it."""

    start: float
    end: float


@dataclass(slots=True)
class LoadTally:
    """Counts inside the window. Times in seconds.

    prompt_tokens     of the requests whose first token has arrived
    cached_tokens     of the replies that ended, if the server reports it (`num_cache_reports`)
    per_token         of each reply that ended: from request to end, over its tokens
    gaps              between two events of a reply with tokens
    open_at_start, open_at_end
                      open requests at these times
    busy              share of a core that the busiest client process used: near 1 the client
                      measures its own limit
    waits             times to the first tokens that came in the window, by kind of turn (TURNS)
    open_waits        times that requests without a first token have waited at the window's end
    open_per_token    of each reply that is open at the end: its time so far, over all its tokens.
                      Its time per token will be at least this
    session_seconds   by the arrival's name: the sum of all turns' latencies, without think times,
                      of conversations that began with their first turn and ended in the window
    sessions          conversations with a first token in the window, or an open wait
    """

    sent: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_cache_reports: int = 0
    output_tokens: int = 0
    open_at_start: int = 0
    open_at_end: int = 0
    busy: float = 0.0
    sessions: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_token: array[float] = field(default_factory=lambda: array("d"))
    per_token: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    open_per_token: array[float] = field(default_factory=lambda: array("d"))
    waits: dict[str, list[float]] = field(default_factory=lambda: {turn: [] for turn in TURNS})
    open_waits: dict[str, list[float]] = field(default_factory=lambda: {turn: [] for turn in TURNS})
    session_seconds: dict[str, float] = field(default_factory=dict)

    def add(self, other: LoadTally) -> None:
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "busy":
                self.busy = max(self.busy, other.busy)
            elif name == "session_seconds":
                mine.update(theirs)
            elif isinstance(mine, dict) and not isinstance(mine, Counter):
                for turn in TURNS:
                    mine[turn].extend(theirs[turn])
            else:
                setattr(self, name, mine + theirs)


class Failed(Exception):
    """A request has failed; the message is the kind of failure."""


class StreamedReply:
    """What came of one request so far. Without token ids from the server, events with text count as
    a token each."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text: list[str] = []
        self.has_ids = False
        self.tokens = 0
        self.usage: dict[str, Any] | None = None
        self._rest = b""

    def read(self, data: bytes) -> list[int]:
        """Takes a piece of the answer's bytes; returns the token count of each of its events that
        has tokens. Raises Failed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        brought = []
        for line in lines:
            if line.startswith(b"data:") and b"{" in line:
                try:
                    tokens = self._event(json.loads(line[5:]))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise Failed("malformed event") from error
                if tokens:
                    brought.append(tokens)
        self.tokens += sum(brought)
        return brought

    def _event(self, event: dict[str, Any]) -> int:
        if "error" in event:
            raise Failed("error in the stream")
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:  # one at most: there is one prompt and n is 1
            ids = choice.get("token_ids")
            if ids is not None:
                self.has_ids = True
                self.ids += ids
                return len(ids)
            self.text.append(choice.get("text") or "")
            return 1 if self.text[-1] else 0
        return 0

    def token_ids(self, encode: Encode | None) -> list[int]:
        if self.has_ids or encode is None:
            return self.ids
        return list(encode("".join(self.text)))

    @property
    def length(self) -> int:
        return (
            self.tokens
            if self.has_ids or self.usage is None
            else int(self.usage["completion_tokens"])
        )

    @property
    def cached(self) -> int | None:
        details = (self.usage or {}).get("prompt_tokens_details")
        return None if details is None else details.get("cached_tokens")


class Client:
    """One process's conversations over one connection pool."""

    def __init__(self, target: Target, words: Words, window: Window, start: float):
        """`start`: by `clock`, the run's start."""
        self.tally = LoadTally()
        self._target = target
        self._words = words
        self._begin = start + window.start
        self._end = start + window.end
        self._start = start
        self._encode = load_encode(target.tokenizer)
        self._conversations: set[asyncio.Task[None]] = set()

    async def run(self, arrivals: Sequence[Arrival]) -> LoadTally:
        """Plays the conversations until the window ends; requests that are open then are cut
        off."""
        async with open_session(self._target) as self._session:
            measured = asyncio.create_task(self._measure_itself())
            coming = asyncio.create_task(self._receive(arrivals))
            await _until(self._end)
            await measured
            tasks = [coming, *self._conversations]
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):  # a fault of this program; cancellations are none
                    raise result
        return self.tally

    async def _receive(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            await _until(self._start + arrival.at)
            task = asyncio.create_task(self._play(arrival))
            self._conversations.add(task)
            task.add_done_callback(self._leave)

    def _leave(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:  # a fault stays, for `run` to raise
            self._conversations.discard(task)

    async def _measure_itself(self) -> None:
        await _until(self._begin)
        used = time.process_time()
        await _until(self._end)
        self.tally.busy = (time.process_time() - used) / (self._end - self._begin)

    async def _play(self, arrival: Arrival) -> None:
        """Plays one turn after the other. A failure ends the conversation: its user leaves."""
        turns = arrival.dialogue.turns
        prompt = self._words.history(arrival)
        name = self._words.name(arrival)
        whole = arrival.turn == 0 and not arrival.done
        played = PlayedConversation("first" if whole else "joined")
        for index in range(arrival.turn, len(turns)):
            wanted = turns[index].output_tokens - (arrival.done if index == arrival.turn else 0)
            left = arrival.think_s if index == arrival.turn else None
            # a history that is sent for one token is not measured
            tally = self.tally if left is None else LoadTally()
            reply = await self._ask(prompt, wanted, name, played, tally)
            if left is not None:
                self.tally.errors += tally.errors
            if reply is None or index + 1 == len(turns):
                break
            if left is not None:
                played = PlayedConversation("joined")
            played.turn = "later"
            following = turns[index + 1]
            log = prompt + reply.token_ids(self._encode)
            prompt = log[: following.history_tokens] + self._words.input(arrival, index + 1)
            if left is None:
                await asyncio.sleep(following.think_s)
            else:
                await _until(self._start + arrival.at + left)
        if reply is not None and whole and self._measured(clock()):
            self.tally.session_seconds[arrival.name] = played.seconds

    async def _ask(
        self,
        prompt: list[int],
        wanted: int,
        conversation: str,
        played: PlayedConversation,
        tally: LoadTally,
    ) -> StreamedReply | None:
        reply = StreamedReply()
        sent = clock()
        tally.sent += self._measured(sent)
        try:
            await self._stream(
                body(self._target, prompt, wanted, conversation),
                reply,
                sent,
                len(prompt),
                played,
                tally,
            )
            now = clock()
            if reply.length < wanted:
                raise Failed("short reply")
            played.seconds += now - sent
            if self._measured(now):
                tally.completed += 1
                tally.per_token.append((now - sent) / reply.length)
                if reply.cached is not None:
                    tally.cached_tokens += reply.cached
                    tally.num_cache_reports += 1
            return reply
        except Failed as error:
            tally.errors[str(error)] += self._measured(clock())
            return None
        finally:  # cancelled at the window's end as well
            now = clock()
            tally.open_at_start += sent < self._begin <= now
            if sent < self._end <= now:
                so_far = self._end - sent
                tally.open_at_end += 1
                tally.open_per_token.append(so_far / wanted)
                if not reply.tokens:
                    played.count(tally.open_waits, so_far, tally)

    async def _stream(
        self,
        content: bytes,
        reply: StreamedReply,
        sent: float,
        prompt_tokens: int,
        played: PlayedConversation,
        tally: LoadTally,
    ) -> None:
        """Raises Failed with the kind of the failure."""
        last = sent
        url = f"{self._target.url}/v1/completions"
        async with aclosing(answer(self._session, url, content)) as pieces:
            async for data in pieces:
                now = clock()
                first = not reply.tokens
                brought = reply.read(data)
                if self._measured(now):
                    if brought and first:
                        played.count(tally.waits, now - sent, tally)
                    _count(tally, brought, now, last, prompt_tokens if first else None, sent)
                if brought:
                    last = now

    def _measured(self, now: float) -> bool:
        return self._begin <= now < self._end


@dataclass(slots=True)
class PlayedConversation:
    """One conversation as its user sees it.

    turn      the kind of its next request, one of TURNS
    seconds   of its replies so far, without think times
    counted   it is one of the tally's `sessions`
    """

    turn: str
    seconds: float = 0.0
    counted: bool = False

    def count(self, waits: dict[str, list[float]], seconds: float, tally: LoadTally) -> None:
        """Counts a wait for a first token."""
        waits[self.turn].append(seconds)
        tally.sessions += not self.counted
        self.counted = True


def _count(
    tally: LoadTally, brought: list[int], now: float, last: float, first_of: int | None, sent: float
) -> None:
    """Events that came at `now`, together; `first_of`: the prompt's length if the reply begins with
    them."""
    for index, tokens in enumerate(brought):
        tally.output_tokens += tokens
        if index == 0 and first_of is not None:
            tally.first_token.append(now - sent)
            tally.prompt_tokens += first_of
        else:
            tally.gaps.append(0.0 if index else now - last)


async def answer(
    session: aiohttp.ClientSession, url: str, content: bytes
) -> AsyncGenerator[bytes, None]:
    """Posts `content` and yields the answer's bytes as they come. Raises Failed with the kind of
    the failure."""
    try:
        async with session.post(url, data=content) as response:
            if response.status != 200:
                raise Failed(f"HTTP {response.status}")
            async for data in response.content.iter_any():
                yield data
    except TimeoutError as error:
        raise Failed("timeout") from error
    except aiohttp.ClientConnectorError as error:
        raise Failed("cannot connect") from error
    except aiohttp.ClientError as error:
        raise Failed("connection lost") from error


def open_session(target: Target) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if target.api_key is not None:
        headers["Authorization"] = f"Bearer {target.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=target.timeout_s
        ),
        headers=headers,
    )


def body(target: Target, prompt: list[int], max_tokens: int, conversation: str) -> bytes:
    """Only fields that vLLM knows too, unless conversations are named."""
    fields: dict[str, Any] = dict(
        model=target.model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
    )
    if target.conversations:
        fields["conversation"] = conversation
    return json.dumps(fields).encode()


def load_encode(tokenizer: str | None) -> Encode | None:
    """Returns a function from text to token ids with a tokenizer.json, without special tokens.
    Raises the tokenizers library's errors."""
    if tokenizer is None:
        return None
    import tokenizers  # text alone needs it

    loaded = tokenizers.Tokenizer.from_file(tokenizer)
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - clock()))


# -- processes


class Load:
    """A run in several processes. A context manager that ends them on exit.

    `start` is the run's start by `clock`. The processes begin together, after their imports.
    """

    def __init__(
        self,
        target: Target,
        arrivals: Sequence[Arrival],
        words: Words,
        window: Window,
        processes: int,
    ):
        self._window = window
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._workers = []
        for index in range(processes):
            here, there = context.Pipe()
            work = (there, target, arrivals[index::processes], words, window)
            self._workers.append(context.Process(target=_work, args=work, daemon=True))
            self._pipes.append(here)
            self._workers[-1].start()
            there.close()  # so that the end of the process is the end of the pipe
        self.start = 0.0

    def __enter__(self) -> Load:
        try:
            for pipe in self._pipes:
                _receive(pipe, PATIENCE_SECONDS)
        except ChildProcessError:
            self.__exit__()
            raise
        self.start = clock() + START_SECONDS
        for pipe in self._pipes:
            pipe.send(self.start)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.terminate()
            worker.join()

    def result(self) -> LoadTally:
        """The sum of all processes' counts, after the window has ended. Raises ChildProcessError if
        a process is lost."""
        whole = LoadTally()
        for pipe in self._pipes:
            whole.add(
                _receive(pipe, max(0.0, self.start + self._window.end - clock()) + PATIENCE_SECONDS)
            )
        return whole


def _receive(pipe: Connection, seconds: float) -> Any:
    try:
        if pipe.poll(seconds):
            return pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise ChildProcessError("a client process has died; its reason stands above") from error
    raise ChildProcessError("a client process says nothing")


def _work(
    pipe: Connection, target: Target, arrivals: Sequence[Arrival], words: Words, window: Window
) -> None:
    pipe.send(None)
    client = Client(target, words, window, pipe.recv())
    pipe.send(asyncio.run(client.run(arrivals)))
