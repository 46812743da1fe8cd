"""The papers' evaluations in small: runs, values of each figure, verdicts, and a GPU's result
lines."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.paper import __main__ as paper_main
from benchmarks.paper import cachedattention, device, pensieve
from benchmarks.paper.__main__ import main
from benchmarks.paper.cachedattention import (
    MODELS,
    CachedAttentionCase,
    _in_units,
    chats,
    policy_label,
    profile,
)
from benchmarks.paper.overlap import A100, copy_s, pipelined_s, prefill_s
from benchmarks.paper.report import (
    HOWS,
    Claim,
    Figure,
    FigureValue,
    append,
    gathered,
    read_figures,
    table,
)
from benchmarks.paper.sessions import play
from pensieve.scheduler.sim.simulator import Report, Session, SessionTurn
from pensieve.scheduler.types import SettingError, Usage

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
POINT = {"done_per_s": 2.0, "host_percent": 50.0, "recomputed_percent": 5.0}
SMALL = [
    "cachedattention",
    "--sessions",
    "40",
    "--warm-up",
    "20",
    "--models",
    "falcon-40b",
    "--jobs",
    "1",
]


def test_lengths_are_rounded_without_a_drift_and_replies_end_at_half_a_window():
    model = MODELS["llama-13b"]
    turns = []
    history = 0
    for _ in range(30):
        turns.append(SessionTurn(history, 38, 305, 1.0))
        history += 343
    units = list(_in_units(turns, model))
    assert [turn.history_tokens for turn in units] == [
        sum(turn.input_tokens + turn.output_tokens for turn in units[:index])
        for index in range(len(units))
    ]
    total = units[-1].history_tokens + units[-1].input_tokens + units[-1].output_tokens
    assert len(units) == 30 and abs(total - 30 * 343 / model.unit) < 2
    (long,) = _in_units([SessionTurn(0, 100, 9000, 0.0)], model)
    assert long.output_tokens == model.window // model.unit // 2


def test_sessions_are_as_long_as_the_paper_says():
    """Figure 2: 47% of them have more than 2,048 tokens and 30% more than 4,096; there are 52,000
    turns."""
    sessions = chats(9000, 1.0, MODELS["llama-13b"])
    lengths = [sum(session.turns[-1][:3]) * MODELS["llama-13b"].unit for session in sessions]
    assert sum(len(session.turns) for session in sessions) == pytest.approx(52_000, rel=0.02)
    assert sum(length > 2048 for length in lengths) / 9000 == pytest.approx(0.47, abs=0.03)
    assert sum(length > 4096 for length in lengths) / 9000 == pytest.approx(0.27, abs=0.03)


def test_sessions_of_a_trace_are_drawn_again(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"conversation": "a", "think_s": 0.0, "arrival_s": None}
    turns = (
        {"turn": 0, "input_tokens": 256, "history_tokens": 0},
        {"turn": 1, "input_tokens": 9000, "history_tokens": 384},
    )
    trace.write_text(
        "".join(json.dumps({**line, **turn, "output_tokens": 128}) + "\n" for turn in turns)
    )
    drawn = chats(5, 1.0, MODELS["llama-13b"], str(trace))
    assert [session.turns for session in drawn] == [
        (SessionTurn(0, 2, 1), SessionTurn(3, 16, 1))
    ] * 5
    assert (
        len({session.name for session in drawn}) == 5
        and len({session.start_s for session in drawn}) == 5
    )


def test_a_unit_takes_as_long_as_its_tokens():
    model = MODELS["llama-13b"]
    cost = profile(model)
    prefill = 2 * model.shape.parameters * model.unit / (2 * 156e12)
    assert cost.chunk_seconds == pytest.approx(prefill)
    weights = 2 * model.shape.parameters
    context = 10 * model.unit * model.shape.token_bytes
    steps = model.unit * (weights + context) / (2 * 1.6e12)
    assert cost.step(0, rows=1, rows_context=10) == pytest.approx(steps + prefill, rel=1e-6)


def test_a_label_tells_what_is_not_as_usual():
    assert policy_label(CachedAttentionCase("llama-13b")) == "lru"
    assert (
        policy_label(CachedAttentionCase("llama-13b", save="sync", overflow="recompute"))
        == "lru sync recompute"
    )
    assert policy_label(CachedAttentionCase("llama-13b", reuse=False)) == "recompute all"


# -- the paper's server


def in_turns(conversations: int, turns: int) -> list[Session]:
    """They come at once and think for no time, so the queue serves them in rounds."""
    one = tuple(SessionTurn(100 * n, 50, 50, 0.0) for n in range(turns))
    return [Session(f"s{n}", 0.0, one) for n in range(conversations)]


def test_a_queue_in_rounds_defeats_lru_and_not_a_cache_that_knows_it():
    """LRU evicts the session that is needed next. So if a round does not fit as a whole, no session
    of it is found."""
    setting = {"token_bytes": 1, "window": 10_000, "warm_up": 10}
    hits = {
        policy: play(in_turns(10, 4), policy, 1500, **setting).hit_of_later
        for policy in ("ca", "lru", "fifo")
    }
    assert hits["lru"] <= 0.2 and hits["fifo"] < 0.4 and hits["ca"] >= 0.5
    roomy = play(in_turns(10, 4), "lru", 10_000, **setting)
    assert roomy.hit_of_later == 1 and roomy.first == 0
    assert play(in_turns(10, 4), "lru", 0, **setting).hit == 0


def test_the_papers_hit_rates_come_from_its_queue():
    """A tenth of the paper's sessions at ten times its rate, on a tenth of the bytes: figure 21's
    order, in small."""
    sessions = chats(900, 10.0, MODELS["llama-13b"])
    unit = {
        "token_bytes": MODELS["llama-13b"].shape.token_bytes * 128,
        "window": 32,
        "warm_up": 1000,
    }
    hits = {
        policy: play(sessions, policy, 0.2128e12, slower=4, **unit).hit
        for policy in ("ca", "lru", "fifo")
    }
    assert hits["ca"] > hits["lru"] + 0.25 and hits["ca"] > hits["fifo"] + 0.25


# -- overlap


def test_preloading_takes_the_longer_of_copy_and_compute_and_a_layer():
    assert pipelined_s(4.0, 2.0, 0, layers=40) == pytest.approx(4.0 + 2.0 / 40)
    assert pipelined_s(2.0, 4.0, 0, layers=40) == pytest.approx(4.0 + 2.0 / 40)
    assert pipelined_s(4.0, 2.0, 40, layers=40) == pytest.approx(2.0)


def test_the_papers_preloading_follows_from_its_hardware():
    """Figure 19: 35% less without a read buffer, 61% with one of 15 layers."""
    load = copy_s(A100, 1000)
    compute = prefill_s(A100, 100)
    for buffer, saved in ((0, 0.35), (15, 0.61)):
        assert 1 - pipelined_s(load, compute, buffer) / (load + compute) == pytest.approx(
            saved, abs=0.04
        )


# -- claims and verdicts


def figure(**claims: Claim) -> Figure:
    return Figure("1", "a subject", "section 1", claims, "a reason", "")


@pytest.mark.parametrize("how", HOWS)
def test_only_what_ran_on_the_hardware_is_reproduced(how):
    verdict = figure(a=Claim("1", 0.9, 1.1), b=Claim("1", 0.9, 1.1)).verdict(
        {"a": FigureValue(1.0, "hardware"), "b": FigureValue(1.0, how)}
    )
    assert ("reproduced" in verdict) == (how == "hardware")
    assert verdict.endswith(HOWS[how] if how == "hardware" else f"{HOWS[how]}: agrees")


def test_a_difference_has_its_reason_and_a_missing_run_is_told():
    claims = figure(a=Claim("1", 0.9, 1.1), b=Claim("2", 1.8, 2.2))
    assert claims.verdict({}) == "not run"
    assert (
        claims.verdict({"a": FigureValue(2.0, "simulated")})
        == "simulated: differs; a reason (1 not run)"
    )
    measured = {"a": FigureValue(1.0, "hardware"), "b": FigureValue(1.0, "hardware")}
    assert claims.verdict(measured) == "measured on hardware: 1 of 2 agree; a reason"


def test_a_lower_bound_or_the_value_itself_is_enough():
    claims = figure(**{"a": Claim("1", 0.9, 1.1), "a, at least": Claim("1", 0.9, 1.1)})
    assert claims.verdict({"a": FigureValue(1.0, "hardware")}) == "reproduced on hardware"
    assert (
        claims.verdict({"a, at least": FigureValue(1.0, "other settings")})
        == "on hardware with other settings: agrees"
    )


def test_a_claim_without_bounds_is_shown_and_not_judged():
    claims = figure(a=Claim.read(["above 1", None, None], 0.1), b=Claim("1", 0.9, 1.1))
    values = {"a": FigureValue(0.5, "simulated"), "b": FigureValue(1.0, "hardware")}
    assert claims.verdict(values) == "reproduced on hardware"
    assert (
        figure(a=Claim.read(["above 1", None, None], 0.1)).verdict(values).startswith("no verdict")
    )
    assert "a: above 1, 0.5" in table([claims], {"1": values})


def test_values_without_a_claim_share_a_line_if_only_their_last_part_differs():
    names = ("a, 1 token", "b, c, d", "a", "a, 2 tokens")
    values = {name: FigureValue(0.5, "hardware") for name in names}
    assert "| a: 1 token **0.5**; **0.5**; 2 tokens **0.5**<br>b, c, d: **0.5** |" in table(
        [figure()], {"1": values}
    )


def test_values_without_a_claim_are_shown_only_if_they_were_measured():
    values = {how: FigureValue(0.5, how) for how in ("computed", "simulated", "hardware")}
    assert "| hardware: **0.5** |" in table([figure()], {"1": values})


def test_the_values_of_several_seeds_are_shown_as_their_mean_and_range():
    values = gathered({"1": {"b": [0.8, 1.2, 1.0]}}, [])
    assert values["1"]["b"] == FigureValue(1.0, "simulated", (0.8, 1.2, 1.0))
    assert "b: 1, 1 (3 seeds: 0.8 to 1.2)" in table([figure(b=Claim("1", 0.9, 1.1))], values)
    opt = pensieve.PensieveCase(pensieve.OPT, "sharegpt", "pensieve", 0.65)
    point = {**POINT, "ms_per_token": 50.0}
    hosts = {("pensieve", 0): 52, ("lru", 0): 50, ("pensieve", 3): 51, ("lru", 3): 50}
    runs = {
        replace(opt, server=server, seed=seed): {**point, "host_percent": host}
        for (server, seed), host in hosts.items()
    }
    assert pensieve.values_by_seed(runs)["14"]["host hits, points above LRU's, at 0.65/s"] == [2, 1]


def test_a_better_way_counts_and_then_the_later_record():
    records = [
        {"figure": "1", "how": "hardware", "values": {"a": 2.0}},
        {"figure": "1", "how": "hardware", "values": {"a": 3.0}},
        {"figure": "1", "how": "simulated", "values": {"a": 4.0}},
    ]
    assert gathered({"1": {"a": 1.0}}, records) == {"1": {"a": FigureValue(3.0, "hardware")}}
    assert gathered({"1": {"a": 1.0}}, records[2:]) == {"1": {"a": FigureValue(1.0, "simulated")}}
    assert gathered({"1": {"a": 1.0}}, [], computed=("1",)) == {
        "1": {"a": FigureValue(1.0, "computed")}
    }


def a_report(host: int = 60) -> Report:
    usage = Usage(
        **dict.fromkeys(Usage.__dataclass_fields__, 0) | {"host": host, "new": 100 - host}
    )
    return Report(100, usage, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 0, 0, 0, 0, 0, full_hits=50)


def test_every_claim_has_a_value_or_a_command():
    """So a claim's name is not misspelt: simulated, from a GPU's lines, or recorded in
    docs/measured."""
    cases = {
        case
        for make in cachedattention.FIGURES.values()
        for model in MODELS
        for case in make(model)
    }
    points = {case for some in pensieve.FIGURES.values() for case in some}
    by_paper = {
        "cachedattention": cachedattention.values(
            {case: a_report(60 if case.reuse else 0) for case in cases}
        ),
        "pensieve": pensieve.values(
            {case: {**POINT, "ms_per_token": 1000 * case.rate} for case in points}
        ),
    }
    lines = [
        json.loads(line)
        for path in MEASURED.glob("paper-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    for paper, figures in by_paper.items():
        covered = {(number, name) for number, some in figures.items() for name in some}
        covered |= {
            (line["figure"], name)
            for line in lines
            if line["paper"] == paper
            for name in line.get("values", ())
        }
        covered |= {(number, device.OVER_VLLM) for number in pensieve.LIMITS_MS}
        covered |= {
            (number, "requests/s over a stateless server's") for number in pensieve.LIMITS_MS
        }
        # not run: no command
        covered |= {(number, "requests/s over TensorRT-LLM's") for number in pensieve.LIMITS_MS}
        covered.add(
            ("15", "requests/s over a stateless server's at 180 ms a token, think time 600 s")
        )
        for claims in read_figures(paper):
            unknown = [name for name in claims.claims if (claims.number, name) not in covered]
            assert claims.not_run or not unknown, f"{paper} {claims.number}: {unknown}"


def test_throughput_is_read_between_the_rates_around_a_limit():
    assert pensieve.between_rates([(50, 1.0), (100, 2.0), (300, 2.2)], 200) == pytest.approx(2.1)
    assert pensieve.between_rates([(70, 1.0), (50, 2.0), (100, 3.0)], 60) == pytest.approx(2.2)
    assert pensieve.between_rates([(50, 1.0)], 200) is None


@pytest.mark.parametrize("server", ["pensieve", "stateless"])
def test_a_point_of_pensieves_curves_is_simulated(monkeypatch, server):
    monkeypatch.setattr(pensieve, "SECONDS", 60.0)
    monkeypatch.setattr(pensieve, "MEASURE_S", 30.0)
    monkeypatch.setattr(pensieve, "RAMP_S", 10.0)
    point = pensieve.run(pensieve.PensieveCase(pensieve.OPT, "sharegpt", server, 0.3, think_s=5.0))
    assert point["done_per_s"] > 0 and (point["host_percent"] + point["gpu_percent"] > 0) == (
        server == "pensieve"
    )


def test_pensieves_runs_have_the_papers_settings_and_no_record_of_others_counts(
    monkeypatch, capsys, tmp_path
):
    """First come, first served; KV is copied out below 25% of free slots, 10% are reserved. The
    stateless server has whole prompts in a step, and reserves 1%."""
    configs = []

    def simulated(run):
        configs.append(run.config)
        return {**POINT, "ms_per_token": 50.0}

    monkeypatch.setattr(pensieve, "simulate_load", simulated)
    case = pensieve.PensieveCase(pensieve.OPT, "sharegpt", "pensieve", 0.65)
    point = pensieve.run(case)
    pensieve.run(replace(case, server="stateless"))
    ours, stateless = configs
    assert ours.queue_order == stateless.queue_order == "arrival"
    assert (ours.swap_out_below, ours.generation_reserve) == (0.25, 0.1)
    assert (stateless.max_num_batched_tokens, stateless.generation_reserve) == (16_384, 0.01)
    heading = {"paper": "pensieve", "how": "simulated"}
    key = {"settings": pensieve.SETTINGS}
    for server, settings in (("lru", key), ("pensieve", {}), ("pensieve", key)):
        record = {"case": asdict(replace(case, server=server)), "found": point}
        append(tmp_path / "runs", {**heading, **settings, **record})
        reported = main(["pensieve", "--report", "--results", str(tmp_path / "runs")])
        assert reported == 0
        told = "host hits, points above LRU's, at 0.65/s: up to 4.4, 0<br>"
        assert (told in capsys.readouterr().out) == (server == "pensieve" and bool(settings))


def test_a_traces_rates_replace_the_figures(monkeypatch, capsys, tmp_path):
    """The throughput at figure 10's limit is read from these rates too."""
    options = [
        "pensieve",
        "--figures",
        "10c",
        "--trace",
        "trace",
        "--rates",
        "2,3",
        "--results",
        str(tmp_path / "runs"),
    ]

    def record(args, files, cases, run, key):
        assert {(case.rate, case.trace) for case in cases} == {(2.0, "trace"), (3.0, "trace")}
        for case in set(cases):
            ms = 100 * (case.rate - 1) * (1 if case.server == "pensieve" else 1.1)
            assert case.seed in (0, 4)
            heading = {"paper": "pensieve", "how": "simulated", **key, "case": asdict(case)}
            append(
                files[-1],
                {**heading, "found": {**POINT, "ms_per_token": ms, "done_per_s": case.rate}},
            )

    monkeypatch.setattr(paper_main, "missing_runs", record)
    assert main(options) == 0
    assert "requests/s over a stateless server's: 1.17, 1.05" in capsys.readouterr().out
    assert main([*options, "--seeds", "0,4"]) == 0
    assert "1.17, 1.05 (2 seeds: 1.05 to 1.05)" in capsys.readouterr().out
    assert main([*options, "--rates", "0,1"]) == 2


# -- recorded lines of commands


def test_a_profiles_line_gives_pensieves_figures_3_and_4_and_the_links_loss():
    line = {
        "bench": "profile",
        "turns": [
            {
                "history": 4096,
                "prefill_recomputed": 5.282,
                "prefill_cached": 0.064,
                "generation": 2.845,
            }
        ],
        "cost": {"chunk_seconds": 1.19e-3, "attention": [[1024, 0.05e-3], [16384, 0.93e-3]]},
        "measured": {"copies": [[40, 64, 7.5e-3, 7.5e-3, 8.3e-3]]},
    }
    values = device.profile_values([line])
    assert values["3"] == {
        "prefill over generation, 4,096 tokens of history": pytest.approx(1.857, rel=1e-3)
    }
    assert values["4"] == {
        "a chunk at 16,384 tokens over one at 1,024": pytest.approx(1.71, rel=1e-2)
    }
    assert list(values["section 5"].values()) == pytest.approx([9.6, 0.904, 1.807], rel=0.01)
    line["cost"]["attention"] = [[1024, 1e-3], [8192, 8e-3], [16384, 16e-3]]
    assert device.profile_values([line])["4"][device.LINEAR] == pytest.approx(15 / 7)


def test_what_only_follows_from_measured_speeds_is_called_computed(monkeypatch, tmp_path):
    line = {
        "bench": "profile",
        "turns": [],
        "cost": {"chunk_seconds": 1e-3, "attention": [[1024, 1e-4]]},
        "measured": {"copies": [[40, 64, 7.5e-3, 7.5e-3, 8.3e-3]]},
    }
    done = SimpleNamespace(returncode=0, stdout=json.dumps(line))
    monkeypatch.setattr(device.subprocess, "run", lambda *words, **how: done)
    monkeypatch.setitem(device.MEASUREMENTS, "pensieve", (device.PROFILE,))
    records = list(device.measure("pensieve", ["section 5"], tmp_path, None, tmp_path))
    assert [(record["how"], len(record["values"])) for record in records] == [
        ("hardware", 1),
        ("computed", 2),
    ]


