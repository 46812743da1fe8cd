"""A request in progress: `Turn` for its whole life, `RunningTurn` for one stay in a seat."""

from __future__ import annotations

from collections import deque

from ..kv.chunk import Chunk, State
from ..plan import Span
from ..types import ChunkKey, QueuePlace, Request, RowId, Tier, Usage
from .drafts import Drafts
from .prompt_keys import PromptKeys
from .row_state import RowState
from .turn_tokens import TurnTokens


class Turn:
    """tokens     the prompt and every applied token of the reply
    context_start the position at which its context begins: nothing before it exists (see
    `ContextWindow`)
    keys          one for each full chunk of `tokens`, as in `ChunkKeys`
    key_chains, first_keys
                  as in `PromptKeys`; until its first seat it shares these and `keys` with other
                  choices
    order         its permanent place in the queue
    arrived       time of its arrival, seconds
    work          predicted seconds that computing the part of its prompt in no tier adds to a step
    reply_work    predicted seconds that its reply adds to all steps together
    allowance     predicted seconds of later arrivals' work that may still join before it (see
                  `queue_order`)
    queued        seconds that it waited for its first seat
    tail          while suspended: a private, partly filled chunk left by its last stay, perhaps
                  dropped meanwhile
    state         private, at the end of its last stay in a seat; None: none
    usage         sources of its prompt's KV, as its first seat found them; None before that seat
    scored        prompt positions whose log probabilities have been reported
    wanted        GPU slots that it needed at its last lookup, if it did not get them; else 0
    waiting_for   key of the last chunk that it waits for, as last seen: a running row computes or
                  swaps it in, it is being promoted, or its copy on HOST is not confirmed
    awaited       chunks that are evicted late because it waits for them
    lower_sources tiers of its chunks that were only in lower tiers at its first lookup; None
                  before
    promotes      its chunks in lower tiers are worth waiting for; if HOST has no room for them,
                  False: they are computed
    read          keys of chunks whose promotion has begun since it joined the queue: none
                  is read twice
    prefetched    its chunks in lower tiers have been looked for ahead of its turn
    drafts        of its reply; None if it has none
    """

    __slots__ = (
        "allowance",
        "arrived",
        "awaited",
        "context_start",
        "drafts",
        "first_keys",
        "key_chains",
        "keys",
        "lower_sources",
        "order",
        "prefetched",
        "promotes",
        "queued",
        "read",
        "reply_work",
        "request",
        "scored",
        "state",
        "tail",
        "tokens",
        "usage",
        "waiting_for",
        "wanted",
        "work",
    )

    def __init__(self, request: Request, arrival: int, now: float):
        self.request = request
        self.order: QueuePlace = (request.priority, arrival)
        self.arrived = now
        self.work = self.reply_work = self.allowance = 0.0
        self.queued: float | None = None
        self.tokens = TurnTokens(request.prompt)
        self.context_start = 0
        self.keys: list[ChunkKey] = []
        self.key_chains: dict[int, list[ChunkKey]] = {}
        self.first_keys: dict[int, ChunkKey] = {}
        self.scored = 0
        self.tail: Chunk | None = None
        self.state: State | None = None
        self.waiting_for: ChunkKey | None = None
        self.wanted = 0
        self.awaited: dict[Chunk, None] = {}
        self.lower_sources: dict[ChunkKey, Tier] | None = None
        self.promotes = True
        self.read: set[ChunkKey | None] = set()
        self.prefetched = False
        self.usage: Usage | None = None
        self.drafts: Drafts | None = None

    def take_keys(self, prompt: PromptKeys) -> None:
        self.context_start, self.keys = prompt.context_start, prompt.keys
        self.key_chains, self.first_keys = prompt.key_chains, prompt.first_keys

    @property
    def total_work(self) -> float:
        return self.work + self.reply_work

    @property
    def resumes(self) -> bool:
        """True for a suspended request. No later request may join before it."""
        return self.usage is not None

    @property
    def unscored(self) -> bool:
        """True if log probabilities of the prompt are still to be reported (the last position has
        no next prompt token)."""
        return (
            self.request.prompt_logprobs is not None and self.scored < len(self.request.prompt) - 1
        )


class RunningTurn:
    """first      index of the chunk at which the row begins: earlier chunks are not seen
    chunks        the chunks from there on, all pinned, all with a GPU slot
    spans         known tokens still to be planned, ascending (seat not yet filled in)
    position      the next position to generate from, once no spans are left
    last_position
                  the last position that is ever computed: its sample is the last token allowed
    begin, end    counts of tokens, the prompt's included, once the reply has its first one, and
                  once it has the last one allowed
    window_end    the first position that does not see the whole row
    first_without_slot
                  the first position that cannot be computed yet: it has no slot, or is at
                  `window_end`
    moved         the row begins at another chunk than the device knows
    swap_ins      chunks whose swap-in has not been issued
    launched      the last step planned with this row
    leaving       suspended: not planned any more; released when its last launched step is applied
    pending       keys that this row is the first to compute
    constrained   the last token decides which ones may follow (grammar, bad words), so each token
                  must be applied before the next one is planned
    state         its recurrent state; None if the model has none
    """

    __slots__ = (
        "begin",
        "chunks",
        "constrained",
        "drafts",
        "end",
        "first",
        "first_without_slot",
        "id",
        "last_position",
        "launched",
        "leaving",
        "moved",
        "pending",
        "position",
        "reply",
        "seat",
        "spans",
        "state",
        "stop_ids",
        "swap_ins",
        "tokens",
        "turn",
        "window_end",
    )

    def __init__(
        self,
        turn: Turn,
        epoch: int,
        first: int,
        chunks: list[Chunk],
        spans: deque[Span],
        swap_ins: deque[Chunk],
        window_end: int,
        state: RowState | None = None,
    ):
        self.turn = turn
        self.id = RowId(turn.request.id, epoch)
        self.first = first
        self.chunks = chunks
        self.spans = spans
        self.swap_ins = swap_ins
        self.position = len(turn.tokens)
        self.begin = len(turn.request.prompt) + 1
        self.end = len(turn.request.prompt) + turn.request.max_tokens
        self.last_position = self.end - 2
        self.stop_ids = turn.request.stop_ids
        self.tokens = turn.tokens
        self.reply = turn.tokens.reply
        self.window_end = window_end
        self.first_without_slot = min(chunks[-1].end, window_end)
        self.moved = first > 0
        self.seat = -1
        self.launched = 0
        self.leaving = False
        self.pending: dict[ChunkKey, None] = {}
        self.constrained = turn.request.sampling.constrained
        self.drafts = turn.drafts
        self.state = state

    @property
    def order(self) -> QueuePlace:
        return self.turn.order

    @property
    def awaits_token(self) -> bool:
        """True if the token at the row's position is drawn but not applied."""
        return self.position >= len(self.turn.tokens)
