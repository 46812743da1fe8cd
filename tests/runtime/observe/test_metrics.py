"""The names that other tools rely on."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pensieve.runtime.counters import DiskCounters, KVCounters, LoopStats, PowerCounts, Waits
from pensieve.runtime.observe.metrics import Latencies, Metrics
from pensieve.scheduler.kv.stats import SchedulerStats
from pensieve.scheduler.types import Usage


def samples(metrics: Metrics) -> dict[str, float]:
    """Values by name and labels, as a scraper reads them."""
    values = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return values


def test_all_names_of_the_contract() -> None:
    metrics = Metrics()
    slots = {"gpu": {"free": 3, "idle": 2}, "host": {"free": 1, "idle": 0}}
    metrics.stats = SchedulerStats(running=4, waiting=5, suspensions=6, slots=slots)
    metrics.copied = KVCounters(swap_in=7, swap_out=8)
    metrics.count_prompt(Usage(gpu=10, host=11, disk=12, recomputed=13, new=14))
    metrics.count_prompt(Usage(gpu=10))
    metrics.generation_tokens = 9
    metrics.finished["stop"] += 2
    metrics.client_errors["404"] += 1
    metrics.time_to_first_token.observe(0.03)
    metrics.inter_token_latency.observe(0.003)
    values = samples(metrics)
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
        'pensieve:client_errors_total{status="404"}': 1,
    }
    assert {name: values[name] for name in expected} == expected


def test_latencies_read_as_the_library_s_histogram() -> None:
    bounds = (0.002, 0.1, 1)
    latencies = Latencies(bounds)
    registry = CollectorRegistry()
    histogram = Histogram("between", "Tokens", buckets=bounds, registry=registry)
    for seconds in (0.0, 0.002, 0.0021, 0.5, 1.0, 7.5):
        latencies.observe(seconds)
        histogram.observe(seconds)
    (family,) = registry.collect()
    expected = [sample for sample in family.samples if not sample.name.endswith("_created")]
    assert latencies.family("between", "Tokens").samples == expected


def test_the_disk_tier() -> None:
    metrics = Metrics()
    metrics.disk = DiskCounters(
        1, 2, 3, 4, 5, 6, 7.5, 8.5, 0.5, 0.25, rejected=9, errors=10, full=1
    )
    values = samples(metrics)
    both = {
        name: (
            values[f'pensieve:kv_disk_{name}{{direction="spill"}}'],
            values[f'pensieve:kv_disk_{name}{{direction="promote"}}'],
        )
        for name in (
            "records_total",
            "bytes_total",
            "seconds_total",
            "queue_seconds_total",
            "queue",
        )
    }
    seconds = {"seconds_total": (7.5, 8.5), "queue_seconds_total": (0.5, 0.25)}
    assert both == {"records_total": (3, 4), "bytes_total": (5, 6), **seconds, "queue": (1, 2)}
    assert values['pensieve:kv_disk_faults_total{kind="rejected"}'] == 9
    assert values['pensieve:kv_disk_faults_total{kind="system"}'] == 10
    assert values["pensieve:kv_disk_full"] == 1


def test_every_source_is_there_before_the_first_request() -> None:
    values = samples(Metrics())
    for source in ("gpu", "host", "disk", "recomputed", "new"):
        assert values[f'pensieve:prompt_tokens_total{{source="{source}"}}'] == 0
    assert values["pensieve:num_requests_running"] == 0


def test_what_the_loop_says_is_passed_on() -> None:
    metrics = Metrics()
    metrics.prompt_tokens |= {"gpu": 3, "host": 2, "new": 5}
    metrics.stats = SchedulerStats(
        conversations=3,
        dropped=7,
        slots={"gpu": {"free": 1, "in_use": 3}},
        evictions={"gpu": {"moved": 4}, "host": {"dropped": 2}},
        eviction_values={-30: 1, -11: 2, 129: 4},
        eviction_value_sum=0.5,
        choices={
            "swap_in": {"chunks": 5, "swap_in": 0.25, "recompute": 2.0},
            "recompute": {"chunks": 1, "swap_in": 0.05, "recompute": 0.01},
        },
        regret_tokens=64,
    )
    sizes = PowerCounts((1, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1), 20_007)
    metrics.loop = LoopStats(
        9,
        {"plan": 0.5},
        sizes,
        PowerCounts((3,), 3),
        2.5,
        0.25,
        0.5,
        0.125,
        Waits(1.5, 4),
        Waits(0.75, 2),
    )
    metrics.ended(3.0, [0.03])
    values = samples(metrics)
    expected = {
        "pensieve:prefix_cache_queries_total": 10,
        'pensieve:prefix_cache_hits_total{tier="host"}': 2,
        "pensieve:conversations": 3,
        "pensieve:kv_dropped_chunks_total": 7,
        "pensieve:kv_cache_usage_perc": 0.75,
        'pensieve:kv_evictions_total{reason="moved",tier="gpu"}': 4,
        'pensieve:kv_evictions_total{reason="dropped",tier="host"}': 2,
        f'pensieve:kv_eviction_value_bucket{{le="{2.0**-24}"}}': 1,
        f'pensieve:kv_eviction_value_bucket{{le="{2.0**-12}"}}': 1,
        f'pensieve:kv_eviction_value_bucket{{le="{2.0**-10}"}}': 3,
        'pensieve:kv_eviction_value_bucket{le="16.0"}': 3,
        'pensieve:kv_eviction_value_bucket{le="+Inf"}': 7,  # a pinned chunk's has no bucket
        "pensieve:kv_eviction_value_sum": 0.5,
        "pensieve:kv_regret_tokens_total": 64,
        'pensieve:kv_choice_chunks_total{choice="swap_in"}': 5,
        'pensieve:kv_choice_predicted_seconds_total{choice="swap_in",way="recompute"}': 2.0,
        'pensieve:kv_choice_predicted_seconds_total{choice="recompute",way="swap_in"}': 0.05,
        "pensieve:steps_total": 9,
        'pensieve:step_seconds_total{part="plan"}': 0.5,
        'pensieve:iteration_tokens_total_bucket{le="2.0"}': 1,
        'pensieve:iteration_tokens_total_bucket{le="4.0"}': 3,
        'pensieve:iteration_tokens_total_bucket{le="16384.0"}': 3,
        "pensieve:iteration_tokens_total_count": 4,
        "pensieve:iteration_tokens_total_sum": 20_007,
        "pensieve:iteration_requests_count": 3,
        "pensieve:gpu_seconds_total": 2.5,
        'pensieve:kv_link_seconds_total{direction="swap_in"}': 0.25,
        'pensieve:kv_link_seconds_total{direction="swap_out"}': 0.5,
        "pensieve:kv_exposed_seconds_total": 0.125,
        'pensieve:kv_link_queue_seconds_sum{direction="swap_in"}': 1.5,
        'pensieve:kv_link_queue_seconds_count{direction="swap_out"}': 2,
        "pensieve:e2e_request_latency_seconds_sum": 3,
        "pensieve:request_queue_time_seconds_count": 1,
    }
    assert {name: values.get(name) for name in expected} == expected


def test_states_are_counted_for_models_that_have_some() -> None:
    metrics = Metrics()
    assert not any(name.startswith("pensieve:states") for name in samples(metrics))
    metrics.stats = SchedulerStats(states={"kept": 5, "swapped_in": 3, "lost": 1})
    values = samples(metrics)
    assert values['pensieve:states_total{event="swapped_in"}'] == 3
    assert values['pensieve:states_total{event="lost"}'] == 1
