"""The states of rows: their slots, the copies to and from HOST, and where prompts are cut
(docs/design/states.md)."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import SchedulerConfig
from ..kv.chunk import NO_SLOT, Chunk, State
from ..kv.chunk_store import ChunkStore
from ..kv.state_slots import StateSlots
from ..kv.states import KeptStates
from ..plan import StateSwapIn
from ..turns.row_state import RowState
from ..turns.turn import RunningTurn, Turn
from ..types import HOST, ChunkKey, InvariantError
from ..work import Backlog, Pieces
from .plan_builder import PlanBuilder

ZERO_STATE = NOT_WRITTEN = -1


class LiveStates:
    """Only for models with states.

    A row's state is written where it was read, so it takes one slot. A state that is kept is copied
    out of that slot by the next plan, and the row's next step writes to another slot.
    """

    def __init__(
        self, config: SchedulerConfig, store: ChunkStore, kept: KeptStates, releases: Backlog
    ):
        """`releases`: takes work for rows that have left."""
        self._reuse = config.reuse
        self._size = config.chunk_tokens
        self._seats = config.max_num_seqs
        self._seated = 0  # rows that hold a slot
        self._states = kept.config
        self._store = store
        self.kept = kept
        self._releases = releases
        self.slots = StateSlots(kept.config, config.gpu_kv_chunks, store.gpu)
        store.delete_state = self._delete
        # states that the latest plan copies in: they keep their HOST slots until the next plan
        self.swapping_in: list[State] = []

    def begin_plan(self, builder: PlanBuilder) -> None:
        """Copies out the states that are to be kept. Their slots are free afterwards, unless their
        rows still hold them."""
        store = self._store
        slots = self.slots
        slots.begin_plan()
        for state in self.swapping_in:
            store.unpin(state.pieces, 0, builder.now)
        self.swapping_in.clear()
        self.kept.drop_unwanted()
        unnamed = []
        for state in slots.fresh:
            if not state.unwanted and not self._named(state):
                unnamed.append(state)
                continue
            if not state.unwanted:
                self._copy_out(state, builder)
            slots.let_go(state.slot)
            state.slot = NO_SLOT
        slots.fresh = unnamed
        slots.begin_plan()

    def _named(self, state: State) -> bool:
        """Whether the state is private or has its key, which it gets here if that is made."""
        if state.keys is None or state.key is not None:
            return True
        index = state.end // self._size - 1
        if index < len(state.keys):
            state.key = state.keys[index]
        return state.key is not None

    def _delete(self, key: ChunkKey) -> Sequence[Chunk]:
        """The chunk of this key is deleted, and its state with it, also if it is not copied yet.
        Returns the state's pieces."""
        for state in self.slots.fresh:
            if self._named(state) and state.key == key:
                state.unwanted = True
        return self.kept.delete(key)

    def _copy_out(self, state: State, builder: PlanBuilder) -> None:
        """Copies the state to HOST, if HOST has room for all of it."""
        store = self._store
        count = self._states.chunks
        if self.kept.has(state.key) or store.host.count < count:
            return
        pieces = [Chunk(state.end, NO_SLOT, builder.now) for _ in range(count)]
        value = store.policy.value(pieces[0], builder.now)
        host_slots = builder.evictor.host_slots(count, value, drops=not state.modest)
        if len(host_slots) < count:
            for slot in host_slots:
                store.host.give(slot)
            return
        builder.copies.evictions.add(self.slots.pieces(state.slot), host_slots)
        self.kept.keep(state, pieces, host_slots)
        if state.replaces is not None:
            self.kept.forget(state.replaces)

    # -- rows

    @property
    def has_seat(self) -> bool:
        """True if a row can be seated: there is a slot for its state."""
        return self.slots.free > 0

    def seat(self, row: RunningTurn) -> None:
        live = _live(row)
        live.slot = self.slots.take()
        self._seated += 1
        live.at = live.base
        live.waits = True

    def leave(self, row: RunningTurn) -> None:
        """The row leaves its seat. Its state becomes a private one of its turn, unless the turn has
        one that reaches as far: a row that is suspended again before it has used that. States of
        its reply that have no key yet will get none."""
        live = _live(row)
        turn = row.turn
        self._seated -= 1
        for state in self.slots.fresh:
            if state.keys is turn.keys and state.end // self._size > len(turn.keys):
                state.unwanted = True
        if self._reuse and live.at > live.base and not _reaches(turn.state, live.at):
            self.forget(turn)
            turn.state = State(live.at, live.slot)
            self.slots.fresh.append(turn.state)
        else:
            self.slots.let_go(live.slot)
        live.slot = NO_SLOT

    def forget(self, turn: Turn) -> None:
        """The turn's private state, if it has one, is not needed any more."""
        if turn.state is not None:
            self.kept.forget(turn.state)
            turn.state = None

    def release(self, row: RunningTurn, now: float) -> None:
        """The row swaps in no more states. The states that it has used get the time of now. A long
        prompt has many, so their times are noted in pieces, the last state's first."""
        live = _live(row)
        for state in live.swap_ins:
            self._store.unpin(state.pieces, 0, now)
        live.swap_ins.clear()
        if live.states:
            self._releases.begin(self._touch(live.states, now))
            live.states = []

    def _touch(self, states: list[State], now: float) -> Pieces:
        while states:
            pieces = states.pop().pieces
            for piece in pieces:
                self._store.touch(piece, now)
            yield 1 + len(pieces)

    def may_begin(self, row: RunningTurn, start: int, builder: PlanBuilder) -> bool:
        """Returns whether this plan may compute the row from position `start` on. A row has one
        segment in a step. If it needs a state from HOST, the copy begins. The plan computes the row
        only if it computes nothing else so far; otherwise the next one does, and this plan's step
        need not wait for the copy."""
        live = _live(row)
        if live.planned == builder.step:
            return False
        if start != live.base and live.at != start:
            self._swap_in(row, start, builder)
        return live.swapped != builder.step or not builder.tokens

    def _swap_in(self, row: RunningTurn, start: int, builder: PlanBuilder) -> None:
        live = _live(row)
        if not live.swap_ins or live.swap_ins[0].end != start:
            raise InvariantError(f"{row.id} begins at {start} and has no state there")
        slot = self._writable(row)
        state = live.swap_ins.popleft()
        builder.copies.early.add(
            [piece.slots[HOST] for piece in state.pieces], self.slots.pieces(slot)
        )
        builder.state_swap_ins.append(StateSwapIn(row.seat, slot, state.end))
        live.at = state.end
        live.waits = True
        live.swapped = builder.step
        live.states.append(state)
        self.swapping_in.append(state)
        self.kept.used(state)

    def cut(self, row: RunningTurn, start: int, most: int, end: int) -> int:
        """Returns where a piece of the prompt that begins at `start` ends: where a state is kept,
        at `end`, or at `most` if that comes first, and then at a multiple if one is on the way."""
        cuts = _live(row).cuts
        while cuts and cuts[0].end <= start:
            cuts.popleft()
        if most < end:
            multiple = most - most % self._states.multiple
            end = multiple if multiple > start else most
        return min(cuts[0].end, end) if cuts else end

    def compute(
        self, row: RunningTurn, start: int, end: int, builder: PlanBuilder
    ) -> tuple[int, int]:
        """The plan computes the row's positions [start, end). Returns the slots of the state that
        it reads and of the state that it writes."""
        live = _live(row)
        if start == live.base:
            read = ZERO_STATE
        elif live.at == start:
            read = live.slot
            self.slots.used_by(read, builder.step)
        else:
            raise InvariantError(f"{row.id} is at {start}, its state at {live.at}")
        written = self._writable(row)
        if live.waits:  # a slot that is read and has just been filled is also the one written
            builder.copies.step_writes(self.slots.first_piece(written))
            live.waits = False
        self.slots.used_by(written, builder.step)
        live.at = end
        live.planned = builder.step
        if live.cuts and live.cuts[0].end == end:
            modest = live.cuts.popleft().modest
            key = row.turn.keys[end // self._size - 1]
            self._keep(row, State(end, written, key, modest=modest))
        return read, written

    def generate(self, row: RunningTurn, position: int, builder: PlanBuilder) -> None:
        """The plan computes the row's token at `position`."""
        builder.generate_states.append(self.reply(row, position, position + 1, builder))

    def reply(
        self, row: RunningTurn, start: int, end: int, builder: PlanBuilder
    ) -> tuple[int, int]:
        """The plan computes the row's token at `end - 1`, and again those from `start` on. Returns
        the state slots as `compute` does."""
        live = _live(row)
        slots = self.compute(row, start, end, builder)
        if end >= live.next_kept and end % self._states.multiple == 0 and self._reuse:
            live.next_kept = end + self._states.generated
            named = row.turn.request.conversation is not None
            state = State(end, live.slot, keys=row.turn.keys, modest=named)
            state.replaces = live.newest
            live.newest = state
            self._keep(row, state)
        return slots

    def check_drafts(self, row: RunningTurn, builder: PlanBuilder) -> tuple[int, int]:
        """The plan checks drafts. The state stays where it is, because it cannot go back behind
        drafts that do not come true: the row's next span begins there again. Returns the state
        slots as `compute` does."""
        live = _live(row)
        live.planned = builder.step
        self.slots.used_by(live.slot, builder.step)
        return live.slot, NOT_WRITTEN

    def most_drafts(self, row: RunningTurn) -> int:
        """How many drafts the row's next step may check. Its span has no more tokens than
        `multiple`. A step that ends where a state is kept has none, and no drafts pass that
        place."""
        live = _live(row)
        multiple = self._states.multiple
        end = len(row.tokens)  # of the step without drafts
        most = multiple - (end - live.at)
        if self._reuse:
            kept = max(live.next_kept, end)
            most = min(most, kept + -kept % multiple - 1 - end)
        return max(0, most)

    def _keep(self, row: RunningTurn, state: State) -> None:
        live = _live(row)
        self.slots.hold(state.slot)
        self.slots.fresh.append(state)
        live.kept = True
        live.states.append(state)

    def _writable(self, row: RunningTurn) -> int:
        """Returns the slot that the row writes: its own, or another one if a state there is kept.
        If there is no other one, the step waits until the state is copied; a state that is not
        being copied yet is given up."""
        live = _live(row)
        if live.kept:
            live.kept = False
            slots = self.slots
            if slots.free > self._seats - self._seated:
                slots.let_go(live.slot)
                live.slot = slots.take()
            else:
                for state in slots.fresh:
                    state.unwanted |= state.slot == live.slot
            live.waits = True
        return live.slot


def _reaches(state: State | None, position: int) -> bool:
    """True if the state is there, or is to be copied, and has seen all tokens up to that
    position."""
    if state is None or state.unwanted or state.end < position:
        return False
    return bool(state.pieces) or state.slot != NO_SLOT


def written(row: RunningTurn) -> list[Chunk]:
    """What may be written to a lower tier when the row's turn ends: its chunks, and the pieces of
    states that it has read and kept. A state that is not copied to HOST yet is written when HOST
    needs its room."""
    if row.state is None:
        return row.chunks
    return [*row.chunks, *(piece for state in row.state.states for piece in state.pieces)]


def _live(row: RunningTurn) -> RowState:
    assert row.state is not None
    return row.state
