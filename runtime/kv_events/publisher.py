"""Publishes KV events over ZeroMQ: batches by a PUB socket, and again by a ROUTER socket for
routers that have missed some.

Batches have numbers from 0 without a gap. Batch 0 says that nothing is stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec.msgpack
import zmq

from ...scheduler.kv.noted_store import NotedChunkStore, ResidencyChanges
from ...scheduler.types import SettingError
from ..counters import KVEventCounters
from .blocks import CLEARED, Blocks, Event
from .config import SETTING, KVEventsConfig

log = logging.getLogger("pensieve")

BATCH_MS = 50  # the longest time that changes wait for their batch
KEPT_BYTES = 256 << 20  # of batches that are kept to be repeated
ANSWERS = 1000  # batches that are repeated in one go, and that wait for a router that reads slowly
ANSWER_MS = 5  # between two goes
LINGER_MS = 500  # at the end, for the last batch to leave
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
RANK = 0  # all ranks have one scheduler, and one set of chunks
FORGET = object()


class _StartOver(NamedTuple):
    """Changes are lost: what is resident now."""

    resident: ResidencyChanges


class KVEventPublisher:
    """`report` is called by the loop's thread and waits for nothing; all else happens in the
    publisher's thread.

    endpoint, replay_endpoint
            the addresses with the ports that the sockets have
    """

    def __init__(
        self,
        config: KVEventsConfig,
        store: NotedChunkStore,
        seed: bytes,
        chunk_tokens: int,
        has_states: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        """Binds the sockets. SettingError if an address cannot be used.

        store   of the scheduler: its changes are reported
        seed    as in `SchedulerConfig`
        has_states
                the model has recurrent states
        """
        self._store = store
        self._blocks = Blocks(seed, chunk_tokens, has_states)
        self._clock = clock
        self._topic = config.topic.encode()
        self._most_queued = config.max_queue_size
        self._queue: deque[ResidencyChanges | _StartOver | object] = deque()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._most_kept = config.buffer_steps
        self._number = 0  # of the next batch
        # by client of the ROUTER socket: what is left of the answer to its latest request
        self._answers: dict[bytes, Iterator[tuple[int, bytes]]] = {}
        self._stored_events = self._removed_events = self._cleared_events = self._resets = 0
        self._closing = threading.Event()
        self._broken = False  # its thread has ended with an error: the server goes on without it
        self._context = zmq.Context(io_threads=1)
        self._poller = zmq.Poller()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publish = self._bind(zmq.PUB, config.endpoint, config.hwm)
            if config.replay_endpoint is not None:
                self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, ANSWERS)
                self._replay.router_mandatory = True  # `_answer` hears of a full or a closed pipe
                self._poller.register(self._replay, zmq.POLLIN)
        except SettingError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._publish.last_endpoint.decode()
        self.replay_endpoint = None if self._replay is None else self._replay.last_endpoint.decode()
        log.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint or "none")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, most_waiting: int) -> zmq.Socket[bytes]:
        """`most_waiting`: messages to one peer."""
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(most_waiting)  # of no effect after the bind
        socket.linger = LINGER_MS
        try:
            socket.bind(endpoint.removesuffix(":0") + ":*" if endpoint.endswith(":0") else endpoint)
        except zmq.ZMQError as error:
            raise SettingError(SETTING, f"cannot bind {endpoint}: {error}") from None
        return socket

    # -- the loop's thread

    def report(self, deleted: bool = False) -> None:
        """Hands over what has changed in the store. If too much waits already, it is given up:
        routers are told to forget all, and then what is resident, as far as its tokens are known.

        `deleted`: the chunks of a conversation that a client has deleted are gone. After it, as
        after a lifetime that ends, no earlier batch, which may have their tokens, is repeated.
        """
        changes = self._store.take_changes()
        if self._broken:
            return
        if len(self._queue) >= self._most_queued:
            self._queue.clear()
            self._queue.append(_StartOver(self._store.resident()))
        elif changes is not None:
            self._queue.append(changes)
        if deleted:
            self._queue.append(FORGET)

    def counters(self) -> KVEventCounters:
        return KVEventCounters(
            self._stored_events,
            self._removed_events,
            self._cleared_events,
            len(self._queue),
            self._resets,
        )

    def close(self) -> None:
        """Publishes what was put, and ends the thread."""
        self._closing.set()
        self._thread.join()
        self._context.destroy()

    # -- the publisher's thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("KV events have ended with an error; restart the server to have them")
            self._broken = True
            self._queue.clear()

    def _serve(self) -> None:
        self._send([CLEARED])
        self._cleared_events += 1
        while not self._closing.is_set():
            if self._replay is None:
                self._closing.wait(BATCH_MS / 1e3)
            else:
                if self._poller.poll(ANSWER_MS if self._answers else BATCH_MS):
                    self._begin_answer(self._replay)
                for client, batches in list(self._answers.items()):
                    self._answer(self._replay, client, batches)
            self._take()
        self._take()

    def _take(self) -> None:
        """Publishes the net changes of all that waits."""
        forgets = False
        while self._queue:
            waiting = self._queue.popleft()
            if isinstance(waiting, ResidencyChanges):
                self._blocks.apply(waiting)
                forgets = forgets or waiting.deleted
                time.sleep(0)  # the loop's thread may go on
            elif isinstance(waiting, _StartOver):
                self._blocks.replace(waiting.resident)
                self._blocks.events()
                self._resets += 1
                self._cleared_events += 1
                self._forget_kept()  # a deletion may be among what is lost
                self._send([CLEARED, *self._blocks.everything()])
            else:
                forgets = True
        events = self._blocks.events()
        if forgets:
            self._forget_kept()
        if events:
            self._send(events)

    def _send(self, events: list[Event]) -> None:
        for event in events:
            self._stored_events += event["type"] == "BlockStored"
            self._removed_events += event["type"] == "BlockRemoved"
        payload = self._payload(events)
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._most_kept or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._publish.send_multipart([self._topic, _bytes(self._number), payload])
        self._number += 1

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    def _payload(self, events: list[Event]) -> bytes:
        encoded: bytes = msgspec.msgpack.encode([self._clock(), events, RANK])
        return encoded

    def _begin_answer(self, replay: zmq.Socket[bytes]) -> None:
        """Reads one request for all batches from a number on. It replaces the client's last one."""
        client, *_, start = replay.recv_multipart()
        if len(start) != NUMBER_BYTES:
            log.warning("a request for KV events has no number")
            return
        self._answers[client] = self._batches(int.from_bytes(start, "big", signed=True))

    def _answer(
        self, replay: zmq.Socket[bytes], client: bytes, batches: Iterator[tuple[int, bytes]]
    ) -> None:
        """Sends as many of the batches as the client takes, `ANSWERS` at most."""
        for _ in range(ANSWERS):
            try:
                replay.send(client, zmq.NOBLOCK | zmq.SNDMORE)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._answers[client]  # it has gone
                return
            number, payload = next(batches, (None, b""))
            mark = END if number is None else _bytes(number)
            replay.send_multipart([b"", self._topic, mark, payload])
            if number is None:
                del self._answers[client]
                return

    def _batches(self, start: int) -> Iterator[tuple[int, bytes]]:
        """The batches from that number on. If one is not kept any more, it becomes one that stores
        all anew, and the later ones become empty: routers expect every number."""
        number = max(0, start)
        end = self._number
        while number < end and self._kept and number >= self._kept[0][0]:
            yield self._kept[number - self._kept[0][0]]
            number += 1
        if number >= end:
            return
        # What waits is not applied yet, so this is what the latest batch left.
        end = self._number
        yield number, self._payload([CLEARED, *self._blocks.everything()])
        empty = self._payload([])
        for later in range(number + 1, end):
            yield later, empty


def _bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
