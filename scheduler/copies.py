"""The copies of one plan, and what each must wait for."""

from __future__ import annotations

from array import array

from .plan import CopyBatch, Lane, Tickets
from .slots import SlotPool


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
        self.evictions = _Batch(Lane.OUT, self._first, gpu, host)
        self.gated = _Batch(Lane.IN, self._first, host, gpu)
        self.early = _Batch(Lane.IN, self._first + 1, host, gpu)
        self.saves = _Batch(Lane.OUT, self._first + 1, gpu, host)
        self._after = [0] * len(Lane)

    def host_slot_in_use(self, slot: int) -> bool:
        last = self._host.last
        return last[Lane.IN][slot] >= self._first or last[Lane.OUT][slot] >= self._first

    def step_writes(self, gpu_slot: int) -> None:
        """This step (or a later one) writes the slot: it waits for copies that still use it."""
        self.step_reads(gpu_slot)
        self._after[Lane.OUT] = max(self._after[Lane.OUT], self._gpu.last[Lane.OUT][gpu_slot])

    def step_reads(self, gpu_slot: int) -> None:
        """This step uses a slot that a swap-in may have filled; only this plan's gated one has gates for that."""
        ticket = self._gpu.last[Lane.IN][gpu_slot]
        if ticket != self._first:
            self._after[Lane.IN] = max(self._after[Lane.IN], ticket)

    @property
    def after(self) -> Tickets:
        """What the step waits for, beside its gates."""
        return Tickets(*self._after)

    def batches(self) -> tuple[CopyBatch, ...]:
        order = (self.evictions, self.gated, self.early, self.saves)
        return tuple(batch.freeze(gated=batch is self.gated) for batch in order if batch.sources)


class _Batch:
    def __init__(self, lane: Lane, ticket: int, source_pool: SlotPool, target_pool: SlotPool):
        self._lane, self._ticket = lane, ticket
        self._source_last, self._target_last = source_pool.last, target_pool.last
        self._others = [other for other in Lane if other != lane]
        self._after = [0] * len(Lane)
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
