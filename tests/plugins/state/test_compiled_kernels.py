"""The machine code of the kernels for states, compiled for a GPU that is not there."""

import pytest
import torch

from ..kernel_cases import CUDA, INTERPRETED
from .state_cases import KEY_HEADS, SHAPE, Tokens, batch_of_spans, new_pool

pytest.importorskip("triton")
from pensieve.plugins.state import kernel
from pensieve.plugins.state.work_list import StateWork

from ..recording_driver import RecordingDriver

pytestmark = pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")

LISTS, OTHERS = 1, 4  # launches of a step with prompts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_kernel_serves_all_sizes_of_step(dtype, monkeypatch):
    recording = RecordingDriver(monkeypatch)
    images = set()
    pool = new_pool(dtype)
    for prompt in (50, 130, 208):
        spans = [(0, prompt, 2, 3), (prompt, prompt + 1, 4, 4)]
        tokens = Tokens(prompt + 1, dtype, SHAPE, KEY_HEADS)
        where = batch_of_spans(spans)
        inputs = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta
        for longest in (1, None):
            work = StateWork(256, 4, "cpu")
            work.build(where[0], where[2], longest)
            kernel.causal_conv(tokens.x, tokens.weight, *where, pool.columns[0], work)
            kernel.gated_delta(*inputs, *where, pool.matrices[0], work)
            launched = recording.take()
            assert len(launched) == LISTS + (2 if longest == 1 else OTHERS)
            images |= {launch.image for launch in launched}
    assert len(images) == LISTS + OTHERS + 1  # the convolution has a kernel for one token each
