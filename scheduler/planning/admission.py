"""Admits requests to the batch: lookup, GPU slots, swap-ins, seat (docs/design/scheduling.md)."""

from __future__ import annotations

from bisect import insort
from itertools import chain

from ..config import SchedulerConfig
from ..context_window import ContextWindow
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.stats import SwapInOrRecomputeStats
from ..plan import Join
from ..turns.conversations import Conversations
from ..turns.row_state import RowState
from ..turns.turn import RunningTurn, Turn
from ..types import GPU, HOST, ChunkKey
from .batcher import Batcher
from .link import link_chunks
from .lookup import CacheLookup, RequestNeeds
from .plan_builder import PlanBuilder
from .promotions import promote
from .queue_order import QueueOrder
from .queues import RequestQueues
from .sharing import Sharing
from .state_lookup import NeedsReads

# requests tried in one step: the history of each is looked up, and it is compared with the queue
MOST_TRIED = 64
NEVER_FULL = 2**62  # the end of a window that never overflows


class Admission:
    """Lets requests join. `choices` counts chunks that were swapped in and chunks that were
    recomputed instead."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        store: ChunkStore,
        conversations: Conversations,
        lookup: CacheLookup,
        queues: RequestQueues,
        order: QueueOrder,
        batcher: Batcher,
        windows: ContextWindow | None,
        sharing: Sharing | None = None,
    ):
        self._config = config
        self._cost = cost
        self._windows = windows
        self._store = store
        self._conversations = conversations
        self._lookup = lookup
        self._queues = queues
        self._order = order
        self._batcher = batcher
        self._sharing = sharing
        self.choices = SwapInOrRecomputeStats(cost)
        self._epochs = 0
        # the last request that did not fit, and `_epochs` then
        self._too_large: tuple[Turn, int] | None = None

    def admit(self, builder: PlanBuilder) -> None:
        """Seats rows whose history has nearly arrived, then lets requests join, in their order.

        The swap-ins that this step waits for take no longer than the step itself; further chunks
        are swapped in before their row gets a seat.
        """
        if not (self._queues.swapping_in or self._queues.waiting):
            return
        link = link_chunks(builder, self._cost)
        for row in list(self._queues.swapping_in):
            link = self._swap_in(row, builder, link)
        if builder.budget <= 0 or self._queues.full:
            return
        joined = [*self._queues.joined()]
        for tried, turn in enumerate(self._order.candidates(joined, builder.now)):
            if tried == MOST_TRIED:
                builder.polls = True
                return
            if self._surely_too_large(turn):
                builder.wanted = turn.wanted
                return
            if self._sharing is not None and self._sharing.awaits(turn, builder.now):
                builder.polls = True
                continue
            needs = self._needs_or_key(turn, builder)
            if not isinstance(needs, RequestNeeds):
                turn.waiting_for = needs
                if turn.resumes:
                    return
                continue
            work = self._lookup.work_now(turn, needs)
            if not self._order.may_join(turn, work):
                turn.work = work
                continue
            if not self._fits(needs):
                self._keep_for_later(turn, needs, builder)
                return
            self._order.joins(turn, work)
            link = self._swap_in(self._reserve(turn, needs, builder), builder, link)
            if builder.budget <= 0 or self._queues.full:
                return

    def _needs_or_key(self, turn: Turn, builder: PlanBuilder) -> RequestNeeds | ChunkKey:
        """Returns the turn's needs, or the key of the chunk that it waits for. Begins to read its
        chunks in lower tiers; chunks that do not fit on HOST are computed instead."""
        conversation = self._conversations.of(turn.request)
        if turn.lower_sources is None:
            turn.lower_sources = self._lookup.lower_sources(turn) if self._store.lower else {}
        needs = self._lookup.look_up(turn, conversation, len(self._queues.rows))
        if isinstance(needs, NeedsReads):
            # The turn's hits get its place in the queue too; otherwise they are evicted before its
            # chunks in lower tiers are read.
            self._queues.await_chunks(turn, [*needs.chunks, *needs.hits], builder.now)
            reads: list[Chunk] = []
            for chunk in needs.chunks:
                # A chunk that was read and evicted is not read twice: HOST cannot keep it until the
                # others are there.
                begun = chunk.key not in turn.read and promote(builder.evictor, chunk, drops=True)
                if begun is False:
                    turn.promotes = False
                    # a state that is not whole is not waited for
                    state = chunk.state
                    reads = [one for one in reads if state is None or one.state is not state]
                    break
                reads.append(chunk)
                if begun is None:
                    builder.polls = True
                    break
                turn.read.add(chunk.key)
            if reads and reads[-1].key is not None:
                return reads[-1].key
            needs = self._lookup.look_up(turn, conversation, len(self._queues.rows))
            assert not isinstance(needs, NeedsReads)
        return needs

    def _surely_too_large(self, turn: Turn) -> bool:
        """True if it did not fit at its last lookup, and there is still less room than it needed
        then.

        If another request has joined since, the need is looked up again: the two may share chunks.
        """
        if self._queues.no_rows or self._too_large != (turn, self._epochs):
            return False
        return self._store.available + self._queues.coming_free() < turn.wanted

    def _keep_for_later(self, turn: Turn, needs: RequestNeeds, builder: PlanBuilder) -> None:
        """The first request of the queue must wait. Its conversation is active, so its hits are
        evicted last."""
        if not turn.wanted:
            pieces = (state.pieces for state in needs.state_swap_ins)
            self._queues.await_chunks(turn, [*needs.chunks, *chain(*pieces)], builder.now)
        builder.wanted = turn.wanted = self._wanted(needs)
        self._too_large = turn, self._epochs

    def _wanted(self, needs: RequestNeeds) -> int:
        return needs.new_slots + needs.idle_spare + self._config.reserved_chunks

    def _fits(self, needs: RequestNeeds) -> bool:
        """True if there is room for all its slots and the reserve. With an empty batch the reserve
        may be used."""
        store = self._store
        needed = needs.new_slots
        if self._queues.no_rows:
            return store.obtainable - needs.idle_spare - needs.idle_only >= needed
        if store.available + self._queues.coming_free() < self._wanted(needs):
            return False
        return store.available - needs.idle_spare >= needed

    def _reserve(self, turn: Turn, needs: RequestNeeds, builder: PlanBuilder) -> RunningTurn:
        """Pins every hit, then takes a slot for every chunk that is swapped in or computed."""
        store = self._store
        tail = needs.tail
        if turn.tail is not None and turn.tail is not tail:
            self._give_up_tail(turn.tail)  # another row has computed the whole chunk
        store.pin(chunk for chunk in needs.chunks if chunk is not None)
        for state in needs.state_swap_ins:
            store.pin(state.pieces)
        self._queues.leave_queue(turn)
        builder.evictor.take_gpu_slots(needs.new_slots)
        store.reserve_swap_ins(needs.swap_ins)
        size = self._config.chunk_tokens
        chunks = [
            chunk if chunk is not None else store.new((index + 1) * size, builder.now)
            for index, chunk in enumerate(needs.chunks, needs.first)
        ]
        self._epochs += 1
        # its own from now on
        if self._queues.states is not None and turn.context_start != needs.context_start:
            self._queues.states.forget(turn)  # it belongs to the context that is left
        turn.context_start = needs.context_start
        turn.keys = needs.keys[:]
        turn.key_chains, turn.first_keys = {}, {}
        store.note_context(turn, 0, len(turn.request.prompt) // size)
        live = None
        if self._config.states is not None:
            next_kept = len(turn.tokens) + self._config.states.generated
            live = RowState(needs.context_start, needs.state_swap_ins, needs.cuts, next_kept)
        window_end = NEVER_FULL if self._windows is None else self._windows.end(needs.first * size)
        row = RunningTurn(
            turn, self._epochs, needs.first, chunks, needs.spans, needs.swap_ins, window_end, live
        )
        if tail is not None:
            tail.tokens = needs.tail_tokens
            self._take_tail(turn, tail)
        turn.tail = None
        turn.waiting_for = None
        turn.wanted = 0
        if turn.usage is None:
            turn.usage = needs.usage
        if self._config.reuse:
            keyed = [*zip(turn.keys[needs.first :], needs.chunks, strict=False)]
            row.pending = {key: None for key, hit in keyed if hit is None or hit is tail}
            passed_over = (store.find(key) for key, hit in keyed if hit is None)
            self.choices.note(
                needs.swap_ins,
                (chunk for chunk in passed_over if chunk and chunk.slots[HOST] != NO_SLOT),
            )
            store.pending.update(dict.fromkeys(row.pending, row.id.epoch))
        insort(self._queues.swapping_in, row, key=lambda row: row.order)
        return row

    def _take_tail(self, turn: Turn, tail: Chunk) -> None:
        """The tail now belongs to the row. The row will append to it, so the tail gives up its copy
        on HOST."""
        if tail is not turn.tail:
            conversation = self._conversations.of(turn.request)
            assert conversation is not None and conversation.tail is tail
            conversation.tail = None
        if tail.slots[HOST] != NO_SLOT and not tail.awaits_swap_in:
            self._store.release_host(tail)

    def _give_up_tail(self, tail: Chunk) -> None:
        if tail.slots[HOST] != NO_SLOT:
            self._store.release_host_late(tail)
        if tail.slots[GPU] != NO_SLOT:
            self._store.release_gpu(tail)

    def _swap_in(self, row: RunningTurn, builder: PlanBuilder, link: int) -> int:
        """Issues the row's swap-ins, `link` chunks at most, and seats the row if these are all.
        Returns the rest of `link`.

        If the batch is empty otherwise, all chunks of the row are swapped in at once: no other
        row is delayed.
        """
        gated = len(row.swap_ins) <= link or not (self._queues.rows or builder.tokens)
        lane = builder.copies.gated if gated else builder.copies.early
        swap_ins = [row.swap_ins.popleft() for _ in range(len(row.swap_ins) if gated else link)]
        lane.add(
            [chunk.slots[HOST] for chunk in swap_ins], [chunk.slots[GPU] for chunk in swap_ins]
        )
        self._store.swap_ins_issued(swap_ins)
        states = self._queues.states
        if gated and builder.budget > 0 and (states is None or states.has_seat):
            self._seat(row, builder)
        return max(0, link - len(swap_ins))

    def _seat(self, row: RunningTurn, builder: PlanBuilder) -> None:
        self._queues.seat_row(row)
        if row.turn.queued is None:
            row.turn.queued = builder.now - row.turn.arrived
        builder.copies.step_reads(
            [chunk.slots[GPU] for chunk in row.chunks if chunk.key is not None]
        )
        for chunk in row.chunks:
            if chunk.key is None:
                builder.copies.step_writes(chunk.slots[GPU])
        builder.joins.append(_join(row))
        if self._queues.states is not None:
            self._queues.states.seat(row)
        self._batcher.send_chunks(row, builder, 0)
        self._batcher.take_spans(row, builder, builder.budget)


def _join(row: RunningTurn) -> Join:
    """Includes the tokens so far if the next token depends on them."""
    request, tokens = row.turn.request, row.turn.tokens
    sampling = request.sampling
    may_end = len(request.prompt) + request.min_tokens
    return Join(
        row.seat,
        row.id,
        sampling,
        prompt=request.prompt if sampling.penalised else (),
        reply=tokens.reply[:] if sampling.penalised or sampling.has_long_words else (),
        prompt_logprobs=request.prompt_logprobs,
        stop_ids=sorted(request.stop_ids) if len(tokens) < may_end else (),
        may_end=may_end,
    )
