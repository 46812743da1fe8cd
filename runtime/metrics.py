"""What /metrics says: engine figures of the latest step, and what the HTTP process itself counts and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..scheduler.types import SchedulerStats, Usage
from .messages import KVCounters

SOURCES = tuple(field.name for field in fields(Usage))
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80)
INTER_TOKEN_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics(Collector):
    """Written by one thread, the event loop's; read whole at each scrape.

    `stats` and `copied` are the loop's latest, already counted since the start. `generation_tokens` counts tokens as
    they arrive, those that run on behind a stop string included.
    """

    def __init__(self) -> None:
        self.stats = SchedulerStats()
        self.copied = KVCounters()
        self.prompt_tokens = dict.fromkeys(SOURCES, 0)
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = Histogram(
            "pensieve:time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self.inter_token_latency = Histogram(
            "pensieve:inter_token_latency_seconds",
            "Between two tokens of a reply",
            buckets=INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def count_prompt(self, usage: Usage) -> None:
        for source in SOURCES:
            self.prompt_tokens[source] += getattr(usage, source)

    def collect(self) -> Iterator[Metric]:
        """One family after the other, as prometheus-client asks for them."""
        prompt = CounterMetricFamily(
            "pensieve:prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
        )
        for source, count in self.prompt_tokens.items():
            prompt.add_metric([source], count)
        yield prompt
        yield CounterMetricFamily("pensieve:generation_tokens", "Tokens generated", value=self.generation_tokens)
        finished = CounterMetricFamily("pensieve:requests", "Requests ended, by how", labels=["finish"])
        for reason, count in self.finished.items():
            finished.add_metric([reason], count)
        yield finished

        stats = self.stats
        yield CounterMetricFamily(
            "pensieve:suspensions", "Running requests set aside for want of GPU slots", value=stats.suspensions
        )
        yield GaugeMetricFamily("pensieve:num_requests_running", "Requests in the batch", value=stats.running)
        yield GaugeMetricFamily("pensieve:num_requests_waiting", "Requests in the queue", value=stats.waiting)
        slots = GaugeMetricFamily("pensieve:kv_slots", "Chunk slots by tier and state", labels=["tier", "state"])
        for tier, states in stats.slots.items():
            for state, count in states.items():
                slots.add_metric([tier, state], count)
        yield slots
        copied = CounterMetricFamily("pensieve:kv_copied_bytes", "Bytes of KV copied", labels=["direction"])
        for direction, count in self.copied._asdict().items():
            copied.add_metric([direction], count)
        yield copied

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
