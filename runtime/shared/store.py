"""One rank's shared tier: writes, reads, looks for and removes records of a store that may fail,
hang or lie, in threads, so that the loop never waits.

    begin(work)     hands a plan's work to the threads and returns
    take()          returns what has ended since

A call that misses its deadline, or ERRORS failures one after the other, switch the tier off: all
work fails at once until a probe, made every OFF_S seconds without any request, is answered. A HOST
slot stays in the hands of a late call until that returns, since it may still read or write there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...scheduler.kv.piece_keys import is_kv, split_key, state_key
from ...scheduler.plan import KeyAnswer, KeyBatch, Promotion, Spill, TierReport, TierWork
from ...scheduler.types import ChunkKey, StoredRecord, Tier
from ..counters import SharedCounters
from ..disk.directory import RecordOrigin
from ..disk.record import PAGE, pack_header, payload_intact, read_header
from ..disk.segments import aligned_buffer
from .batches import batches_of
from .calls import Calls, CallThreads
from .config import SharedConfig
from .engine import Parts, SharedEngine, StoreOutcome
from .speed import Speed
from .trial import READERS, WRITERS, StoreTrial, trial_memory, try_store

log = logging.getLogger(__name__)

DEADLINE_S = 0.5  # of a call, beside twice its predicted time
ERRORS = 3  # failures one after the other that switch the tier off
OFF_S = 5.0  # seconds from going off to a probe
TRIAL_AGAIN_S = 120.0
"""Seconds until a new trial after the first one, which runs while the server starts, after one that
failed, and once the store is believed slower than SLOWED. A store that is believed slow is not
read, so only a trial can tell that it is fast."""
SLOWED = 0.5  # of the best speed that a trial has found
TRIALS_S = 900.0  # seconds from one trial to the next if nothing asks for an earlier one
LENT_SHARE = 1 / 8  # of the HOST slots; with more of them lent the tier stays off
BATCH_BYTES = 16 * 2**20  # bytes of one call
FIRST_SPEED = 1e9  # bytes/s, before any transfer
FIRST_KEYS = 5e3  # keys/s of a thread, before any question
REMOVALS_AT_ONCE = 128
"""Removals that one call does if they wait for it: a directory flushes a folder once for all."""
LANES = {"read": READERS, "write": WRITERS, "find": 2, "remove": 1}  # threads
COMPLAINT_S = 60.0
CLOSE_S = 2.0  # seconds that the end waits for calls in progress

KEY_VERSION = 1

Call = TypeVar("Call")


class SharedSettings(NamedTuple):
    """fingerprint     digest of all that changes KV, as `SchedulerConfig.seed`, hexadecimal
    host_slots      slots of the HOST pool
    states          the model has recurrent states; each is one record
    """

    config: SharedConfig
    fingerprint: str
    host_slots: int
    ranks: int = 1
    rank: int = 0
    states: bool = False


@dataclass(eq=False)
class _Transfer:
    """A call that moves records, all in one direction. `work`: by record. A record of KV is one
    spill or promotion, and that of a state is one for each piece."""

    work: Sequence[Sequence[Spill | Promotion]]
    deadline: float
    started: bool = False
    late: bool = False
    records: list[Parts] = field(default_factory=list)

    @property
    def kind(self) -> type[Spill] | type[Promotion]:
        return type(self.work[0][0])

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(one.slot for record in self.work for one in record)


@dataclass(eq=False)
class _Question:
    """A call about keys.

    deadline    moves when a thread begins the call, so a long queue makes nothing late
    answered    its answer has been given, perhaps that there is none
    """

    batch: KeyBatch
    finds: bool
    deadline: float
    began: float | None = None
    answered: bool = False


class SharedStore:
    """One thread calls its methods. Only rank 0 finds and removes, on behalf of all ranks."""

    tier = Tier.SHARED

    def __init__(
        self,
        engine: SharedEngine,
        settings: SharedSettings,
        chunk_tokens: int,
        host_record: Callable[[int], np.ndarray],
        calls: Calls | None = None,
    ):
        """Owns the engine. host_record: as for `DiskStore`; calls: threads, if it is None."""
        self._engine = engine
        self._settings = settings
        self._host_record = host_record
        self._payload = len(host_record(0))
        self._calls = calls or CallThreads(LANES)
        origins = [
            RecordOrigin(settings.fingerprint, chunk_tokens, self._payload, settings.ranks, rank)
            for rank in range(settings.ranks)
        ]
        self._origin = origins[settings.rank].digest
        folder = f"{settings.config.namespace}/" if settings.config.namespace else ""
        self._prefixes = [
            f"pensieve/{KEY_VERSION}/{folder}{origin.digest.hex()[:32]}/{rank}/"
            for rank, origin in enumerate(origins)
        ]
        self._batch = max(1, BATCH_BYTES // (PAGE + self._payload))
        self._most_lent = max(self._batch, int(LENT_SHARE * settings.host_slots))
        # HOST slots of a call that reads: if all hang, they hold no more than may be lent
        self._most_read = max(1, min(self._batch, self._most_lent // READERS))
        self._registering = threading.Lock()
        self._registered: set[int] = set()  # addresses; used only while that lock is held

        # Used only while the condition is held.
        self._changed = threading.Condition()
        self._transfers: dict[_Transfer, None] = {}
        self._questions: dict[_Question, None] = {}
        self._report = TierReport(self.tier)
        self._pages: list[np.ndarray] = []
        self._speeds = {kind: Speed(self._payload, FIRST_SPEED) for kind in (Spill, Promotion)}
        self._best: dict[type[Spill] | type[Promotion], float] = {}  # what the best trial found
        self._key_speeds = {finds: Speed(1, FIRST_KEYS) for finds in (True, False)}
        # by lane, the latest deadline of a question that a thread has begun
        self._patience = {True: 0.0, False: 0.0}
        self._next_trial = inf  # its time
        self._trials = 0
        self._trial_memory: np.ndarray | None = None
        self._failures = 0
        self._off = False
        self._probing = 0  # number of the probe whose answer counts
        self._counters = SharedCounters()
        self._silent_until = 0.0
        self._error: BaseException | None = None
        self._inside = 0  # threads that may be in a call of the engine
        self._closed = False

    # -- called by the loop

    def measure(self) -> None:
        """Begins to measure the store's speed, in a thread. Until that is done, or the first
        transfers are, it is a guess."""
        self._calls.submit("find", lambda: self._guarded(self._try, self._payload))

    def records(self) -> list[StoredRecord]:
        """None: the store is asked only for what a request needs."""
        return []

    def erase(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Nothing: the tier has no slots to erase."""
        return ()

    def begin(self, work: TierWork) -> None:
        """Begins a plan's work. Raises the error that ended a call, if there is one."""
        self._raise_error()
        with self._changed:
            for spills in batches_of(work.spills, self._batch):
                self._begin_transfer(spills, "write", self._write)
            share = -(-len(work.promotions) // READERS)
            for promotions in batches_of(work.promotions, min(share, self._most_read)):
                self._begin_transfer(promotions, "read", self._read)
            if self._settings.rank == 0:
                for batch in work.finds:
                    self._begin_question(batch, finds=True)
                for batch in work.removals:
                    self._begin_question(batch, finds=False)

    @property
    def busy(self) -> bool:
        """True if work has begun whose end has not been taken, late work left out."""
        with self._changed:
            waited = any(not transfer.late for transfer in self._transfers)
            return waited or self._asks or self._has_news

    def wait(self, seconds: float) -> None:
        """Returns when a report can be taken, or after `seconds` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_news or self._error is not None, seconds)

    def take(self) -> TierReport:
        """Returns what has ended, or is late, since the last call. Raises the error that ended a
        call, if there is one."""
        self._raise_error()
        with self._changed:
            self._look_at_deadlines()
            report = self._report
            self._report = TierReport(self.tier)
            read_s = (PAGE + self._payload) / self._speeds[Promotion].value
        return report._replace(read_seconds=read_s)

    @property
    def counters(self) -> SharedCounters:
        with self._changed:
            return self._counters._replace(off=int(self._off), lent=self._lent)

    def close(self) -> bool:
        """Waits a moment for calls in progress, then leaves them behind, with the engine. Returns
        False if it has left some: they may use HOST slots. Idempotent."""
        self._calls.close()
        with self._changed:
            self._closed = True
            idle = self._changed.wait_for(lambda: not self._inside, CLOSE_S)
        if idle:
            self._engine.close()
        else:
            log.warning("the shared store hangs: calls are left behind")
        return idle

    # -- beginning work, with the condition held

    def _begin_transfer(
        self,
        work: Sequence[Sequence[Spill | Promotion]],
        lane: str,
        run: Callable[[_Transfer], None],
    ) -> None:
        transfer = _Transfer(work, deadline=0.0)
        if self._off:
            self._end_work(transfer, done=set())
            return
        speed = self._speeds[transfer.kind]
        ahead = self._in_progress(transfer.kind)
        predicted = (ahead + len(transfer.slots)) * (PAGE + self._payload) / speed.value
        now = self._calls.clock()
        if not ahead:
            speed.begins(now)
        transfer.deadline = now + 2 * predicted + DEADLINE_S
        self._transfers[transfer] = None
        self._calls.submit(lane, lambda: self._guarded(run, transfer))

    def _begin_question(self, batch: KeyBatch, finds: bool) -> None:
        question = _Question(batch, finds, self._calls.clock() + DEADLINE_S)
        if self._off:
            self._answer(question, ())
            return
        self._questions[question] = None
        lane = "find" if finds else "remove"
        run = self._find if finds else self._remove
        self._calls.submit(lane, lambda: self._guarded(run, question))

    # -- run by the threads

    def _guarded(self, run: Callable[[Call], None], work: Call) -> None:
        with self._changed:
            if self._closed:
                return
            self._inside += 1
        error = None
        try:
            run(work)
        except BaseException as raised:  # carried to the loop's thread, which raises it
            error = raised
        with self._changed:
            self._error = self._error or error
            self._inside -= 1
            self._changed.notify_all()

    def _write(self, transfer: _Transfer) -> None:
        if not self._start(transfer):
            return
        for record, parts in zip(transfer.work, transfer.records, strict=True):
            for spill, page, payload in zip(record, parts[::2], parts[1::2], strict=True):
                assert isinstance(spill, Spill)
                header = pack_header(spill.key, spill.end, self._origin, time.time(), payload)
                page[:] = np.frombuffer(header, np.uint8)
        names = [self._name(record[0].key) for record in transfer.work]
        outcomes = self._engine.put(names, transfer.records)
        with self._changed:
            done = {
                spill.slot
                for record, outcome in zip(transfer.work, outcomes, strict=True)
                if outcome is StoreOutcome.DONE
                for spill in record
            }
            self._count(
                written=len(done),
                written_bytes=len(done) * self._payload,
                refused=outcomes.count(StoreOutcome.FULL),
            )
            self._end_transfer(transfer, outcomes, done)

    def _read(self, transfer: _Transfer) -> None:
        if not self._start(transfer):
            return
        names = [self._name(record[0].key) for record in transfer.work]
        outcomes = self._engine.get(names, transfer.records)
        done: set[int] = set()
        rejected = []
        for record, name, parts, outcome in zip(
            transfer.work, names, transfer.records, outcomes, strict=True
        ):
            if outcome is StoreOutcome.DONE:
                if self._intact([read.key for read in record], parts):
                    done.update(read.slot for read in record)
                else:
                    rejected.append(name)
        with self._changed:
            self._count(
                read=len(done), read_bytes=len(done) * self._payload, rejected=len(rejected)
            )
            if rejected:
                self._complain(f"{len(rejected)} records are damaged, or another chunk's")
            self._end_transfer(transfer, outcomes, done)
        if rejected:  # else the record would stay, and the chunk would never be written again
            self._engine.remove(rejected)

    def _intact(self, keys: Sequence[ChunkKey], parts: Parts) -> bool:
        """Whether the record is that of the chunk, or of these pieces of a state. The state may be
        of any computation, but of one."""
        positions = set[tuple[int, bytes]]()
        for key, page, payload in zip(keys, parts[::2], parts[1::2], strict=True):
            header = read_header(page.data, self._origin, self._payload)
            if header is None or not payload_intact(page.data, payload):
                return False
            chunk_key, piece = split_key(key)
            computation = b""
            written_key, written = split_key(header.key)
            if piece is not None and written is not None:
                computation = written.computation
                written = written._replace(computation=piece.computation)
            if (written_key, written) != (chunk_key, piece):
                return False
            positions.add((header.end, computation))
        return len(positions) == 1

    def _try(self, payload: int) -> None:
        with self._changed:
            self._trials += 1
            self._next_trial = inf
        try:
            trial = self._trial(PAGE + payload)
        except MemoryError:
            trial = StoreTrial(failed="a trial finds no memory")
        with self._changed:
            if trial.failed:
                self._complain(trial.failed)
            else:
                log.info(
                    "the shared store reads %.2f GB/s, writes %.2f",
                    trial.read / 1e9,
                    trial.write / 1e9,
                )
                for kind, speed in ((Promotion, trial.read), (Spill, trial.write)):
                    self._speeds[kind].assume(payload, speed)
                    self._best[kind] = max(self._best.get(kind, 0.0), speed)
            self._try_in(TRIAL_AGAIN_S if trial.failed or self._trials == 1 else TRIALS_S)

    def _trial(self, record_bytes: int) -> StoreTrial:
        """Its memory is kept: an engine may have registered it for good."""
        if self._trial_memory is None:
            memory = trial_memory(record_bytes)
            self._engine.register(memory)
            self._trial_memory = memory
        return try_store(self._engine, record_bytes, self._trial_memory)

    def _find(self, question: _Question) -> None:
        if not self._start_questions(question, most=1):
            return
        keys = question.batch.keys
        there = self._engine.exists(self._of_all_ranks(keys))
        with self._changed:
            stored = () if there is None else _all_of(there, len(keys))
            self._note(there is not None)
            # a find asks for a state wherever there may be one: that is no miss
            of_kv = [there for key, there in zip(keys, stored, strict=False) if is_kv(key)]
            self._count(hits=sum(of_kv), misses=len(of_kv) - sum(of_kv))
            self._answered([question], stored, there is not None)

    def _remove(self, question: _Question) -> None:
        """Takes the removals along that wait behind it."""
        questions = self._start_questions(question, most=REMOVALS_AT_ONCE)
        if not questions:
            return
        keys = [key for question in questions for key in question.batch.keys]
        names = keys
        if self._settings.states:
            names = [name for key in keys for name in (key, state_key(key))]
        outcomes = self._engine.remove(self._of_all_ranks(names))
        with self._changed:
            done = [outcome is StoreOutcome.DONE for outcome in outcomes]
            removed = _all_of(done, len(keys))
            self._note(all(done))
            self._count(removed=sum(removed))
            self._answered(questions, removed, all(done))

    def _start_questions(self, first: _Question, most: int) -> list[_Question]:
        """Returns the questions of one call, `most` at most: the first and those of its kind that
        no thread has begun. None if it has been given up or has gone with an earlier one."""
        with self._changed:
            if first not in self._questions or first.began is not None:
                return []
            behind = (
                other
                for other in self._questions
                if other is not first and other.finds == first.finds and other.began is None
            )
            questions = [first, *islice(behind, most - 1)]
            now = self._calls.clock()
            keys = sum(len(question.batch.keys) for question in questions)
            deadline = now + 2 * keys / self._key_speeds[first.finds].value + DEADLINE_S
            for question in questions:
                question.began = now
                question.deadline = deadline
            self._patience[first.finds] = max(self._patience[first.finds], deadline)
            return questions

    def _start(self, transfer: _Transfer) -> bool:
        """Gives the transfer its memory. Returns False if it has been given up."""
        with self._changed:
            if transfer not in self._transfers:
                return False
            transfer.started = True
            transfer.records = [
                [part for one in record for part in (self._page(), self._host_record(one.host))]
                for record in transfer.work
            ]
        with self._registering:  # not the condition: it may take long
            for part in (part for parts in transfer.records for part in parts):
                if part.ctypes.data not in self._registered:
                    self._engine.register(part)
                    self._registered.add(part.ctypes.data)
        return True

    # -- ends, with the condition held

    def _end_transfer(
        self, transfer: _Transfer, outcomes: Sequence[StoreOutcome], done: set[int]
    ) -> None:
        del self._transfers[transfer]
        self._pages += [page for parts in transfer.records for page in parts[::2]]
        if not transfer.late:  # a late call says nothing of the store now
            self._note(StoreOutcome.FAILED not in outcomes)
            kind = transfer.kind
            self._speeds[kind].moved(len(done) * (PAGE + self._payload))
            if not self._in_progress(kind):
                self._speeds[kind].ends(self._calls.clock())
                if self._speeds[kind].value < SLOWED * self._best.get(kind, FIRST_SPEED):
                    self._try_in(TRIAL_AGAIN_S)
        self._end_work(transfer, done)

    def _end_work(self, transfer: _Transfer, done: set[int]) -> None:
        ended = tuple(slot for slot in transfer.slots if slot in done)
        failed = tuple(slot for slot in transfer.slots if slot not in done)
        report = self._report
        kind = "spilled" if transfer.kind is Spill else "promoted"
        slots: dict[str, Any] = {kind: getattr(report, kind) + ended}
        self._report = report._replace(failed=report.failed + failed, **slots)
        self._changed.notify_all()

    def _answered(
        self, questions: Sequence[_Question], keys: tuple[bool, ...], succeeded: bool
    ) -> None:
        """One call has answered these. `keys`: of all of them, in their order; none without an
        answer."""
        first = questions[0]
        if succeeded and first.began is not None:  # a late one too: the next may have more time
            self._key_speeds[first.finds].add(len(keys), self._calls.clock() - first.began)
        end = 0
        for question in questions:
            del self._questions[question]
            start = end
            end += len(question.batch.keys)
            if not question.answered:
                self._answer(question, keys[start:end])
        self._changed.notify_all()

    def _answer(self, question: _Question, keys: tuple[bool, ...]) -> None:
        question.answered = True
        answer = KeyAnswer(question.batch.number, keys)
        report = self._report
        if question.finds:
            self._report = report._replace(looked_up=(*report.looked_up, answer))
        else:
            self._report = report._replace(removed=(*report.removed, answer))
        self._changed.notify_all()

    # -- the breaker, with the condition held

    def _look_at_deadlines(self) -> None:
        now = self._calls.clock()
        for transfer in [t for t in self._transfers if not t.late and t.deadline <= now]:
            if transfer not in self._transfers:
                continue  # given up meanwhile
            transfer.late = True
            if not self._off:
                # Late calls say little: one may have hung. So a slow store is learned in halves,
                # and a trial finds out whether it is fast again.
                self._speeds[transfer.kind].halve()
                self._try_in(TRIAL_AGAIN_S)
            if transfer.started:
                self._report = self._report._replace(late=self._report.late + transfer.slots)
            self._missed()
        for question in [q for q in self._questions if not q.answered and self._due(q) <= now]:
            if question.answered:
                continue  # given up meanwhile
            self._answer(question, ())
            self._missed()

    def _try_in(self, seconds: float) -> None:
        """A trial in so many seconds, unless one comes before."""
        due = self._calls.clock() + seconds
        if due < self._next_trial:
            self._next_trial = due
            self._calls.later(seconds, lambda: self._try_if_due(due))

    def _try_if_due(self, due: float) -> None:
        with self._changed:
            is_due = due == self._next_trial
        if is_due:
            self.measure()

    def _due(self, question: _Question) -> float:
        """Until a thread begins it, the deadline follows those that it waits for."""
        if question.began is not None:
            return question.deadline
        return max(question.deadline, self._patience[question.finds] + DEADLINE_S)

    def _missed(self) -> None:
        self._count(late=1)
        self._switch_off("a call missed its deadline")

    def _note(self, succeeded: bool) -> None:
        self._failures = 0 if succeeded else self._failures + 1
        if not succeeded:
            self._count(errors=1)
        if self._failures >= ERRORS:
            self._switch_off(f"{ERRORS} calls have failed")

    def _switch_off(self, why: str) -> None:
        """Work that no thread has begun fails at once."""
        for transfer in [t for t in self._transfers if not t.started]:
            del self._transfers[transfer]
            self._end_work(transfer, done=set())
        for question in [q for q in self._questions if q.began is None]:
            del self._questions[question]
            if not question.answered:
                self._answer(question, ())
        if not self._off:
            self._off = True
            self._complain(f"{why}; no shared KV for at least {OFF_S:g} s")
            self._calls.later(OFF_S, self._probe)

    def _probe(self) -> None:
        """Called every OFF_S seconds while the tier is off. A probe that hangs is not waited
        for."""
        with self._changed:
            self._probing += 1
            number = self._probing
        self._calls.submit("find", lambda: self._guarded(self._ask, number))
        self._calls.later(OFF_S, lambda: self._probe_again(number))

    def _ask(self, number: int) -> None:
        with self._changed:
            if number != self._probing:
                return
        answer = self._engine.exists([self._prefixes[0] + "0" * 64])
        with self._changed:
            if number == self._probing and answer is not None and self._lent <= self._most_lent:
                self._off = False
                self._failures = 0
                self._probing += 1
                log.info("the shared store answers again")

    def _probe_again(self, number: int) -> None:
        with self._changed:
            waits = number == self._probing and self._off
        if waits:
            self._probe()

    # -- internal

    def _in_progress(self, kind: type[Spill] | type[Promotion]) -> int:
        """HOST slots of transfers in that direction that are not late."""
        return sum(
            len(transfer.slots)
            for transfer in self._transfers
            if not transfer.late and transfer.kind is kind
        )

    @property
    def _lent(self) -> int:
        return sum(len(transfer.slots) for transfer in self._transfers if transfer.late)

    @property
    def _asks(self) -> bool:
        return any(not question.answered for question in self._questions)

    @property
    def _has_news(self) -> bool:
        report = self._report
        return any((*report[1:-1],))

    def _name(self, key: ChunkKey) -> str:
        """The name of the record of the chunk, or of the state that the piece is of."""
        chunk_key, piece = split_key(key)
        name = chunk_key if piece is None else state_key(chunk_key)
        return self._prefixes[self._settings.rank] + name.hex()

    def _page(self) -> np.ndarray:
        return self._pages.pop() if self._pages else _new_page()

    def _of_all_ranks(self, keys: Iterable[ChunkKey]) -> list[str]:
        return [prefix + key.hex() for key in keys for prefix in self._prefixes]

    def _count(self, **changes: int) -> None:
        values = {name: getattr(self._counters, name) + by for name, by in changes.items()}
        self._counters = self._counters._replace(**values)

    def _complain(self, message: str) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + COMPLAINT_S
            log.error("shared KV: %s", message)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _new_page() -> np.ndarray:
    return np.frombuffer(aligned_buffer(PAGE), np.uint8)


def _all_of(values: Sequence[bool], keys: int) -> tuple[bool, ...]:
    """For each key, whether all of its values, one for each rank, are true."""
    ranks = len(values) // keys
    return tuple(all(values[first : first + ranks]) for first in range(0, len(values), ranks))