def test_a_kernel_benchs_line_gives_figure_12():
    row = {
        "heads": "40/40",
        "ours": 1252.4,
        "contiguous": 2100.0,
        "copy out": 17318.0,
        "rounds": 9486.0,
    }
    shapes = ("append 32 x 8 at 8192", "queries 32 x 4 at 8192", "mixed 96 decode + 16 append")
    line = {"gpu": "NVIDIA H200", "results": [{"shape": shape, **row} for shape in shapes]}
    values = device.kernel_values([line])["12"]
    assert values["copied out over ours, 8,192 tokens"] == pytest.approx(13.83, rel=1e-3)
    assert values["one token a round over ours, 4 query tokens at 8,192"] == pytest.approx(
        7.574, rel=1e-3
    )
    assert device.machine([line]) == "NVIDIA H200" and len(values) == 6


def test_a_tier_benchs_line_gives_cachedattentions_figures_14_and_15():
    values = device.tier_values([{"bench": "tiers_tiers", "host_s": 0.0264, "recomputed_s": 0.233}])
    assert [round(next(iter(values[number].values())), 1) for number in ("14", "15")] == [88.7, 8.8]
    with pytest.raises(SettingError, match="printed no line of tiers_tiers"):
        device.tier_values([])


def test_a_batchs_lines_give_the_figures_of_overlapped_access():
    """A save that stops the GPU takes the turn's time and the copy's; loading first, the copy's and
    the step's."""
    times = {"recomputed_s": 0.6, "host_s": 0.2, "gpu_s": 0.1, "copy_in_s": 0.2}
    splits = [{"split": split, **times} for split in ("500/500", "1000/100")]
    turns = [{"prompt": 1000, "dropped_s": 0.1, "copied_beside_s": 0.11, "copy_out_s": 0.025}]
    lines = [
        {"bench": "tiers_batch", "splits": splits},
        {"bench": "tiers_saved_batch", "turns": turns},
    ]
    by_figure = device.batch_values(lines)
    assert list(by_figure["18"].values()) == pytest.approx([3, 2, 6])
    assert list(by_figure["19"].values()) == pytest.approx([100 / 3, 200 / 3])
    assert by_figure["20"] == {"saved at 1000 tokens": pytest.approx(12)}
    claimed = {figure.number: set(figure.claims) for figure in read_figures("cachedattention")}
    assert all(claimed[number] & set(values) for number, values in by_figure.items())


