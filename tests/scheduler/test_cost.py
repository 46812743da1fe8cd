from __future__ import annotations

import pytest

from pensieve.scheduler.cost import CostProfile, analytic_profile
from pensieve.scheduler.types import SettingError


def a_profile(attention=((64, 1.0), (128, 3.0), (256, 4.0))):
    return CostProfile(
        chunk_tokens=32,
        chunk_seconds=10.0,
        attention=attention,
        step_base_seconds=100.0,
        chunk_bytes=1000,
        link_bytes_per_s=4000.0,
    )


@pytest.mark.parametrize(
    ("context", "attention"),
    [
        *((64, 1.0), (128, 3.0), (256, 4.0)),  # at the points
        *((96, 2.0), (112, 2.5), (192, 3.5)),  # linear between
        *((0, 0.0), (32, 0.5), (512, 8.0), (2560, 40.0)),  # proportional beyond both ends
    ],
)
def test_attention_costs(context, attention):
    assert a_profile().recompute(context) == pytest.approx(10.0 + attention)


def test_one_point_is_enough():
    assert a_profile(((64, 1.0),)).recompute(640) == pytest.approx(20.0)
    assert a_profile(((0, 1.0),)).recompute(640) == pytest.approx(11.0)


def test_a_step_costs_its_base_and_its_tokens():
    assert a_profile().step(0) == 100.0
    assert a_profile().step(64, context=128) == pytest.approx(100.0 + 2 * 13.0)


def test_a_chunk_loads_at_the_speed_of_the_link():
    assert a_profile().load() == 0.25


@pytest.mark.parametrize("attention", [(), ((64, 1.0), (32, 2.0)), ((64, 1.0), (64, 2.0))])
def test_a_profile_without_ascending_points_names_itself(attention):
    with pytest.raises(SettingError, match="profile: ") as error:
        a_profile(attention)
    assert error.value.setting == "profile"


def test_the_estimate_counts_operations():
    profile = analytic_profile(
        chunk_tokens=32,
        parameters=10**9,
        layers=2,
        attention_width=128,
        chunk_bytes=1000,
        max_context=1000,
        flops_per_s=1e12,
        link_bytes_per_s=1e6,
        step_base_seconds=0.0,
    )
    assert profile.attention[0][0] == 32 and profile.attention[-1][0] == 1024
    for context in (32, 500, 1000, 4000):
        operations = 2 * 10**9 * 32 + 4 * 2 * 128 * 32 * context
        assert profile.recompute(context) == pytest.approx(operations / 1e12)
