"""A model of the device that executes plans and checks their ordering.

It keeps for every slot its contents (token ids and positions) and the work that has used it, and
for every piece of work the work that is known to be complete before it begins (vector clocks over
the three lanes). So it detects a slot that is read before it is written, or rewritten while it is
read, and a row that would see another's KV.

A state slot holds the tokens that its state has seen, in each of its pieces. So the model detects a
row that reads a state of other tokens, of another salt, or of pieces that do not belong together.

Disk work is on no lane: it begins when its plan is launched and ends when the test says so
(`finish`). Earlier uses of its HOST slot must be complete according to the results so far
(`known`), and no other work may use its slots meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from pensieve.scheduler.context_window import RECOMPUTE
from pensieve.scheduler.plan import (
    NO_TICKETS,
    Lane,
    Spill,
    StepPlan,
    StepResult,
    Tickets,
    TierReport,
    TierWork,
)
from pensieve.scheduler.types import RowResult, Tier


def disk_work(plan):
    """The plan's work for DISK, perhaps none."""
    return next((work for work in plan.lower if work.tier is Tier.DISK), TierWork(Tier.DISK))


def disk_report(**slots):
    """A result's `lower` with these slots of DISK."""
    return (TierReport(Tier.DISK, **slots),)


class DeviceModel:
    """copy_fails  returns whether a copy to HOST fails; None: no copy fails, and each may be read
    before it is known to be complete
    salts       request id -> salt; KV computed under one salt differs from KV of the same tokens
                under another
    erases      returns whether a record can be erased; None: each can
    states      None, or the `StateConfig` of a model with states
    """

    def __init__(
        self,
        gpu_slots,
        host_slots,
        chunk_tokens,
        windows=None,
        vocabulary=97,
        copy_fails=None,
        salts=None,
        erases=None,
        states=None,
    ):
        self.states = states
        self.kv_slots = gpu_slots
        if states is not None:
            gpu_slots += states.slots * states.chunks
        self.chunk_tokens = chunk_tokens
        self.windows = windows
        self.vocabulary = vocabulary
        self.pools = {
            "gpu": [{} for _ in range(gpu_slots)],
            "host": [{} for _ in range(host_slots)],
        }
        self.last_writer = {}  # (tier, slot) -> (lane, ticket)
        self.users = defaultdict(dict)  # (tier, slot) -> {lane: ticket} since the last writer
        # work that is complete when the lane's newest work begins
        self.clock = {lane: Tickets() for lane in Lane}
        self.begun = {lane: ([], []) for lane in Lane}  # tickets and their clocks
        self.issued = Tickets()
        self.tables, self.rows, self.last_token = {}, {}, {}
        # seat -> (position of its row's first token, position that the model counts as 0)
        self.origins = {}
        self.step = self.applied = 0
        self.disk = {}  # slot -> (key, end, content)
        self.work = {}  # DISK slot -> Spill or Promotion
        self.erased = {}  # slot -> step
        self.completed = Tickets()
        # (ticket, HOST slot)
        self.copy_fails = copy_fails
        self.failed_copies = []
        self.salts = {} if salts is None else salts
        self.erases = erases

    def grow_host(self, slots):
        self.pools["host"] += [{} for _ in range(slots - len(self.pools["host"]))]

    # -- order

    def _begin(self, lane, ticket, after):
        """A piece of work is issued: everything it waits for is issued already and its clock
        follows from theirs."""
        assert ticket > self.issued[lane], "tickets of a lane ascend"
        clocks_seen = list(self.clock[lane])
        clocks_seen[lane] = self.issued[lane]
        for other, waited in zip(Lane, after, strict=True):
            assert waited <= self.issued[other], (
                f"{lane.name} waits for {other.name} {waited}, not issued yet: deadlock"
            )
            if other == lane:
                continue
            clocks_seen[other] = max(clocks_seen[other], waited)
            tickets, clocks = self.begun[other]
            if done := bisect_right(tickets, waited):
                clocks_seen = [
                    max(a, b) for a, b in zip(clocks_seen, clocks[done - 1], strict=True)
                ]
        self.clock[lane] = Tickets(*clocks_seen)
        tickets, clocks = self.begun[lane]
        tickets.append(ticket)
        clocks.append(self.clock[lane])
        self.issued = self.issued._replace(**{self.issued._fields[lane]: ticket})

    def _reads(self, lane, ticket, place):
        writer = self.last_writer.get(place)
        assert writer is not None, f"{place} is read but was never written"
        assert place not in self._places(being_read=False), (
            f"{place} is read while the disk writes it"
        )
        self._ordered(lane, writer, place, "read before it was written")
        self.users[place][lane] = ticket

    def _writes(self, lane, ticket, place):
        assert place not in self._places(), f"{place} is written while the disk uses it"
        for user in self.users[place].items():
            self._ordered(lane, user, place, "written while still in use")
        if place in self.last_writer:
            self._ordered(lane, self.last_writer[place], place, "written twice at once")
        self.last_writer[place] = (lane, ticket)
        self.users[place].clear()

    def _ordered(self, lane, other, place, what):
        other_lane, other_ticket = other
        if other_lane != lane and self.clock[lane][other_lane] < other_ticket:
            raise AssertionError(
                f"{place} {what}: {lane.name} does not wait for {other_lane.name} {other_ticket}"
            )

    # -- plans

    def launch(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        gates = 0
        for batch in plan.copies:
            gates += batch.gated
            self._copy(batch)
        assert gates <= 1
        for join in plan.joins:
            self.rows[join.seat] = join.row
            self.tables[join.seat] = []
            self.origins[join.seat] = (0, 0)
        for seat, start, zero in plan.origins:
            assert start % self.chunk_tokens == 0
            self.tables[seat] = []
            self.origins[seat] = (start, zero)
        for update in plan.blocks:
            table = self.tables[update.seat]
            assert update.first == len(table)
            table.extend(update.slots)
        erase_failed = self._use_disk(plan)
        gate = max((batch.ticket for batch in plan.copies if batch.gated), default=0)
        after = plan.after._replace(swap_in=max(plan.after.swap_in, gate))
        # a plan without tokens launches nothing that could wait
        self._begin(Lane.COMPUTE, plan.step, after if plan.tokens else NO_TICKETS)
        self._advance_states(plan)
        tokens, scores = self._compute(plan)
        rows = {
            row: RowResult(row.request, prompt_logprobs=entries)
            for row, entries in ((self.rows[seat], entries) for seat, entries in scores.items())
        }
        return StepResult(
            plan.step,
            plan.samples,
            tokens,
            self.issued,
            lower=disk_report(erase_failed=erase_failed),
            rows=rows,
        )

    def _copy(self, batch):
        lane = Lane(batch.lane)
        source, target = ("host", "gpu") if lane == Lane.IN else ("gpu", "host")
        self._begin(lane, batch.ticket, batch.after)
        assert len(set(batch.targets)) == len(batch.targets) == len(batch.sources)
        for a, b in zip(batch.sources, batch.targets, strict=True):
            self._reads(lane, batch.ticket, (source, a))
            self._writes(lane, batch.ticket, (target, b))
            if self.copy_fails is not None and lane is Lane.IN:
                writer, written = self.last_writer[source, a]
                assert writer is not Lane.OUT or written <= self.completed.swap_out, (
                    "it may be no copy"
                )
            self.pools[target][b] = dict(self.pools[source][a])
            if self.copy_fails is not None and lane is Lane.OUT and self.copy_fails():
                self.pools[target][b] = {}
                self.failed_copies.append((batch.ticket, b))

    def newly_failed_copies(self, completed):
        """HOST slots of failed copies out up to that ticket that have not been reported yet."""
        told = tuple(slot for ticket, slot in self.failed_copies if ticket <= completed)
        self.failed_copies = [
            (ticket, slot) for ticket, slot in self.failed_copies if ticket > completed
        ]
        return told

    # -- the disk

    def _places(self, being_read=True):
        """HOST slots that the disk writes; with `being_read` also the slots that it reads."""
        return {
            ("host", work.host)
            for work in self.work.values()
            if being_read or not isinstance(work, Spill)
        }

    def _use_disk(self, plan):
        """Begins the plan's disk work. Returns the slots that could not be erased."""
        failed = []
        disk = disk_work(plan)
        for slot in disk.erased:
            assert slot not in self.work
            if self.erases is None or self.erases():
                self.disk.pop(slot, None)
            else:
                failed.append(slot)
            self.erased[slot] = plan.step
        for work in (*disk.spills, *disk.promotions):
            place = ("host", work.host)
            assert work.slot not in self.work and self.erased.get(work.slot, 0) <= self.applied
            assert place not in self._places(), "two pieces of disk work on one HOST slot"
            before = dict([self.last_writer[place]] if place in self.last_writer else [])
            if isinstance(work, Spill):
                assert before, f"{place} is spilled but was never written"
                content = self.pools["host"][work.host]
                assert "piece" in content or len(content) == self.chunk_tokens
            else:
                before |= self.users[place]
                assert self.disk[work.slot][0] == work.key, "another chunk's record is read"
            for lane, ticket in before.items():
                assert ticket <= self.completed[lane], (
                    f"{place}: {lane.name} {ticket} is not known to be complete"
                )
            self.work[work.slot] = work
        return tuple(failed)

    def finish(self, slot, succeeds=True, torn=True):
        """The disk work on that slot ends. A write that fails leaves a `torn` record, or the one
        before it."""
        work = self.work.pop(slot)
        if isinstance(work, Spill):
            if succeeds:
                self.disk[slot] = (work.key, work.end, dict(self.pools["host"][work.host]))
            elif torn:
                self.disk.pop(slot, None)
        elif succeeds:
            self.pools["host"][work.host] = dict(self.disk[slot][2])
            self.users["host", work.host].clear()
            self.last_writer["host", work.host] = (Lane.OUT, 0)
        return work

    def _advance_states(self, plan):
        """Reads the state of each segment, which must be that of the tokens before it, and writes
        the one behind it. No segment reads or writes a slot that another one writes."""
        if self.states is None:
            assert not plan.state_in and not plan.state_out and not plan.state_swap_ins
            return
        segments = [
            (seat, position, [self.last_token[seat]])
            for seat, position in zip(plan.generate, plan.positions, strict=True)
        ]
        offset = 0
        for span in plan.spans:
            step_tokens = plan.token_ids[offset : offset + span.end - span.start]
            segments.append((span.seat, span.start, list(step_tokens)))
            offset += len(step_tokens)
        seats = [seat for seat, _, _ in segments]
        assert len(set(seats)) == len(seats), "a row has two segments in one step"
        written = [slot for slot in plan.state_out if slot >= 0]
        assert len(set(written)) == len(written), "two segments write one state"
        segments = [
            (*segment, read, write)
            for segment, read, write in zip(segments, plan.state_in, plan.state_out, strict=True)
        ]
        seen = {}
        for index, (seat, start, _, read, _) in enumerate(segments):
            origin, _ = self.origins[seat]
            seen[index] = ()
            if read < 0:
                assert start == origin, f"{self.rows[seat]} begins at {start} with a zero state"
                continue
            others = [write for *_, write in segments[:index] + segments[index + 1 :]]
            assert read not in others, "a segment reads a state that another one writes"
            pieces = []
            for place in self._pieces(read):
                self._reads(Lane.COMPUTE, plan.step, ("gpu", place))
                pieces.append(self.pools["gpu"][place])
            prefix = pieces[0]["seen"]
            assert all(piece["seen"] == prefix for piece in pieces), "pieces of different states"
            assert [piece["piece"] for piece in pieces] == [*range(self.states.chunks)]
            salt, tokens = prefix
            assert salt == self._salt(seat)
            before = [token for token, _ in self._row(seat, start - origin)]
            assert list(tokens) == before, f"{self.rows[seat]} reads another state at {start}"
            seen[index] = tokens
        for index, (seat, _, step_tokens, _, write) in enumerate(segments):
            if write < 0:
                continue
            for number, place in enumerate(self._pieces(write)):
                self._writes(Lane.COMPUTE, plan.step, ("gpu", place))
                self.pools["gpu"][place] = {
                    "piece": number,
                    "seen": (self._salt(seat), (*seen[index], *step_tokens)),
                }

    def _pieces(self, slot):
        first = self.kv_slots + slot * self.states.chunks
        return range(first, first + self.states.chunks)

    def _compute(self, plan):
        """Writes every token first, then reads and samples: as one layer does. Returns the samples,
        and by seat the KV of each scored position with the next token: they stand for its log
        probability."""
        work = []
        offset = 0
        for seat, position in zip(plan.generate, plan.positions, strict=True):
            work.append((seat, position, position, [self.last_token[seat]], True, False))
        for span in plan.spans:
            step_tokens = plan.token_ids[offset : offset + span.end - span.start]
            work.append(
                (span.seat, span.start, span.write_from, step_tokens, span.samples, span.scores)
            )
            offset += len(step_tokens)
        assert offset == len(plan.token_ids)
        for seat, start, write_from, step_tokens, *_ in work:
            self._write(seat, start, write_from, step_tokens, plan.step)
        samples = []
        sampled_rows = []
        scored = iter(plan.scored)
        scores = {}
        for seat, start, _, step_tokens, sampled, scoring in work:
            states = self._attend(seat, start, step_tokens, plan.step)
            if scoring:
                scores[seat] = (
                    *scores.get(seat, ()),
                    *zip(states[: len(states) - sampled], scored, strict=False),
                )
            for state in states[len(states) - sampled :]:
                samples.append(state % self.vocabulary)
                sampled_rows.append(self.rows[seat])
            # after drafts the next token is known to the host: which of them is the last one, the
            # device does not know
            self.last_token[seat] = samples[-1] if sampled == 1 else None
        assert tuple(sampled_rows) == plan.samples
        assert next(scored, None) is None
        return tuple(samples), scores

    def _write(self, seat, start, write_from, step_tokens, step):
        origin, zero = self.origins[seat]
        assert start >= origin and (
            self.windows is None or start + len(step_tokens) <= self.windows.end(origin)
        )
        seen = sum(value for _, value in self._row(seat, start - origin))
        for position, token in enumerate(step_tokens, start):
            index, offset = divmod(position - origin, self.chunk_tokens)
            slot = self.tables[seat][index]
            if position >= write_from:
                if self.last_writer.get(("gpu", slot)) != (Lane.COMPUTE, step):
                    self._writes(Lane.COMPUTE, step, ("gpu", slot))
                self.pools["gpu"][slot][offset] = (
                    token,
                    mix(seen, token, position - zero, self._salt(seat)),
                )
            seen += self.pools["gpu"][slot][offset][1]

    def _attend(self, seat, start, step_tokens, step):
        """Reads all KV up to the last of the `known` tokens at `start`: each must follow from the
        tokens that it saw, as far as they are still in the row. Returns the KV of the `known`
        tokens."""
        origin, zero = self.origins[seat]
        end = start - origin + len(step_tokens)
        for slot in self.tables[seat][: -(-end // self.chunk_tokens)]:
            if self.last_writer.get(("gpu", slot)) != (Lane.COMPUTE, step):
                self._reads(Lane.COMPUTE, step, ("gpu", slot))
        whole = not origin or self.windows.mode == RECOMPUTE
        # earlier positions saw more than the row contains
        first = 0 if whole else self.windows.length - self.windows.step
        seen = 0
        values = []
        for coordinate, (token, value) in enumerate(self._row(seat, end)):
            position = origin + coordinate
            assert coordinate < first or value == mix(
                seen, token, position - zero, self._salt(seat)
            ), f"{self.rows[seat]} sees KV at {position} that was computed behind other tokens"
            assert position < start or token == step_tokens[position - start]
            seen += value
            values.append(value)
        return values[len(values) - len(step_tokens) :]

    def _salt(self, seat):
        return self.salts.get(self.rows[seat].request, b"")

    def _row(self, seat, count):
        """The contents of the row's first `count` places."""
        size = self.chunk_tokens
        contents = [self.pools["gpu"][slot] for slot in self.tables[seat][: -(-count // size)]]
        return [contents[place // size][place % size] for place in range(count)]


def mix(seen, token, position, salt=b""):
    """KV of a token: depends on everything that it sees, on its position for the model, and here
    also on the salt."""
    return hash((seen, token, position, *salt)) & 0xFFFFFFFF


def next_token(tokens, windows=None, base=0, vocabulary=97, salt=b""):
    """The model's next token after `tokens`, if nothing before `base` exists."""
    return kv(tokens, windows, base, salt)[-1] % vocabulary


def kv(tokens, windows=None, base=0, salt=b""):
    """The KV of `tokens` from `base` on; nothing before exists."""
    if windows is not None and windows.mode == RECOMPUTE:
        base = windows.start(len(tokens) - 1)
    sums = [0]
    values = []
    for position, token in enumerate(tokens[base:], base):
        start = 0 if windows is None else windows.start(position, base)
        zero = start if windows is not None and windows.mode == RECOMPUTE else 0
        values.append(mix(sums[-1] - sums[start - base], token, position - zero, salt))
        sums.append(sums[-1] + values[-1])
    return values
