"""The machine code of the products that widen FP8 weights, compiled for a GPU that is not there."""

import pytest
import torch

from pensieve.plugins.linear.expert_reference import Experts

from ..kernel_cases import CUDA, INTERPRETED

pytest.importorskip("triton")
from pensieve.plugins.linear import expert_kernel

from ..recording_driver import RecordingDriver
from .test_expert_kernel import in_groups, random_route

pytestmark = pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")

GROUP = 128


@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_experts_in_fp8_compile(tokens, monkeypatch):
    recording = RecordingDriver(monkeypatch)
    up, up_scale = in_groups(torch.randn(6 * 2 * 128, 256), GROUP)
    down, down_scale = in_groups(torch.randn(6 * 256, 128), GROUP)
    of = Experts(up, down, up_scale=up_scale, down_scale=down_scale)
    chosen = random_route(tokens)
    x = torch.randn(tokens, 256, dtype=torch.bfloat16)
    expert_kernel.experts(x, chosen, torch.rand(chosen.shape), of)
    assert len(recording.take()) == (3 if tokens == 1 else 4)


@pytest.mark.parametrize("tokens", [1, 9, 20, 64])
def test_projections_in_fp8_with_groups_compile(tokens, monkeypatch):
    recording = RecordingDriver(monkeypatch)
    weight, scale = in_groups(torch.randn(384, 256), GROUP)
    x = torch.randn(tokens, 256, dtype=torch.bfloat16)
    expert_kernel.linear(x, weight, scale, None)
    (launched,) = recording.take()
    assert launched.grid[0] >= 384 / 64
