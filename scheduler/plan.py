"""StepPlan and StepResult: all that the scheduler and the executor tell each other.

Both are frozen plain data, and their pickles are small: rank 0 sends plans to the other ranks. A
plan carries changes only: a seat's block-table row is sent once and then extended.

**Lanes and tickets.** Work runs on three lanes, each in its own order: COMPUTE (steps), IN (host to
GPU copies) and OUT (GPU to host copies). Every piece of work has a ticket, counted from 1 on its
lane; a step's ticket is its number. `after` names, for each lane, the last ticket that must be
complete *on the device* before the work may begin; 0 means none. This order ensures that no slot is
read before it is written, or written while it is still read.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from .types import ChunkKey, RequestId, RowId, RowResult, Sampling, Tier


class Lane(IntEnum):
    COMPUTE = 0
    IN = 1
    OUT = 2


class Tickets(NamedTuple):
    """One ticket for each lane, in the order of `Lane`."""

    compute: int = 0
    swap_in: int = 0
    swap_out: int = 0


NO_TICKETS = Tickets()


class Join(NamedTuple):
    """A request takes a seat, and its sampler state starts.

    `prompt` and `reply` are the tokens so far; they are filled if the next token depends on them
    (penalties; bad words need `reply` only). `prompt_logprobs` as in `Request`. `stop_ids`: none of
    them is drawn for a position before `may_end`.
    """

    seat: int
    row: RowId
    sampling: Sampling
    prompt: Sequence[int] = ()
    reply: Sequence[int] = ()
    prompt_logprobs: int | None = None
    stop_ids: Sequence[int] = ()
    may_end: int = 0


class RowStart(NamedTuple):
    """The row of the request in `seat` now begins at position `start`, the first of a chunk.
    Earlier positions are no longer seen. A `BlockUpdate` from chunk 0 on follows with the whole
    row. The model counts positions from `zero`.

    Without a RowStart a row begins at position 0. This holds for every row that joins.
    """

    seat: int
    start: int
    zero: int


class BlockUpdate(NamedTuple):
    """GPU slots for the chunks `first`, `first + 1`, ... of the row of the request in `seat`."""

    seat: int
    first: int
    slots: tuple[int, ...]


class Span(NamedTuple):
    """Positions [start, end) of the request in `seat`, to be computed from known token ids.

    Positions below `write_from` belong to a keyed chunk and are not written (the last token of a
    full hit). `samples`: so many of the span's last positions yield a token: 1 for the request's
    next one, more to check drafts. `scores`: for each position, the log probability of the known
    next token is reported.
    """

    seat: int
    start: int
    end: int
    write_from: int
    samples: int
    scores: bool = False


class StateSwapIn(NamedTuple):
    """A copy of this plan brings the state after `end` tokens of the request in `seat` to state
    slot `slot`."""

    seat: int
    slot: int
    end: int


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Whole chunks to copy on one lane: `sources[i]` to `targets[i]` (GPU and HOST slots, as the
    lane requires).

    This plan's step waits for a gated batch, layer group by layer group. At most one batch of a
    plan is gated.
    """

    lane: Lane
    ticket: int
    sources: array[int]
    targets: array[int]
    after: Tickets
    gated: bool = False


class Spill(NamedTuple):
    """Write HOST slot `host` to the lower tier's slot `slot`, as the record of the keyed chunk that
    ends at position `end`."""

    host: int
    slot: int
    key: ChunkKey
    end: int


class Promotion(NamedTuple):
    """Read the record of `key` in the lower tier's slot `slot` into HOST slot `host`."""

    slot: int
    host: int
    key: ChunkKey


class KeyBatch(NamedTuple):
    """Keys that a store without slots is asked for, or is to remove. `number`: of the report."""

    number: int
    keys: tuple[ChunkKey, ...]


class KeyAnswer(NamedTuple):
    """The report on the `KeyBatch` of that number: for each key, whether its record is there, or
    is removed. Empty: the store does not answer."""

    number: int
    keys: tuple[bool, ...] = ()


