"""The device model with a store that several servers share, and harnesses for it."""

from __future__ import annotations

from pensieve.scheduler.kv.piece_keys import split_key, state_key
from pensieve.scheduler.plan import KeyAnswer, Spill, TierReport
from pensieve.scheduler.types import Tier

from .device_model import DeviceModel
from .driver import Driver
from .harness import Harness

NOTICE_S = 4.0
"""Seconds until other servers know of a deletion."""


class SharedDevice(DeviceModel):
    """shared    the store: key -> content of a chunk, or of all pieces of a state
    moves        slot -> Spill or Promotion, in progress
    began        slot -> number of the step that began it
    written      key -> the step that began its last write
    questions    finds and removals without an answer: (whether it finds, `KeyBatch`)
    """

    def __init__(self, *of):
        super().__init__(*of)
        self.shared = {}
        self.moves, self.began, self.written = {}, {}, {}
        self.questions = []

    def _places(self, being_read=True):
        return super()._places(being_read) | {
            ("host", work.host)
            for work in self.moves.values()
            if being_read or not isinstance(work, Spill)
        }

    def _use_disk(self, plan):
        failed = super()._use_disk(plan)
        for part in plan.lower:
            if part.tier is not Tier.SHARED:
                continue
            assert not part.erased
            self.questions += [(True, batch) for batch in part.finds]
            self.questions += [(False, batch) for batch in part.removals]
            for work in (*part.spills, *part.promotions):
                place = ("host", work.host)
                assert work.slot not in self.moves
                assert place not in self._places(), f"{place} is lent already"
                writer = self.last_writer.get(place)
                before = dict([writer] if writer else [])
                if isinstance(work, Spill):
                    assert before, f"{place} is written to the store, but nothing is there"
                    content = self.pools["host"][work.host]
                    assert "piece" in content or len(content) == self.chunk_tokens
                else:
                    before |= self.users[place]
                for lane, ticket in before.items():
                    assert ticket <= self.completed[lane]
                self.moves[work.slot] = work
                self.began[work.slot] = plan.step
        return failed

    def end_move(self, slot, succeeds=True):
        """Returns the field of the report that names the slot, and all slots of its record."""
        work = self.moves[slot]
        key, piece = split_key(work.key)
        if piece is None:
            return self._end_move(slot, succeeds), (slot,)
        slots = [
            other
            for other, move in self.moves.items()
            if type(move) is type(work) and _state_of(move) == _state_of(work)
        ]
        pieces = [self.moves.pop(slot) for slot in slots]
        numbers = [split_key(one.key)[1].number for one in pieces]
        assert numbers == [*range(self.states.chunks)], "a state is moved in parts"
        key = state_key(key)
        hosts = [one.host for one in pieces]
        if isinstance(work, Spill):
            if succeeds:  # a store keeps the first record of a key
                content = [dict(self.pools["host"][host]) for host in hosts]
                self.shared.setdefault(key, content)
                self.written[key] = self.began[slot]
            return ("spilled" if succeeds else "failed"), slots
        record = self.shared.get(key) if succeeds else None
        for host, content in zip(hosts, record or [{}] * len(hosts), strict=True):
            self.pools["host"][host] = dict(content)
            self.users["host", host].clear()
            self.last_writer["host", host] = (1, 0)
        return ("promoted" if record else "failed"), slots

    def _end_move(self, slot, succeeds):
        work = self.moves.pop(slot)
        if isinstance(work, Spill):
            if succeeds:
                self.shared[work.key] = dict(self.pools["host"][work.host])
                self.written[work.key] = self.began[slot]
            return "spilled" if succeeds else "failed"
        # a read that fails may have written anything
        content = self.shared.get(work.key) if succeeds else None
        self.pools["host"][work.host] = dict(content or {})
        self.users["host", work.host].clear()
        self.last_writer["host", work.host] = (1, 0)
        return "promoted" if content is not None else "failed"

    def answer(self, finds, batch):
        assert all(len(key) == 32 for key in batch.keys if not key.endswith(b"state"))
        if finds:
            return KeyAnswer(batch.number, tuple(key in self.shared for key in batch.keys))
        for key in batch.keys:
            self.shared.pop(key, None)
            self.shared.pop(state_key(key), None)
        return KeyAnswer(batch.number, (True,) * len(batch.keys))