def test_lines_of_versus_give_serving_figures():
    lines = [
        json.loads(line) for line in (MEASURED / "versus-2026-11-24.jsonl").read_text().splitlines()
    ]
    chats_lines = [line for line in lines if line["workload"] == "chats"]
    claims = [
        device.FigureComparison("13", "vllm-simple-offload", "time a token"),
        *(device.FigureComparison(number, "vllm-offload", "more") for number in ("10b", "15")),
    ]
    values = device.versus_values(claims)(chats_lines)
    assert values["13"] and all(ratio > 1 for ratio in values["13"].values())
    assert list(values["10b"]) == list(values["15"]) == ["more, at least"], (
        "no rate of ours takes 68 ms a token"
    )


def test_a_policys_sources_are_compared_too():
    def line(server, ms, host, recomputed):
        sources = {"gpu": 10, "host": host, "recomputed": recomputed}
        row = {"rate": 2, "ms_per_token_mean": ms, "completed_per_s": 1.0, "sources": sources}
        return {"server": server, "machine": {"name": "NVIDIA H200"}, "result": row}

    lines = [line(device.RETENTION, 20.0, 80, 10), line("pensieve", 22.0, 70, 20)]
    values = device.versus_values([device.LRU])(lines)["14"]
    assert list(values.values()) == pytest.approx([1.1, 10, 50])


