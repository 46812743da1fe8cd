"""Every kernel once, on small batches: also for the sanitizer, which slows a GPU down a
hundredfold.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck python -m pytest --noconftest -m gpu
    tests/plugins/test_small_kernels.py compute-sanitizer --tool racecheck python -m pytest
    --noconftest -m gpu tests/plugins/test_small_kernels.py

Memory then comes straight from the driver, without torch's cache, so that an access behind a
tensor's end is one behind an allocation's end. Results are compared with the CPU's.
"""

from __future__ import annotations

import pytest
import torch

from pensieve.plugins import torch_ops
from pensieve.plugins.attention import reference as attention_reference
from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import Capacity
from pensieve.plugins.linear import experts  # noqa: F401  register torch.ops.pensieve.experts

CHUNK, LAYERS, SLOTS = 16, 2, 48
SEGMENTS = ((1, 1), (1, 70), (33, 33), (7, 150), (40, 200))  # (queries, context)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def check(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """The largest difference between the GPU's and the CPU's results of one step."""
    dice = torch.Generator().manual_seed(heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(dtype)

    tokens = sum(queries for queries, _ in SEGMENTS)
    q, k, v = (
        draw(tokens, heads, head_dim),
        draw(tokens, kv_heads, head_dim),
        draw(tokens, kv_heads, head_dim),
    )
    pool = draw(SLOTS, LAYERS, 2, kv_heads, CHUNK, head_dim)
    order = torch.randperm(SLOTS, generator=dice).int()
    table = torch.zeros(len(SEGMENTS), 16, dtype=torch.int32)
    rows = []
    slots = []
    first = 0
    taken = 0
    for seat, (queries, context) in enumerate(SEGMENTS):
        blocks = -(-context // CHUNK)
        table[seat, :blocks] = order[taken : taken + blocks]
        taken += blocks
        rows.append((first, queries, 0, context, seat))
        places = range(context - queries, context)
        slots += [int(table[seat, at // CHUNK]) * CHUNK + at % CHUNK for at in places]
        first += queries
    segments, slots = torch.tensor(rows, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)
    slots[0] = -1  # not written
    rotary = torch.rand(tokens, head_dim, generator=dice)
    scale = head_dim**-0.5

    from pensieve.plugins.attention import kernel as attention_kernel  # Triton comes with CUDA only

    expected_pool = pool.clone()
    turned = attention_reference.write_kv(q, k, v, rotary, slots, expected_pool, 1)
    expected = attention_reference.multi_token_attention(
        turned, segments, table, expected_pool, 1, scale
    )

    here = pool.cuda()
    work = attention_kernel.make_work_list(
        Capacity(tokens, len(SEGMENTS), 256), heads, kv_heads, head_dim, dtype
    )
    handle = torch_ops.register_pool(here, work=work)
    work.build(segments.cuda())
    on_gpu = [tensor.cuda() for tensor in (q, k, v, rotary, slots)]
    turned = torch.ops.pensieve.write_kv(*on_gpu, handle, 1)
    got = torch.ops.pensieve.multi_token_attention(
        turned, segments.cuda(), table.cuda(), handle, 1, scale
    )
    torch.cuda.synchronize()
    torch_ops.release_pool(handle)
    apart = [
        (got.cpu().float() - expected.float()).abs().max(),
        (here.cpu() - expected_pool).float().abs().max(),
    ]

    x, y, weight = draw(5, 96), draw(5, 96), draw(96)
    for norm in (
        lambda *t: torch.ops.pensieve.add_norm(*t, None, 1e-5, True),
        lambda *t: norm_only(*t),
    ):
        for ours, theirs in zip(
            norm(x.cuda(), y.cuda(), weight.cuda()), norm(x, y, weight), strict=True
        ):
            apart.append((ours.cpu() - theirs).float().abs().max())
    gate = draw(5, 192)
    apart.append(
        (torch.ops.pensieve.silu_gate(gate.cuda()).cpu() - torch.ops.pensieve.silu_gate(gate))
        .abs()
        .max()
    )
    shares, chosen = torch.rand(5, 4, generator=dice).topk(2)
    inputs = (x, chosen, shares, 0.1 * draw(4 * 2 * 16, 96), 0.25 * draw(4 * 96, 16))
    theirs = torch.ops.pensieve.experts(*inputs)
    apart.append(
        (torch.ops.pensieve.experts(*(tensor.cuda() for tensor in inputs)).cpu() - theirs)
        .float()
        .abs()
        .max()
    )
    return max(float(difference) for difference in apart)


def norm_only(x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.ops.pensieve.norm(x, weight, None, 1e-5, True),)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (5, 1, 80)])
def test_a_gpu_computes_what_the_cpu_does(dtype, heads, kv_heads, head_dim, monkeypatch):
    for name, value in (
        ("SMALLEST_SPLIT", 32),
        ("LARGEST_SPLIT", 64),
        ("TOKENS_PER_ROW", 1),
    ):  # so that there are merges
        monkeypatch.setattr(work_list, name, value)
    assert check(dtype, heads, kv_heads, head_dim) < TOLERANCE[dtype] * 4
