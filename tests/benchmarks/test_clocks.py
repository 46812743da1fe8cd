"""Traces with a clock of their own."""

import pytest

from benchmarks.clocks import clock_rate, replay
from pensieve.scheduler.sim.simulator import SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens

ONE_TURN = Dialogue("d", None, (SessionTurn(0, 3, 100),), ((SyntheticTokens(3),),))


def test_a_trace_with_a_clock_is_thinned_and_never_stretched():
    clocked = [
        ONE_TURN._replace(name=f"{index}", start_s=100 + index / 10) for index in range(1001)
    ]
    assert clock_rate(clocked) == pytest.approx(10.0, rel=0.01)
    everything = replay(clocked, rate=clock_rate(clocked), seconds=60.0, seed=0)
    assert [arrival.at for arrival in everything] == pytest.approx(
        [index / 10 for index in range(600)]
    )
    thinned = replay(clocked, rate=2.0, seconds=60.0, seed=0)
    assert 80 < len(thinned) < 160 and {arrival.at for arrival in thinned} < {
        arrival.at for arrival in everything
    }
    with pytest.raises(SettingError, match="--rate: at most 10"):
        replay(clocked, rate=11.0, seconds=60.0, seed=0)
    with pytest.raises(SettingError, match="--send-histories: the trace has its own clock"):
        replay(clocked, rate=2.0, seconds=60.0, seed=0, send_histories=True)
    with pytest.raises(SettingError, match=r"--measure-s: .* 101 s .* trace 100"):
        replay(clocked, rate=2.0, seconds=101.0, seed=0)
