"""The scheduler's settings, frozen; they check themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, log2
from typing import Any

from .context_window import OVERFLOW_MODES, RECOMPUTE, ContextWindow
from .declaration import SERVERS, check_declared, setting
from .types import SettingError

EVICTION_POLICIES = ("retention", "lru", "lru-conversation")
PLAIN_POLICIES = ("lru-plain", "fifo-plain")
BATCHING_MODES = ("unified", "separate")
SAVE_MODES = ("async", "sync", "off")
QUEUE_ORDERS = ("bounded-ratio", "arrival")

BATCH, CACHE = "engine and batch", "KV cache"
_batch = partial(setting, group=BATCH)
_cache = partial(setting, group=CACHE)
SHARE: dict[str, Any] = {"unit": "SHARE", "least": 0, "most": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What users and benchmarks set, whatever the engine is. SettingError names a wrong one."""

    max_num_seqs: int = _batch(64, "running requests", least=1, common=True)
    max_num_batched_tokens: int = _batch(1024, "tokens a step", unit="TOKENS", least=1)
    target_ms_per_token: float | None = _batch(
        None,
        "beside generation, a step has as many prompt tokens as this time allows, at least a chunk",
        "all it can",
        unit="MS",
        least=0,
        most=inf,
        between=True,
        page="docs/measured/steps.md#prompts-beside-generation",
    )
    batching: str = _batch("unified", "", choices=BATCHING_MODES, users=SERVERS)
    queue_order: str = _batch(
        "bounded-ratio",
        "which request joins first: the one with the largest ratio of wait to prompt cost, with a "
        "bound on overtaking, or the earliest",
        choices=QUEUE_ORDERS,
        page="docs/measured/queue-order.md",
    )
    speculate: str = _batch(
        "off",
        "lookup: draft tokens from the conversation's own; check several a step where that pays",
        choices=("off", "lookup"),
        page="docs/design/drafts.md",
    )
    max_queue: int = _batch(1024, "waiting requests, then 429", least=1, users=SERVERS)
    queue_timeout: float | None = _batch(
        None,
        "longest wait for a seat, then 503",
        "none",
        unit="SECONDS",
        least=0,
        most=inf,
        between=True,
        users=SERVERS,
    )
    save: str = _cache(
        "async",
        "an ended turn's KV goes to disk: soon, behind other work; before its reply ends; or only "
        "when host memory needs the room",
        choices=SAVE_MODES,
        page="docs/design/disk.md",
    )
    prefetch: bool = _cache(
        True,
        "read the KV of requests in the queue from disk ahead",
        choices=("on", "off"),
    )
    chunk_tokens: int = _cache(32, "tokens of a chunk", least=1)
    conversation_ttl: float = _cache(
        86400.0,
        "a conversation claims its KV for so long after its last turn",
        unit="SECONDS",
        least=0,
        between=True,
    )
    eviction: str = _cache(
        "lru",
        "which KV goes first: that with the lowest retention value, as in Pensieve; or that of the "
        "conversation idle longest, in chunks or as a whole",
        choices=EVICTION_POLICIES,
        compared=PLAIN_POLICIES,
        page="docs/design/scheduling.md#which-chunk-is-evicted-first",
    )
    swap_out_below: float | None = _cache(
        None,
        "while a smaller share of the GPU's KV is free, copy out ahead of time",
        "by the costs of steps and copies",
        **SHARE,
    )
    generation_reserve: float = _cache(
        0.02,
        "requests join while a larger share of the GPU's KV is free",
        **SHARE,
    )
    overflow: str = _cache(
        RECOMPUTE,
        "when a context outgrows the model's: recompute the half that is left, or keep its KV: "
        "takes no time, but most models lose quality without their first token",
        choices=OVERFLOW_MODES,
        page="docs/use/long-conversations.md",
    )
    overflow_ratio: float = _cache(
        0.5,
        "part of the context that is then truncated at once",
        between=True,
        **SHARE,
    )
    reuse: bool = _cache(
        True,
        "off: compute every history anew, for comparison; other options may stay as they are",
    )

    def __post_init__(self) -> None:
        check_declared(self, compared=True)
        if self.target_ms_per_token is not None and self.batching != "unified":
            message = "needs `batching` unified: `separate` computes no prompt beside generation"
            raise SettingError("target_ms_per_token", message)
        tokens = self.max_num_batched_tokens
        if tokens < self.max_num_seqs:
            message = f"must be at least `max_num_seqs` ({self.max_num_seqs}), not {tokens}"
            raise SettingError("max_num_batched_tokens", message)


STATE_MULTIPLE = 64  # tokens, a piece of the kernels
SPARE_STATES = 8
"""State slots besides those of the seats: a row moves to another slot while its own is copied."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The recurrent states of a model with linear attention (docs/design/states.md).

    chunks      GPU chunks that a state takes: its pieces
    slots       GPU slots for states: one for each seat, and at least one more
    spacing     a prompt's states are kept every so many tokens
    generated   and the newest one of a reply, every so many tokens
    multiple    a state is kept at multiples of so many tokens, and prompts are cut there: a state
                does not depend on such cuts
    """

    chunks: int
    slots: int
    spacing: int = 2048
    generated: int = 512
    multiple: int = STATE_MULTIPLE

    @classmethod
    def of_size(cls, nbytes: int, chunk_bytes: int, chunk_tokens: int, seats: int) -> StateConfig:
        """For states of so many bytes. Their spacing is the power of two at which they take about
        as many bytes as KV."""
        chunks = -(-nbytes // chunk_bytes)
        spacing = 2 ** round(log2(chunks * chunk_tokens))
        return cls(chunks, seats + SPARE_STATES, spacing=max(STATE_MULTIPLE, spacing))

    def __post_init__(self) -> None:
        for name in ("chunks", "slots", "spacing", "generated", "multiple"):
            value = getattr(self, name)
            need(value >= 1, f"states.{name}", f"must be at least 1, not {value}")
        for name in ("spacing", "generated"):
            value = getattr(self, name)
            need(
                value % self.multiple == 0,
                f"states.{name}",
                f"must be a multiple of {self.multiple}, not {value}",
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig(SchedulerSettings):
    """The settings and what follows from the engine and its memory. Sizes in chunks and tokens.

    gpu_kv_chunks, host_kv_chunks
                     slots of each tier (0 host slots: GPU cache only)
    host_kv_growth   slots that HOST may gain while it is in use (`Scheduler.grow_host`)
    max_model_len    most tokens of a context, reply included
    disk_kv_chunks   0: no disk tier
    shared_min_tokens
                     shorter contexts are not written to the shared tier, and fewer missing tokens
                     are not looked for; 0: no shared tier
    owner_kv_chunks  quota of each owner: chunks beyond it are evicted first; None: no quotas
    log_chunks       chunks in the logs of all conversations; while there are more, the conversation
                     that is idle longest is forgotten: its KV stays in the cache, unclaimed
    copies_may_fail  a copy to HOST may fail (`Form.is_exact`): a chunk's only copy is used only
                     after a result has confirmed it
    seed             digest of all else that changes KV: weights, dtype, rotary parameters, ...
    states           None: the model has no recurrent states
    """

    gpu_kv_chunks: int
    host_kv_chunks: int
    max_model_len: int
    disk_kv_chunks: int = 0
    shared_min_tokens: int = 0
    host_kv_growth: int = 0
    owner_kv_chunks: int | None = None
    log_chunks: float = inf
    copies_may_fail: bool = False
    seed: bytes = b""
    states: StateConfig | None = None

    def __post_init__(self) -> None:
        SchedulerSettings.__post_init__(self)
        sizes = {"gpu_kv_chunks": 1, "max_model_len": 1, "host_kv_chunks": 0, "disk_kv_chunks": 0}
        for name, least in sizes.items():
            size = getattr(self, name)
            need(size >= least, name, f"must be at least {least}, not {size}")
        need(
            self.host_kv_growth >= 0 and (self.host_kv_chunks > 0 or not self.host_kv_growth),
            "host_kv_growth",
            f"must be at least 0, and 0 without HOST, not {self.host_kv_growth}",
        )
        need(
            self.host_kv_chunks > 0 or not self.disk_kv_chunks,
            "disk_kv_bytes",
            "needs `host_kv_bytes` above 0: all KV to and from the disk passes through host memory",
        )
        need(
            self.host_kv_chunks > 0 or not self.shared_min_tokens,
            "kv_shared_config",
            "needs `host_kv_bytes` above 0: all KV to and from the store passes through host "
            "memory",
        )
        quota = self.owner_kv_chunks
        need(quota is None or quota >= 1, "owner_kv_bytes", "must be enough for one chunk")
        need(self.log_chunks > 0, "log_chunks", f"must be more than 0, not {self.log_chunks}")
        largest = self.largest_context
        needed = self.chunks(self.max_model_len) + self.reserved_chunks
        need(
            self.max_model_len <= largest,
            "max_model_len",
            f"a context of {self.max_model_len} tokens needs {needed} GPU chunks with the reserve; "
            f"`gpu_kv_chunks` is {self.gpu_kv_chunks}, enough for {largest} tokens",
        )
        if self.states is not None:
            self._check_states(self.states)

    def _check_states(self, states: StateConfig) -> None:
        need(
            states.slots > self.max_num_seqs,
            "states.slots",
            f"must be more than `max_num_seqs` ({self.max_num_seqs}), not {states.slots}",
        )
        need(
            states.multiple % self.chunk_tokens == 0,
            "chunk_tokens",
            f"must divide {states.multiple} for a model with states, not {self.chunk_tokens}",
        )
        need(
            self.overflow == RECOMPUTE,
            "overflow",
            f"must be {RECOMPUTE} for a model with states, not {self.overflow}",
        )

    @property
    def state_chunks(self) -> int:
        """The GPU slots of all state slots."""
        return 0 if self.states is None else self.states.slots * self.states.chunks

    @property
    def most_host_kv_chunks(self) -> int:
        return self.host_kv_chunks + self.host_kv_growth

    def chunks(self, tokens: int) -> int:
        """Chunks that hold `tokens` tokens."""
        return -(-tokens // self.chunk_tokens)

    @property
    def windows(self) -> ContextWindow | None:
        """The rules of context overflow, or None if contexts are shorter than a step of whole
        chunks and cannot overflow."""
        dropped = int(self.overflow_ratio * self.max_model_len)
        step = dropped // self.chunk_tokens * self.chunk_tokens
        return ContextWindow(self.max_model_len, step, self.overflow) if step else None

    @property
    def reserved_chunks(self) -> int:
        return int(self.generation_reserve * self.gpu_kv_chunks)

    @property
    def largest_context(self) -> int:
        """The longest context that the GPU pool holds besides the reserve, tokens."""
        return (self.gpu_kv_chunks - self.reserved_chunks) * self.chunk_tokens


def need(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise SettingError(name, message)
