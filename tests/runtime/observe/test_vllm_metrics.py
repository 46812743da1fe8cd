"""What routers and dashboards that know vLLM read."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pensieve.runtime.observe.metrics import Metrics
from pensieve.runtime.observe.vllm_metrics import COPIED, VllmMetrics
from pensieve.scheduler.kv.stats import SchedulerStats
from pensieve.scheduler.types import FinishReason, Usage

LABELS = {"model_name": "tea", "engine": "0"}


def samples(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    """By name: labels and value of each, as a scraper reads them."""
    by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(
        VllmMetrics(metrics, "tea", 32, 200).text().decode()
    ):
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
    return by_name


def test_values_are_those_of_our_metrics() -> None:
    metrics = Metrics()
    gpu = {"free": 3, "idle": 2, "in_use": 5}
    metrics.stats = SchedulerStats(
        running=4, waiting=5, suspensions=6, slots={"gpu": gpu}, drafts=2, drafted=15, accepted=7
    )
    metrics.generation_tokens = 9
    values = samples(metrics)
    for name, value in (
        ("num_requests_running", 4),
        ("num_requests_waiting", 5),
        ("num_preemptions_total", 6),
        ("kv_cache_usage_perc", 0.5),
        ("generation_tokens_total", 9),
        ("spec_decode_num_drafts_total", 2),
        ("spec_decode_num_draft_tokens_total", 15),
        ("spec_decode_num_accepted_tokens_total", 7),
    ):
        assert values[f"vllm:{name}"] == [(LABELS, value)]


def test_labels_that_only_we_have_are_summed_over() -> None:
    metrics = Metrics()
    metrics.count_prompt(Usage(gpu=10, host=11, disk=12, recomputed=13, new=14))
    values = samples(metrics)
    assert (
        values["vllm:prompt_tokens_total"]
        == values["vllm:prefix_cache_queries_total"]
        == [(LABELS, 60)]
    )
    assert values["vllm:prefix_cache_hits_total"] == [(LABELS, 33)]


def test_histograms_keep_their_buckets() -> None:
    metrics = Metrics()
    metrics.time_to_first_token.observe(0.03)
    metrics.ended(1.5, [0.01, 0.02])
    values = samples(metrics)
    buckets = {
        labels.pop("le"): (labels, value)
        for labels, value in values["vllm:time_to_first_token_seconds_bucket"]
    }
    assert buckets["0.02"] == (LABELS, 0) and buckets["0.04"] == buckets["+Inf"] == (LABELS, 1)
    assert values["vllm:time_to_first_token_seconds_sum"] == [(LABELS, 0.03)]
    assert values["vllm:request_queue_time_seconds_count"] == [(LABELS, 2)]
    assert values["vllm:e2e_request_latency_seconds_sum"] == [(LABELS, 1.5)]
    assert values["vllm:inter_token_latency_seconds_count"] == [(LABELS, 0)]


def test_refused_requests_are_no_successes() -> None:
    metrics = Metrics()
    metrics.finished.update({"stop": 2, "abort": 1, "refused": 5})
    reasons = {
        labels["finished_reason"]: value
        for labels, value in samples(metrics)["vllm:request_success_total"]
    }
    assert reasons == {"stop": 2, "length": 0, "abort": 1}


def test_the_size_of_the_cache() -> None:
    cache = {"block_size": "32", "num_gpu_blocks": "200", "engine": "0"}
    assert samples(Metrics())["vllm:cache_config_info"] == [(cache, 1)]


def test_all_are_there_before_the_first_request() -> None:
    """A router that finds a name missing ranks the server as unknown, and a rate needs a first
    value."""
    metrics = Metrics()
    kinds = {family.name: family.type for family in metrics.families()}
    text = VllmMetrics(metrics, "tea", 32, 200).text().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, ours in COPIED.items():
        assert families[name].type == kinds[ours] and families[name].samples
    assert len(families["vllm:request_success"].samples) == len(FinishReason)
