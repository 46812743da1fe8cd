"""The measured profile: batches whose rows are apart, sane figures, and a file that is believed
only where it holds."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from pensieve.builder.build import build_random_engine
from pensieve.builder.manifest import Manifest
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.engine import open_engine
from pensieve.runtime.executor import GROUP_LAYERS
from pensieve.runtime.launch.profiling import bench_config
from pensieve.runtime.measure import profile as profile_module
from pensieve.runtime.measure.profile import (
    PROFILE,
    Measured,
    Profile,
    cost_profile,
    load_profile,
    profile_engine,
    split_attention,
)
from pensieve.runtime.measure.step_bench import STEPS_IN_FLIGHT, UNCOUNTED, CopyTime, StepBench
from pensieve.scheduler.config import SchedulerConfig, SchedulerSettings
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.sim.simulator import Session, SessionTurn, simulate
from pensieve.scheduler.types import SettingError
from pensieve.scripts.profile_engine import main, parser
from tests.models import QWEN3_5_SHAPE
from tests.runtime.fake_engine import FakeEngine

CHUNK = 16
CONFIG = SchedulerConfig(
    gpu_kv_chunks=40,
    host_kv_chunks=8,
    max_model_len=128,
    max_num_seqs=6,
    max_num_batched_tokens=64,
    chunk_tokens=CHUNK,
)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def build_tiny(directory, **how):
    """An engine directory in `directory`."""
    (directory / "config.json").write_text(json.dumps(SHAPE))
    build_random_engine(directory / "config.json", directory / "engine", **how)
    return directory / "engine"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def engine(directory):
    return open_engine(directory)


@pytest.fixture(scope="module")
def profile(engine):
    with StepBench(CpuDevice(), engine, CONFIG, seconds=0.05) as bench:
        return profile_engine(bench, engine, say=lambda what: None)


# The measurements.


def test_every_figure_is_there_and_finite(profile):
    measured = profile.measured
    contexts = [16, 32, 64, 128]
    assert [tokens for tokens, _ in measured.steps] == [1, 2, 4, 8, 16, 32, 64]
    assert [context for context, _ in measured.full_batches] == contexts
    assert [(r, c) for r, c, _ in measured.generation] == [
        (r, c) for r in (1, 2, 4, 6) for c in contexts
    ]
    assert [copy.layers for copy in measured.copies] == [1, 2]
    seconds = [
        point[-1]
        for points in (measured.steps, measured.full_batches, measured.generation)
        for point in points
    ]
    seconds += [
        each for copy in measured.copies for each in (copy.swap_in, copy.swap_out, copy.both)
    ]
    assert all(0 < each < 10 for each in seconds)
    assert SchedulerSettings().generation_reserve <= profile.swap_out_below <= 1.0
    assert (profile.dtype, profile.torch, profile.chunk_tokens) == (
        "float32",
        torch.__version__,
        CHUNK,
    )


def test_costs_grow_with_context_tokens_and_rows(profile):
    cost = profile.cost
    chunks = [cost.recompute(end) for end in range(0, 1000, 40)]
    # the first is no less than 0, where contexts cost most
    assert chunks == sorted(chunks) and chunks[1] > 0
    steps = [cost.step(tokens, context=64) for tokens in range(1, 200, 7)]
    assert steps == sorted(steps)
    rows = [cost.step(0, rows=4, rows_context=context) for context in range(0, 300, 16)]
    assert rows == sorted(rows)
    assert all(map(math.isfinite, (*chunks, *steps, *rows, cost.swap_in(), cost.swap_out())))


def test_the_simulator_runs_with_measured_costs(profile):
    turns = (SessionTurn(0, 40, 8), SessionTurn(48, 20, 8, think_s=0.5))
    report = simulate(CONFIG, profile.cost, [Session(f"c{i}", 0.1 * i, turns) for i in range(8)])
    assert report.requests == 16 and 0 < report.ttft_p50 < report.seconds


@pytest.mark.parametrize("longest", [256, 64])
def test_a_hybrid_is_measured_with_its_states(tmp_path, longest, capsys):
    """A full batch is one row, and each row has a state. A model's contexts may be shorter."""
    kinds = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_SHAPE | kinds))
    build_random_engine(tmp_path / "config.json", tmp_path / "engine")
    words = ["--max-num-seqs", "3", "--max-num-batched-tokens", "128", "--max-model-len", longest]
    words += ["--engine", tmp_path / "engine", "--chunk-tokens", CHUNK, "--seconds", "0.01"]
    assert main([*map(str, words)]) == 0, capsys.readouterr()
    profile = Profile.read(tmp_path / "engine" / PROFILE)
    batch = min(128, longest // 2)
    assert profile.max_num_batched_tokens == batch
    contexts = [context for context, _ in profile.measured.full_batches]
    assert contexts == ([64, 192] if longest == 256 else [16, 48])
    assert profile.measured.steps[-1][0] == batch
    assert profile.measured.generation[-1][:2] == (3, longest)
    engine = open_engine(tmp_path / "engine")
    assert load_profile(tmp_path / "engine", engine, CHUNK) == profile.cost


def test_more_seats_than_the_default_batch_are_measured(directory, engine):
    words = ["--engine", str(directory), "--max-num-seqs", "1100"]
    args = parser().parse_args([*words, "--max-num-batched-tokens", "1200"])
    config = bench_config(args, engine, CpuDevice())
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (1100, 1200)


# Batches: each slot is written by one row only, and no other row reads it.


class Recorder(CpuDevice):
    """Keeps each computed step's inputs and the block table as of then."""

    def load(self, engine, seats, blocks, *settings):
        super().load(engine, seats, blocks, *settings)
        self.table = np.zeros((seats, blocks), np.int32)
        self.steps = []

    def upload(self, inputs):
        super().upload(inputs)
        self.table.reshape(-1)[inputs.block_cells] = inputs.block_slots
        if len(inputs.token_ids):
            self.steps.append((inputs, self.table.copy()))


@pytest.fixture
def bench():
    with StepBench(Recorder(), FakeEngine(), CONFIG, seconds=0.0) as opened:
        yield opened


def steps_of(bench):
    return bench._device.steps


@pytest.mark.parametrize(
    ("run", "tokens", "samples", "contexts"),
    [
        (lambda bench: bench.chunks_at(128, 4), 64, 0, [128] * 4),
        (lambda bench: bench.generation(128, 6), 6, 6, [128] * 6),
        (lambda bench: bench.generation(16, 1), 1, 1, [16]),
        (lambda bench: bench.fresh(64), 64, 4, [16] * 4),
        (lambda bench: bench.fresh(35), 35, 3, [16, 16, 3]),
    ],
)
def test_rows_share_only_what_they_read(bench, run, tokens, samples, contexts):
    assert run(bench) > 0
    inputs, table = steps_of(bench)[-1]
    assert len(inputs.token_ids) == tokens and len(inputs.sample_seats) == samples
    assert inputs.segments[:, 3].tolist() == contexts
    assert (inputs.slots >= 0).all()
    used = [
        table[seat, : -(-kv_len // CHUNK)].tolist() for *_, kv_len, seat in inputs.segments.tolist()
    ]
    assert all(
        len(set(slots)) == len(slots) and max(slots) < CONFIG.gpu_kv_chunks for slots in used
    )
    for slots, (start, length, *_) in zip(used, inputs.segments.tolist(), strict=True):
        written = set((inputs.slots[start : start + length] // CHUNK).tolist())
        assert written == {slots[-1]}
        assert sum(bool(written & set(others)) for others in used) == 1


def test_contexts_larger_than_the_pool_use_all_of_it(bench):
    bench.generation(128, 6)
    _, table = steps_of(bench)[-1]
    assert set(table[:6, :8].flatten().tolist()) == set(range(40))  # 48 chunks over 40 slots


def test_a_turn_computes_the_history_or_leaves_it(bench):
    turn = bench.turn(history=40, prompt=10, generated=5, requests=3)
    assert turn.history == 40 and min(turn[1:]) > 0
    steps = [inputs for inputs, _ in steps_of(bench)]
    assert [len(inputs.token_ids) for inputs in steps] == [64, 64, 22, 30, 3, 3, 3, 3]
    assert sum(len(inputs.sample_seats) for inputs in steps[:3]) == 3
    assert steps[3].positions.tolist() == [*range(40, 50)] * 3
    assert [inputs.positions.tolist() for inputs in steps[4:]] == [[50 + i] * 3 for i in range(4)]


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (dict(gpu_kv_chunks=13), "--gpu-kv-bytes"),  # a context of 8 beside 6 written ones
        (dict(max_num_batched_tokens=12), "--max-num-batched-tokens"),
    ],
)
def test_too_small_a_bench_names_the_setting(change, setting):
    with pytest.raises(SettingError) as error:
        StepBench(CpuDevice(), FakeEngine(), replace(CONFIG, **change), 0.0)
    assert error.value.setting == setting


def test_of_several_ranks_the_slowest_counts_and_all_do_as_many_steps():
    """Here another rank takes 5 s for everything."""
    with StepBench(
        Recorder(), FakeEngine(), CONFIG, seconds=50.0, slowest=lambda seconds: max(seconds, 5.0)
    ) as bench:
        assert bench.fresh(16) == 5.0
        assert len(steps_of(bench)) == UNCOUNTED + 10 + 3 * (STEPS_IN_FLIGHT - 1)
        assert bench.copies(2, 1)[2:] == (5.0, 5.0, 5.0)
        assert bench.turn(history=40, prompt=10, generated=5, requests=1)[1:] == (5.0, 5.0, 5.0)


# Figures made of measured ones.


def test_attention_is_parted_from_the_rest():
    rest, attention = split_attention([(32, 5.32), (64, 5.64), (128, 6.28), (1024, 15.24)])
    assert rest == pytest.approx(5.0)
    assert attention == tuple(
        (context, pytest.approx(context / 100)) for context in (32, 64, 128, 1024)
    )
    # One disturbed time: a longer context was faster.
    rest, attention = split_attention([(32, 5.32), (64, 9.0), (128, 6.28), (1024, 15.24)])
    assert rest == pytest.approx(5.0) and attention[1] == (64, pytest.approx(1.28))
    assert split_attention([(32, 5.0)]) == (5.0, ((32, 0.0),))


def test_costs_from_times_that_can_be_worked_out():
    measured = Measured(
        steps=((1, 1.0), (64, 3.0)),
        full_batches=((16, 4.16), (32, 4.32)),
        generation=((1, 16, 9.0), (2, 16, 1.016), (2, 32, 1.032)),
        copies=tuple(
            CopyTime(*each)
            for each in ((1, 10, 1, 1, 5), (GROUP_LAYERS, 10, 1, 1, 2), (40, 10, 1, 1, 1.25))
        ),
    )
    cost = cost_profile(measured, CONFIG, chunk_bytes=100)
    assert cost.chunk_seconds == pytest.approx(1.0)  # of four chunks
    assert cost.recompute(32) == pytest.approx(1.08)
    assert cost.step(64) == pytest.approx(3.0) and cost.step_base_seconds == 1.0
    assert cost.row_attention == ((16, pytest.approx(0.008)), (32, pytest.approx(0.016)))
    assert cost.link_bytes_per_s == 500.0  # pieces as a gated swap-in's, the other way running too
    assert cost.out_bytes_per_s == 800.0  # whole records


# The file.


def test_a_profile_is_kept_and_read_back(profile, engine, directory):
    path = profile.save(directory)
    assert path.name == PROFILE and Profile.read(path) == profile
    assert load_profile(directory, engine, CHUNK) == profile.cost
    assert open_engine(directory).manifest == engine.manifest  # no part of the engine


@pytest.mark.parametrize("part", ["hardware", "engine", "chunk_tokens", "kv_cache_dtype"])
def test_a_profile_of_something_else_is_not_used(
    profile, engine, directory, tmp_path, caplog, part
):
    other = {"hardware": "abacus", "engine": "0" * 64, "chunk_tokens": 32, "kv_cache_dtype": "fp8"}[
        part
    ]
    replace(profile, **{part: other}).save(tmp_path)
    with caplog.at_level(logging.INFO, profile_module.__name__):
        assert load_profile(tmp_path, engine, CHUNK) is None
    assert str(other) in caplog.text and part in caplog.text and "estimated" in caplog.text


def test_an_engine_that_was_not_measured(engine, tmp_path, caplog):
    with caplog.at_level(logging.INFO, profile_module.__name__):
        assert load_profile(tmp_path, engine, CHUNK) is None
    assert "not been measured" in caplog.text


def _lose(value):
    del value["cost"]["attention"]


@pytest.mark.parametrize(
    "damage",
    [
        _lose,
        lambda value: value.update(format=2),
        lambda value: value.update(colour="red"),
        lambda value: value["cost"].update(chunk_seconds=math.nan),
        lambda value: value["cost"].update(chunk_seconds="quick"),
        lambda value: value["cost"].update(link_bytes_per_s=0),
        lambda value: value["cost"].update(attention=[[32, 1.0], [16, 2.0]]),
        lambda value: value["measured"].update(copies=[[1, 2]]),
    ],
)
def test_a_damaged_profile_is_named(profile, engine, tmp_path, damage):
    path = profile.save(tmp_path)
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    with pytest.raises(SettingError, match=r"profile\.json is damaged") as error:
        load_profile(tmp_path, engine, CHUNK)
    assert error.value.setting == "--engine"


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_torn_profile_is_named(engine, tmp_path, text):
    (tmp_path / PROFILE).write_text(text)
    with pytest.raises(SettingError, match="damaged"):
        load_profile(tmp_path, engine, CHUNK)


# The command.

SMALL = [
    "--chunk-tokens",
    "64",
    "--max-num-seqs",
    "2",
    "--max-num-batched-tokens",
    "128",
    "--seconds",
    "0.001",
]


def test_the_command_measures_and_saves(directory, engine, capsys):
    assert main(["--engine", str(directory), *SMALL]) == 0
    printed = capsys.readouterr()
    for words in ("context     256", "generation, ms", "GB/s", "--swap-out-below 0.", "saved in"):
        assert words in printed.out
    assert "measuring" in printed.err
    cost = load_profile(directory, engine, 64)
    assert cost is not None and [context for context, _ in cost.attention] == [64, 128, 256, 512]

    assert (
        main(
            ["--engine", str(directory), *SMALL, "--kv-cache-dtype", "fp8", "--max-model-len", "64"]
        )
        == 0
    )
    assert load_profile(directory, engine, 64) is None
    assert (
        load_profile(directory, open_engine(directory, kv_cache_dtype="fp8"), 64).chunk_bytes
        < cost.chunk_bytes / 3
    )


@pytest.mark.slow
def test_the_command_measures_two_ranks(tmp_path):
    directory = build_tiny(tmp_path, tensor_parallel=2)
    words = [
        sys.executable,
        "-m",
        "pensieve.scripts.profile_engine",
        "--engine",
        str(directory),
        *SMALL,
        "--json",
    ]
    alone = {"OMP_NUM_THREADS": "1", **os.environ}  # it starts its ranks by itself
    ended = subprocess.run(words, env=alone, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()  # of rank 0
    assert json.loads(line)["cost"]["chunk_bytes"] == open_engine(directory, rank=1).chunk_bytes(64)
    assert Profile.read(directory / PROFILE).engine == Manifest.read(directory).fingerprint

    words += ["--gpu-kv-bytes", "16KiB"]
    ended = subprocess.run(words, env=alone, capture_output=True, text=True, timeout=120)
    assert (
        ended.returncode == 2
        and ended.stderr.count("pensieve profile: --gpu-kv-bytes: must hold") == 1
    )


def test_the_command_draws_both_figures(directory, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = [*SMALL, "--chunk-tokens", "32", "--json", "--plots", str(tmp_path / "plots")]
    assert main(["--engine", str(directory), *options]) == 0
    line = json.loads(capsys.readouterr().out)
    (turn,) = line["turns"]  # the next longer history exceeds the model's context
    assert line["bench"] == "profile" and turn["history"] == 256
    assert min(turn["prefill_recomputed"], turn["prefill_cached"], turn["generation"]) > 0
    names = ["chunk_by_context.png", "turn_by_history.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "--seconds: must be above 0"),
        (["--max-model-len", "4096"], "--max-model-len: 4096 is more than the model's 512"),
        (["--gpu-kv-bytes", "lots"], "--gpu-kv-bytes: 'lots' is not a size"),
        (["--gpu-kv-bytes", "64KiB"], "--gpu-kv-bytes: must hold"),
        (
            ["--max-num-batched-tokens", "16"],
            "--max-num-batched-tokens: must hold a chunk of 32 tokens",
        ),
        (["--device", "cpu", "--engine", "nowhere"], "--engine: nowhere is no engine"),
    ],
)
def test_a_wrong_setting_is_named(directory, capsys, options, message):
    assert main(["--engine", str(directory), "--max-num-seqs", "4", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_command_on_a_gpu(tmp_path, capsys):
    directory = build_tiny(tmp_path, device="cuda", dtype="bfloat16")
    assert main(["--engine", str(directory), "--device", "cuda", *SMALL, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["hardware"] == torch.cuda.get_device_name()
    engine = open_engine(directory, "cuda")
    cost = load_profile(directory, engine, 64)
    assert cost is not None and 0 < cost.recompute(512) < 1 and cost.swap_in() < 1e-3


def test_an_estimate_and_a_measurement_answer_the_same_questions(profile, engine):
    decoder = engine.manifest.decoder
    estimate = analytic_profile(
        chunk_tokens=CHUNK,
        parameters=engine.parameters,
        layers=decoder.layers,
        attention_width=decoder.heads * decoder.head_dim,
        chunk_bytes=engine.chunk_bytes(CHUNK),
        max_context=CONFIG.max_model_len,
        flops_per_s=1e10,
        link_bytes_per_s=1e9,
        step_base_seconds=1e-3,
    )
    for cost in (estimate, profile.cost):
        assert cost.chunk_bytes == engine.chunk_bytes(CHUNK)
        assert 0 < cost.step(32, 64, rows=2, rows_context=64) < 1
