"""The contents of /metrics: engine figures of the latest step, and the HTTP process's own counts
and times."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import accumulate

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ...scheduler.kv.stats import SchedulerStats
from ...scheduler.types import LABELS, Usage
from ..counters import (
    DiskCounters,
    KVCounters,
    KVEventCounters,
    LoopStats,
    PowerCounts,
    SharedCounters,
)

SOURCES = tuple(field.name for field in fields(Usage))
FIRST_TOKEN_BUCKETS = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.25,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
INTER_TOKEN_BUCKETS = (
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.1,
    0.2,
    0.5,
    1,
    2.5,
)

# The last powers of two with their own bucket.
MOST_STEP_TOKENS = 14
MOST_STEP_REQUESTS = 10
EVICTION_VALUES = range(-24, 6, 2)


class Latencies:
    """A histogram that only the event loop's thread touches, at every token: it has no lock."""

    def __init__(self, bounds: Sequence[float]):
        """`bounds`: the upper ends of its buckets, ascending, seconds."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._seconds += seconds

    def family(self, name: str, text: str) -> Metric:
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = [*zip(names, map(float, accumulate(self._counts)), strict=True)]
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._seconds)


class Metrics(Collector):
    """Written by one thread, the event loop's; read as a whole at each scrape.

    `stats`, `copied`, `disk`, `shared`, `loop` and `kv_events` are the loop's latest counts since
    its start; `shared` is None without a shared tier.
    `generation_tokens` counts tokens as they arrive, including those generated after a stop string.
    `histories_healthy` is set before each scrape. A metric with the meaning of a vLLM metric has
    its name.
    """

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self.copied = KVCounters()
        self.disk = DiskCounters()
        self.shared: SharedCounters | None = None
        self.loop = LoopStats()
        self.kv_events = KVEventCounters()
        self.prompt_tokens = dict.fromkeys(SOURCES, 0)
        self.generation_tokens = 0
        self.histories_healthy = True
        self.finished: Counter[str] = Counter()
        self.client_errors: Counter[str] = Counter()
        self.inter_token_latency = Latencies(INTER_TOKEN_BUCKETS)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = Histogram(
            "pensieve:time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.request_queue_time = Histogram(
            "pensieve:request_queue_time_seconds",
            "From a request's arrival to its first seat in the batch",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.request_latency = Histogram(
            "pensieve:e2e_request_latency_seconds",
            "From a call's arrival to the end of its answer",
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    def count_prompt(self, usage: Usage) -> None:
        for source in SOURCES:
            self.prompt_tokens[source] += getattr(usage, source)

    def ended(self, seconds: float, queued: Sequence[float]) -> None:
        """Records a call's seconds, and the seconds that its requests waited for their seats."""
        self.request_latency.observe(seconds)
        for wait in queued:
            self.request_queue_time.observe(wait)

    def collect(self) -> Iterator[Metric]:
        """Yields the families, as required by prometheus-client."""
        prompt = CounterMetricFamily(
            "pensieve:prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
        )
        for source, count in self.prompt_tokens.items():
            prompt.add_metric([source], count)
        yield prompt
        yield CounterMetricFamily(
            "pensieve:generation_tokens", "Tokens generated", value=self.generation_tokens
        )
        yield CounterMetricFamily(
            "pensieve:prefix_cache_queries",
            "Prompt tokens looked for in the cache",
            value=sum(self.prompt_tokens.values()),
        )
        hits = {tier: self.prompt_tokens[tier] for tier in LABELS}
        yield _counters(
            "pensieve:prefix_cache_hits", "Prompt tokens found in the cache, by tier", "tier", hits
        )
        yield _counters("pensieve:requests", "Requests ended, by how", "finish", self.finished)
        yield _counters(
            "pensieve:client_errors",
            "Answers with a status from 400 to 499, by status",
            "status",
            self.client_errors,
        )
        yield GaugeMetricFamily(
            "pensieve:histories_healthy",
            "1 while histories can be read and written; /health has the reason of a 0",
            value=self.histories_healthy,
        )
        yield self.inter_token_latency.family(
            "pensieve:inter_token_latency_seconds", "Between two tokens of a reply"
        )
        yield from self._cache()
        yield from self._disk()
        if self.shared is not None:
            yield from self._shared(self.shared)
        yield from self._steps()
        yield from self._kv_events()

    def _cache(self) -> Iterator[Metric]:
        """The scheduler's statistics."""
        stats = self.stats
        yield CounterMetricFamily(
            "pensieve:suspensions",
            "Running requests set aside for want of GPU slots",
            value=stats.suspensions,
        )
        yield CounterMetricFamily(
            "pensieve:spec_decode_num_drafts",
            "Steps of a request that checked drafts",
            value=stats.drafts,
        )
        yield CounterMetricFamily(
            "pensieve:spec_decode_num_draft_tokens",
            "Drafted tokens that were checked",
            value=stats.drafted,
        )
        yield CounterMetricFamily(
            "pensieve:spec_decode_num_accepted_tokens",
            "Drafted tokens that came true",
            value=stats.accepted,
        )
        yield GaugeMetricFamily(
            "pensieve:num_requests_running", "Requests in the batch", value=stats.running
        )
        yield GaugeMetricFamily(
            "pensieve:num_requests_waiting", "Requests in the queue", value=stats.waiting
        )
        slots = GaugeMetricFamily(
            "pensieve:kv_slots", "Chunk slots by tier and state", labels=["tier", "state"]
        )
        for tier, states in stats.slots.items():
            for state, count in states.items():
                slots.add_metric([tier, state], count)
        yield slots
        gpu = stats.slots.get("gpu", {})
        yield GaugeMetricFamily(
            "pensieve:kv_cache_usage_perc",
            "Share of the GPU's chunk slots that requests in the batch hold",
            value=gpu.get("in_use", 0) / max(1, sum(gpu.values())),
        )
        yield GaugeMetricFamily(
            "pensieve:conversations", "Conversations that claim KV", value=stats.conversations
        )
        evictions = CounterMetricFamily(
            "pensieve:kv_evictions",
            "Chunks that lost their slot, by what became of them",
            labels=["tier", "reason"],
        )
        for tier, reasons in stats.evictions.items():
            for reason, count in reasons.items():
                evictions.add_metric([tier, reason], count)
        yield evictions
        yield _eviction_values(stats)
        yield from _choices(stats)
        yield CounterMetricFamily(
            "pensieve:kv_dropped_chunks", "Chunks that were left in no tier", value=stats.dropped
        )
        yield CounterMetricFamily(
            "pensieve:kv_regret_tokens",
            "Tokens computed again within a minute after their chunk was dropped",
            value=stats.regret_tokens,
        )
        if stats.states:
            yield _counters(
                "pensieve:states",
                "Recurrent states copied to HOST, copied back, and lost there",
                "event",
                stats.states,
            )
        yield CounterMetricFamily(
            "pensieve:kv_failed_copies",
            "Failed copies on HOST: chunks that --lower-tier-kv packed could not store exactly",
            value=stats.bad_copies,
        )

    def _disk(self) -> Iterator[Metric]:
        """The disk tier's counts; zeros without one."""
        disk = self.disk
        for name, text, spilled, promoted in (
            ("records", "Chunks written to disk and read from it", disk.spilled, disk.promoted),
            (
                "bytes",
                "Bytes of KV written to disk and read from it",
                disk.spilled_bytes,
                disk.promoted_bytes,
            ),
            (
                "seconds",
                "From being asked for to being done, of all chunks",
                disk.spilling_seconds,
                disk.promoting_seconds,
            ),
            (
                "queue_seconds",
                "Of that, the wait before they began",
                disk.spilling_queued,
                disk.promoting_queued,
            ),
        ):
            yield _counters(
                f"pensieve:kv_disk_{name}",
                text,
                "direction",
                {"spill": spilled, "promote": promoted},
            )
        queue = GaugeMetricFamily(
            "pensieve:kv_disk_queue", "Chunks on their way", labels=["direction"]
        )
        queue.add_metric(["spill"], disk.spilling)
        queue.add_metric(["promote"], disk.promoting)
        yield queue
        faults = {"system": disk.errors, "rejected": disk.rejected}
        text = "Refusals of the system, and damaged records"
        yield _counters("pensieve:kv_disk_faults", text, "kind", faults)
        yield GaugeMetricFamily(
            "pensieve:kv_disk_full", "1 while nothing is spilled for want of room", value=disk.full
        )

    def _shared(self, shared: SharedCounters) -> Iterator[Metric]:
        """The shared tier's counts."""
        yield _counters(
            "pensieve:kv_shared_lookups",
            "Chunks that the shared store was asked for, by turns that arrive and turns that ended",
            "outcome",
            {"hit": shared.hits, "miss": shared.misses},
        )
        yield _counters(
            "pensieve:kv_shared_records",
            "Chunks written to the shared store, read from it and removed",
            "direction",
            {"write": shared.written, "read": shared.read, "remove": shared.removed},
        )
        yield _counters(
            "pensieve:kv_shared_bytes",
            "Bytes of KV written to the shared store and read from it",
            "direction",
            {"write": shared.written_bytes, "read": shared.read_bytes},
        )
        yield _counters(
            "pensieve:kv_shared_faults",
            "Failed calls, missed deadlines, damaged records, and records without room",
            "kind",
            {
                "error": shared.errors,
                "late": shared.late,
                "rejected": shared.rejected,
                "full": shared.refused,
            },
        )
        yield GaugeMetricFamily(
            "pensieve:kv_shared_off", "1 while the shared store is not used", value=shared.off
        )
        yield GaugeMetricFamily(
            "pensieve:kv_shared_lent_slots",
            "Host slots that calls past their deadline still hold",
            value=shared.lent,
        )

    def _steps(self) -> Iterator[Metric]:
        """The loop's counts of its steps and copies."""
        loop = self.loop
        yield _counters(
            "pensieve:kv_copied_bytes", "Bytes of KV copied", "direction", self.copied._asdict()
        )
        link = {"swap_in": loop.swap_in, "swap_out": loop.swap_out}
        yield _counters(
            "pensieve:kv_link_seconds", "Time in which the link copied KV", "direction", link
        )
        queue = SummaryMetricFamily(
            "pensieve:kv_link_queue_seconds",
            "From a copy's issue to its beginning",
            labels=["direction"],
        )
        for direction, waits in (("swap_in", loop.queued_in), ("swap_out", loop.queued_out)):
            queue.add_metric([direction], count_value=waits.copies, sum_value=waits.seconds)
        yield queue
        yield CounterMetricFamily(
            "pensieve:kv_exposed_seconds",
            "Time that steps waited for copies; the rest of the link's time was hidden behind "
            "compute",
            value=loop.exposed,
        )
        yield CounterMetricFamily("pensieve:steps", "Steps launched", value=loop.steps)
        yield _counters(
            "pensieve:step_seconds", "The loop's time, by part of a step", "part", loop.parts
        )
        yield CounterMetricFamily(
            "pensieve:gpu_seconds", "Time with work on the device", value=loop.busy
        )
        yield _sizes(
            "pensieve:iteration_tokens_total", "Tokens of a step", loop.tokens, MOST_STEP_TOKENS
        )
        yield _sizes(
            "pensieve:iteration_requests", "Requests of a step", loop.requests, MOST_STEP_REQUESTS
        )

    def _kv_events(self) -> Iterator[Metric]:
        """What routers were told; zeros without KV events."""
        events = self.kv_events
        kinds = {"stored": events.stored, "removed": events.removed, "cleared": events.cleared}
        yield _counters("pensieve:kv_events", "KV events published", "kind", kinds)
        yield GaugeMetricFamily(
            "pensieve:kv_events_queue_batches",
            "Steps whose KV events wait to be published",
            value=events.queue_batches,
        )
        yield CounterMetricFamily(
            "pensieve:kv_events_resets",
            "Times that routers were told to forget all, because too many KV events waited",
            value=events.resets,
        )

    def families(self) -> Iterable[Metric]:
        """All metrics, as they are now."""
        return self._registry.collect()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _counters(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _sizes(name: str, text: str, sizes: PowerCounts, last: int) -> Metric:
    counts = dict(enumerate(sizes.counts))
    return HistogramMetricFamily(
        name, text, buckets=_buckets(counts, range(last + 1)), sum_value=sizes.total
    )


def _eviction_values(stats: SchedulerStats) -> Metric:
    return HistogramMetricFamily(
        "pensieve:kv_eviction_value",
        "Value of chunks when they left the GPU or were dropped: with LRU 1 / seconds idle, with "
        "--eviction retention "
        "seconds of recomputation per second idle",
        buckets=_buckets(stats.eviction_values, EVICTION_VALUES),
        sum_value=stats.eviction_value_sum,
    )


def _choices(stats: SchedulerStats) -> Iterator[Metric]:
    text = "Chunks on HOST, by whether they were swapped in or computed again"
    chunks = {choice: parts["chunks"] for choice, parts in stats.choices.items()}
    yield _counters("pensieve:kv_choice_chunks", text, "choice", chunks)
    seconds = CounterMetricFamily(
        "pensieve:kv_choice_predicted_seconds",
        "What either way was predicted to take for them; what swap-ins took is in kv_link_seconds",
        labels=["choice", "way"],
    )
    for choice, parts in stats.choices.items():
        for way in ("swap_in", "recompute"):
            seconds.add_metric([choice, way], parts[way])
    yield seconds


def _buckets(counts: Mapping[int, int], exponents: range) -> list[tuple[str, float]]:
    """Cumulative counts; the bounds of `counts` and of the buckets are powers of two."""
    buckets = [
        (str(2.0**end), sum(n for at, n in counts.items() if at <= end)) for end in exponents
    ]
    return [*buckets, ("+Inf", sum(counts.values()))]
