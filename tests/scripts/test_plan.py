"""The plan: the largest rate is found, more load needs more GPUs, and wrong input is answered in
one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from pensieve.runtime.device.protocol import Memory
from pensieve.scheduler.sim.ring import fullest_share
from pensieve.scheduler.types import SettingError
from pensieve.scripts import plan
from pensieve.scripts.simulation.load import host_size
from pensieve.scripts.simulation.models import MODELS, read_costs, read_shape, scaled

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"
LLAMA = SHAPES / "llama-3-8b.json"
MEASURED = SHAPES / "h200" / "llama-3-8b.json"
SMALL = [
    *(
        "--config",
        str(LLAMA),
        "--profile",
        str(MEASURED),
        "--synthetic",
        "sharegpt",
        "--load",
        "2,40",
    ),
    *(
        "--seconds",
        "8",
        "--measure-s",
        "5",
        "--ramp-s",
        "2",
        "--seeds",
        "0",
        "--jobs",
        "1",
        "--chunk-tokens",
        "128",
    ),
    *("--gpu-kv-bytes", "6GiB", "--host-kv-bytes", "4GiB", "--think-s", "5"),
    *("--max-num-seqs", "4"),
]


def rows(capsys, *options: str) -> list[dict]:
    assert plan.main([*SMALL, "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_largest_good_rate_is_found():
    for largest in (0.3, 1.0, 7.0, 50.0):
        rate = plan.bisect(lambda rate, most=largest: rate <= most, guess=1.0)
        assert largest / plan.CLOSE <= rate <= largest


def test_targets_that_an_idle_replica_misses_are_named():
    with pytest.raises(
        SettingError, match="--ms-per-token, --ttft-ms-p95: an idle replica misses them"
    ):
        plan.bisect(lambda rate: False, guess=1.0)


@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3.5-9b"])
def test_a_run_too_short_to_miss_a_target_is_named(shape, capsys):
    """A request that still waits at the end counts for no target."""
    options = ["--config", str(SHAPES / f"{shape}.json"), "--synthetic", "sharegpt", "--load", "1"]
    options += ["--seconds", "3", "--measure-s", "2", "--ttft-ms-p95", "3000", "--seeds", "0"]
    assert plan.main([*options, "--ramp-s", "1", "--jobs", "1"]) == 2
    told = capsys.readouterr().err
    assert "--seconds, --measure-s: " in told
    assert "more than a replica can compute, miss no target in 3 s" in told
    assert plan.main(options) == 2
    message = "--ramp-s: must be at most --seconds less --measure-s (1)"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("load", [0.2, 1.0, 3.0, 70.0])
def test_the_fullest_replica_has_no_more_than_it_can_serve(load):
    count = plan.replicas(load, rate=1.0)
    assert load <= count <= 1.4 * load + 1
    assert load * fullest_share(count) <= 1.0


@pytest.mark.slow
def test_more_load_needs_more_gpus_and_costs_more(capsys):
    few, many = rows(capsys, "--ms-per-token", "20", "--price", "3", "--host-price", "0.5")
    assert (few["load"], many["load"]) == (2, 40)
    assert few["gpus"] < many["gpus_if_even"] <= many["gpus"]
    assert many["host_gib"] == 4 * many["gpus"]
    assert many["cost"] == 3 * many["gpus"] + 0.5 * many["host_gib"]
    assert many["cost_1000"] == pytest.approx(many["cost"] / 40 / 3.6)


@pytest.mark.slow
def test_a_margin_is_a_harder_target(capsys):
    each_options = [
        ("--ms-per-token", "20", "--margin", "0.4"),
        ("--ms-per-token", "12", "--margin", "0"),
    ]
    first, second = (rows(capsys, *options, "--load", "60") for options in each_options)
    assert first == second


def test_the_table_names_the_cheapest_size_of_host_memory():
    args = plan.parser().parse_args([*SMALL, "--ms-per-token", "20"])
    sizes = ((0, 0, [1.0]), (2**32, 0, [2.0]), (2**33, 0, [2.0]), (2**32, 2**39, [2.0]))
    by_size = [
        plan.plan_row(args, load, plan.TierBytes(host, disk), rates)
        for load in (2.0, 40.0)
        for host, disk, rates in sizes
    ]
    titles, *lines, best, sure, source = plan.table("NVIDIA H200, 2026-11-20", by_size)
    assert titles.split()[:2] == ["host", "GiB/GPU"]
    assert [line.split()[:3] for line in lines[:2]] == [["0", "0", "2"], ["4", "0", "2"]]
    gpus = by_size[5]["gpus"]
    assert best == f"40/s: {gpus} GPUs, {4 * gpus} GiB of host memory, {gpus:.2f} an hour"
    assert f"{gpus} to {gpus} GPUs" in sure and "NVIDIA H200, 2026-11-20" in source


def test_a_disk_that_saves_gpus_is_proposed():
    args = plan.parser().parse_args([*SMALL, "--ms-per-token", "20"])
    sizes = ((0, [1.0]), (2**38, [2.0]), (2**39, [2.0]))
    by_size = [
        plan.plan_row(args, 40.0, plan.TierBytes(2**32, disk), rates) for disk, rates in sizes
    ]
    best = list(plan.table("", by_size))[-3]
    assert ", --disk-kv-bytes 256GiB, " in best


def test_the_default_of_a_servers_host_memory_is_known(monkeypatch):
    memory = Memory(90 * 2**30, 100 * 2**30)
    monkeypatch.setattr("pensieve.runtime.device.memory.host_memory", lambda: memory)
    options = [*SMALL, "--ms-per-token", "20", "--disk-kv-bytes", "0,1GiB"]
    args = plan.parser().parse_args([*options, "--host-kv-bytes", "auto,1GiB"])
    sizes = [(host // 2**30, disk // 2**30) for host, disk in plan.tier_sizes(args)]
    assert sizes == [(1, 0), (1, 1), (60, 0), (60, 1)]
    assert host_size("auto", 2**30) == 16 * 2**30 and host_size("auto", 0) == 2 * 2**30


@pytest.mark.slow
def test_more_disk_serves_more(capsys):
    """Conversations that come back after 5 s, and a host that holds few of them."""
    options = ("--ms-per-token", "20", "--load", "40", "--host-kv-bytes", "1GiB")
    none, some = rows(capsys, *options, "--disk-kv-bytes", "0,64GiB")
    assert (none["disk_gib_per_gpu"], some["disk_gib_per_gpu"]) == (0, 64)
    assert some["rate"] >= none["rate"]


@pytest.mark.slow
def test_a_store_that_replicas_share_serves_more(capsys):
    options = ("--ms-per-token", "20", "--load", "40", "--host-kv-bytes", "1GiB")
    (none,) = rows(capsys, *options)
    (some,) = rows(capsys, *options, "--shared-bytes-per-s", "2e10")
    assert some["rate"] >= none["rate"]


def test_the_seeds_say_how_sure_it_is():
    args = plan.parser().parse_args([*SMALL, "--ms-per-token", "20"])
    row = plan.plan_row(args, 10.0, plan.TierBytes(2**32, 0), [1.0, 0.5, 2.0])
    assert row["rate"] == median([1.0, 0.5, 2.0]) and row["rates_by_seed"] == "0.5 to 2"
    fewest, most = map(int, row["gpus_by_seed"].split(" to "))
    assert fewest < row["gpus"] < most


def test_a_shape_is_read_from_a_config():
    shape = read_shape(LLAMA, ranks=1)
    model = MODELS["llama-3-8b"]
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (32, 32, 8, 128)
    assert shape.parameters == pytest.approx(model.parameters, rel=1e-3)
    assert read_shape(LLAMA, ranks=4).token_bytes == shape.token_bytes // 4


def test_only_the_experts_that_a_token_uses_are_computed():
    shape = read_shape(SHAPES / "qwen3-30b-a3b.json", ranks=1)
    assert shape.parameters == pytest.approx(
        30.5e9, rel=0.01
    ) and shape.active_parameters == pytest.approx(3.3e9, rel=0.02)
    gpt_oss = read_shape(SHAPES / "gpt-oss-20b.json", ranks=1)
    assert gpt_oss.parameters == pytest.approx(20.9e9, rel=0.01)
    # and the embeddings
    assert gpt_oss.active_parameters == pytest.approx(3.6e9 + 201088 * 2880, rel=0.02)
    sizes = dict(chunk_tokens=32, max_context=4096, memory_bytes_per_s=1e12, link_bytes_per_s=1e10)
    cost = shape.cost(flops_per_s=1e14, **sizes)
    assert cost.chunk_seconds == pytest.approx(32 * 2 * shape.active_parameters / 1e14)
    assert cost.step_base_seconds == pytest.approx(2 * shape.parameters / 1e12)
    assert (
        read_shape(SHAPES / "llama-3-8b.json", ranks=1).active_parameters
        == read_shape(LLAMA, ranks=1).parameters
    )


def test_the_sizes_of_a_model_with_states():
    shape = read_shape(SHAPES / "qwen3.5-9b.json", ranks=1)
    assert shape.sizes() == "weights 16.7 GiB, KV 32 KiB a token, a state 49.1 MiB"
    states = shape.states(chunk_tokens=32, seats=64)
    assert (states.chunks, states.slots, states.spacing) == (50, 72, 2048)
    few, many = (shape.states_in_host(32, 64, size * 2**30) for size in (2, 64))
    assert few.text == "40 states in 2 GiB of host memory"
    assert few.few.startswith("fewer than two for each of --max-num-seqs 64")
    assert many.text == "1310 states in 64 GiB of host memory" and not many.few
    half = read_shape(SHAPES / "qwen3.5-9b.json", ranks=2)
    assert 2 * half.state_bytes == shape.state_bytes
    plain = read_shape(LLAMA, ranks=1)
    assert plain.sizes() == "weights 15.0 GiB, KV 128 KiB a token"
    assert plain.states(32, 64) is plain.states_in_host(32, 64, 2**30) is None


def test_a_row_that_generates_moves_its_state():
    shape = read_shape(SHAPES / "qwen3.5-9b.json", ranks=1)
    cost = shape.cost(32, 4096, 1e14, 1e12, 1e10)
    without = replace(shape, state_bytes=0).cost(32, 4096, 1e14, 1e12, 1e10)
    assert not without.row_attention
    more = cost.step(0, rows=64, rows_context=500) - without.step(0, rows=64, rows_context=500)
    assert more == pytest.approx(64 * 2 * shape.state_bytes / 1e12)


@pytest.mark.slow
def test_a_plan_of_a_model_with_states(capsys):
    options = ["--config", str(SHAPES / "qwen3.5-9b.json"), "--synthetic", "sharegpt"]
    options += ["--load", "1", "--ms-per-token", "30", "--chunk-tokens", "64", "--seeds", "0"]
    options += ["--seconds", "8", "--measure-s", "5", "--ramp-s", "2", "--jobs", "1"]
    options += ["--max-num-seqs", "16", "--host-kv-bytes", "1GiB"]
    assert plan.main(options) == 0
    *_, sizes, states = capsys.readouterr().out.splitlines()
    assert sizes == "a GPU: weights 16.7 GiB, KV 32 KiB a token, a state 49.1 MiB"
    assert states.startswith("a GPU: 20 states in 1 GiB of host memory, fewer than two for each")


def test_forms_that_states_do_not_have_are_refused(capsys):
    options = [*SMALL, "--config", str(SHAPES / "qwen3.5-9b.json"), "--ms-per-token", "60"]
    at = options.index("--profile")
    del options[at : at + 2]
    options[options.index("128")] = "64"
    assert plan.main([*options, "--lower-tier-kv", "fp8"]) == 2
    assert "--lower-tier-kv: must be same for a model with states" in capsys.readouterr().err


def test_long_contexts_cost_no_more_attention_than_the_windows(tmp_path):
    config = json.loads((SHAPES / "llama-3-8b.json").read_text()) | {
        "architectures": ["MistralForCausalLM"]
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 1000}))
    shape = read_shape(tmp_path / "config.json", ranks=1)
    assert shape.windows == (1000,) * 32
    cost = shape.cost(32, 8192, 1e14, 1e12, 1e10)
    assert cost.token_attention(500) == pytest.approx(cost.token_attention(1000) / 2)
    assert cost.token_attention(8000) == cost.token_attention(1000)


def test_costs_by_larger_chunks_are_the_same_costs():
    shape = read_shape(LLAMA, ranks=1)
    small, source = read_costs(MEASURED, shape, 32)
    large = scaled(small, 128)
    assert source == "NVIDIA H200, 2026-11-20"
    assert large.recompute(4096) == pytest.approx(4 * small.recompute(4096))
    assert large.swap_in() == pytest.approx(4 * small.swap_in())
    assert large.step(512, 1024, 8, 2048) == pytest.approx(small.step(512, 1024, 8, 2048))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "--ms-per-token, --ttft-ms-p95: give one target or both"),
        (["--ms-per-token", "0"], "--ms-per-token: must be above 0"),
        (["--ms-per-token", "20", "--load", "many"], "--load: 'many' is not a list of numbers"),
        (["--ms-per-token", "20", "--load", "0"], "--load: must be above 0"),
        (["--ms-per-token", "20", "--jobs", "0"], "--jobs: must be at least 1"),
        (["--ms-per-token", "20", "--margin", "1"], "--measure-s, --margin: must be below"),
        (["--ms-per-token", "20", "--config", "none.json"], "--config: none.json does not exist"),
        (
            ["--ms-per-token", "20", "--config", str(SHAPES / "opt-13b.json")],
            "is of another model than --config",
        ),
        (["--ms-per-token", "20", "--profile", str(LLAMA)], "run `pensieve profile` again"),
        (["--ms-per-token", "20", "--tensor-parallel", "3"], "--tensor-parallel: 32 heads"),
        (
            ["--ms-per-token", "20", "--gpu-kv-bytes", "auto", "--gpu-memory", "16GiB"],
            "use more GPUs a replica",
        ),
        (["--ms-per-token", "0.01"], "an idle replica misses them"),
    ],
)
def test_wrong_input_is_answered_in_one_line(options, told, capsys):
    assert plan.main([*SMALL, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pensieve plan: ") and told in error and error.count("\n") == 1


def test_the_cost_is_drawn_over_the_load(tmp_path):
    pytest.importorskip("matplotlib")
    args = plan.parser().parse_args([*SMALL, "--plot", str(tmp_path / "cost.png")])
    plan.draw(args, {2**32: [1.0, 2.0]}, 10.0)
    assert (tmp_path / "cost.png").stat().st_size > 1000
