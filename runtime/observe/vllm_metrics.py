"""Metrics under vLLM's names, for routers and dashboards made for vLLM: copies of ours, made at
each scrape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...scheduler.types import FinishReason
from .metrics import Metrics

COPIED = {
    "vllm:num_requests_running": "pensieve:num_requests_running",
    "vllm:num_requests_waiting": "pensieve:num_requests_waiting",
    "vllm:num_preemptions": "pensieve:suspensions",
    "vllm:kv_cache_usage_perc": "pensieve:kv_cache_usage_perc",
    "vllm:prefix_cache_queries": "pensieve:prefix_cache_queries",
    "vllm:prefix_cache_hits": "pensieve:prefix_cache_hits",
    "vllm:prompt_tokens": "pensieve:prompt_tokens",
    "vllm:generation_tokens": "pensieve:generation_tokens",
    "vllm:spec_decode_num_drafts": "pensieve:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens": "pensieve:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "pensieve:spec_decode_num_accepted_tokens",
    "vllm:time_to_first_token_seconds": "pensieve:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "pensieve:inter_token_latency_seconds",
    "vllm:request_queue_time_seconds": "pensieve:request_queue_time_seconds",
    "vllm:e2e_request_latency_seconds": "pensieve:e2e_request_latency_seconds",
}
"""vLLM's name of a family, and ours. Names, labels and meanings are those of vLLM 0.23
(vllm/v1/metrics/loggers.py)."""

ENGINE = "0"  # vLLM numbers the engines of one server; here there is one


class VllmMetrics(Collector):
    """Copies of `metrics`, without own counts. Labels that only our metrics have are summed over.

    model          the label `model_name`
    chunk_tokens   tokens of a chunk, vLLM's block
    gpu_kv_chunks  chunks in the GPU's pool
    """

    def __init__(self, metrics: Metrics, model: str, chunk_tokens: int, gpu_kv_chunks: int):
        self._metrics = metrics
        self._labels = {"model_name": model, "engine": ENGINE}
        self._cache = {
            "block_size": str(chunk_tokens),
            "num_gpu_blocks": str(gpu_kv_chunks),
            "engine": ENGINE,
        }
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format, as `Metrics.text`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        ours = {family.name: family for family in self._metrics.families()}
        for name, source in COPIED.items():
            yield self._copied(name, ours[source])
        success = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by how; refused requests are left out",
            labels=[],
        )
        for reason in FinishReason:
            labels = {**self._labels, "finished_reason": str(reason)}
            success.add_sample("vllm:request_success_total", labels, self._metrics.finished[reason])
        yield success
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "Size of the KV cache on the GPU", labels=[]
        )
        cache.add_sample("vllm:cache_config_info", self._cache, 1)
        yield cache

    def _copied(self, name: str, source: Metric) -> Metric:
        sums: dict[tuple[str, str | None], float] = defaultdict(float)
        for sample in source.samples:
            sums[sample.name.removeprefix(source.name), sample.labels.get("le")] += sample.value
        copy = Metric(name, source.documentation, source.type)
        for (suffix, bound), value in sums.items():
            copy.add_sample(
                name + suffix,
                self._labels if bound is None else {**self._labels, "le": bound},
                value,
            )
        return copy
