"""The copies of one plan, and the work that each must wait for."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property

from ..kv.chunk import Chunk
from ..kv.slots import SlotPool
from ..plan import CopyBatch, Lane, Tickets
from ..types import HOST


class StepCopies:
    """Collects one plan's copies in four batches, in the order in which they are issued.

    evictions        GPU -> HOST, now: the step needs their GPU slots
    gated            HOST -> GPU, this step waits for them
    early            HOST -> GPU, for a request that joins in a later step
    swap_outs_ahead  GPU -> HOST, ahead of time

    A batch waits only for work that was issued before it; otherwise the lanes could deadlock. The
    copies of one batch run in any order. So no HOST slot that this plan reads or writes is given to
    another chunk by the same plan: see `without_host_slot_in_use`. Each lane has two tickets in a
    step, so a batch's ticket is known before the batch is complete.
    """

    def __init__(self, step: int, gpu: SlotPool, host: SlotPool):
        self._gpu = gpu
        self._host = host
        self._first = 2 * step - 1
        _, self._gpu_in, self._gpu_out = gpu.last
        _, self._host_in, self._host_out = host.last
        self._after_in = self._after_out = 0  # tickets that the step waits for

    # Created at first use: most steps copy nothing.

    @cached_property
    def evictions(self) -> LaneCopies:
        return LaneCopies(Lane.OUT, self._first, self._gpu, self._host)

    @cached_property
    def gated(self) -> LaneCopies:
        return LaneCopies(Lane.IN, self._first, self._host, self._gpu)

    @cached_property
    def early(self) -> LaneCopies:
        return LaneCopies(Lane.IN, self._first + 1, self._host, self._gpu)

    @cached_property
    def swap_outs_ahead(self) -> LaneCopies:
        return LaneCopies(Lane.OUT, self._first + 1, self._gpu, self._host)

    def without_host_slot_in_use(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Returns the chunks, all of them on HOST, whose HOST slots this plan does not use."""
        first, last_in, last_out = self._first, self._host_in, self._host_out
        return [
            chunk
            for chunk in chunks
            if last_in[chunk.slots[HOST]] < first and last_out[chunk.slots[HOST]] < first
        ]

    def step_writes(self, gpu_slot: int) -> None:
        """This step (or a later one) writes the slot, so it waits for copies that still use it."""
        swapped_in = self._gpu_in[gpu_slot]
        swapped_out = self._gpu_out[gpu_slot]
        if swapped_in > self._after_in and swapped_in != self._first:
            self._after_in = swapped_in
        if swapped_out > self._after_out:
            self._after_out = swapped_out

    def step_reads(self, gpu_slots: Sequence[int]) -> None:
        """This step uses slots that a swap-in may have filled; only this plan's gated swap-in has
        gates for that."""
        after, first, last = self._after_in, self._first, self._gpu_in
        for slot in gpu_slots:
            if last[slot] > after and last[slot] != first:
                after = last[slot]
        self._after_in = after

    @property
    def after(self) -> Tickets:
        """The tickets that the step waits for, besides its gates."""
        return Tickets(swap_in=self._after_in, swap_out=self._after_out)

    def batches(self) -> tuple[CopyBatch, ...]:
        copies = vars(self)  # has the batches that were used
        order = ("evictions", "gated", "early", "swap_outs_ahead")
        return tuple(
            copies[name].freeze(gated=name == "gated")
            for name in order
            if name in copies and copies[name].sources
        )


class LaneCopies:
    """One batch while it is built."""

    def __init__(self, lane: Lane, ticket: int, source_pool: SlotPool, target_pool: SlotPool):
        self._lane = lane
        self._ticket = ticket
        self._last = source_pool.last[lane], target_pool.last[lane]
        self._others = [
            (other, source_pool.last[other], target_pool.last[other])
            for other in Lane
            if other != lane
        ]
        self._after = [0] * len(Lane)
        self.sources: array[int] = array("i")
        self.targets: array[int] = array("i")

    def add(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies `sources[i]` to `targets[i]`."""
        # Collects the tickets now: later work of this plan on these slots waits for this batch, so
        # the batch must not wait for it.
        for lane, source_last, target_last in self._others:
            used = (*map(source_last.__getitem__, sources), *map(target_last.__getitem__, targets))
            self._after[lane] = max(self._after[lane], *used, 0)
        for last, slots in zip(self._last, (sources, targets), strict=True):
            for slot in slots:
                last[slot] = self._ticket
        self.sources.extend(sources)
        self.targets.extend(targets)

    def freeze(self, gated: bool) -> CopyBatch:
        return CopyBatch(
            self._lane, self._ticket, self.sources, self.targets, Tickets(*self._after), gated
        )