def test_requests_are_compared_at_a_time_that_fits_the_faster_gpu():
    limit = 180 / device.memory_speedup("NVIDIA H200")
    assert 60 < limit < 75
    with pytest.raises(
        SettingError, match="speed of an L4's memory is not known: only A100, H200's"
    ):
        device.memory_speedup("an L4")

    def line(server, rate, ms, done):
        return {
            "server": server,
            "machine": {"name": "NVIDIA H200"},
            "result": {"rate": rate, "ms_per_token_mean": ms, "completed_per_s": done},
        }

    lines = [line("pensieve", 2, limit - 10, 10.0), line("pensieve", 3, limit + 10, 14.0)]
    lines += [line("vllm", 3, limit + 1, 6.0), line("vllm", 2, limit - 1, 4.0)]
    assert device.versus_values([device.FigureComparison("10b", "vllm", "more")])(lines) == {
        "10b": {"more": pytest.approx(12 / 5)}
    }


@pytest.mark.parametrize(
    "measurement", [one for some in device.MEASUREMENTS.values() for one in some]
)
def test_the_commands_for_a_gpu_exist_with_their_options(measurement):
    name, *words = (
        word.format(engine="engine", output="output", vllm="site") for word in measurement.words
    )
    command = importlib.import_module(name)
    assert command.parser().parse_args(words)
    if name == "benchmarks.versus":
        assert Path(words[words.index("--shape") + 1]).is_file()


