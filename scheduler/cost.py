"""What recomputing and moving a chunk costs, in seconds: the profile behind every retention value and choice.

Cost(l) is the marginal cost, in a full batch, of computing one chunk whose context ends at l (Pensieve, section 4.3.1):
a part that is the same for every chunk, and attention, which grows with l. It is known at powers of two and linear
between. Until an engine has been measured the profile is an estimate from the model's shape.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .types import SettingError


@dataclass(frozen=True, slots=True)
class CostProfile:
    """chunk_seconds     all but attention, for one chunk in a full batch
    attention            (context tokens, seconds for one chunk), ascending, at least one point
    step_base_seconds    a step's fixed part
    chunk_bytes          one chunk's KV on one rank
    link_bytes_per_s     host to GPU copies
    """

    chunk_tokens: int
    chunk_seconds: float
    attention: tuple[tuple[int, float], ...]
    step_base_seconds: float
    chunk_bytes: int
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        contexts = [context for context, _ in self.attention]
        if not contexts or contexts != sorted(set(contexts)):
            raise SettingError("profile", f"attention costs must be at ascending contexts, not {contexts}")

    def recompute(self, end: int) -> float:
        """Cost(l): seconds to compute the chunk that ends at position `end`."""
        return self.chunk_seconds + self._attention(end)

    def load(self) -> float:
        """Seconds to copy one chunk from host to GPU."""
        return self.chunk_bytes / self.link_bytes_per_s

    def step(self, tokens: int, context: int = 0) -> float:
        """Predicted seconds of a step of `tokens` tokens, the mean context of which is `context`."""
        chunks = tokens / self.chunk_tokens
        return self.step_base_seconds + chunks * (self.chunk_seconds + self._attention(context))

    def _attention(self, context: int) -> float:
        points = self.attention
        right = bisect_right(points, (context, float("inf")))
        if right == 0:
            return points[0][1] * context / points[0][0] if points[0][0] else points[0][1]
        if right == len(points):
            return points[-1][1] * (context / points[-1][0] if points[-1][0] else 1.0)
        (left_context, left), (right_context, above) = points[right - 1], points[right]
        return left + (above - left) * (context - left_context) / (right_context - left_context)


def analytic_profile(
    *,
    chunk_tokens: int,
    parameters: int,
    layers: int,
    attention_width: int,
    chunk_bytes: int,
    max_context: int,
    flops_per_s: float,
    link_bytes_per_s: float,
    step_base_seconds: float,
) -> CostProfile:
    """An estimate from the model's shape: two operations a parameter and token, four a context token and channel.

    `attention_width` is query heads x head size; `chunk_bytes` one chunk's KV.
    """
    contexts = [chunk_tokens]
    while contexts[-1] < max_context:
        contexts.append(2 * contexts[-1])
    per_context = 4 * layers * attention_width * chunk_tokens / flops_per_s
    return CostProfile(
        chunk_tokens=chunk_tokens,
        chunk_seconds=2 * parameters * chunk_tokens / flops_per_s,
        attention=tuple((context, per_context * context) for context in contexts),
        step_base_seconds=step_base_seconds,
        chunk_bytes=chunk_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )
