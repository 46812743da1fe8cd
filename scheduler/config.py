"""The scheduler's settings, frozen; they check themselves. A setting that is also a command-line option has its
name."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .context_window import KEEP, OVERFLOW_MODES, ContextWindow
from .types import SettingError

EVICTION_POLICIES = ("retention", "lru", "fifo", "lru-conversation", "fifo-conversation", "lru-plain", "fifo-plain")
BATCHING_MODES = ("unified", "separate")
SAVE_MODES = ("async", "sync", "off")
SPECULATION = ("off", "lookup")
QUEUE_ORDERS = ("bounded-ratio", "response-ratio", "arrival")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes in chunks and tokens.

    gpu_kv_chunks, host_kv_chunks   slots of each tier (0 host slots: GPU cache only)
    max_model_len                   most tokens of a context, reply included
    max_num_seqs                    seats
    max_num_batched_tokens          token budget of a step
    target_ms_per_token             beside rows that generate, a step has as many prompt tokens as are predicted to fit
                                    into this time, and at least a chunk; None: as many as the budget has
    max_queue                       requests that may wait; one more is refused with 429
    queue_timeout                   seconds that a request may wait for its first seat before it is refused with 503
    owner_kv_chunks                 quota, in chunks, of each owner: chunks beyond it are evicted first; None: no quotas
    conversation_ttl                seconds after its last activity for which a conversation claims its KV
    log_chunks                      chunks in the logs of all conversations; while there are more, the conversation that
                                    is idle longest is forgotten: its KV stays in the cache, unclaimed
    swap_out_below                  share of the GPU's slots: while fewer are free or reclaimable, chunks are copied out
                                    ahead of time; capped at a quarter of HOST's slots
    generation_reserve              share of the GPU's slots: new requests join only while more are free or reclaimable
    queue_order                     which request joins first: the one with the longest wait relative to its prompt's
                                    predicted work, with or without a bound on overtaking (see `queue_order`), or the
                                    earliest arrival
    speculate                       `lookup`: drafts from the conversation's own tokens are checked where that pays (see
                                    `Drafts`)
    overflow, overflow_ratio        treatment of a context that outgrows `max_model_len` if its request allows it (see
                                    `ContextWindow`), and the share of the window that is dropped at once
    reuse                           False: every request computes its whole context (for comparison)
    disk_kv_chunks                  0: no disk tier
    save                            when an ended turn's chunks are written to DISK: `async` soon, behind compute;
                                    `sync` before the turn's last event; `off` only when HOST needs the room
    prefetch                        False: chunks on DISK are read only when their request is next to join
    copies_may_fail                 a copy to HOST may fail (`Form.is_exact`): a chunk's only copy is used only after a
                                    result has confirmed it
    seed                            digest of all else that changes KV: weights, dtype, rotary parameters, ...
    """

    gpu_kv_chunks: int
    host_kv_chunks: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    target_ms_per_token: float | None = None
    chunk_tokens: int = 32
    max_queue: int = 1024
    queue_timeout: float | None = None
    owner_kv_chunks: int | None = None
    conversation_ttl: float = inf
    log_chunks: float = inf
    eviction: str = "lru"
    swap_out_below: float = 0.25
    generation_reserve: float = 0.10
    batching: str = "unified"
    queue_order: str = "bounded-ratio"
    speculate: str = "off"
    overflow: str = KEEP
    overflow_ratio: float = 0.5
    reuse: bool = True
    disk_kv_chunks: int = 0
    save: str = "async"
    prefetch: bool = True
    copies_may_fail: bool = False
    seed: bytes = b""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, message: str) -> None:
            if not ok:
                raise SettingError(f"--{name.replace('_', '-')}", message)

        for name in ("gpu_kv_chunks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "chunk_tokens"):
            need(getattr(self, name) >= 1, name, f"must be at least 1, not {getattr(self, name)}")
        need(self.host_kv_chunks >= 0, "host_kv_chunks", f"must not be negative, not {self.host_kv_chunks}")
        need(self.disk_kv_chunks >= 0, "disk_kv_chunks", f"must not be negative, not {self.disk_kv_chunks}")
        need(
            self.host_kv_chunks > 0 or not self.disk_kv_chunks,
            "disk_kv_bytes",
            "needs --host-kv-bytes above 0: all KV to and from the disk passes through host memory",
        )
        target = self.target_ms_per_token
        need(target is None or 0.0 < target < inf, "target_ms_per_token", f"must be more than 0 ms, not {target}")
        need(
            target is None or self.batching == "unified",
            "target_ms_per_token",
            "needs --batching unified: `separate` computes no prompt beside rows that generate",
        )
        quota = self.owner_kv_chunks
        need(quota is None or quota >= 1, "owner_kv_bytes", "must be enough for one chunk")
        need(self.max_queue >= 1, "max_queue", f"must be at least 1, not {self.max_queue}")
        patience = self.queue_timeout
        need(patience is None or 0.0 < patience < inf, "queue_timeout", f"must be more than 0 seconds, not {patience}")
        need(self.conversation_ttl > 0.0, "conversation_ttl", f"must be more than 0 s, not {self.conversation_ttl}")
        need(self.log_chunks > 0, "log_chunks", f"must be more than 0, not {self.log_chunks}")
        for name in ("swap_out_below", "generation_reserve"):
            need(0.0 <= getattr(self, name) <= 1.0, name, f"must be between 0 and 1, not {getattr(self, name)}")
        ratio = self.overflow_ratio
        need(0.0 < ratio < 1.0, "overflow_ratio", f"must be more than 0 and less than 1, not {ratio}")
        choices = (
            *(("eviction", EVICTION_POLICIES), ("batching", BATCHING_MODES), ("queue_order", QUEUE_ORDERS)),
            *(("overflow", OVERFLOW_MODES), ("save", SAVE_MODES), ("speculate", SPECULATION)),
        )
        for name, allowed in choices:
            need(
                getattr(self, name) in allowed,
                name,
                f"must be one of {', '.join(allowed)}, not {getattr(self, name)!r}",
            )
        need(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"must be at least --max-num-seqs ({self.max_num_seqs}), not {self.max_num_batched_tokens}",
        )
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
        return ContextWindow(self.max_model_len, step, self.overflow) if step else None

    @property
    def reserved_chunks(self) -> int:
        return int(self.generation_reserve * self.gpu_kv_chunks)

    @property
    def largest_context(self) -> int:
        """The longest context that the GPU pool holds besides the reserve, tokens."""
        return (self.gpu_kv_chunks - self.reserved_chunks) * self.chunk_tokens
