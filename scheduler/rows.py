"""A request on its way: `Turn` for its whole life, `Row` for one stay in a seat."""

from __future__ import annotations

from array import array
from collections import deque

from .chunks import Chunk
from .plan import Span
from .types import ChunkKey, Request, RowId, Usage


class Turn:
    """tokens        the prompt and every applied token of the reply
    keys          one for each full chunk of `tokens`
    arrival       its place in the queue, kept for life
    tail          while suspended: a private, partly filled chunk left by its last stay, perhaps dropped meanwhile
    waiting_for   the key that a running row is computing or loading, as last seen
    """

    __slots__ = ("arrival", "keys", "request", "tail", "tokens", "usage", "waiting_for")

    def __init__(self, request: Request, arrival: int, keys: list[ChunkKey]):
        self.request = request
        self.arrival = arrival
        self.tokens = request.prompt[:]
        self.keys = keys
        self.tail: Chunk | None = None
        self.waiting_for: ChunkKey | None = None
        self.usage: Usage | None = None


class Row:
    """chunks        by index, all pinned, all with a GPU slot
    spans         known tokens still to be planned, ascending (seat not yet filled in)
    position      the next position to generate from, once no spans are left
    last_position
                  the last one that is ever computed: its sample is the last token allowed
    room          the first position without a slot
    loads         chunks whose swap-in has not been issued
    launched      the last step planned with this row
    leaving       suspended: planned no more, released when its last launched step is applied
    pending       keys that this row is the first to compute
    """

    __slots__ = (
        "chunks",
        "id",
        "last_position",
        "launched",
        "leaving",
        "loads",
        "pending",
        "position",
        "room",
        "seat",
        "spans",
        "turn",
    )

    def __init__(self, turn: Turn, epoch: int, chunks: list[Chunk], spans: deque[Span], loads: deque[Chunk]):
        self.turn = turn
        self.id = RowId(turn.request.id, epoch)
        self.chunks = chunks
        self.spans = spans
        self.loads = loads
        self.position = len(turn.tokens)
        self.last_position = len(turn.request.prompt) + turn.request.max_tokens - 2
        self.room = chunks[-1].end
        self.seat = -1
        self.launched = 0
        self.leaving = False
        self.pending: dict[ChunkKey, None] = {}

    @property
    def arrival(self) -> int:
        return self.turn.arrival


def token_slice(tokens: array[int], span: Span) -> array[int]:
    return tokens[span.start : span.end]
