"""The names that other tools rely on."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pensieve.runtime.messages import KVCounters
from pensieve.runtime.metrics import Metrics
from pensieve.scheduler.types import SchedulerStats, Usage


def samples(metrics: Metrics) -> dict[str, float]:
    """Values by name and labels, as a scraper reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_all_names_of_the_contract() -> None:
    metrics = Metrics()
    slots = {"gpu": {"free": 3, "idle": 2}, "host": {"free": 1, "idle": 0}}
    metrics.stats = SchedulerStats(running=4, waiting=5, suspensions=6, slots=slots)
    metrics.copied = KVCounters(swap_in=7, swap_out=8)
    metrics.count_prompt(Usage(gpu=10, host=11, disk=12, recomputed=13, new=14))
    metrics.count_prompt(Usage(gpu=10))
    metrics.generation_tokens = 9
    metrics.finished["stop"] += 2
    metrics.time_to_first_token.observe(0.03)
    metrics.inter_token_latency.observe(0.003)
    found = samples(metrics)
    expected = {
        'pensieve:prompt_tokens_total{source="gpu"}': 20,
        'pensieve:prompt_tokens_total{source="host"}': 11,
        'pensieve:prompt_tokens_total{source="disk"}': 12,
        'pensieve:prompt_tokens_total{source="recomputed"}': 13,
        'pensieve:prompt_tokens_total{source="new"}': 14,
        "pensieve:generation_tokens_total": 9,
        "pensieve:suspensions_total": 6,
        'pensieve:kv_slots{state="free",tier="gpu"}': 3,
        'pensieve:kv_slots{state="idle",tier="host"}': 0,
        "pensieve:num_requests_running": 4,
        "pensieve:num_requests_waiting": 5,
        "pensieve:time_to_first_token_seconds_count": 1,
        'pensieve:time_to_first_token_seconds_bucket{le="0.04"}': 1,
        "pensieve:inter_token_latency_seconds_count": 1,
        'pensieve:kv_copied_bytes_total{direction="swap_in"}': 7,
        'pensieve:kv_copied_bytes_total{direction="swap_out"}': 8,
        'pensieve:requests_total{finish="stop"}': 2,
    }
    assert {name: found[name] for name in expected} == expected


def test_every_source_is_there_before_the_first_request() -> None:
    found = samples(Metrics())
    for source in ("gpu", "host", "disk", "recomputed", "new"):
        assert found[f'pensieve:prompt_tokens_total{{source="{source}"}}'] == 0
    assert found["pensieve:num_requests_running"] == 0
