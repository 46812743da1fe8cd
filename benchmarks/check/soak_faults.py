"""The clients and faults that the soak adds to conversations: streams that are measured, looks at
/health, clients that do not read, histories that expire, a database that stops, a disk that fills,
a worker of the HTTP process that ends.

Each is a thread that repeats one step while the server is to be used (`Stage.repeat`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import resource
import signal
import socket
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from pensieve.runtime.conversations.databases import open_database
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import Transcript
from pensieve.scripts.chat import ServerError

from ..servers import MetricsServer
from .postgres import PrivatePostgres
from .soak_watch import (
    CUT_OFF,
    FAULTS,
    LONGEST_GAP,
    LONGEST_WAIT,
    TELL_SECONDS,
    FaultWindow,
    Watch,
    Wrong,
    failing_parts,
)

AWAY_SECONDS = 0.2  # until a client tries a server again that has failed it
PROBE_TOKENS = 120
LOOK_SECONDS = 1.0  # between two looks at /health

READERS = 2
READER_CHOICES = 4
READER_TOKENS = 120
READER_LOGPROBS = 20
READER_BUFFER = 4096  # bytes that its socket takes without being read
READER_PACKET = 536  # bytes
READER_HOLDS = LONGEST_WAIT + 5.0  # seconds without a read: longer than other clients may wait

EXPIRED = 3000  # conversations of one turn, in the database before the server starts
EXPIRED_PREFIX = "old "
DAY = 86400.0
SHORT_TTL = 2.0  # seconds

FAULT_LASTS = (3.0, 8.0)  # seconds
FAULT_PAUSE = (2.0, 5.0)  # seconds between two faults
HANGING = 0.2  # chance that a worker is stopped, which takes half a minute, and not killed
PATIENCE = 60.0  # seconds until a fault must have been met, and until it must be over
LEASE = 15.0  # seconds: longer than a lease of an open turn
FAULTED = 'pensieve:kv_disk_faults_total{kind="system"}'
SAVED = 'pensieve:kv_disk_records_total{direction="spill"}'


class GreedyReference(Protocol):
    vocabulary: int

    def check(self, tokens: Sequence[int], start: int) -> None: ...


class RunningServer(Protocol):
    """The part of a server's life that faults need."""

    server: MetricsServer
    model: str
    processes: list[int]

    def history_processes(self) -> list[int]: ...

    def other_processes(self) -> list[int]: ...

    def workers(self) -> list[int]: ...


