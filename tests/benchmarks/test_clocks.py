"""Traces with a clock of their own."""

import pytest

from benchmarks.clocks import clock_rate, replay
from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens

ONE_TURN = Dialogue("d", None, (SessionTurn(0, 3, 100),), ((SyntheticTokens(3),),))


def clocked(seconds, per_s):
    """Conversations at equal distances, the last one at `seconds`."""
    return [
        ONE_TURN._replace(name=f"{index}", start_s=100 + index / per_s)
        for index in range(seconds * per_s + 1)
    ]


def test_a_trace_with_a_clock_is_thinned_and_never_stretched():
    trace = clocked(100, 10)
    assert clock_rate(trace) == pytest.approx(10.0, rel=0.01)
    everything = replay(trace, rate=clock_rate(trace), seconds=60.0, seed=0)
    assert [arrival.at for arrival in everything] == pytest.approx(
        [index / 10 for index in range(600)]
    )
    thinned = replay(trace, rate=2.0, seconds=60.0, seed=0)
    assert len(thinned) == 120 and {arrival.at for arrival in thinned} < {
        arrival.at for arrival in everything
    }
    with pytest.raises(SettingError, match=r"--measure-s: .* 101 s .* trace 100"):
        replay(trace, rate=2.0, seconds=101.0, seed=0)


def test_parts_of_a_trace_run_at_once_for_a_rate_above_its_own():
    trace = clocked(100, 10)
    busy = replay(trace, rate=25.0, seconds=20.0, seed=0)
    assert len(busy) == 500
    assert len({arrival.dialogue.name for arrival in busy}) == 500
    offsets = {round(arrival.dialogue.start_s - 100 - arrival.at, 6) for arrival in busy}
    assert len(offsets) == 3 and all(offset % 20 == 0 for offset in offsets)
    with pytest.raises(SettingError, match="--rate: at most 50"):
        replay(trace, rate=51.0, seconds=20.0, seed=0)


def test_seeds_play_other_parts_of_a_trace():
    trace = clocked(100, 10)

    def names(seed):
        return {arrival.dialogue.name for arrival in replay(trace, rate=9, seconds=20, seed=seed)}

    assert names(0) == names(0)
    assert len({min(map(int, names(seed))) // 200 for seed in range(8)}) > 1


def test_a_part_with_few_arrivals_gets_more_of_another():
    """The rate is that of the run, also where the trace has quiet minutes."""
    quiet = [each for each in clocked(100, 10) if each.start_s >= 150 or int(each.name) % 5 == 0]
    for seed in range(4):
        assert len(replay(quiet, rate=6.0, seconds=25.0, seed=seed)) == 150