def test_what_a_gpu_printed_becomes_a_record(monkeypatch, tmp_path):
    row = {
        "shape": "append 32 x 8 at 8192",
        "heads": "40/40",
        "ours": 1.0,
        "contiguous": 2.0,
        "copy out": 3.0,
    }
    line = json.dumps({"gpu": "NVIDIA H200", "results": [{**row, "rounds": 4.0}]})
    done = SimpleNamespace(returncode=0, stdout=f"some words\n{line}\n")
    monkeypatch.setattr(device.subprocess, "run", lambda *words, **how: done)
    results = tmp_path / "runs.jsonl"
    # needs no engine
    options = ["pensieve", "--device", "cuda", "--figures", "12", "--results", str(results)]
    assert main(options) == 0
    (record,) = [json.loads(line) for line in results.read_text().splitlines()]
    assert (record["how"], record["figure"], record["machine"]) == ("hardware", "12", "NVIDIA H200")
    assert record["source"].startswith("benchmarks.kernels") and len(record["values"]) == 3
    done.returncode = 1
    assert main(options) == 2


def test_a_gpu_run_with_other_settings_reproduces_nothing(monkeypatch, tmp_path, capsys):
    printed = [
        {
            "server": server,
            "machine": {"name": "NVIDIA H200"},
            "result": {"rate": rate, "ms_per_token_mean": ms * rate, "completed_per_s": rate},
        }
        for server, ms in (("pensieve", 30.0), ("vllm", 37.5))
        for rate in (1.0, 2.0)
    ]
    done = SimpleNamespace(returncode=0, stdout="\n".join(map(json.dumps, printed)))
    monkeypatch.setattr(device.subprocess, "run", lambda *words, **how: done)
    results = tmp_path / "runs.jsonl"
    assert (
        main(["pensieve", "--device", "cuda", "--figures", "10a,15", "--results", str(results)])
        == 0
    )
    assert {json.loads(line)["how"] for line in results.read_text().splitlines()} == {
        "other settings"
    }
    told = capsys.readouterr().out
    assert "on hardware with other settings: agrees" in told and "reproduced" not in told
    paper_settings = {
        one for some in device.MEASUREMENTS.values() for one in some if one.how == "hardware"
    }
    assert paper_settings == {device.PROFILE, device.KERNELS, device.BATCH}


