"""The scheduler's benchmark at a hundredth of its size: its steps are of the kinds that it
names."""

import json

from benchmarks import scheduler
from benchmarks.scheduler import FilledScheduler, SchedulerLoad, summary

SMALL = SchedulerLoad(3000, 4000, seats=16, plain_steps=20, heavy_steps=3, swap_ins=40, victims=80)


def test_steps_are_of_the_kinds_that_are_measured():
    bench = FilledScheduler(SMALL)
    bench.fill()
    slots = bench.scheduler.stats().slots
    assert slots["gpu"]["free"] == slots["host"]["free"] == 0
    plain = bench.plain()
    assert len(plain) == 20 and all(step.generate == step.tokens == 12 for step in plain[1:])
    for step in bench.heavy(3200):
        assert step.swap_ins >= 40 and step.victims >= 80 and step.generate >= 12
    bench.scheduler.check()
    figures = summary(plain)
    assert (
        figures["steps"] == 20
        and figures["plan_ms_p50"] + figures["apply_ms_p50"] <= 2 * figures["total_ms_p50"]
    )


def test_the_command_ends_in_one_json_line(capsys, monkeypatch):
    monkeypatch.setattr(scheduler, "SchedulerLoad", lambda **steps: SMALL)
    assert scheduler.main([]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["bench"] == "scheduler" and line["heavy"]["swap_ins"] >= 40
