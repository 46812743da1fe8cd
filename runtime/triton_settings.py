"""What Triton's model is told by the engine's process before anything else, all of it plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """history_file, history_ttl, max_conversations_per_owner, log_format, log_level
                    as in `HTTPSettings`
    chunk_tokens    what Triton's clients call a block of the KV cache
    end_seconds     the longest time from SIGTERM to the end of the engine's process
    """

    history_file: str
    history_ttl: float | None
    max_conversations_per_owner: int | None
    log_format: str
    log_level: str
    chunk_tokens: int
    end_seconds: float
