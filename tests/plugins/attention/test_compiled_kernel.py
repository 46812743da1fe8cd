"""The attention's machine code for an H200, compiled without one."""

import pytest
import torch

from ..kernel_cases import CUDA, INTERPRETED

pytest.importorskip("triton")
import triton

from pensieve.plugins.attention import fp8_pool, prefill_kernel
from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention.work_list import Capacity

from ..recording_driver import RecordingDriver

pytestmark = pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 32


@pytest.mark.parametrize(
    "model, dtype, window, sinks",
    [
        (torch.float16, torch.float16, 0, None),
        (torch.float16, fp8_pool.DTYPE, 0, None),
        (torch.bfloat16, fp8_pool.DTYPE, 0, None),
        (torch.float16, torch.float16, 20, None),
        (torch.float16, fp8_pool.DTYPE, 20, torch.zeros(HEADS, dtype=torch.float16)),
    ],
)
def test_one_kernel_a_class_serves_all_sizes_of_step(model, dtype, window, sinks, monkeypatch):
    recording = RecordingDriver(monkeypatch)
    monkeypatch.setattr(attention_kernel, "_overlaps", lambda device: True)
    work = attention_kernel.make_work_list(
        Capacity(64, 4, 128), HEADS, KV_HEADS, HEAD_DIM, model, "cpu"
    )
    work.longest = 1  # of the smallest class
    pool = torch.zeros(2, 1, 2, KV_HEADS, 32, fp8_pool.pool_width(HEAD_DIM, dtype), dtype=dtype)
    for tokens, blocks in ((1, 1), (16, 16), (17, 33)):
        q = torch.zeros(tokens, HEADS, HEAD_DIM, dtype=model)
        block_table = torch.zeros(2, blocks).int()
        attention_kernel.multi_token_attention(q, block_table, pool, 0, 1.0, work, window, sinks)
    assert len({launch.image for launch in recording.take()}) == 1


@pytest.mark.skipif(
    not triton.__version__.startswith(prefill_kernel.TRITON), reason="needs its version of Triton"
)
def test_the_kernel_for_prompts_compiles(monkeypatch):
    RecordingDriver(monkeypatch)
    work = attention_kernel.make_work_list(
        Capacity(200, 4, 2048), HEADS, KV_HEADS, 128, torch.bfloat16, "cpu"
    )
    pool = torch.zeros(2, 1, 2, KV_HEADS, 32, 128, dtype=torch.bfloat16)
    q = torch.zeros(200, HEADS, 128, dtype=torch.bfloat16)
    launch = prefill_kernel.launch(q, q, torch.zeros(2, 33).int(), pool, 0, 1.0, work)
    compiled = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.settings)
    assert compiled.metadata.shared <= 227 * 1024
