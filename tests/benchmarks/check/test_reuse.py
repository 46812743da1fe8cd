"""check.reuse on the CPU: every way occurs, all agree, and a difference fails."""

import json
from math import inf

import pytest
import torch

from benchmarks.check import reuse
from benchmarks.check.reuse import SOURCES, Way, judge, states_of
from benchmarks.check.reuse_ways import DISK, FETCHED, WAYS, WAYS_OF_RANKS, WAYS_OF_STATES
from benchmarks.loop import LoopAnswer
from pensieve.builder.build import build_engine
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import Tier, TokenLogprobs, Usage
from tests.benchmarks.test_ranks import json_lines
from tests.models import save_random, tiny_checkpoint, tiny_config

SMALL = ["--tokens", "80", "--repetitions", "2", "--chunk-tokens", "8"]
WITH_STATES = ["--tokens", "192", "--repetitions", "3", "--chunk-tokens", "8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    tiny_checkpoint("llama", directory)
    return directory


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request, checkpoint, tmp_path):
    build_engine(checkpoint, tmp_path / "engine", dtype=request.param)
    return str(tmp_path / "engine")


@pytest.mark.slow
def test_all_ways_agree(engine, capsys):
    assert reuse.main(["--engine", engine, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("PASS")
    told = json.loads(lines[-1])
    assert list(told["ways"]) == list(WAYS) and told["passed"]
    assert all(way["count"] == 2 for way in told["ways"].values())


@pytest.mark.slow
def test_all_ways_agree_on_two_ranks(checkpoint, tmp_path):
    build_engine(checkpoint, tmp_path / "engine", dtype="float32", tensor_parallel=2)
    lines = json_lines("benchmarks.check.reuse", "--engine", tmp_path / "engine", *SMALL)
    assert list(lines[-1]["ways"]) == list(WAYS_OF_RANKS) and lines[-1]["passed"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("hybrid")
    config = tiny_config("qwen3-5")
    # so large that a prompt leaves states only where it ends and parts
    config.linear_num_value_heads = 8
    config.linear_value_head_dim = 64
    save_random(config, directory, gain=1.0)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ways_of_states_agree(hybrid, dtype, tmp_path, capsys):
    build_engine(hybrid, tmp_path / "engine", dtype=dtype)
    assert reuse.main(["--engine", str(tmp_path / "engine"), *WITH_STATES]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["passed"] and list(told["ways"]) == list(WAYS_OF_STATES)
    assert all(way["count"] == 3 for way in told["ways"].values())
    assert told["ways"]["alone-half"]["tokens"]["gpu"] and told["ways"][DISK]["tokens"]["disk"]
    assert told["ways"][FETCHED]["tokens"]["shared"]


@pytest.mark.slow
def test_all_ways_of_states_agree_on_two_ranks(hybrid, tmp_path):
    build_engine(hybrid, tmp_path / "engine", dtype="float32", tensor_parallel=2)
    lines = json_lines("benchmarks.check.reuse", "--engine", tmp_path / "engine", *WITH_STATES)
    assert lines[-1]["passed"]
    of_ranks = [way for way in WAYS_OF_STATES if way not in (DISK, FETCHED)]
    assert list(lines[-1]["ways"]) == of_ranks


@pytest.mark.slow
def test_a_state_of_which_a_piece_does_not_come_back_is_detected(
    hybrid, tmp_path, capsys, monkeypatch
):
    """It is the last piece of every state, on its way to the last slots of the GPU's pool."""
    build_engine(hybrid, tmp_path / "engine", dtype="float32")
    states = states_of(open_engine(tmp_path / "engine"), 8)
    copy = CpuDevice.copy

    def incomplete(self, lane, sources, targets, layers):
        if lane is Lane.IN:
            behind = len(self._pools[Tier.GPU]) - targets
            lost = (behind <= states.slots * states.chunks) & (behind % states.chunks == 1)
            sources, targets = sources[~lost], targets[~lost]
        copy(self, lane, sources, targets, layers)

    monkeypatch.setattr(CpuDevice, "copy", incomplete)
    assert reuse.main(["--engine", str(tmp_path / "engine"), *WITH_STATES]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    ways = told["ways"]
    assert ways["alone-host"]["other_bits"] and ways["host"]["to_float32_max"] > told["tolerance"]


def test_a_prompt_with_states_is_long_enough_for_holes(hybrid, tmp_path, capsys):
    build_engine(hybrid, tmp_path / "engine", dtype="float32")
    assert reuse.main(["--engine", str(tmp_path / "engine"), *SMALL]) == 2
    assert "--tokens: with states prompts have at least 192 tokens" in capsys.readouterr().err


def test_rows_whose_prompts_fill_their_chunks_leave_room_for_the_prompt(
    checkpoint, tmp_path, capsys
):
    build_engine(checkpoint, tmp_path / "engine", dtype="float32")
    assert reuse.main(["--engine", str(tmp_path / "engine"), *SMALL, "--tokens", "128"]) == 0
    assert "PASS" in capsys.readouterr().out


@pytest.mark.slow
def test_packed_kv_is_as_good(checkpoint, tmp_path, capsys):
    build_engine(checkpoint, tmp_path / "engine", dtype="bfloat16")
    assert (
        reuse.main(["--engine", str(tmp_path / "engine"), *SMALL, "--lower-tier-kv", "packed"]) == 0
    )
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["passed"] and list(told["ways"]) == list(WAYS)


@pytest.mark.slow
def test_kv_in_eight_bits_is_as_good_as_cold(checkpoint, tmp_path, capsys):
    build_engine(checkpoint, tmp_path / "engine", dtype="float32")
    arguments = ["--engine", str(tmp_path / "engine"), *SMALL, "--kv-cache-dtype", "fp8"]
    assert reuse.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["passed"] and told["ways"]["cold"]["to_float32_max"] > 1e-4
    assert reuse.main([*arguments, "--lower-tier-kv", "packed"]) == 2
    assert "--lower-tier-kv: cannot be given beside --kv-cache-dtype" in capsys.readouterr().err


def test_packed_kv_is_for_bfloat16(checkpoint, tmp_path, capsys):
    build_engine(checkpoint, tmp_path / "engine", dtype="float32")
    assert (
        reuse.main(["--engine", str(tmp_path / "engine"), *SMALL, "--lower-tier-kv", "packed"]) == 2
    )
    assert "packed is for engines built with bfloat16" in capsys.readouterr().err


def answer(*tokens, logprob=-1.0, others=(7, 8, 9)):
    told = [TokenLogprobs(logprob, 1, others, (-2.0, -2.5, -3.0)) for _ in tokens]
    return LoopAnswer(list(tokens), told, Usage(**dict.fromkeys(SOURCES, 1)), True)


def test_a_difference_is_found_where_both_tell():
    way = Way()
    way.add(answer(1, 2), answer(1, logprob=-1.5, others=(7, 8, 6)), answer(1, 2, logprob=-1.25))
    assert sorted(way.to_float32) == [0, 0, 0.5]
    assert max(way.to_float32) == 0.5 and max(way.to_cold) == 0.25 and not way.gaps


def test_replies_are_compared_up_to_the_first_differing_token():
    way = Way()
    way.add(answer(1, 7, 5), answer(1), answer(1, 8, 4))
    assert way.gaps == [1.5]
    unseen = Way()
    unseen.add(answer(1, 5), answer(1), answer(1, 4))
    assert unseen.gaps == [inf]


def test_other_bits_fail():
    way = Way(1, to_float32=[0.0], to_cold=[0.0], other_bits=1)
    assert judge({"cold": Way(1, to_float32=[1.0]), "alone-host": way}, False)[1] == ["alone-host"]


@pytest.mark.parametrize("float32", [False, True])
def test_a_larger_difference_than_allowed_fails(float32):
    cold = Way(1, to_float32=[5e-5], to_cold=[0.0])
    near, far = Way(1, to_float32=[9e-5], to_cold=[9e-5]), Way(1, to_float32=[2e-4], to_cold=[2e-4])
    nan = Way(1, to_float32=[float("nan")], to_cold=[0.0])
    no_tie = Way(1, to_float32=[0.0], to_cold=[0.0], gaps=[1e-3])
    tolerance, failed = judge(
        {"cold": cold, "gpu": near, "host": far, "partly": nan, "suspended": no_tie}, float32
    )
    assert tolerance == pytest.approx(1e-4) and failed == ["host", "partly", "suspended"]


@pytest.mark.slow
def test_kv_that_comes_back_wrong_is_found(checkpoint, tmp_path, capsys, monkeypatch):
    """The copies in leave a layer out."""
    copy = CpuDevice.copy

    def incomplete(self, lane, sources, targets, layers):
        if lane is not Lane.IN or 1 not in layers:
            copy(self, lane, sources, targets, layers)

    monkeypatch.setattr(CpuDevice, "copy", incomplete)
    build_engine(checkpoint, tmp_path / "engine")
    assert reuse.main(["--engine", str(tmp_path / "engine"), *SMALL]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not told["passed"]
    assert (
        told["ways"]["host"]["to_float32_max"]
        > told["tolerance"]
        > told["ways"]["cold"]["to_float32_max"]
    )
