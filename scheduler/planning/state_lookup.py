"""What a request computes if its model has recurrent states, and the states that it begins from
(docs/design/states.md)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from math import inf
from operator import add, itemgetter
from typing import NamedTuple

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk, State
from ..kv.lower_tiers import LowerTiers
from ..kv.states import KeptStates
from ..kv.whereabouts import shared_only
from ..plan import Span
from ..turns.conversations import Conversation
from ..turns.row_state import Cut
from ..turns.turn import Turn
from ..types import HOST, ChunkKey


class StateNeeds(NamedTuple):
    """spans   the tokens to compute, ascending; the last one ends with the prompt and samples
    swap_ins   states on HOST from which spans begin, ascending
    cuts       where a state is kept, within the spans, ascending
    """

    spans: deque[Span]
    swap_ins: list[State]
    cuts: list[Cut]


class NeedsReads(NamedTuple):
    """Chunks that are read from lower tiers faster than computed, and the turn's other hits."""

    chunks: list[Chunk]
    hits: list[Chunk | None]


NOTHING: Mapping[int, int] = {}


class _Way(NamedTuple):
    """The ranges to compute, ascending, the states at which they begin unless that is zero, and the
    predicted seconds."""

    seconds: float
    runs: list[tuple[int, int]]
    states: list[State]


class _Amounts(NamedTuple):
    """What a row must do for some ranges of tokens.

    tokens    to compute
    swap_ins  states at the ranges' starts
    pieces    pieces of these states that are read from disk
    computed  chunks inside the ranges, which need not be read
    """

    tokens: int
    swap_ins: int
    pieces: int
    computed: int