# -- the command


def test_a_record_and_a_verdict_for_each_figure_and_no_run_twice(capsys, tmp_path):
    results = tmp_path / "runs.jsonl"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- the table of `paper` -->\n<!-- its end -->\nafter\n")
    options = [*SMALL, "--results", str(results), "--figures", "13,24", "--page", str(page)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(lines) == 4, "one case is in both figures"
    assert {line["how"] for line in lines} == {"simulated"}
    assert cachedattention.read_report(lines[0]["found"]).requests > 0
    assert [asdict(CachedAttentionCase(**line["case"])) for line in lines] == [
        line["case"] for line in lines
    ]
    assert main([*options, "--report"]) == main(options) == 0
    assert len(results.read_text().splitlines()) == 4
    text = page.read_text()
    assert (
        text.startswith("before\n") and text.endswith("\nafter\n") and "reproduced" not in printed
    )
    assert text.count("\n| ") == 1 + len(read_figures("cachedattention"))


@pytest.mark.slow
def test_the_values_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert (
        main(
            [
                *SMALL,
                "--figures",
                "18",
                "--results",
                str(tmp_path / "none"),
                "--plot",
                str(tmp_path / "a.png"),
            ]
        )
        == 0
    )
    assert (tmp_path / "a.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "gpt"], "--models: must be of llama-13b"),
        (["--figures", "99"], "--figures: '99' is none of 13"),
        (["--warm-up", "99999"], "--warm-up: must leave some of"),
        (["--sessions", "0"], "--sessions: must be at least 1"),
        (["--sample", "99"], "--sample: must be between 1 and 24"),
        (["--device", "cuda"], "--engine: is needed for these figures"),
        (["--rates", "1"], "--rates: only for pensieve, simulated"),
        (["--seeds", "0,1"], "--seeds: only for pensieve, simulated"),
        (["--engine", "engine"], "--engine: only with --device"),
        (
            ["--device", "cuda", "--engine", "engine", "--trace", "file"],
            "--trace: not with --device",
        ),
        (["--device", "cuda", "--engine", "engine", "--report"], "--report: not with --device"),
    ],
)
def test_a_wrong_setting_is_named(capsys, options, message):
    assert main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--models=llama-13b", "--sessions=40", "--warm-up=20", "--sample=2"]
)
def test_pensieve_refuses_the_options_of_cachedattention(capsys, option):
    assert main(["pensieve", "--report", option]) == 2
    assert f"{option.partition('=')[0]}: only for cachedattention" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ['{"paper": "pensieve", "how": "guessed", "values": {}}', '{"how": "cpu", "values": {}}', "[]"],
)
def test_a_damaged_record_is_named(capsys, tmp_path, line):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    assert main(["pensieve", "--report", "--results", str(tmp_path / "bad.jsonl")]) == 2
    assert "bad.jsonl, line 1 is no record of `paper`" in capsys.readouterr().err
