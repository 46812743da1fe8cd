"""All states of one chunk and all changes between them, against the table above
`ChunkStore.update_victim_set`."""

from __future__ import annotations

from collections import deque

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.moves import report_moves
from pensieve.scheduler.plan import StepResult, TierReport
from pensieve.scheduler.types import GPU, HOST, SHARED, ChunkKey, Tier

from ..stores import SIZE, a_store, check

LOWER = Tier.DISK
KEY = ChunkKey(b"k")


class OneChunk:
    """A store with one chunk, which a conversation claims. It is idle on the GPU at first."""

    def __init__(self):
        self.store = a_store(gpu=3, host=3, disk=3)
        self.lower = self.store.lower[0]
        self.chunk = self.store.publish(self.store.new(SIZE, 0.0), KEY)
        self.store.claim(self.chunk)
        self.store.unpin([self.chunk], 0, 0.0)
        self.step = 0

    # -- its state

    @property
    def there(self):
        return tuple(slot != NO_SLOT for slot in self.chunk.slots[:SHARED])

    @property
    def moving(self):
        move = self.chunk.moving
        return "" if move is None else "spill" if move.spills else "promotion"

    @property
    def state(self):
        chunk = self.chunk
        marks = (chunk.users, chunk.awaits_swap_in, chunk.staged, chunk.refused_by_host)
        left = sum(move.chunk is None for move in self.lower._moves.values())
        return *self.there, self.moving, *marks, left

    def row(self):
        """The chunk's row in the table, and the set that the table gives."""
        gpu, host, lower = self.there
        chunk, store = self.chunk, self.store
        if chunk.users:
            if host and not (chunk.awaits_swap_in or chunk.staged or self.moving):
                return "in use, copied", store.busy_copied
            return ("in use, copied, not spare" if host else "in use"), None
        if gpu:
            if chunk.refused_by_host and (chunk.staged or not host):
                return "idle, refused", store.spare[GPU]
            if chunk.staged:
                return "idle, staged", store.only[GPU]
            return ("idle, copied", store.spare[GPU]) if host else ("idle", store.only[GPU])
        if self.moving:
            return "moving", None
        if host:
            return ("HOST, spare", store.spare[HOST]) if lower else ("HOST", store.only[HOST])
        return ("lower", store.only[LOWER]) if lower else ("dropped", None)

    # -- its changes: by name, whether one is possible now, and the change

    def changes(self):
        chunk, store = self.chunk, self.store
        gpu, host, lower = self.there
        idle = not chunk.users
        issued = not chunk.awaits_swap_in
        left = next((m for m in self.lower._moves.values() if m.chunk is None), None)
        few = left is None
        return {
            "computed": (idle and not gpu, self.compute),
            "used": (idle and gpu, lambda: store.pin([chunk])),
            "released": (not idle and issued, lambda: store.unpin([chunk], 0, 1.0)),
            "swapped out": (idle and gpu and not host, self.swap_out),
            "refused": (
                idle and gpu and not host and not chunk.refused_by_host,
                lambda: store.make_reclaimable([chunk]),
            ),
            "touched": (True, lambda: store.touch(chunk, 1.0)),
            "staged": (
                gpu and issued and not host and not lower and not self.moving,
                lambda: store.stage(chunk, store.host.take()),
            ),
            "staging ends": (
                chunk.staged and not self.moving,
                lambda: store.release_host(chunk),
            ),
            "leaves the GPU": (idle and gpu, lambda: store.release_gpu(chunk)),
            "leaves HOST": (
                host and issued and not self.moving,
                lambda: store.release_host(chunk),
            ),
            "copy fails": (host and issued and not self.moving, self.fail_copy),
            "swap-in reserved": (idle and host and not gpu, self.reserve),
            "swap-in issued": (not issued, lambda: store.swap_ins_issued([chunk])),
            "swap-in cancelled": (not issued, self.cancel),
            "spilled": (
                host and issued and not lower and not self.moving and few,
                lambda: store.spill(chunk, self.lower),
            ),
            "promoted": (
                self.there == (False, False, True) and not self.moving and few,
                lambda: store.promote(chunk, store.host.take()),
            ),
            "move succeeds": (self.moving, lambda: self.end(chunk.moving, True)),
            "move fails": (self.moving, lambda: self.end(chunk.moving, False)),
            "left move ends": (left, lambda: self.end(left, True)),
            "leaves the lower tier": (
                lower and not self.moving,
                lambda: store.release_record(chunk, self.lower),
            ),
            "dropped": (idle and chunk.resident and few, lambda: store.drop(chunk)),
        }

    def compute(self):
        self.store.publish(self.store.new(SIZE, 1.0), KEY)

    def swap_out(self):
        self.store.copied_out(self.chunk, self.store.host.take())
        self.store.update_victim_set(self.chunk)

    def fail_copy(self):
        self.store._copied_out[self.chunk.slots[HOST]] = self.chunk
        self.store.drop_bad_copies([self.chunk.slots[HOST]])

    def reserve(self):
        self.store.pin([self.chunk])
        self.store.reserve_swap_ins([self.chunk])

    def cancel(self):
        self.store.cancel_swap_ins([self.chunk])
        self.store.unpin([self.chunk], 0, 1.0)

    def end(self, move, succeeds):
        self.result()
        kind = ("spilled" if move.spills else "promoted") if succeeds else "failed"
        report_moves(
            self.store,
            StepResult(self.step, (), (), lower=(TierReport(LOWER, **{kind: (move.slot,)}),)),
            1.0,
        )

    def result(self):
        """A plan and its result, so that slots that were given up are free again."""
        self.step += 1
        self.lower.hand_over(self.step)
        report_moves(self.store, StepResult(self.step, (), ()), 1.0)

    def check(self):
        name, victim_set = self.row()
        assert self.chunk.victim_set is victim_set, (name, self.chunk)
        chunk = self.chunk
        check(self.store, held=[chunk] if chunk.users else [], claims={chunk: 1})


def after(names):
    one = OneChunk()
    for name in names:
        possible, change = one.changes()[name]
        assert possible
        change()
        one.result()
    return one


def test_every_change_of_every_state_leads_to_the_set_of_the_table():
    one = OneChunk()
    ways = {one.state: ()}
    waiting = deque(ways)
    rows = {}
    changes = set()
    while waiting:
        state = waiting.popleft()
        way = ways[state]
        one = after(way)
        rows.setdefault(one.row()[0], set())
        for name, (possible, _) in one.changes().items():
            if not possible:
                continue
            there = after((*way, name))
            there.check()
            changes.add(name)
            rows[one.row()[0]].add(there.row()[0])
            if there.state not in ways:
                ways[there.state] = (*way, name)
                waiting.append(there.state)
    assert changes == set(OneChunk().changes())
    assert set(rows) == {
        *("in use", "in use, copied", "in use, copied, not spare", "moving", "dropped", "lower"),
        *("idle", "idle, copied", "idle, staged", "idle, refused", "HOST", "HOST, spare"),
    }
    for row, following in rows.items():
        assert following - {row}, f"nothing leads out of {row}"
