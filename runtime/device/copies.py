"""Issues copies in order: turns a plan's copy batches and tickets into work of a device.

A swap-out moves whole records. A gated swap-in moves one group of layers after the other and opens
each group's gate after it, so the step computes with the first layers while the last ones are still
being copied.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from ...scheduler.plan import CopyBatch, Lane, StepPlan, Tickets
from ...scheduler.types import InvariantError
from ..counters import KVCounters
from .protocol import Device, Ticket


class TicketBook:
    """One lane's plan tickets that may be incomplete, with the device's tickets for them."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self.completed = 0
        self.issued = 0  # the last ticket
        self._pending: dict[int, Ticket] = {}  # ascending

    def enter(self, number: int, ticket: Ticket) -> None:
        if number <= self.issued:
            raise InvariantError(
                f"ticket {number} on lane {self.lane.name} comes after ticket {self.issued}"
            )
        self.issued = number
        self._pending[number] = ticket

    def find(self, number: int) -> Ticket | None:
        """Returns the device ticket to wait for until ticket `number` is complete; None if it is
        known to be complete."""
        if number > self.issued:
            raise InvariantError(
                f"ticket {number} on lane {self.lane.name} is waited for before it is issued"
            )
        # A plan that was never launched leaves a gap; its ticket counts as complete with the one
        # before.
        return next((ticket for n, ticket in reversed(self._pending.items()) if n <= number), None)

    def prune(self, device: Device) -> None:
        """Forgets the tickets that are complete."""
        while self._pending:
            number, ticket = next(iter(self._pending.items()))
            if not device.ready(ticket):
                return
            del self._pending[number]
            self.completed = number


class Transfers:
    """Issues copies and keeps the tickets of all lanes."""

    def __init__(
        self,
        device: Device,
        layers: int,
        group_layers: int,
        chunk_bytes: int,
        in_first: bool = False,
        is_exact: Callable[[int], bool] | None = None,
    ):
        """layers, chunk_bytes: of a record in HOST; group_layers: number of layers of a gated
        swap-in that share a gate.

        in_first: swap-outs ahead of time wait for the swap-ins issued before them (for comparison:
        by default both directions of the link are used at the same time). is_exact: returns whether
        the record in a HOST slot has its chunk's KV; None: every record has it.
        """
        self._device = device
        self._layers = range(layers)
        self._groups = [
            self._layers[first : first + group_layers] for first in range(0, layers, group_layers)
        ]
        self._chunk_bytes = chunk_bytes
        self._in_first = in_first
        self._books = {lane: TicketBook(lane) for lane in Lane}
        self._copied = dict.fromkeys((Lane.IN, Lane.OUT), 0)
        self._is_exact = is_exact
        # tickets and HOST slots of swap-outs
        self._unchecked: deque[tuple[int, array[int]]] = deque()
        self._gated_step = 0  # the last step whose gates are all marked

    @property
    def gates(self) -> tuple[int, ...]:
        """The first layer of each group."""
        return tuple(group.start for group in self._groups)

    @property
    def copied_bytes(self) -> KVCounters:
        """Bytes given to the device to copy over the link, so far."""
        return KVCounters(swap_in=self._copied[Lane.IN], swap_out=self._copied[Lane.OUT])

    def issue(self, plan: StepPlan) -> list[Ticket]:
        """Issues the plan's copies. Returns their tickets. InvariantError for a ticket out of
        order."""
        if sum(batch.gated for batch in plan.copies) > 1:
            raise InvariantError(f"step {plan.step} has more than one gated batch")
        tickets = []
        for batch in plan.copies:
            self._wait(batch.lane, self._after(batch, plan))
            if batch.gated:
                ticket = self._issue_gated(batch)
            else:
                self._device.copy(batch.lane, *_arrays(batch), self._layers)
                ticket = self._device.mark(batch.lane)
            self._books[batch.lane].enter(batch.ticket, ticket)
            self._copied[batch.lane] += len(batch.sources) * self._chunk_bytes
            if batch.lane is Lane.OUT and self._is_exact is not None:
                self._unchecked.append((batch.ticket, batch.targets))
            tickets.append(ticket)
        self._gated_step = plan.step
        return tickets

    def _after(self, batch: CopyBatch, plan: StepPlan) -> Tickets:
        """The tickets that the batch waits for: only of work issued before it, because lanes could
        otherwise deadlock."""
        if not self._in_first or batch.lane is not Lane.OUT:
            return batch.after
        # The step, or a swap-in, waits for copies that free room for this step, so these must not
        # wait for swap-ins.
        needed = max(
            after.swap_out for after in (plan.after, *(other.after for other in plan.copies))
        )
        if batch.ticket <= needed:
            return batch.after
        return batch.after._replace(swap_in=self._books[Lane.IN].issued)

    def _issue_gated(self, batch: CopyBatch) -> Ticket:
        if batch.lane is not Lane.IN:
            raise InvariantError(
                f"only a swap-in can be gated, not ticket {batch.ticket} on lane {batch.lane.name}"
            )
        sources, targets = _arrays(batch)
        for group in self._groups:
            self._device.copy(batch.lane, sources, targets, group)
            ticket = self._device.mark(batch.lane, gate=group.start)
        return ticket

    def hold_step(self, plan: StepPlan) -> None:
        """Makes COMPUTE wait for the tickets that the step needs besides its gates.

        A gate holds a step only if it is marked before the step is run. InvariantError if the
        plan's copies are not issued yet: the step would pass its gates at once and read slots that
        are not filled.
        """
        if self._gated_step != plan.step:
            raise InvariantError(f"step {plan.step} would be launched before its gates are marked")
        self._wait(Lane.COMPUTE, plan.after)

    def launched(self, step: int, ticket: Ticket) -> None:
        """Enters the step's own ticket."""
        self._books[Lane.COMPUTE].enter(step, ticket)

    def completed(self) -> Tickets:
        """The last ticket known to be complete on each lane. Raises the error that ended the
        device, if it has failed."""
        for book in self._books.values():
            book.prune(self._device)
        return Tickets(*(self._books[lane].completed for lane in Lane))

    def bad_copies(self) -> tuple[int, ...]:
        """HOST slots of failed copies, among the swap-outs that the last `completed` call found
        complete."""
        bad = list[int]()
        completed = self._books[Lane.OUT].completed
        while self._unchecked and self._unchecked[0][0] <= completed:
            _, slots = self._unchecked.popleft()
            assert self._is_exact is not None
            bad += (slot for slot in slots if not self._is_exact(slot))
        return tuple(bad)

    def _wait(self, lane: Lane, after: Iterable[int]) -> None:
        """Makes the lane wait for the other lanes' tickets; its own order needs no wait."""
        for other, number in zip(Lane, after, strict=True):
            ticket = self._books[other].find(number)
            if other is not lane and ticket is not None:
                self._device.wait(lane, ticket)


def _arrays(batch: CopyBatch) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets, as new arrays."""
    if len(batch.sources) != len(batch.targets):
        raise InvariantError(
            f"ticket {batch.ticket} on lane {batch.lane.name} copies unlike numbers of slots"
        )
    return np.array(batch.sources, np.int32), np.array(batch.targets, np.int32)
