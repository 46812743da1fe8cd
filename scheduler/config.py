"""The scheduler's settings, frozen; they check themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf

from .context_window import KEEP, OVERFLOW_MODES, ContextWindow
from .declaration import SERVERS, check_declared, flag, setting
from .types import SettingError

EVICTION_POLICIES = ("retention", "lru", "lru-conversation")
PLAIN_POLICIES = ("lru-plain", "fifo-plain")
BATCHING_MODES = ("unified", "separate")
SAVE_MODES = ("async", "sync", "off")
QUEUE_ORDERS = ("bounded-ratio", "arrival")

SWAP_OUT_BELOW = 0.25
"""Where neither the user nor a profile says otherwise."""

BATCH, CACHE = "engine and batch", "KV cache"
_batch = partial(setting, group=BATCH)
_cache = partial(setting, group=CACHE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What users and benchmarks set, whatever the engine is. SettingError names a wrong one."""

    max_num_seqs: int = _batch(64, "running requests", unit="N", least=1, common=True)
    max_num_batched_tokens: int = _batch(1024, "tokens a step", unit="TOKENS", least=1)
    target_ms_per_token: float | None = _batch(
        None,
        "beside generation, a step has as many prompt tokens as this time allows, at least a chunk",
        unit="MS",
        unset="all it can",
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
        "lookup: draft tokens from the conversation's own, and check several a step where that pays",
        choices=("off", "lookup"),
        page="docs/design/drafts.md",
    )
    max_queue: int = _batch(1024, "waiting requests, then 429", unit="N", least=1, users=SERVERS)
    queue_timeout: float | None = _batch(
        None, "longest wait for a seat, then 503", unit="SECONDS", unset="none", users=SERVERS
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
        "read from disk the KV that requests in the queue will need",
        choices=("on", "off"),
    )
    chunk_tokens: int = _cache(32, "tokens of a chunk", unit="N", least=1)
    conversation_ttl: float = _cache(
        86400.0, "a conversation claims its KV for so long after its last turn", unit="SECONDS"
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
        unit="SHARE",
        unset=f"as `pensieve profile` measured, else {SWAP_OUT_BELOW}",
    )
    generation_reserve: float = _cache(
        0.10,
        "requests join while a larger share of the GPU's KV is free",
        unit="SHARE",
    )
    overflow: str | None = _cache(
        None,
        "when a context outgrows the model's: keep its latest tokens' KV, or compute it again",
        choices=OVERFLOW_MODES,
        unset="keep with rotary positions, else recompute",
        page="docs/use/long-conversations.md",
    )
    overflow_ratio: float = _cache(
        0.5,
        "part of the context that is then truncated at once",
        unit="SHARE",
    )
    reuse: bool = _cache(
        True,
        "off: compute every history anew, for comparison: the other options may stay as they are",
    )

    def __post_init__(self) -> None:
        check_declared(self, compared=True)
        target = self.target_ms_per_token
        need(
            target is None or 0.0 < target < inf,
            "target_ms_per_token",
            f"must be more than 0 ms, not {target}",
        )
        need(
            target is None or self.batching == "unified",
            "target_ms_per_token",
            "needs --batching unified: `separate` computes no prompt beside rows that generate",
        )
        patience = self.queue_timeout
        need(
            patience is None or 0.0 < patience < inf,
            "queue_timeout",
            f"must be more than 0 seconds, not {patience}",
        )
        need(
            self.conversation_ttl > 0.0,
            "conversation_ttl",
            f"must be more than 0 s, not {self.conversation_ttl}",
        )
        for name in ("swap_out_below", "generation_reserve"):
            share = getattr(self, name)
            need(
                share is None or 0.0 <= share <= 1.0,
                name,
                f"must be between 0 and 1, not {share}",
            )
        ratio = self.overflow_ratio
        need(
            0.0 < ratio < 1.0,
            "overflow_ratio",
            f"must be more than 0 and less than 1, not {ratio}",
        )
        tokens = self.max_num_batched_tokens
        need(
            tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"must be at least --max-num-seqs ({self.max_num_seqs}), not {tokens}",
        )


