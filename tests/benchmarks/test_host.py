"""The device of `benchmarks.host`: steps one behind the other. No step of this test ends."""

from typing import cast

import numpy as np

from benchmarks.host import TimedDevice
from benchmarks.scheduler import ModelOfShape
from pensieve.runtime.device.protocol import ForwardPass
from pensieve.runtime.step.inputs import StepPacker
from pensieve.scripts.simulation.models import MODELS

from ..runtime.fake_engine import join, plan, span

HOUR_S = 3600.0


def test_steps_run_one_behind_the_other(capsys):
    device = TimedDevice(HOUR_S)
    device.load(cast(ForwardPass, ModelOfShape(MODELS["llama-3-8b"])), 4, 2, (), 64)
    packer = StepPacker(4, 2, 32)
    prompt = plan(
        1, joins=[join(2)], blocks=[(2, 0, (5,))], spans=[span(2, 0, 3)], token_ids=[7, 8, 9]
    )
    tickets = []
    for step in (prompt, plan(2, generate={2: 3})):
        device.upload(packer.pack(step))
        device.run()
        ticket, tokens, scores = device.sample()
        assert tokens.dtype == np.int32 and len(tokens) == 1 and scores is None
        tickets.append(ticket)
    assert not device.ready(tickets[0])
    assert tickets[1].due == tickets[0].due + HOUR_S
    device.close()
    assert capsys.readouterr().out == "2 steps, idle 0 us a step\n"
