"""The command: a line for each run's last seconds; the order of service under overload; wrong
settings are named."""

import json

import pytest

from pensieve.scheduler.sim.simulator import Open, Session, SessionTurn
from pensieve.scheduler.types import Applied, FinishReason, RequestId, RowResult, Usage
from pensieve.scripts.simulate import main, parser
from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.load import Tally, joined, load_run, measured
from pensieve.scripts.simulation.traces import synthetic_dialogue

SMALL = [
    "--preset",
    "load",
    "--jobs",
    "1",
    "--seconds",
    "8",
    "--measure-s",
    "6",
    "--gpu-kv-bytes",
    "5GiB",
    "--host-kv-bytes",
    "3GiB",
]


def runs(capsys, *options):
    assert main([*SMALL, "--json", *options]) == 0
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_recomputations_do_not_evict_the_hits_of_later_requests(capsys):
    """More load than the tiers hold: by response ratio more is done, and most turns wait less."""
    options = ["--rate", "2", "--think-s", "5", "--start", "middle", "--ramp-s", "5"]
    options += ["--seconds", "90", "--measure-s", "60"]
    (fair,) = runs(capsys, *options)
    (first_come,) = runs(capsys, *options, "--queue-order", "arrival")
    assert fair["waiting"] and first_come["waiting"]
    assert fair["recomputed_percent"] < first_come["recomputed_percent"]
    assert (
        fair["ttft_ms_p50"] < first_come["ttft_ms_p50"]
        and fair["done_per_s"] > first_come["done_per_s"]
    )


def test_every_rate_with_every_seed_has_a_line(capsys):
    options = ["--rate", "0.5,1", "--seeds", "0,1"]
    assert main([*SMALL, *options]) == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert [tuple(map(float, text.split()[:2])) for text in lines] == [
        (0.5, 0),
        (0.5, 1),
        (1, 0),
        (1, 1),
    ]
    assert {len(text) for text in (titles, *lines)} == {len(titles)}


def test_a_json_line_tells_the_settings_of_its_run(capsys):
    (line,) = runs(capsys, "--rate", "1", "--eviction", "retention", "--queue-order", "arrival")
    assert (line["eviction"], line["queue_order"]) == ("retention", "arrival")
    assert (line["swap_out_below"], line["generation_reserve"]) == (0.15, 0.02)
    (given,) = runs(capsys, "--rate", "1", "--swap-out-below", "0", "--generation-reserve", "0.1")
    assert (given["swap_out_below"], given["generation_reserve"]) == (0.0, 0.1)


def test_a_target_bounds_the_time_between_tokens(capsys):
    """A chunk of 64 tokens beside generation takes 7.5 ms or more."""
    options = ["--rate", "4", "--start", "middle", "--ramp-s", "4", "--chunk-tokens", "64"]
    (fixed,) = runs(capsys, *options)
    (target,) = runs(capsys, *options, "--target-ms-per-token", "12")
    assert fixed["inter_token_ms_p99"] > 24 and 8 < target["inter_token_ms_p99"] <= 12 + 1e-6
    assert fixed["ms_per_token_p50"] < fixed["ms_per_token_p99"]


def test_the_window_counts_what_happens_in_it():
    turns = (SessionTurn(0, 8, 2), SessionTurn(10, 5, 4))
    served = {
        RequestId(1): Open(Session("a", 0.0, turns), 0, 9.0),
        RequestId(2): Open(Session("b", 0.0, turns), 1, 9.5),
    }
    tally = Tally(start=10.0)
    tally.watch(9.75, Applied(rows=(RowResult(RequestId(1), (7,), usage=Usage(new=8)),)), served)
    tally.watch(
        10.5, Applied([1], [7], (RowResult(RequestId(2), (7,), usage=Usage(gpu=15)),)), served
    )
    ended = tuple(RowResult(RequestId(number), (7,), FinishReason.LENGTH) for number in (1, 2))
    tally.watch(11.5, Applied(rows=ended), served)
    assert (
        list(tally.gaps) == [0.75, 1.0, 1.0]
        and list(tally.ttft) == [1.0]
        and tally.usage == [Usage(gpu=15)]
    )
    assert list(tally.latency) == [2.5, 2.0] and list(tally.tokens) == [2, 4]
    assert (tally.logs, tally.returning) == (10 + 19, 1)
    served[RequestId(3)] = Open(Session("c", 0.0, turns), 0, 11.0)
    del served[RequestId(1)], served[RequestId(2)]
    tally.end(12.0, served)
    assert tally.waits == {"first": [1.0], "later": [1.0]}


def test_a_conversation_in_the_middle_sends_its_history_first():
    dialogue = synthetic_dialogue(
        Session(
            "a", 0.0, (SessionTurn(0, 8, 6), SessionTurn(14, 5, 4, 2.0), SessionTurn(19, 1, 1, 3.0))
        )
    )
    session = joined(Arrival(7.0, dialogue, turn=1, done=3), "b")
    assert session == Session("b", 7.0, (SessionTurn(0, 22, 1), SessionTurn(19, 1, 1, 3.0)))


def test_a_chunk_costs_what_was_measured():
    cost = measured(32)
    assert cost.recompute(1024) == pytest.approx(1.24e-3) and cost.swap_in() == pytest.approx(
        0.135e-3, rel=0.01
    )
    assert cost.step(0, rows=1, rows_context=1024) == pytest.approx(6.78e-3)
    assert measured(64).recompute(1024) == pytest.approx(2.48e-3)


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "fast"], "--rate"),
        (["--seeds", "1.5"], "--seeds"),
        (["--measure-s", "9"], "--measure-s"),
        (["--rate", "0.001"], "--rate"),
        (["--measure-s", "0.001", "--rate", "0.5"], "--measure-s"),
        (["--think-s", "0"], "--think-s"),
        (["--host-kv-bytes", "much"], "--host-kv-bytes"),
        (["--shared-bytes-per-s", "-1"], "--shared-bytes-per-s"),
    ],
)
def test_wrong_settings_are_named(capsys, options, setting):
    assert main([*SMALL, *options]) == 2
    assert setting in capsys.readouterr().err


def test_kv_in_eight_bits_has_about_half_the_bytes_on_every_tier(capsys):
    args = parser("load").parse_args(["--preset", "load"])
    pools = []
    for name in ("auto", "fp8"):
        args.kv_cache_dtype = name
        run = load_run(args, measured(32), [Session("a", 0.0, (SessionTurn(0, 8, 2),))], 1.0, 0)
        pools.append(
            (run.config.gpu_kv_chunks, run.config.host_kv_chunks, 1 / run.cost.chunk_bytes)
        )
    assert all(1.98 < now / before < 1.985 for before, now in zip(*pools, strict=True))
    assert main([*SMALL, "--kv-cache-dtype", "fp8", "--lower-tier-kv", "packed"]) == 2
    assert "--lower-tier-kv: cannot be given beside --kv-cache-dtype" in capsys.readouterr().err
