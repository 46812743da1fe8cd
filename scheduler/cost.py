"""Costs of recomputing and moving a chunk, in seconds. Retention values and swap-in-or-recompute
choices use this profile.

Cost(l) is the marginal cost, in a full batch, of computing one chunk whose context ends at l
(Pensieve, section 4.3.1): a part that is the same for every chunk, and attention, which grows with
l. It is measured at powers of two and interpolated linearly. Until an engine has been measured
(`pensieve profile`) the profile is an estimate from the model's shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from .plan import StepPlan
from .plan_contexts import mean_contexts
from .types import SettingError

Points = tuple[tuple[int, float], ...]
"""(tokens, seconds), ascending by tokens."""


@dataclass(frozen=True)
class CostProfile:
    """chunk_seconds     seconds for one chunk in a full batch, without attention
    attention            (context tokens, seconds for one chunk), ascending, at least one point
    step_base_seconds    a step's fixed part
    chunk_bytes          one chunk's KV on one rank, in the form that HOST and DISK hold
    link_bytes_per_s     host to GPU copies

    Known only from a measurement:

    steps                (tokens, seconds of a step at the shortest context); if empty, a step costs
                         its base and its chunks
    row_attention        (context tokens, seconds for one row that generates, in a full batch); if
                         empty, its share of a chunk
    out_bytes_per_s      GPU to host copies; None: as fast as host to GPU
    disk_read_bytes_per_s, disk_write_bytes_per_s
                         one rank's disk; the defaults are about those of one NVMe drive

    most_context         the most tokens that a chunk or a row sees, at any position of its context
    """

    chunk_tokens: int
    chunk_seconds: float
    attention: Points
    step_base_seconds: float
    chunk_bytes: int
    link_bytes_per_s: float
    steps: Points = ()
    row_attention: Points = ()
    out_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float = 3e9
    disk_write_bytes_per_s: float = 2e9
    most_context: int | None = None

    def __post_init__(self) -> None:
        if not self.attention:
            raise SettingError("profile", "attention costs must be at ascending contexts, not []")
        for name, points in (
            ("attention", self.attention),
            ("step", self.steps),
            ("row", self.row_attention),
        ):
            tokens = [count for count, _ in points]
            if tokens != sorted(set(tokens)):
                raise SettingError(
                    "profile", f"{name} costs must be at ascending contexts, not {tokens}"
                )
        curves = (*self.attention, *self.steps, *self.row_attention)
        seconds = [self.chunk_seconds, self.step_base_seconds, *(cost for _, cost in curves)]
        if not all(0 <= cost < inf for cost in seconds):
            raise SettingError("profile", f"seconds must be finite and not negative, not {seconds}")
        above_0 = (
            self.link_bytes_per_s,
            self._out_bytes_per_s,
            self.disk_read_bytes_per_s,
            self.disk_write_bytes_per_s,
            self.chunk_bytes,
        )
        if not all(number > 0 for number in above_0):
            message = "the speeds of link and disk and a chunk's bytes must be above 0, not "
            raise SettingError("profile", f"{message}{above_0}")

    @cached_property
    def _by_end(self) -> dict[int, float]:
        """What `recompute` has returned for the ends of chunks."""
        return {}

    def recompute(self, end: int) -> float:
        """Cost(l): seconds to compute the chunk that ends at position `end`."""
        seconds = self._by_end.get(end)
        if seconds is None:
            seconds = self.chunk_seconds + self._at(self.attention, end)
            if end % self.chunk_tokens == 0:  # lengths of prompts would be too many
                self._by_end[end] = seconds
        return seconds

    def swap_in(self) -> float:
        """Seconds to copy one chunk from host to GPU."""
        return self.chunk_bytes / self.link_bytes_per_s

    def swap_out(self) -> float:
        """Seconds to copy one chunk from GPU to host."""
        return self.chunk_bytes / self._out_bytes_per_s

    def read(self) -> float:
        """Seconds to read one chunk from disk."""
        return self.chunk_bytes / self.disk_read_bytes_per_s

    def write(self) -> float:
        """Seconds to write one chunk to disk."""
        return self.chunk_bytes / self.disk_write_bytes_per_s

    def step(self, tokens: int, context: int = 0, rows: int = 0, rows_context: int = 0) -> float:
        """Predicted seconds of a step with `tokens` known tokens, whose mean context is `context`,
        and `rows` rows that generate one token each, with mean context `rows_context`."""
        attention = tokens / self.chunk_tokens * self._at(self.attention, context)
        if rows:
            attention += rows * self._row_attention(rows_context)
        if self.steps:
            return _interpolated(self.steps, tokens + rows) + attention
        return (
            self.step_base_seconds
            + (tokens + rows) / self.chunk_tokens * self.chunk_seconds
            + attention
        )

    def token_attention(self, context: int) -> float:
        """Seconds that attention takes for one known token with this context."""
        return self._at(self.attention, context) / self.chunk_tokens

    def plan_seconds(self, plan: StepPlan, begins: Mapping[int, int] | None = None) -> float:
        """Predicted seconds of a plan; 0 without tokens. `begins`: by seat, the first position that
        its row sees (default: 0)."""
        if not plan.tokens:
            return 0.0
        seen, rows_seen = mean_contexts(plan, begins)
        checks = sum(span.samples > 1 for span in plan.spans)
        tokens = len(plan.token_ids) - checks
        return self.step(tokens, seen, len(plan.generate) + checks, rows_seen)

    def _row_attention(self, context: int) -> float:
        return (
            self._at(self.row_attention, context)
            if self.row_attention
            else self.token_attention(context)
        )

    def _at(self, curve: Points, context: int) -> float:
        """The curve's seconds at this context. No context costs more than the most that is seen."""
        return _interpolated(
            curve, context if self.most_context is None else min(context, self.most_context)
        )

    @property
    def _out_bytes_per_s(self) -> float:
        return self.link_bytes_per_s if self.out_bytes_per_s is None else self.out_bytes_per_s


def _interpolated(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Linear between the points, proportional beyond both ends."""
    right = bisect_right(points, (tokens, inf))
    if right == 0:
        return points[0][1] * tokens / points[0][0] if points[0][0] else points[0][1]
    if right == len(points):
        return points[-1][1] * (tokens / points[-1][0] if points[-1][0] else 1.0)
    (left_tokens, left), (right_tokens, above) = points[right - 1], points[right]
    return left + (above - left) * (tokens - left_tokens) / (right_tokens - left_tokens)