@dataclass(frozen=True, slots=True)
class SchedulerConfig(SchedulerSettings):
    """The settings and what follows from the engine and its memory. Sizes in chunks and tokens.

    gpu_kv_chunks, host_kv_chunks
                     slots of each tier (0 host slots: GPU cache only)
    max_model_len    most tokens of a context, reply included
    disk_kv_chunks   0: no disk tier
    owner_kv_chunks  quota of each owner: chunks beyond it are evicted first; None: no quotas
    log_chunks       chunks in the logs of all conversations; while there are more, the conversation
                     that is idle longest is forgotten: its KV stays in the cache, unclaimed
    copies_may_fail  a copy to HOST may fail (`Form.is_exact`): a chunk's only copy is used only
                     after a result has confirmed it
    seed             digest of all else that changes KV: weights, dtype, rotary parameters, ...
    """

    gpu_kv_chunks: int
    host_kv_chunks: int
    max_model_len: int
    disk_kv_chunks: int = 0
    owner_kv_chunks: int | None = None
    log_chunks: float = inf
    copies_may_fail: bool = False
    seed: bytes = b""

    def __post_init__(self) -> None:
        SchedulerSettings.__post_init__(self)
        for name in ("gpu_kv_chunks", "max_model_len"):
            need(getattr(self, name) >= 1, name, f"must be at least 1, not {getattr(self, name)}")
        need(
            self.host_kv_chunks >= 0,
            "host_kv_chunks",
            f"must not be negative, not {self.host_kv_chunks}",
        )
        need(
            self.disk_kv_chunks >= 0,
            "disk_kv_chunks",
            f"must not be negative, not {self.disk_kv_chunks}",
        )
        need(
            self.host_kv_chunks > 0 or not self.disk_kv_chunks,
            "disk_kv_bytes",
            "needs --host-kv-bytes above 0: all KV to and from the disk passes through host memory",
        )
        quota = self.owner_kv_chunks
        need(quota is None or quota >= 1, "owner_kv_bytes", "must be enough for one chunk")
        need(self.log_chunks > 0, "log_chunks", f"must be more than 0, not {self.log_chunks}")
        largest = self.largest_context
        need(
            self.max_model_len <= largest,
            "max_model_len",
            f"a context of {self.max_model_len} tokens needs {self.chunks(self.max_model_len) + self.reserved_chunks} "
            f"GPU chunks with the reserve; --gpu-kv-chunks is {self.gpu_kv_chunks}, enough for {largest} tokens",
        )

    def chunks(self, tokens: int) -> int:
        """Chunks that hold `tokens` tokens."""
        return -(-tokens // self.chunk_tokens)

    @property
    def windows(self) -> ContextWindow | None:
        """The rules of context overflow, or None if contexts are shorter than a step of whole chunks and cannot
        overflow."""
        step = int(self.overflow_ratio * self.max_model_len) // self.chunk_tokens * self.chunk_tokens
        return ContextWindow(self.max_model_len, step, self.overflow or KEEP) if step else None

    @property
    def swap_out_chunks(self) -> int:
        """While fewer GPU slots are free or reclaimable, chunks are copied out ahead of time.

        Most of HOST is kept for chunks that are in no other tier. A second copy of a chunk on the
        GPU gains nothing.
        """
        share = SWAP_OUT_BELOW if self.swap_out_below is None else self.swap_out_below
        return min(int(share * self.gpu_kv_chunks), self.host_kv_chunks // 4)

    @property
    def reserved_chunks(self) -> int:
        return int(self.generation_reserve * self.gpu_kv_chunks)

    @property
    def largest_context(self) -> int:
        """The longest context that the GPU pool holds besides the reserve, tokens."""
        return (self.gpu_kv_chunks - self.reserved_chunks) * self.chunk_tokens


def need(ok: bool, name: str, message: str) -> None:
    if not ok:
        raise SettingError(flag(name), message)