class Stage:
    """What the threads of a soak share.

    life     the server's present life
    running  set while it is to be used
    over     set at the end, and when something has failed
    """

    life: RunningServer

    def __init__(self, reference: GreedyReference, seed: int):
        self.reference = reference
        self.seed = seed
        self.watch = Watch()
        self.running, self.over = threading.Event(), threading.Event()
        # held by a fault from its beginning to its end, and by a kill
        self.undisturbed = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._open = 0
        self._failure: BaseException | None = None

    def repeat(self, step: Callable[[], None]) -> threading.Thread:
        """Returns the thread, which has begun."""

        def work() -> None:
            try:
                while not self.over.is_set():
                    if self.running.wait(0.1):
                        with self.busy():
                            step()
            except BaseException as error:  # raised by the thread that runs the soak
                self.fail(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def pause(self, seconds: float) -> None:
        """Waits, but no longer than the server is to be used."""
        until = time.monotonic() + seconds
        while self.running.is_set() and not self.over.is_set() and time.monotonic() < until:
            time.sleep(0.05)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    @property
    def idle(self) -> bool:
        return self._open == 0

    def count(self, what: str, times: int = 1) -> None:
        with self._lock:
            self.counts[what] += times

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.over.set()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def failed(self, error: ServerError, since: float, named: bool, what: str) -> None:
        """Judges the failure of a request that was sent at `since`, and waits a little: the server
        may be down."""
        self.watch.status(error, since, named, what)
        self.count(f"status {error.status}" if error.status else "cut off")
        time.sleep(AWAY_SECONDS)


# -- measured streams, and looks


class Probe:
    """Reads one stream of a known prompt after the other, and measures each wait. `named`: each is
    a turn of a new conversation, which is deleted afterwards."""

    def __init__(self, stage: Stage, named: bool):
        self._stage = stage
        self._named = named
        self._what = "a turn's stream" if named else "a stream"
        self._prompt = (
            [40 + 3 * at for at in range(20)] if named else [50 + 2 * at for at in range(20)]
        )
        self._right: list[int] = []  # as compared with the reference
        self._number = 0

    def step(self) -> None:
        stage = self._stage
        since = time.monotonic()
        self._number += 1
        name = f"probe {self._number}"
        body: dict[str, Any] = {
            "model": stage.life.model,
            "prompt": self._prompt,
            "max_tokens": PROBE_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        if self._named:
            body["conversation"] = name
        tokens: list[int] = []
        stored = self._named
        try:
            self._read(body, tokens)
        except ServerError as error:
            stage.failed(error, since, self._named, self._what)
            stored = False  # or perhaps
        self._check(tokens)
        if self._named:
            self._delete(name, stored)

    def _read(self, body: dict[str, Any], tokens: list[int]) -> None:
        """Adds to `tokens` as they arrive."""
        last = self._now()
        with contextlib.closing(self._stage.life.server.events("/v1/completions", body)) as events:
            for event in events:
                new = [token for choice in event["choices"] for token in choice["token_ids"]]
                if new:
                    self._waited(last, "token" if tokens else "first token")
                    tokens += new
                    last = self._now()
        if len(tokens) < PROBE_TOKENS:
            raise ServerError("the stream ended early", CUT_OFF)
        self._waited(last, "end")

    def _now(self) -> tuple[float, float]:
        """The time, and the seconds for which the server and this thread have waited for a
        processor until then."""
        return time.monotonic(), waited_for_processor(self._stage.life.processes)

    def _waited(self, last: tuple[float, float], what: str) -> None:
        watch, (now, starved) = self._stage.watch, self._now()
        since, starved_before = last
        whole = now - since
        seconds = max(0.0, whole - max(0.0, starved - starved_before))
        first = what == "first token"
        most = LONGEST_WAIT if first else LONGEST_GAP
        if not watch.wait(since, seconds, most, self._named, f"{self._what}: its {what}"):
            return
        if first:
            watch.longest.wait = max(watch.longest.wait, seconds)
        else:
            watch.longest.gap = max(watch.longest.gap, seconds)
            watch.longest.whole_gap = max(watch.longest.whole_gap, whole)

    def _check(self, tokens: list[int]) -> None:
        if tokens != self._right[: len(tokens)]:
            self._stage.reference.check([*self._prompt, *tokens], len(self._prompt))
            self._right = tokens
        self._stage.count("probe tokens", len(tokens))
        self._stage.count("probe streams")

    def _delete(self, name: str, stored: bool) -> None:
        since = time.monotonic()
        try:
            self._stage.life.server.ask("DELETE", f"/v1/conversations/{quote(name)}")
            self._stage.count("probes deleted")
        except ServerError as error:
            if stored or error.status != 404:
                self._stage.failed(error, since, True, "a deletion")


def waited_for_processor(processes: Sequence[int]) -> float:
    """Seconds for which this thread and the main threads of these processes could run and had no
    processor, because the machine had other work. 0.0 on a system that does not count them."""
    waited = 0
    for place in ("thread-self", *processes):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            _, delay, _ = Path(f"/proc/{place}/schedstat").read_text().split()
            waited += int(delay)
    return waited / 1e9


def look_at_health(stage: Stage) -> None:
    stage.pause(LOOK_SECONDS)
    since = time.monotonic()
    try:
        body = stage.life.server.ask("GET", "/health")
    except ServerError as error:
        stage.failed(error, since, False, "/health")
    else:
        stage.watch.look(body, since, time.monotonic())


# -- clients that do not read


class SlowReader:
    """Asks for streams that do not fit into any buffer, and does not read them: it reads late, or
    hangs up."""

    def __init__(self, stage: Stage, number: int):
        self._stage = stage
        self._random = random.Random(f"{stage.seed}/reader {number}")
        self._prompt = [60 + 5 * at + number for at in range(12)]
        self._right: list[int] = []

    def step(self) -> None:
        stage = self._stage
        since = time.monotonic()
        try:
            with stage.watch.fault("readers"), contextlib.closing(self._ask()) as connection:
                stage.pause(READER_HOLDS)
                if self._random.random() < 0.5:
                    stage.count("readers that hung up")
                    return
                self._read(connection)
                stage.count("readers that read late")
        except ServerError as error:
            stage.failed(error, since, False, "a stream that is read late")
        except (OSError, http.client.HTTPException) as error:
            stage.failed(ServerError(repr(error)), since, False, "a stream that is read late")

    def _ask(self) -> http.client.HTTPConnection:
        address = urlsplit(self._stage.life.server.url)
        connection = http.client.HTTPConnection(address.netloc)
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READER_BUFFER)
        # The system sizes the server's buffer by this: packets of the loopback device would let it
        # take megabytes.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, READER_PACKET)
        connection.sock.settimeout(PATIENCE)
        connection.sock.connect((address.hostname, address.port))
        body = {
            "model": self._stage.life.model,
            "prompt": self._prompt,
            "n": READER_CHOICES,
            "max_tokens": READER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stop": ["no text has this"],
            "logprobs": READER_LOGPROBS,
            "return_token_ids": True,
            "stream": True,
        }
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return connection

    def _read(self, connection: http.client.HTTPConnection) -> None:
        response = connection.getresponse()
        if response.status >= 400:
            raise ServerError(response.read().decode(errors="replace"), response.status)
        replies: list[list[int]] = [[] for _ in range(READER_CHOICES)]
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                for choice in event["choices"]:
                    replies[choice["index"]] += choice["token_ids"]
        for tokens in replies:
            if tokens != self._right:
                self._stage.reference.check([*self._prompt, *tokens], len(self._prompt))
                self._right = tokens
        if any(len(tokens) < READER_TOKENS for tokens in replies):
            raise ServerError("the stream ended early")


# -- histories that expire


def put_expired(where: str | Path) -> int:
    """Fills the database up to EXPIRED expired conversations; no server may use a file meanwhile.
    Returns how many there are."""
    there = expired_left(where)
    long_ago = time.time() - DAY
    log = Transcript((), array("i", range(64)), "", 0)
    store = HistoryStore(where)
    for number in range(EXPIRED - there):
        store.commit(Name("", f"{EXPIRED_PREFIX}{time.time_ns()} {number}"), log, long_ago)
    store.close()
    database = open_database(where)
    with database.transaction():
        database.execute(
            "UPDATE conversations SET history_ttl = 1 WHERE id LIKE :name",
            {"name": f"{EXPIRED_PREFIX}%"},
        )
    database.close()
    return EXPIRED


def expired_left(where: str | Path) -> int:
    """How many of them the database still has."""
    HistoryStore(where).close()  # makes the tables
    database = open_database(where)
    counted = "SELECT count(*) FROM conversations WHERE id LIKE :name"
    ((left,),) = database.execute(counted, {"name": f"{EXPIRED_PREFIX}%"})
    database.close()
    return int(left)


class ShortLived:
    """A conversation with a short lifetime: it is there until then, and not after it."""

    def __init__(self, stage: Stage):
        self._stage = stage
        self._number = 0

    def step(self) -> None:
        since = time.monotonic()
        try:
            self._live_and_expire()
        except ServerError as error:
            self._stage.failed(error, since, True, "a conversation that expires")

    def _live_and_expire(self) -> None:
        stage = self._stage
        since = time.monotonic()
        self._number += 1
        name = f"short {self._number}"
        path = f"/v1/conversations/{quote(name)}"
        server = stage.life.server
        prompt = [70 + at for at in range(30)]
        body = {
            "model": stage.life.model,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
        }
        began = time.time()
        answer = server.ask(
            "POST", "/v1/completions", {**body, "conversation": name, "return_token_ids": True}
        )
        stored = time.time()
        server.ask("POST", path, {"history_ttl_s": SHORT_TTL})
        stage.reference.check([*prompt, *answer["choices"][0]["token_ids"]], len(prompt))
        there = self._is_there(path)
        if not there and time.time() < began + SHORT_TTL:
            stage.watch.report(f"{name} is gone before its {SHORT_TTL} s are over")
        stage.pause(stored + SHORT_TTL + 0.1 - time.time())
        late = time.time() > stored + SHORT_TTL
        if late and self._is_there(path) and not stage.watch.disturbed(since):
            stage.watch.report(
                f"{name} is there {time.time() - stored:.1f} s after its turn, and had {SHORT_TTL} "
                "s"
            )
        stage.count("expired")

    def _is_there(self, path: str) -> bool:
        try:
            self._stage.life.server.ask("GET", path)
        except ServerError as error:
            if error.status == 404:
                return False
            raise
        return True


# -- a database that stops, a disk that fills, a worker that ends


class Faults:
    """One fault after the other, of the kinds in `turns`: "database", "full histories", "full disk
    tier", "full disk" (both) or "workers"."""

    def __init__(self, stage: Stage, turns: Sequence[str], database: PrivatePostgres | None):
        self._stage = stage
        self._turns = turns
        self._database = database
        self._random = random.Random(f"{stage.seed}/faults")
        self._number = 0

    def step(self) -> None:
        stage = self._stage
        stage.pause(self._random.uniform(*FAULT_PAUSE))
        with stage.undisturbed:
            if not stage.running.is_set():
                return
            kind = self._turns[self._number % len(self._turns)]
            self._number += 1
            if kind == "database":
                self._stop_database()
            elif kind == "workers":
                self._end_worker(
                    signal.SIGSTOP if self._random.random() < HANGING else signal.SIGKILL
                )
            else:
                self._fill_disk(
                    histories=kind != "full disk tier", disk_tier=kind != "full histories"
                )

    def _last(self) -> None:
        self._stage.over.wait(self._random.uniform(*FAULT_LASTS))

    def _stop_database(self) -> None:
        assert self._database is not None
        stage = self._stage
        with stage.watch.fault("leases", lasts=LEASE), stage.watch.fault("database") as window:
            self._database.stop("immediate")
            try:
                self._until(503)
                self._until_told([window])
                self._last()
            finally:
                window.lifted = time.monotonic()
                self._database.start()
            self._until(200)
            self._until_untold([window])

    def _end_worker(self, how: signal.Signals) -> None:
        stage = self._stage
        before = stage.life.workers()
        ending = self._random.choice(before)
        with stage.watch.fault("workers"):
            os.kill(ending, how)
            stage.count("workers killed" if how == signal.SIGKILL else "workers stopped")
            until = time.monotonic() + PATIENCE
            while not stage.over.is_set():
                now = stage.life.workers()
                if ending not in now and len(now) == len(before):
                    break
                if time.monotonic() > until:
                    raise Wrong(f"worker {ending} is not replaced within {PATIENCE} s")
                time.sleep(AWAY_SECONDS)

    def _fill_disk(self, histories: bool, disk_tier: bool) -> None:
        """No mount is needed: a process with RLIMIT_FSIZE 0 may write to no file."""
        stage = self._stage
        kinds = {"full histories": histories, "full disk tier": disk_tier}
        processes = stage.life.history_processes() if histories else []
        processes += stage.life.other_processes() if disk_tier else []
        with contextlib.ExitStack() as stack:
            windows = [
                stack.enter_context(stage.watch.fault(kind)) for kind, full in kinds.items() if full
            ]
            if disk_tier:
                stack.enter_context(stage.watch.fault("records", lasts=math.inf))
            faults = self._metric(FAULTED)
            try:
                limit_files(processes, 0)
                if histories:
                    self._until(507)
                if disk_tier:
                    self._until_more(FAULTED, faults)
                self._until_told(windows)
                self._last()
            finally:
                for window in windows:
                    window.lifted = time.monotonic()
                limit_files(processes, None)
            if histories:
                self._until(200)
            if disk_tier:
                self._until_more(SAVED, self._metric(SAVED))
            self._until_untold(windows)

    def _until(self, wanted: int) -> None:
        """Returns when a small turn has got this status. Raises Wrong if none does for too long."""
        stage = self._stage
        until = time.monotonic() + PATIENCE
        while (status := self._turn()) != wanted and not stage.over.is_set():
            if time.monotonic() > until:
                raise Wrong(f"turns get {status} instead of {wanted} for {PATIENCE} s")
            time.sleep(AWAY_SECONDS)

    def _until_told(self, windows: Sequence[FaultWindow]) -> None:
        """Requests have met these faults: returns when /health says so."""
        parts = {part for window in windows for part in FAULTS[window.kind].parts}
        longest = self._stage.watch.longest
        took, failing = self._looked(parts.issubset)
        if took is None:
            missing = " and ".join(sorted(parts - failing))
            self._stage.watch.report(
                f"/health does not tell within {TELL_SECONDS} s of a fault of {missing}"
            )
            return
        longest.told = max(longest.told, took)
        for window in windows:
            window.told = time.monotonic()

    def _until_untold(self, windows: Sequence[FaultWindow]) -> None:
        """Requests have found these faults gone: returns when /health says nothing of them."""
        parts = {part for window in windows for part in FAULTS[window.kind].parts}
        longest = self._stage.watch.longest
        took, failing = self._looked(parts.isdisjoint)
        if took is None:
            still = " and ".join(sorted(parts & failing))
            self._stage.watch.report(
                f"/health still tells of a fault of {still}, {TELL_SECONDS} s after its end"
            )
            return
        longest.recovered = max(longest.recovered, took)

    def _looked(self, wanted: Callable[[set[str]], bool]) -> tuple[float | None, set[str]]:
        """Returns the seconds until /health names the wanted parts (None: TELL_SECONDS were too
        few), and the parts that it named last."""
        began = time.monotonic()
        while True:
            since = time.monotonic()
            failing = failing_parts(self._stage.life.server.ask("GET", "/health"))
            if wanted(failing):
                return time.monotonic() - began, failing
            if since > began + TELL_SECONDS:
                return None, failing
            time.sleep(AWAY_SECONDS)

    def _turn(self) -> int:
        """The status of a small turn."""
        body = {
            "model": self._stage.life.model,
            "prompt": [45, 46, 47],
            "max_tokens": 1,
            "conversation": "fault",
        }
        try:
            self._stage.life.server.ask("POST", "/v1/completions", body)
        except ServerError as error:
            return error.status
        return 200

    def _metric(self, name: str) -> float:
        return self._stage.life.server.metrics()[name]

    def _until_more(self, metric: str, before: float) -> None:
        """Returns when the metric has grown: chunks are saved all the time. Raises Wrong if it does
        not."""
        until = time.monotonic() + PATIENCE
        while self._metric(metric) <= before and not self._stage.over.is_set():
            if time.monotonic() > until:
                raise Wrong(f"{metric} does not grow within {PATIENCE} s")
            time.sleep(AWAY_SECONDS)


def limit_files(processes: Sequence[int], size: int | None) -> None:
    """Sets the bytes beyond which these processes may write no file; None: as many as the system
    allows. Python ignores the signal, so a write fails."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
            resource.prlimit(process, resource.RLIMIT_FSIZE, (most if size is None else size, most))
