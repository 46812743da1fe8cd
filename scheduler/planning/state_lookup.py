"""What a request computes if its model has recurrent states, and the states that it begins from
(docs/design/states.md)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import State
from ..kv.states import KeptStates
from ..plan import Span
from ..turns.conversations import Conversation
from ..turns.row_state import Cut
from ..turns.turn import Turn
from ..types import ChunkKey


class StateNeeds(NamedTuple):
    """spans   the tokens to compute, ascending; the last one ends with the prompt and samples
    swap_ins   states on HOST from which spans begin, ascending
    cuts       where a state is kept, within the spans, ascending
    """

    spans: deque[Span]
    swap_ins: list[State]
    cuts: list[Cut]


class StateLookup:
    """Changes no state."""

    def __init__(self, config: SchedulerConfig, cost: CostProfile, kept: KeptStates):
        self._size = config.chunk_tokens
        self._reuse = config.reuse
        self._cost = cost
        self._kept = kept
        self._config = kept.config

    def needs(
        self,
        turn: Turn,
        conversation: Conversation | None,
        base: int,
        keys: list[ChunkKey],
        missing: Iterable[Span],
    ) -> StateNeeds:
        """The needs of a turn whose context begins at `base`, with these keys, and whose KV is
        missing where `missing` says.

        The last span begins at a state: behind it every token is computed, up to the last one. A
        hole of KV before it is computed from the last state before the hole. Tokens whose KV is
        there are computed for the state alone and are not written.

            KV      |..gone..|########|gone|######|#####|
            state   0                 s1          e           n
            spans   |~~~~~~~~|        |~~~~|      |~~~~~~~~~~~|

        Of all states that the last span could begin at, the cheapest is taken.
        """
        count = len(turn.tokens)
        holes = [(span.start, span.end) for span in missing]
        states = self._states(turn, conversation, base, keys)
        begins = [base, *states]
        token = self._cost.recompute(count) / self._size
        swap_in = self._config.chunks * self._cost.swap_in()
        # all positions from the first that is not scored yet are computed
        latest = turn.scored if turn.unscored else count - 1
        cheapest = inf
        chosen: list[tuple[int, int]] = []
        for begin in begins:
            if begin > latest:
                break
            runs = _runs(holes, begins, begin, count)
            cost = sum(end - start for start, end in runs) * token
            cost += sum(start > base for start, _ in runs) * swap_in
            if cost <= cheapest:
                cheapest = cost
                chosen = runs
        spans: deque[Span] = deque()
        for start, end in chosen:
            spans += _spans(holes, start, end)
        spans[-1] = spans[-1]._replace(samples=1)
        swap_ins = [states[start] for start, _ in chosen if start > base]
        return StateNeeds(spans, swap_ins, self._cuts(turn, keys, holes, [*spans]))

    def likely(self, turn: Turn, conversation: Conversation | None) -> State | None:
        """The state from which the turn's last span will most likely begin."""
        if conversation is not None and conversation.state is not None:
            return conversation.state
        by_key = self._kept.by_key
        every = self._config.multiple // self._size
        keys = turn.keys[every - 1 :: every] if by_key else []
        return next((by_key[key] for key in reversed(keys) if key in by_key), None)

    def _states(
        self, turn: Turn, conversation: Conversation | None, base: int, keys: list[ChunkKey]
    ) -> dict[int, State]:
        """The states that can be swapped in, by their ends, ascending."""
        states: dict[int, State] = {}
        if not self._reuse:
            return states
        kept = self._kept
        if kept.by_key:
            every = self._config.multiple // self._size
            for key in keys[every - 1 :: every]:
                state = kept.by_key.get(key)
                if state is not None and kept.can_swap_in(state):
                    states[state.end] = state
        private = turn.state
        common = len(turn.tokens)
        begun = turn.context_start
        if private is None and conversation is not None and conversation.state is not None:
            private = conversation.state
            common = conversation.common(turn.tokens)
            begun = conversation.context_start
        if (
            private is not None
            and begun == base
            and private.end <= common
            and kept.can_swap_in(private)
        ):
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
            and keys[end // size - 1] not in self._kept.by_key
        ]


def _runs(
    holes: Sequence[tuple[int, int]], begins: Sequence[int], begin: int, count: int
) -> list[tuple[int, int]]:
    """What is computed, as ascending ranges, if the last one begins at `begin`. `begins`: the
    positions of all states, ascending."""
    runs: list[tuple[int, int]] = []
    for start, end in [*((a, min(b, begin)) for a, b in holes if a < begin), (begin, count)]:
        start = begins[bisect_right(begins, start) - 1]
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def _spans(holes: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[Span]:
    """The range [start, end) as spans. Each writes the KV of its last tokens, or of none."""
    for hole, after in holes:
        hole, after = max(hole, start), min(after, end)
        if hole < after:
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
