"""Executes plans one after the other: the next step is launched while the previous one runs.

The executor makes no decisions. Only `wait` waits for the device. The order of work comes from the
plan's tickets and from the order of issue on the device's lanes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..plugins.kv_forms.forms import Form, record_bytes
from ..plugins.state.pool import StateShape
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import Lane, StepPlan, StepResult, TierReport
from ..scheduler.types import (
    ErrorKind,
    InvariantError,
    RequestError,
    RequestId,
    RowId,
    RowResult,
    StoredRecord,
    Tier,
)
from .counters import DiskCounters, KVCounters, SharedCounters
from .device.copies import Transfers
from .device.protocol import Device, ForwardPass, Ticket, TransferSeconds
from .disk.store import DiskSettings, DiskStore
from .shared.open import open_engine
from .shared.store import SharedSettings, SharedStore
from .step.bad_words import BadWords
from .step.logprobs import rows_with_logprobs
from .step.reusing_packer import ReusingPacker
from .step.sampler import Scores
from .step.sampling_inputs import Mask, SamplingInputs

if TYPE_CHECKING:
    from .step.grammar import Grammars

MAX_IN_FLIGHT = 3
"""Steps launched and not waited for. Two keep the device busy; `Device.sample` holds the tokens of
three."""

GROUP_LAYERS = 4
"""Layers of a gated swap-in that share a gate: copies of 4 layers reach the link's speed."""

LOWER_WAIT_SECONDS = 0.002
"""Seconds that a plan without computation and copies lasts at most while a lower tier works."""

STUCK = (
    "the reply's grammar cannot be followed any further: it is too complex for a text of this "
    "length"
)

_NO_TOKENS = np.empty(0, np.int32)


class _Launched(NamedTuple):
    """`scored_rows`: the row of each span that scores."""

    plan: StepPlan
    inputs: SamplingInputs
    tickets: list[Ticket]
    tokens: np.ndarray = _NO_TOKENS
    scores: Scores | None = None
    scored_rows: tuple[RowId, ...] = ()
    erased: Sequence[tuple[Tier, Future[tuple[int, ...]] | None]] = ()