class TierWork(NamedTuple):
    """Work of one tier below HOST.

    spills, promotions
                they are on no lane: they begin at once, and the step does not wait for them. Until
                a result reports one done or failed, its slots have no other use (but copies may
                read a HOST slot that is being spilled). All earlier uses of its HOST slots are
                complete on the device
    erased      slots whose records cannot be read again once the plan is done, except those in the
                result's `erase_failed`; no plan uses these slots before that result
    finds, removals
                keys of the shared tier to look for and to remove, on behalf of all ranks
    """

    tier: Tier
    spills: tuple[Spill, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    erased: tuple[int, ...] = ()
    finds: tuple[KeyBatch, ...] = ()
    removals: tuple[KeyBatch, ...] = ()


class TierReport(NamedTuple):
    """Slots of one tier below HOST.

    spilled, promoted
                their records are written, or read and verified, on every rank; each reported once
    failed      their records could not be written, read or verified on some rank; each reported
                once
    erase_failed
                of a plan's `erased`: some rank could not erase them; reported with that plan's
                result or before
    late        work past its deadline on some rank. It keeps its HOST slot until it is reported
                as done or failed too
    looked_up, removed
                answers to `finds` and `removals`, each reported once
    read_seconds
                of one record, as measured now; 0: not measured
    """

    tier: Tier
    spilled: tuple[int, ...] = ()
    promoted: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    erase_failed: tuple[int, ...] = ()
    late: tuple[int, ...] = ()
    looked_up: tuple[KeyAnswer, ...] = ()
    removed: tuple[KeyAnswer, ...] = ()
    read_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration over one batch.

    copies      in the order in which they are to be issued, before the step is launched
    after       tickets that the step itself waits for, besides its gates
    joins, origins, blocks
                applied to the seats before anything else, in this order
    generate    seats that compute one token (the row's last sample), each at its position in
                `positions`
    spans       pieces of known tokens, ascending within a seat; `token_ids` holds the ids of all
                spans, in their order
    scored      the known next token of each position in the spans that score; a position that
                samples has none
    samples     a row for each token, in this order: all of `generate`, then the positions of spans
                that sample
    lower       work of the tiers below HOST, at most one entry for each
    ended       requests with a grammar that will take no seat again: the states of their grammars
                can be freed
    state_in, state_out
                for each seat of `generate`, then for each span: the state slot that holds the
                state after the tokens before it (-1: none, it begins a context), and the slot
                for the state after it; they may be equal. Both are empty if the model has no
                states. State slot s is the GPU slots of its pieces, behind those of the KV:
                gpu_kv_chunks + s * pieces and the next ones
    state_swap_ins
                the states that `copies` bring to the GPU

    The batch's tokens are those of `generate`, then those of `spans`. A plan without both launches
    nothing.
    """

    step: int
    copies: tuple[CopyBatch, ...]
    after: Tickets
    joins: tuple[Join, ...]
    blocks: tuple[BlockUpdate, ...]
    generate: array[int]
    positions: array[int]
    spans: tuple[Span, ...]
    token_ids: array[int]
    samples: tuple[RowId, ...]
    scored: array[int] = field(default_factory=lambda: array("i"))
    lower: tuple[TierWork, ...] = ()
    origins: tuple[RowStart, ...] = ()
    ended: tuple[RequestId, ...] = ()
    state_in: Sequence[int] = ()
    state_out: Sequence[int] = ()
    state_swap_ins: tuple[StateSwapIn, ...] = ()

    @property
    def tokens(self) -> int:
        """Token count of the batch."""
        return len(self.generate) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step: `tokens[i]` is the sample of `samples[i]`.

    rows        the results of rows that have more than a token: log probabilities that they asked
                for, or an error that ends them (then their sampled tokens mean nothing)
    completed   the last ticket known to be complete on each lane, the minimum over all ranks
    lower       reports of the tiers below HOST, at most one for each
    bad_copies  HOST slots with a failed copy on some rank: a swap-out left data there that is not
                its chunk's KV. Reported with the `completed` that covers the swap-out, or before
    """

    step: int
    samples: tuple[RowId, ...]
    tokens: tuple[int, ...]
    completed: Tickets = NO_TICKETS
    lower: tuple[TierReport, ...] = ()
    bad_copies: tuple[int, ...] = ()
    rows: Mapping[RowId, RowResult] = field(default_factory=dict)
