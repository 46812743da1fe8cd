"""benchmarks.steps on the CPU device with a tiny engine: its reports of turns and steps are
right."""

import json
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.loop import Loop, make_device, table
from benchmarks.steps import QUIET_STEPS, Returning, StepPools, main, parser
from pensieve.builder.build import build_random_engine
from pensieve.runtime.engine import open_engine
from pensieve.runtime.executor import Executor
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import InvariantError, Tier

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SMALL = [
    "--history",
    "160",
    "--new-tokens",
    "8",
    "--rows",
    "2",
    "--row-context",
    "40",
    "--repeats",
    "1",
]
SMALL += [
    "--gap-rows",
    "5",
    "--gap-context",
    "40",
    "--steps",
    "12",
    "--max-num-batched-tokens",
    "64",
]


def build(directory, **how):
    (directory / "config.json").write_text(json.dumps(SHAPE))
    build_random_engine(directory / "config.json", directory / "engine", **how)
    return directory / "engine"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(directory):
    return open_engine(directory)


def results(printed):
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {line.pop("bench"): line for line in lines}


def check_results(results):
    assert list(results) == ["steps_copies", "steps_returning", "steps_gaps"]
    speeds = results["steps_copies"]["gb_per_s"]
    assert [speed["layers"] for speed in speeds] == [1, 2, 4, 6]
    assert all(speed[way] > 0 for speed in speeds for way in ("swap_in", "swap_out", "both"))
    turns = results["steps_returning"]
    for way in ("pipelined", "first"):
        for name in ("alone", "beside_rows"):
            turn = turns[f"{way}_{name}"]
            assert (
                0 < turn["compute_s"] < turn["gpu_hit_ttft_s"]
                and 0 < turn["ttft_s"] <= turn["ttft_max_s"]
            )
            assert turn["ratio"] == pytest.approx(
                turn["ttft_s"] / max(turns["copy_s"], turn["compute_s"])
            )
            assert turn["swap_in_gb_per_s"] > 0
        assert turns[f"{way}_beside_rows"]["itl_p99_rise"] > 0
    gaps = results["steps_gaps"]
    assert (gaps["rows"], gaps["steps"]) == (5, 12)
    assert (
        0 <= gaps["idle_share"] < 1
        and gaps["device_step_s"] > 0
        and 0 < gaps["host_wait_s"] < gaps["step_s"] * 10
    )
    assert gaps["tokens_per_s"] > 0 and 0 <= gaps["late_launches"] <= 14


@pytest.mark.slow
def test_all_parts(directory, capsys):
    assert main(["--engine", str(directory), *SMALL]) == 0
    printed = capsys.readouterr().out
    check_results(results(printed))
    for words in (
        "GB/s by layers",
        "first_beside_rows",
        "itl_during_p99_s",
        "idle_share",
        "host_plan_s",
    ):
        assert words in printed


def test_one_part(directory, capsys):
    assert main(["--engine", str(directory), *SMALL, "--parts", "gaps"]) == 0
    assert list(results(capsys.readouterr().out)) == ["steps_gaps"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--history", "2000"], "--history: contexts come to 2009 tokens, the model's to 512"),
        (["--history", "20"], "--history: must be at least 32, not 20"),
        (["--steps", "1"], "--steps: must be at least 10, not 1"),
        (["--engine", "nowhere"], "--engine: nowhere is no engine"),
    ],
)
def test_a_wrong_setting_is_named(directory, capsys, options, message):
    assert main(["--engine", str(directory), *SMALL, *options]) == 2
    assert message in capsys.readouterr().err


# The parts of it.

COST = CostProfile(32, 1e-3, ((32, 1e-4),), 1e-3, 1000, 1e9)


@pytest.fixture
def bench(directory, engine):
    """Its device, arguments, sizes, and a function that makes a loop."""
    args = parser().parse_args(["--engine", str(directory), *SMALL])
    sizes = StepPools(args, engine)
    config = sizes.config()
    device = make_device("cpu")
    Executor(device, engine, config)

    def make_loop(group_layers, **changes):
        make = partial(Executor, group_layers=group_layers)
        return Loop(device, engine, replace(config, **changes), COST, make_executor=make)

    yield device, args, sizes, make_loop
    device.end()