class Executor:
    """One rank's device, with its KV pools in GPU and HOST memory. It executes plans in order.

    One thread calls it. A failure on the device is raised by the next `launch` or `wait`;
    afterwards only `close` is useful.
    """

    def __init__(
        self,
        device: Device,
        engine: ForwardPass,
        config: SchedulerConfig,
        group_layers: int = GROUP_LAYERS,
        grammars: Grammars | None = None,
        in_first: bool = False,
        host_form: Form | None = None,
        disk: DiskSettings | None = None,
        shared: SharedSettings | None = None,
        states: StateShape | None = None,
    ):
        """Takes ownership of the device, which `close` closes. SettingError if a pool does not fit
        its memory, or the disk's directory cannot be used.

        grammars    None: no row may have a grammar
        in_first    as in `Transfers`
        host_form   of the records in HOST, as in `Device.allocate_pool`
        disk, shared
                    None: no plan may have work for that tier
        states      of a model with linear attention; their slots are behind the KV of the GPU's
                    pool, as many as `config.states` says
        """
        if (states is None) != (config.states is None):
            raise InvariantError("the engine has states and the scheduler has none, or vice versa")
        shape = engine.kv_shape(config.gpu_kv_chunks + config.state_chunks, config.chunk_tokens)
        blocks = config.chunks(config.max_model_len)
        host_shape = engine.kv_shape(config.host_kv_chunks, config.chunk_tokens)
        self._device = device
        self._inputs = ReusingPacker(
            config.max_num_seqs,
            blocks,
            config.chunk_tokens,
            0 if config.states is None else config.states.slots,
        )
        record = record_bytes(host_shape, engine.kv_dtype, host_form)
        is_exact = None if host_form is None else host_form.is_exact
        check = None if is_exact is None else lambda slot: is_exact(device.record(slot), host_shape)
        self._transfers = Transfers(device, shape[1], group_layers, record, in_first, check)
        self._bad_words = BadWords()
        self._constraints = None
        if grammars is not None:
            # imported here because it needs llguidance
            from .step.constraints import GrammarMatchers

            self._constraints = GrammarMatchers(grammars)
        self._launched: deque[_Launched] = deque()
        self._seated: dict[int, RowId] = {}  # the newest row of each seat
        device.allocate_pool(Tier.GPU, shape, engine.kv_dtype)
        device.allocate_pool(
            Tier.HOST, host_shape, engine.kv_dtype, host_form, config.most_host_kv_chunks
        )
        self._stores: dict[Tier, DiskStore | SharedStore] = {}
        if disk is not None:
            self._stores[Tier.DISK] = DiskStore(disk, config.chunk_tokens, device.record)
        if shared is not None:
            store = SharedStore(
                open_engine(shared.config), shared, config.chunk_tokens, device.record
            )
            store.measure()
            self._stores[Tier.SHARED] = store
        if states is not None and config.states is not None:
            device.keep_states(config.states.slots, states)
        device.load(
            engine,
            config.max_num_seqs,
            blocks,
            self._transfers.gates,
            config.max_num_batched_tokens,
        )

    @property
    def host_slots(self) -> int:
        """Slots of HOST that plans may use now; more with time, if HOST grows."""
        return self._device.host_slots

    def begin_grammar(self, grammar: str) -> Future[Any] | None:
        """Begins to compile the grammar, in another thread. Returns None if this engine cannot
        follow any."""
        return None if self._constraints is None else self._constraints.begin(grammar)

    def keep_grammar(self, request: RequestId, compiled: Any) -> None:
        """Keeps the outcome of `begin_grammar` until the request, which has been added, has
        ended."""
        assert self._constraints is not None
        self._constraints.keep(request, compiled)

    def launch(self, plan: StepPlan) -> None:
        """Issues the plan's work and returns. Raises InvariantError if the plan contradicts itself
        or too many plans are in flight.

        A plan without tokens computes nothing; it is complete when its copies are.
        """
        if len(self._launched) == MAX_IN_FLIGHT:
            raise InvariantError(f"step {plan.step} launched with {MAX_IN_FLIGHT} steps in flight")
        self._seated.update((join.seat, join.row) for join in plan.joins)
        forbidden = self._bad_words.forbidden(plan)
        inputs = self._inputs.pack(plan, self._grammar_mask(plan), forbidden)
        self._device.upload(inputs)
        tickets = self._transfers.issue(plan)
        if plan.tokens:
            self._transfers.hold_step(plan)
            self._device.run()
            ticket, tokens, scores = self._device.sample()
            scored = (
                tuple(self._seated[span.seat] for span in plan.spans if span.scores)
                if plan.scored
                else ()
            )
            launched = _Launched(plan, inputs.sampling, [ticket], tokens, scores, scored)
        else:
            ticket = self._device.mark(Lane.COMPUTE)
            launched = _Launched(plan, inputs.sampling, [*tickets, ticket])
        self._transfers.launched(plan.step, ticket)
        if plan.lower:
            if not self._stores.keys() >= {work.tier for work in plan.lower}:
                raise InvariantError(f"step {plan.step} has work for a tier that does not exist")
            erased = [(work.tier, self._stores[work.tier].begin(work)) for work in plan.lower]
            launched = launched._replace(erased=erased)
        self._launched.append(launched)

    @property
    def in_flight(self) -> int:
        """Plans launched and not waited for."""
        return len(self._launched)

    def done(self) -> bool:
        """True if `wait` would return at once; False with nothing in flight. Raises the error that
        ended the device."""
        return bool(self._launched) and all(map(self._device.ready, self._launched[0].tickets))

    def wait(self) -> StepResult:
        """Waits for the oldest launched plan and returns its result. Raises InvariantError if there
        is none."""
        if not self._launched:
            raise InvariantError("no step is in flight")
        launched = self._launched.popleft()
        plan = launched.plan
        for ticket in launched.tickets:
            self._device.synchronize(ticket)
        failed = {tier: ended.result() for tier, ended in launched.erased if ended}
        tokens = tuple(launched.tokens.tolist())
        stuck = () if self._constraints is None else self._constraints.advance(plan.samples, tokens)
        self._bad_words.advance(plan.samples, tokens)
        completed = self._transfers.completed()
        lower = self._lower_reports(plan, failed)
        rows = {}
        if launched.scores is not None:
            rows = rows_with_logprobs(
                plan, launched.inputs, launched.scored_rows, tokens, launched.scores
            )
        rows |= {
            row: RowResult(row.request, error=RequestError(ErrorKind.INTERNAL, STUCK))
            for row in stuck
        }
        return StepResult(
            plan.step,
            plan.samples,
            tokens,
            completed,
            lower,
            bad_copies=self._transfers.bad_copies(),
            rows=rows,
        )

    def _lower_reports(
        self, plan: StepPlan, erase_failed: dict[Tier, tuple[int, ...]]
    ) -> tuple[TierReport, ...]:
        busy = [store for store in self._stores.values() if store.busy]
        if not plan.tokens and not plan.copies and busy:
            busy[0].wait(LOWER_WAIT_SECONDS)
        return tuple(
            store.take()._replace(erase_failed=erase_failed.get(tier, ()))
            for tier, store in self._stores.items()
        )

    def stored_records(self) -> dict[Tier, list[StoredRecord]]:
        """The records that the lower tiers hold from an earlier process. Called before the first
        plan; reads every header."""
        return {tier: store.records() for tier, store in self._stores.items()}

    def erase_records(self, tier: Tier, slots: Sequence[int]) -> None:
        """Erases these slots of `stored_records`. Called before the first plan; blocks until the
        records are gone."""
        self._stores[tier].erase(slots)

    def _grammar_mask(self, plan: StepPlan) -> Mask | None:
        if self._constraints is not None:
            return self._constraints.mask(plan)
        if any(join.sampling.grammar for join in plan.joins):
            raise InvariantError("a row has a grammar and this engine cannot follow any")
        return None

    @property
    def copied_bytes(self) -> KVCounters:
        """Bytes of KV copied so far, by direction."""
        return self._transfers.copied_bytes

    @property
    def disk_counters(self) -> DiskCounters | None:
        """The disk's counters, or None without a disk tier."""
        disk = self._stores.get(Tier.DISK)
        return disk.counters if isinstance(disk, DiskStore) else None

    @property
    def shared_counters(self) -> SharedCounters | None:
        """The shared tier's counters, or None without one."""
        shared = self._stores.get(Tier.SHARED)
        return shared.counters if isinstance(shared, SharedStore) else None

    def transfer_seconds(self) -> TransferSeconds:
        """The seconds that the link was busy so far, and the part of them that steps waited for."""
        return self._device.transfer_seconds()

    def close(self) -> None:
        """Closes the device and frees the pools, after work in flight is finished. Idempotent."""
        # first, because their threads use the HOST pool
        idle = [store.close() for store in self._stores.values()]
        self._device.close(host_in_use=not all(idle))
