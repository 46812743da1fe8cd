"""The copies of one plan, and what each must wait for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

from .plan import CopyBatch, Lane, Tickets
from .slots import SlotPool

OTHER_LANES = {lane: tuple(other for other in Lane if other != lane) for lane in Lane}


class StepCopies:
    """Collects one plan's copies in four batches, in the order in which they are issued.

    evictions    GPU -> HOST, now: the step needs their GPU slots
    gated        HOST -> GPU, waited for by this step
    early        HOST -> GPU, for a request that joins in a later step
    saves        GPU -> HOST, ahead of time

    Every batch waits only for work issued before it, or no order of the lanes could save us from a deadlock, and the
    copies of one batch run in any order. So no HOST slot that this plan reads or writes is given away again by the
    same plan: see `host_slot_in_use`.
    Two tickets a lane and step make a batch's ticket known before the batch is complete.
    """

    def __init__(self, step: int, gpu: SlotPool, host: SlotPool):
        self._gpu, self._host = gpu, host
        self._first = 2 * step - 1
        self._after = [0, 0, 0]

    # Made when first used: most steps copy nothing.

    @cached_property
    def evictions(self) -> _Batch:
        return _Batch(Lane.OUT, self._first, self._gpu, self._host)

    @cached_property
    def gated(self) -> _Batch:
        return _Batch(Lane.IN, self._first, self._host, self._gpu)

    @cached_property
    def early(self) -> _Batch:
        return _Batch(Lane.IN, self._first + 1, self._host, self._gpu)

    @cached_property
    def saves(self) -> _Batch:
        return _Batch(Lane.OUT, self._first + 1, self._gpu, self._host)

    def host_slot_in_use(self, slot: int) -> bool:
        last = self._host.last
        return last[Lane.IN][slot] >= self._first or last[Lane.OUT][slot] >= self._first

    def step_writes(self, gpu_slot: int) -> None:
        """This step (or a later one) writes the slot: it waits for copies that still use it."""
        self.step_reads([gpu_slot])
        self._after[Lane.OUT] = max(self._after[Lane.OUT], self._gpu.last[Lane.OUT][gpu_slot])

    def step_reads(self, gpu_slots: Sequence[int]) -> None:
        """This step uses slots that a swap-in may have filled; only this plan's gated one has gates for that."""
        after, first, last = self._after[Lane.IN], self._first, self._gpu.last[Lane.IN]
        for slot in gpu_slots:
            if last[slot] > after and last[slot] != first:
                after = last[slot]
        self._after[Lane.IN] = after

    @property
    def after(self) -> Tickets:
        """What the step waits for, beside its gates."""
        return Tickets(*self._after)

    def batches(self) -> tuple[CopyBatch, ...]:
        made = vars(self)
        order = ("evictions", "gated", "early", "saves")
        return tuple(made[name].freeze(gated=name == "gated") for name in order if name in made and made[name].sources)

    def moved(self) -> tuple[int, int]:
        """Chunks swapped in and out so far."""
        made = vars(self)
        sizes = [len(made.get(name, ())) for name in ("gated", "early", "evictions", "saves")]
        return sizes[0] + sizes[1], sizes[2] + sizes[3]


class _Batch:
    def __init__(self, lane: Lane, ticket: int, source_pool: SlotPool, target_pool: SlotPool):
        self._lane, self._ticket = lane, ticket
        self._source_last, self._target_last = source_pool.last, target_pool.last
        self._others = OTHER_LANES[lane]
        self._after = [0, 0, 0]
        self.sources: array[int] = array("i")
        self.targets: array[int] = array("i")

    def __len__(self) -> int:
        return len(self.sources)

    def add(self, source: int, target: int) -> None:
        # Waits are collected now: later in this plan the slots get users that come after this batch.
        after, source_last, target_last = self._after, self._source_last, self._target_last
        for other in self._others:
            if source_last[other][source] > after[other]:
                after[other] = source_last[other][source]
            if target_last[other][target] > after[other]:
                after[other] = target_last[other][target]
        source_last[self._lane][source] = target_last[self._lane][target] = self._ticket
        self.sources.append(source)
        self.targets.append(target)

    def freeze(self, gated: bool) -> CopyBatch:
        return CopyBatch(self._lane, self._ticket, self.sources, self.targets, Tickets(*self._after), gated)