class WithSharedTier:
    """For a harness: its device has a store. Reports name all of its work as done at once, unless
    a test has set

    answers     False: questions get no answer yet
    ends        False: moves do not end
    late        slots that are reported as late once
    read_s      seconds to read a record
    """

    answers = ends = True
    read_s = 1e-4

    def __init__(self, **settings):
        self.late = []
        super().__init__(**({"shared_min_tokens": 8, "host_kv_chunks": 30} | settings))

    def _new_device(self):
        config = self.config
        sizes = (config.gpu_kv_chunks, config.host_kv_chunks, config.chunk_tokens)
        copy_fails = (lambda: self._copy_fails.random() < 0.2) if config.copies_may_fail else None
        return SharedDevice(
            *sizes,
            self.windows,
            self._vocabulary,
            copy_fails,
            self.salts,
            self.erases,
            config.states,
        )

    def shared_reports(self):
        device = self.device
        slots = {"spilled": (), "promoted": (), "failed": ()}
        for slot, succeeds in self.ended_moves():
            if slot in device.moves:  # not ended with another piece
                field, ended = device.end_move(slot, succeeds)
                slots[field] += tuple(ended)
                pieces = self.config.states is not None and len(ended) == self.config.states.chunks
                self.counts[f"states {field}"] += pieces
        looked_up = removed = ()
        for finds, batch in self.answered():
            device.questions.remove((finds, batch))
            answer = device.answer(finds, batch)
            if finds:
                looked_up += (answer,)
            else:
                removed += (answer,)
        late = tuple(self.late)
        self.late = []
        self.counts["late"] += len(late)
        for name, ended in slots.items():
            self.counts[f"shared {name}"] += len(ended)
        yield TierReport(
            Tier.SHARED,
            late=late,
            looked_up=looked_up,
            removed=removed,
            read_seconds=self.read_s,
            **slots,
        )

    def ended_moves(self):
        return [(slot, True) for slot in self.device.moves] if self.ends else []

    def answered(self):
        return list(self.device.questions) if self.answers else []


class SharedHarness(WithSharedTier, Harness):
    """One operation a method."""


class SharedDriver(WithSharedTier, Driver):
    """Random operations. Other servers remove records, and write records of conversations that this
    server has just deleted."""

    def __init__(self, **settings):
        self.deleted = {}  # key -> content, step and time of its deletion
        super().__init__(**settings)

    def step(self):
        super().step()
        self.read_s = self.random.choice((1e-4, 1e-4, 1.0))
        shared = self.device.shared
        if shared and self.random.random() < 0.02:
            del shared[self.random.choice(list(shared))]
        for key, (content, _, at) in self.deleted.items():
            late = content is not None and self.now - at < NOTICE_S
            if late and self.random.random() < 0.02:
                shared.setdefault(key, content)
                self.counts["late writers"] += 1

    def ended_moves(self):
        moves = list(self.device.moves)
        if self.random.random() < 0.2:
            self.late = self.random.sample(moves, self.random.randint(0, len(moves)))
        ended = self.random.sample(moves, self.random.randint(0, len(moves)))
        return [(slot, self.random.random() > 0.05) for slot in ended]

    def answered(self):
        return [question for question in self.device.questions if self.random.random() < 0.6]

    def _delete(self, name, shared=0, kept=0):
        find = self.scheduler._store.find
        conversation = self.scheduler.conversations.get(name)
        claimed = {chunk.key for chunk in conversation.chunks if chunk.claims > 1 or chunk.users}
        own = set(conversation.keys) - claimed
        super()._delete(name, shared, kept)
        for key in self.erasing[-1]:
            if key in own and not (find(key) and find(key).claims > 1):
                for one in (key, state_key(key)):
                    content = self.device.shared.get(one)
                    self.deleted[one] = (content, self.device.step, self.now)

    def restart_one(self):
        """The store outlives this server."""

    def drain(self):
        super().drain()
        for _ in range(50):
            self.now += 1.0
            while self.launch() or self.results or self.device.questions:
                self.apply()
        left = [
            key
            for key in self.deleted.keys() & self.device.shared.keys()
            if self.device.written.get(key, -1) <= self.deleted[key][1]
        ]
        assert not left, f"{len(left)} records of deleted conversations are in the store"


def _state_of(work):
    """The key and the computation of the state that a piece of work is of; None for KV."""
    key, piece = split_key(work.key)
    return None if piece is None else (key, piece.computation)