@pytest.mark.parametrize(("group_layers", "pieces"), [(4, 2), (6, 1)])
def test_one_device_serves_loops_of_both_ways(bench, group_layers, pieces):
    device, args, sizes, make_loop = bench
    pools = dict(device._pools)
    for _ in range(2):
        turns = Returning(
            device, make_loop(group_layers, gpu_kv_chunks=sizes.returning[2]), sizes, args, rows=2
        )
        turn = turns._turn(turns.histories[0], Tier.HOST)
        assert len(device.copies_in) % pieces == 0 and len(device.copies_in) >= pieces
        assert turn.swap_in > 0 and turn.first_token > turn.step > 0
        assert len(turns.before) == QUIET_STEPS - 1 and turn.others
        assert turns._turn(turns.histories[0], Tier.GPU).swap_in == 0.0
        turns.loop.abort_all()
        turns.loop.scheduler.check()
    assert device._pools == pools


def test_a_history_that_is_elsewhere_is_told(bench):
    device, args, sizes, make_loop = bench
    turns = Returning(device, make_loop(4), sizes, args, rows=0)
    with pytest.raises(
        InvariantError,
        match=r"160 tokens of KV were to be on HOST, but the prompt had Usage\(gpu=160",
    ):
        turns._turn(turns.histories[-1], Tier.HOST)
    turns.loop.drain()


def test_rows_that_end_are_told(bench):
    loop = bench[3](4)
    loop.add(loop.random_ids(10), 5)
    loop.add(loop.random_ids(10), 20)
    with pytest.raises(
        InvariantError, match="2 rows were to generate throughout, and once only 1 did"
    ):
        loop.steady(2, 10)
    with pytest.raises(InvariantError, match="nothing is left to do"):
        loop.run_until(lambda: False)


def test_stamps_tell_when_work_was_done(bench):
    device = bench[0]
    device.start_recording()
    slots = np.zeros(1, np.int32)
    device.copy(Lane.OUT, slots, slots, range(6))
    device.copy(Lane.IN, slots, slots, range(6))
    device.synchronize(device.mark(Lane.IN))
    ((start, end),) = device.copies_in
    assert device.passed(start) and 0 <= device.seconds(start, end) < 10
    device.start_recording()
    assert not device.copies_in and not device.steps


def test_random_prompts_are_ids_of_the_model(bench):
    ids = bench[3](4).random_ids(1000)
    assert isinstance(ids, array) and ids.typecode == "i" and len(ids) == 1000
    assert min(ids) == 0 and max(ids) == 159


def test_the_gpu_cache_is_what_the_parts_need(directory, engine):
    sizes = {}
    for parts in ("copies", "returning", "gaps", "copies,returning,gaps"):
        args = parser().parse_args(
            ["--engine", str(directory), *SMALL, "--gap-rows", "40", "--parts", parts]
        )
        sizes[parts] = StepPools(args, engine).gpu
    assert (
        sizes["copies,returning,gaps"] == max(sizes.values()) == sizes["gaps"] > sizes["returning"]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_parts_on_a_gpu(tmp_path, capsys):
    directory = build(tmp_path, device="cuda", dtype="bfloat16")
    assert main(["--engine", str(directory), "--device", "cuda", *SMALL]) == 0
    check_results(results(capsys.readouterr().out))


def test_a_table_has_a_column_for_each_name_of_any_row():
    lines = table(
        [{"way": "load", "seconds": 0.123456}, {"way": "recompute", "read": 3}]
    ).splitlines()
    assert lines[0].split() == ["|", "way", "|", "seconds", "|", "read", "|"]
    assert lines[2].split() == ["|", "load", "|", "0.1235", "|", "|"]
    assert len({len(line) for line in lines}) == 1