class StateLookup:
    """Changes no state."""

    def __init__(
        self, config: SchedulerConfig, cost: CostProfile, kept: KeptStates, lower: LowerTiers
    ):
        self._size = config.chunk_tokens
        self._reuse = config.reuse
        self._cost = cost
        self._kept = kept
        self._lower = lower
        self._config = kept.config

    def look_up(
        self,
        turn: Turn,
        conversation: Conversation | None,
        base: int,
        keys: list[ChunkKey],
        holes: list[tuple[int, int]],
        hits: list[Chunk | None],
        to_read: list[Chunk],
        rows: int,
    ) -> StateNeeds | NeedsReads | ChunkKey:
        """The needs of a turn whose context begins at `base`, with these keys, in a batch with
        `rows` other rows; or what is to be read first, or the key of the last piece to wait for.
        `holes`: where KV is neither on the GPU nor on HOST, ascending. `to_read`: chunks in them
        that can be read, ascending. `hits`: the chunks of the other KV.

        The last span begins at a state: behind it every token is computed, up to the last one. A
        hole of KV before it is computed from the last state before the hole. Tokens whose KV is
        there are computed for the state alone and are not written.

            KV      |..gone..|########|gone|######|#####|
            state   0                 s1          e           n
            spans   |~~~~~~~~|        |~~~~|      |~~~~~~~~~~~|

        Of all states that the last span could begin at, the cheapest is taken.
        """
        states = self._states(turn, conversation, base, keys, self._kept.can_swap_in)
        if turn.promotes and self._lower:
            below = self._states(turn, conversation, base, keys, self._kept.can_read)
            reads = self._reads(turn, base, holes, hits, to_read, rows, states, below)
            if reads is not None:
                return reads
        way = self._cheapest(turn, base, states, holes)
        spans: deque[Span] = deque()
        for start, end in way.runs:
            spans += _spans(holes, start, end)
        spans[-1] = spans[-1]._replace(samples=1)
        return StateNeeds(spans, way.states, self._cuts(turn, keys, holes, [*spans]))

    def _reads(
        self,
        turn: Turn,
        base: int,
        holes: list[tuple[int, int]],
        hits: list[Chunk | None],
        to_read: list[Chunk],
        rows: int,
        here: dict[int, State],
        states: dict[int, State],
    ) -> NeedsReads | ChunkKey | None:
        """What the turn's cheapest way reads from lower tiers; the key of a piece that is being
        read if that is all that it waits for; None if it reads nothing. `here`: those of the states
        that are on HOST."""
        if not to_read and len(states) == len(here):
            return None
        computed = self._cheapest(turn, base, here, holes, rows)
        for chunks, usable, read_s in self._sources(to_read, states):
            below = {
                end: sum(piece.slots[HOST] == NO_SLOT for piece in state.pieces)
                for end, state in usable.items()
                if end not in here
            }
            ends = [chunk.end for chunk in chunks]
            left = _without(holes, [(end - self._size, end) for end in ends])
            way = self._cheapest(turn, base, usable, left, rows, ends, below, read_s)
            if way.seconds > computed.seconds:
                continue
            outside = _outside(ends, way.runs, self._size)
            pieces = [piece for state in way.states for piece in state.pieces]
            missing_pieces = [piece for piece in pieces if piece.slots[HOST] == NO_SLOT]
            # the pieces first: if HOST has no room for them, no KV is read in vain
            reads = [piece for piece in missing_pieces if piece.moving is None]
            reads += [chunk for first, end in outside for chunk in chunks[first:end]]
            if reads:
                return NeedsReads(reads, [*hits, *pieces])
            return missing_pieces[-1].key if missing_pieces else None
        return None

    def _sources(
        self, to_read: list[Chunk], states: dict[int, State]
    ) -> Iterator[tuple[list[Chunk], dict[int, State], float]]:
        """Chunks that can be read, states, and the seconds of a read: first of all tiers, then of
        this server's own."""
        disk_s = self._cost.read()
        shared = self._lower.shared
        if shared is not None:
            own = {end: one for end, one in states.items() if not _is_shared(one)}
            local = [chunk for chunk in to_read if not shared_only(chunk)]
            if (len(local), len(own)) != (len(to_read), len(states)):
                yield to_read, states, max(shared.read_s, disk_s if self._lower.local else 0.0)
                to_read = local
                states = own
        yield to_read, states, disk_s

    def _cheapest(
        self,
        turn: Turn,
        base: int,
        states: dict[int, State],
        holes: Sequence[tuple[int, int]],
        rows: int = 0,
        to_read: Sequence[int] = (),
        below: Mapping[int, int] = NOTHING,
        read_s: float = 0.0,
    ) -> _Way:
        """The cheapest way to compute these holes, from these states. It reads from lower tiers, in
        `read_s` seconds each, the chunks with the ends `to_read`, as far as it does not compute
        them, and as many pieces of a state as `below` says."""
        count = len(turn.tokens)
        latest = turn.scored if turn.unscored else count - 1
        begins = [base, *(end for end in states if end <= latest)]
        token = (1 + rows) * self._cost.recompute(count) / self._size
        swap_in = self._cost.swap_in()

        def amounts(run: tuple[int, int]) -> _Amounts:
            start, end = run
            first = bisect_left(to_read, start + self._size)
            computed = max(bisect_right(to_read, end) - first, 0)
            return _Amounts(end - start, start > base, below.get(start, 0), computed)

        least = inf
        cheapest = base
        for begin, of in zip(begins, _amounts(holes, begins, count, amounts), strict=True):
            chunks = len(to_read) - of.computed
            reads = chunks + of.pieces
            seconds = of.tokens * token
            seconds += (chunks + of.swap_ins * self._config.chunks) * swap_in
            seconds += (self._lower.reading + reads) * read_s if reads else 0.0
            if seconds <= least:
                least = seconds
                cheapest = begin
        runs = _runs(holes, begins, cheapest, count)
        return _Way(least, runs, [states[start] for start, _ in runs if start > base])

    def likely(self, turn: Turn, conversation: Conversation | None) -> Sequence[Chunk]:
        """The pieces of the state from which the turn's last span will most likely begin."""
        private = None if conversation is None else conversation.state
        if private is not None and private.pieces:
            return private.pieces
        by_key = self._kept.by_key
        every = self._config.multiple // self._size
        keys = turn.keys[every - 1 :: every] if by_key else []
        return next((by_key[key].pieces for key in reversed(keys) if key in by_key), ())

    def last_end(self, turn: Turn, conversation: Conversation | None) -> int:
        """Where the last state ends from which the turn could begin, also one that is still on the
        GPU; the context's start if there is none."""
        base = turn.context_start
        states = self._states(turn, conversation, base, turn.keys, _is_here)
        return max(states, default=base)

    def _states(
        self,
        turn: Turn,
        conversation: Conversation | None,
        base: int,
        keys: list[ChunkKey],
        usable: Callable[[State], bool],
    ) -> dict[int, State]:
        """Those of the states here from which the turn could begin and that are `usable`, by their
        ends, ascending."""
        states: dict[int, State] = {}
        if not self._reuse:
            return states
        by_key = self._kept.by_key
        if by_key:
            multiple = self._config.multiple
            every = multiple // self._size
            for number, key in enumerate(keys[every - 1 :: every], 1):
                state = by_key.get(key)
                # a record may have come with another position
                if state is not None and state.end == number * multiple and usable(state):
                    states[state.end] = state
        private = turn.state
        common = len(turn.tokens)
        begun = turn.context_start
        if private is None and conversation is not None and conversation.state is not None:
            private = conversation.state
            common = conversation.common(turn.tokens)
            begun = conversation.context_start
        if private is not None and begun == base and private.end <= common and usable(private):
            states.setdefault(private.end, private)
        return {end: states[end] for end in sorted(states) if base < end < len(turn.tokens)}

    def _cuts(
        self,
        turn: Turn,
        keys: list[ChunkKey],
        holes: Sequence[tuple[int, int]],
        spans: Sequence[Span],
    ) -> list[Cut]:
        """States are kept before the prompt's marks, at the spacing, and where the prompt parts
        from KV that is there. Only those at marks may displace KV, and the one before the end of a
        prompt without a conversation's name: its next turn finds no private state."""
        if not self._reuse:
            return []
        prompt = len(turn.request.prompt)
        multiple = self._config.multiple
        spacing = self._config.spacing
        marks = turn.request.marks or (prompt,)
        needed = bool(turn.request.marks) or turn.request.conversation is None
        # of a whole prompt that is there, its last token is computed: from a state before it
        parts = holes[0][0] if holes else prompt - 1
        wanted = dict.fromkeys(
            (parts - parts % multiple, *range(spacing, prompt + 1, spacing)), True
        )
        wanted |= {mark - mark % multiple: not needed for mark in marks}
        size = self._size
        starts = [span.start for span in spans]
        return [
            Cut(end, modest)
            for end, modest in sorted(wanted.items())
            if end // size <= len(keys)
            and (at := bisect_left(starts, end)) > 0
            and end <= spans[at - 1].end
            and not self._kept.has(keys[end // size - 1])
        ]


def _is_here(state: State) -> bool:
    """True if the state is in a tier, or on the GPU on its way to HOST."""
    return not state.unwanted and (bool(state.pieces) or state.slot != NO_SLOT)


def _is_shared(state: State) -> bool:
    """True if only the shared tier has the state. All pieces come from there together."""
    return shared_only(state.pieces[0])


def _runs(
    holes: Sequence[tuple[int, int]], begins: Sequence[int], begin: int, count: int
) -> list[tuple[int, int]]:
    """What is computed, as ascending ranges, if the last one begins at `begin`. `begins`: the
    positions of all states, ascending."""
    runs: list[tuple[int, int]] = []
    for start, end in [*((a, min(b, begin)) for a, b in holes if a < begin), (begin, count)]:
        _extend(runs, begins[bisect_right(begins, start) - 1], end)
    return runs


def _extend(runs: list[tuple[int, int]], start: int, end: int) -> None:
    """The range is computed too. It neither starts nor ends before the last one."""
    if runs and start <= runs[-1][1]:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((start, end))


def _amounts(
    holes: Sequence[tuple[int, int]],
    begins: Sequence[int],
    count: int,
    of_run: Callable[[tuple[int, int]], _Amounts],
) -> Iterator[_Amounts]:
    """The sums of `of_run` over `_runs`, for each of the begins. The runs of the holes before it
    are those of the begin before and further ones, so all begins together read each hole twice."""
    closed = _Amounts(0, 0, 0, 0)  # of all runs before the last one
    runs: list[tuple[int, int]] = []  # the last run, or none
    at = 0
    for begin in begins:
        while at < len(holes) and holes[at][1] <= begin:
            start, end = holes[at]
            _extend(runs, begins[bisect_right(begins, start) - 1], end)
            if len(runs) > 1:
                closed = _sum(closed, of_run(runs.pop(0)))
            at += 1
        last = [*runs]
        if at < len(holes) and holes[at][0] < begin:
            _extend(last, begins[bisect_right(begins, holes[at][0]) - 1], begin)
        _extend(last, begin, count)
        yield reduce(_sum, map(of_run, last), closed)


def _sum(some: _Amounts, more: _Amounts) -> _Amounts:
    return _Amounts(*map(add, some, more))


def _without(
    holes: Iterable[tuple[int, int]], parts: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The holes without these parts of them. All ranges are ascending."""
    left = []
    at = 0
    for start, end in holes:
        while at < len(parts) and parts[at][0] < end:
            if start < parts[at][0]:
                left.append((start, parts[at][0]))
            start = parts[at][1]
            at += 1
        if start < end:
            left.append((start, end))
    return left


def _outside(
    ends: Sequence[int], runs: Iterable[tuple[int, int]], size: int
) -> list[tuple[int, int]]:
    """The chunks of `size` tokens with these ends, ascending, that the runs do not compute whole:
    as ranges [first, last) of `ends`."""
    ranges = []
    first = 0
    for start, end in runs if ends else ():
        computed = bisect_left(ends, start + size)
        if first < computed:
            ranges.append((first, computed))
        first = max(first, computed, bisect_right(ends, end))
    if first < len(ends):
        ranges.append((first, len(ends)))
    return ranges


def _spans(holes: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[Span]:
    """The range [start, end) as spans. Each writes the KV of its last tokens, or of none."""
    for at in range(bisect_right(holes, start, key=itemgetter(1)), len(holes)):
        hole = max(holes[at][0], start)
        after = min(holes[at][1], end)
        if hole >= after:
            break
        yield Span(-1, start, after, hole, 0)
        start = after
    if start < end:
        yield Span(-1, start, end, end, 0)


def overlaps(spans: Sequence[Span], ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yields how many positions of each range [start, end) are in the spans. Both are ascending."""
    first = 0
    for start, end in ranges:
        while first < len(spans) and spans[first].end <= start:
            first += 1
        covered = 0
        at = first
        while at < len(spans) and spans[at].start < end:
            covered += min(spans[at].end, end) - max(spans[at].start, start)
            at += 1
        yield covered
