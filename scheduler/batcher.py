"""Composes steps: who generates, which spans are computed, who joins, who is suspended (DESIGN section 4, batch)."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Sequence

from .choices import Choices
from .chunk import NO_SLOT, Chunk
from .chunks import ChunkStore
from .config import SchedulerConfig
from .conversations import Conversations
from .copies import StepCopies
from .cost import CostProfile
from .plan import BlockUpdate, Join, Origin, Promotion, Span, Spill, StepPlan
from .planner import Finding, OnDisk, Planner
from .room import RoomMaker
from .rows import Row, Turn, token_slice
from .types import ChunkKey, RowId
from .windows import RECOMPUTE, Windows

LINK_PIECE_S = 2e-3  # the least link time that swap-ins may use in one step
NEVER_FULL = 2**62  # the end of a window that no context outgrows
MOST_SCORED = 256  # prompt positions scored in one step: each takes a row of logits as wide as the vocabulary


class Batch:
    """One plan in the making."""

    def __init__(self, step: int, applied: int, now: float, copies: StepCopies, room: RoomMaker, budget: int):
        self.step, self.applied, self.now = step, applied, now
        self.copies, self.room = copies, room
        self.budget = budget
        self.joins: list[Join] = []
        self.origins: list[Origin] = []
        self.blocks: list[BlockUpdate] = []
        self.generate: list[int] = []
        self.positions: list[int] = []
        self.spans: list[Span] = []
        self.span_rows: list[Row] = []
        self.token_ids: array[int] = array("i")
        self.samples: list[RowId] = []
        self.scored: array[int] = array("i")
        self.polls = False  # a copy must be known to be complete before more can be planned
        self.short = 0  # GPU slots that running rows asked for in vain
        self.wanted = 0  # GPU slots that the request at the queue's head asked for in vain
        self.spills: tuple[Spill, ...] = ()
        self.promotions: tuple[Promotion, ...] = ()
        self.erased: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.generate) + len(self.token_ids)

    def room_for(self, span: Span) -> int:
        """How much of the span the step can still take, tokens."""
        return min(self.budget, MOST_SCORED - len(self.scored)) if span.scores else self.budget

    def freeze(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            copies=self.copies.batches(),
            after=self.copies.after,
            joins=tuple(self.joins),
            origins=tuple(self.origins),
            blocks=tuple(self.blocks),
            generate=array("i", self.generate),
            positions=array("i", self.positions),
            spans=tuple(self.spans),
            token_ids=self.token_ids,
            samples=tuple(self.samples),
            scored=self.scored,
            spills=self.spills,
            promotions=self.promotions,
            erased=self.erased,
        )


class Batcher:
    """Rows in seats; rows off the batch whose history is still loading; the requests that wait. All by `order`."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        store: ChunkStore,
        conversations: Conversations,
        planner: Planner,
        windows: Windows | None,
    ):
        self.config, self.cost, self.windows = config, cost, windows
        self.store, self.conversations, self.planner = store, conversations, planner
        self.waiting: list[Turn] = []
        self.loading: list[Row] = []
        self.rows: list[Row] = []
        self.by_id: dict[RowId, Row] = {}
        self.free_seats = deque(range(config.max_num_seqs))
        self.suspensions = 0
        self.choices = Choices(cost)
        self._leaving: list[Row] = []
        self._epochs = 0

    # -- generation

    def plan_generation(self, batch: Batch) -> None:
        """One token for every row that is past its prompt, in their order; slots as they are needed."""
        step, generate, positions, samples = batch.step, batch.generate, batch.positions, batch.samples
        for row in tuple(self.rows):
            position = row.position
            if row.spans or row.leaving or position > row.last_position or (row.constrained and row.awaits_token):
                continue
            if position == row.room and not self._extend(row, batch, position + 1):
                continue
            generate.append(row.seat)
            positions.append(position)
            samples.append(row.id)
            row.position = position + 1
            row.launched = step
        batch.budget -= len(generate)

    def _extend(self, row: Row, batch: Batch, end: int) -> bool:
        """Slots for the row's positions up to `end`, or as many as its window and the pool have; False: for none.

        If the pool is short somebody is suspended, perhaps the row itself. What the device must know is said only if
        the row is then planned: one that is not may be out of its seat before this plan is complete.
        """
        position = row.room
        if position == row.window_end and not self._move_on(row, batch):
            return False
        first, end = len(row.chunks), min(end, row.window_end)
        while row.chunks[-1].end < end:
            if not self.store.obtainable:
                self._suspend_for(batch)
                if row.leaving:
                    return False
                if not self.store.obtainable:
                    break
            batch.room.gpu_slots(1)
            chunk = self.store.new(row.chunks[-1].end + self.config.chunk_tokens, batch.now)
            batch.copies.step_writes(chunk.gpu)
            row.chunks.append(chunk)
        row.room = min(row.chunks[-1].end, row.window_end)
        if row.room == position:
            return False
        self._send_chunks(row, batch, first)
        return True

    def _move_on(self, row: Row, batch: Batch) -> bool:
        """The row has filled its window: it begins at the next window's start from now on, and the chunks before that
        are let go.

            |  let go  |   kept    |<- room
            first      start       window_end        window_end, then

        Everything launched is applied first: its chunks have their keys then, and nothing in flight begins at `first`.
        """
        if row.launched > batch.applied:
            return False
        turn, windows = row.turn, self.windows
        assert windows is not None
        if windows.mode == RECOMPUTE:
            self.leave_seat(row)
            self._queue_again(row, None, batch.now)
            row.leaving = True
            return False
        start = windows.start(row.room, turn.base)
        first = start // self.config.chunk_tokens
        gone = row.chunks[: first - row.first]
        self._release(row, gone, None, batch.now)
        row.first, row.chunks, row.moved = first, row.chunks[len(gone) :], True
        row.window_end = windows.end(start)
        row.room = min(row.chunks[-1].end, row.window_end)
        return True

    def _send_chunks(self, row: Row, batch: Batch, first: int) -> None:
        """The device learns the row's chunks from number `first` on; all of them if the row begins elsewhere now."""
        if row.moved:
            start = row.first * self.config.chunk_tokens
            assert self.windows is not None
            batch.origins.append(Origin(row.seat, start, self.windows.zero(start)))
            row.moved, first = False, 0
        slots = tuple(chunk.gpu for chunk in row.chunks[first:])
        if slots:
            batch.blocks.append(BlockUpdate(row.seat, first, slots))

    def _suspend_for(self, batch: Batch) -> None:
        """One shortage suspends one row: slots on their way free count. The last in order goes first."""
        batch.short += 1
        if batch.short <= self.coming_free():
            return
        staying = [row for row in self.rows if not row.leaving]
        last = max(self.loading + staying, key=lambda row: row.order)
        if last in self.loading:
            self.loading.remove(last)
            self._requeue(last, batch.now)
        elif len(staying) > 1:
            self.suspend(last)
            self.release_suspended(batch.applied, batch.now)
        # else the others are leaving already, or wait for their reply's length to be confirmed

    def suspend(self, row: Row) -> None:
        """The row is planned no more, and leaves its seat when its launched steps are applied."""
        row.leaving = True
        self._leaving.append(row)
        self.suspensions += 1

    def coming_free(self) -> int:
        return sum(chunk.users == 1 for row in self._leaving for chunk in row.chunks)

    def release_suspended(self, applied: int, now: float) -> None:
        """Suspended rows whose every launched step is applied give their seats and chunks back and queue again."""
        for row in [row for row in self._leaving if row.launched <= applied]:
            self.leave_seat(row)
            self._requeue(row, now)

    def _requeue(self, row: Row, now: float) -> None:
        self._queue_again(row, self._keep_tail(row), now)

    def _queue_again(self, row: Row, tail: Chunk | None, now: float) -> None:
        turn = row.turn
        turn.tail, turn.promotes = tail, True
        turn.read.clear()
        self.let_go(row, tail, now)
        insort(self.waiting, turn, key=lambda turn: turn.order)

    def _keep_tail(self, row: Row) -> Chunk | None:
        """The partly filled chunk that the row would append to when it comes back."""
        if not self.config.reuse:
            return None
        size = self.config.chunk_tokens
        if not row.spans and not row.loads:
            full, valid = divmod(len(row.turn.tokens) - 1, size)
            index = full - row.first
            if index < len(row.chunks) and row.chunks[index].key is None:
                row.chunks[index].tokens = valid
        return next((c for c in row.chunks if c.key is None and 0 < c.tokens < size), None)

    # -- known tokens

    def plan_spans(self, batch: Batch) -> None:
        """Pieces of prompts (and of dropped history), row by row in their order, while the token budget lasts."""
        for row in tuple(self.rows):
            if batch.budget <= 0:
                return
            if row.spans and not row.leaving:
                self._take_spans(row, batch)

    def _take_spans(self, row: Row, batch: Batch) -> None:
        while row.spans and (room := batch.room_for(row.spans[0])) > 0:
            start, end = row.spans[0].start, row.spans[0].end
            if start >= row.room and not self._extend(row, batch, min(end, start + room)):
                return
            row.launched = batch.step
            span = row.spans.popleft()._replace(seat=row.seat)
            cut = min(start + room, row.room)
            if end > cut:
                row.spans.appendleft(span._replace(start=cut, write_from=max(cut, span.write_from)))
                span = span._replace(end=cut, samples=False)
            batch.budget -= span.end - span.start
            batch.spans.append(span)
            batch.span_rows.append(row)
            batch.token_ids += token_slice(row.turn.tokens, span)
            if span.scores:
                batch.scored += row.turn.tokens[span.start + 1 : span.end + (not span.samples)]
            if span.samples:
                batch.samples.append(row.id)

    # -- joining

    def admit(self, batch: Batch) -> None:
        """Rows whose history has nearly arrived take their seats, then requests join, in their order.

        Swap-ins that this step waits for stay under the time it takes anyway; more is loaded ahead of the seat.
        """
        if not (self.loading or self.waiting):
            return
        link = self.link_chunks(batch)
        for row in list(self.loading):
            link = self._load(row, batch, link)
        for turn in list(self.waiting):
            if batch.budget <= 0 or len(self.rows) + len(self.loading) >= self.config.max_num_seqs:
                return
            if turn.waiting_for is not None and self.planner.must_wait(turn.waiting_for):
                if self._resumes(turn):
                    return
                continue
            if self._surely_too_large(turn):
                batch.wanted = turn.wanted
                return
            finding = self._look_up(turn, batch)
            if not isinstance(finding, Finding):
                turn.waiting_for = finding
                if self._resumes(turn):
                    return
                continue
            if not self._fits(finding):
                self._keep_for_later(turn, finding, batch)
                return
            link = self._load(self._reserve(turn, finding, batch), batch, link)

    def _look_up(self, turn: Turn, batch: Batch) -> Finding | ChunkKey:
        """What the turn needs, or the key of the chunk that it waits for. Chunks on DISK begin to be read, off the
        batch; those that HOST has no room for are computed."""
        conversation = self.conversations.of(turn.request)
        if turn.from_disk is None:
            turn.from_disk = self.planner.keys_on_disk(turn) if self.config.disk_kv_chunks else frozenset()
        finding = self.planner.look_up(turn, conversation, len(self.rows))
        if isinstance(finding, OnDisk):
            # All of it, not only what the last position sees: else what is read for older windows is given up first.
            self.await_chunks(turn, [*finding.chunks, *finding.hits], batch.now)
            latest = None
            for chunk in finding.chunks:
                # Once read it was given up again: HOST cannot keep it until the rest is there.
                begun = chunk.key not in turn.read and batch.room.promote(chunk, drops=True)
                if begun is False:
                    turn.promotes = False
                    break
                latest = chunk.key
                if begun is None:
                    batch.polls = True
                    break
                turn.read.add(chunk.key)
            if latest is not None:
                return latest
            finding = self.planner.look_up(turn, conversation, len(self.rows))
            assert not isinstance(finding, OnDisk)
        return finding

    def await_chunks(self, turn: Turn, chunks: Sequence[Chunk | None], now: float) -> None:
        """The turn waits in the queue: what it will hit goes to every order's end, as far as nobody holds it.

        A suspended request's chunks are not exempt from eviction.
        """
        place = 0 if self._resumes(turn) else turn.order[1]
        for chunk in chunks:
            if chunk is not None and chunk.resident and not chunk.users:
                self.store.touch(chunk, now, place)
                turn.awaited.append(chunk)

    def leave_queue(self, turn: Turn) -> None:
        self.waiting.remove(turn)
        self.store.end_wait(turn.awaited)
        turn.awaited.clear()

    def link_chunks(self, batch: Batch) -> int:
        """Chunks that the link copies one way while the step runs."""
        rows = len(batch.generate)
        context = min(sum(batch.positions) // rows, self.config.max_model_len) if rows else 0
        step = self.cost.step(len(batch.token_ids), rows=rows, rows_context=context)
        return max(1, int(max(step, LINK_PIECE_S) / self.cost.load()))

    def _resumes(self, turn: Turn) -> bool:
        """While a suspended request waits, nobody behind it joins."""
        return turn.usage is not None  # it has had its room before

    def _surely_too_large(self, turn: Turn) -> bool:
        """It did not fit when it was last looked at, and there is still less room than it wanted then."""
        return bool(self.rows or self.loading) and self.store.available + self.coming_free() < turn.wanted

    def _keep_for_later(self, turn: Turn, finding: Finding, batch: Batch) -> None:
        """The head of the queue must wait. Its conversation is active: what it will hit goes to every order's end."""
        if not turn.wanted:
            self.await_chunks(turn, finding.chunks, batch.now)
        batch.wanted = turn.wanted = self._wanted(finding)

    def _wanted(self, finding: Finding) -> int:
        return finding.new_slots + finding.idle_safe + self.config.reserved_chunks

    def _fits(self, finding: Finding) -> bool:
        """All the room it needs beyond the reserve, or nothing. An empty batch ignores the reserve."""
        store, needed = self.store, finding.new_slots
        if not self.rows and not self.loading:
            return store.obtainable - finding.idle_safe - finding.idle_only >= needed
        if store.available + self.coming_free() < self._wanted(finding):
            return False
        return store.available - finding.idle_safe >= needed

    def _reserve(self, turn: Turn, finding: Finding, batch: Batch) -> Row:
        """Holds every hit, then takes a slot for every chunk that is loaded or computed."""
        store, tail = self.store, finding.tail
        if turn.tail is not None and turn.tail is not tail:
            self._give_up_tail(turn.tail)  # somebody else has computed that chunk whole
        store.pin(chunk for chunk in finding.chunks if chunk is not None)
        self.leave_queue(turn)
        batch.room.gpu_slots(finding.new_slots)
        for chunk in finding.loads:
            chunk.gpu, chunk.loading = store.gpu.take(), True
        size = self.config.chunk_tokens
        chunks = [
            chunk if chunk is not None else store.new((index + 1) * size, batch.now)
            for index, chunk in enumerate(finding.chunks, finding.first)
        ]
        self._epochs += 1
        turn.base, turn.keys, turn.chains, turn.firsts = finding.base, finding.keys, {}, {}
        window_end = NEVER_FULL if self.windows is None else self.windows.end(finding.first * size)
        row = Row(turn, self._epochs, finding.first, chunks, finding.spans, finding.loads, window_end)
        if tail is not None:
            tail.tokens = finding.tail_tokens
            self._take_tail(turn, tail)
        turn.tail, turn.waiting_for = None, None
        if turn.usage is None:
            turn.usage = finding.usage
        if self.config.reuse:
            keyed = [*zip(turn.keys[finding.first :], finding.chunks, strict=False)]
            row.pending = {key: None for key, hit in keyed if hit is None or hit is tail}
            passed_over = (store.find(key) for key, hit in keyed if hit is None)
            self.choices.note(finding.loads, (chunk for chunk in passed_over if chunk and chunk.host != NO_SLOT))
            self.planner.pending.update(dict.fromkeys(row.pending, row.id.epoch))
        insort(self.loading, row, key=lambda row: row.order)
        return row

    def _take_tail(self, turn: Turn, tail: Chunk) -> None:
        """The tail is the row's now: it is about to be appended to, so its copy on HOST ends."""
        if tail is not turn.tail:
            conversation = self.conversations.of(turn.request)
            assert conversation is not None and conversation.tail is tail
            conversation.tail = None
        if tail.host != NO_SLOT and not tail.loading:
            self.store.release_host(tail)

    def _give_up_tail(self, tail: Chunk) -> None:
        if tail.host != NO_SLOT:
            self.store.release_host_late(tail)
        if tail.gpu != NO_SLOT:
            self.store.release_gpu(tail)

    def _load(self, row: Row, batch: Batch, link: int) -> int:
        """Issues the row's swap-ins within `link` chunks; seats it if they suffice. Returns what is left of `link`.

        Nobody is held up in a batch that is empty but for this row: all its chunks load at once.
        """
        gated = len(row.loads) <= link or not (self.rows or batch.tokens)
        lane = batch.copies.gated if gated else batch.copies.early
        loads = [row.loads.popleft() for _ in range(len(row.loads) if gated else link)]
        lane.add([chunk.host for chunk in loads], [chunk.gpu for chunk in loads])
        for chunk in loads:
            chunk.loading = False
            if chunk.key is None:
                self.store.release_host_late(chunk)
            self.store.file(chunk)
        if gated and batch.budget > 0:
            self._seat(row, batch)
        return max(0, link - len(loads))

    def _seat(self, row: Row, batch: Batch) -> None:
        self.loading.remove(row)
        row.seat = self.free_seats.popleft()
        if row.turn.queued is None:
            row.turn.queued = batch.now - row.turn.arrived
        insort(self.rows, row, key=lambda row: row.order)
        self.by_id[row.id] = row
        batch.copies.step_reads([chunk.gpu for chunk in row.chunks if chunk.key is not None])
        for chunk in row.chunks:
            if chunk.key is None:
                batch.copies.step_writes(chunk.gpu)
        batch.joins.append(_join(row))
        self._send_chunks(row, batch, 0)
        self._take_spans(row, batch)

    # -- leaving

    def leave_seat(self, row: Row) -> None:
        self.rows.remove(row)
        if row.leaving:
            self._leaving.remove(row)
        del self.by_id[row.id]
        self.free_seats.append(row.seat)
        row.seat = -1

    def let_go(self, row: Row, tail: Chunk | None, now: float) -> None:
        """The row's chunks are free to move. Keyed ones and `tail` stay as cache, other private ones are dropped.

        Its launched steps may still use the slots; whoever takes them waits for that on the device.
        """
        for chunk in row.loads:
            chunk.loading = False
            self.store.gpu.give(chunk.gpu)
            chunk.gpu = NO_SLOT
        row.loads.clear()
        for key in row.pending:
            del self.planner.pending[key]
        row.pending.clear()
        self._release(row, row.chunks, tail, now)
        row.chunks = []

    def _release(self, row: Row, chunks: list[Chunk], tail: Chunk | None, now: float) -> None:
        for chunk in chunks:
            if chunk.key is None and chunk is not tail:
                chunk.tokens = 0
        self.store.unpin(chunks, row.launched, now)


def _join(row: Row) -> Join:
    """With the tokens so far where the next one depends on them."""
    request, tokens = row.turn.request, row.turn.tokens
    prompt, sampling = len(request.prompt), request.sampling
    return Join(
        row.seat,
        row.id,
        sampling,
        prompt=tokens[:prompt] if sampling.penalised else (),
        reply=tokens[prompt:] if sampling.penalised or row.constrained else (),
        prompt_logprobs=request.prompt_logprobs,
    )
