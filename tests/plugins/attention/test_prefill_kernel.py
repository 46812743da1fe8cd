"""The kernel for prompts on a Hopper GPU. `test_kernel` compares both kernels with plain
attention."""

import math
from unittest.mock import MagicMock

import pytest
import torch

from ..kernel_cases import CUDA, error, random_batch

pytest.importorskip("triton")
from pensieve.plugins.attention import kernel as attention_kernel
from pensieve.plugins.attention import prefill_kernel, work_list
from pensieve.plugins.attention.work_list import Capacity, Tile, WorkList

TILES = (Tile(16, 64, 4, 2, 1), Tile(64, 64, 4, 2, 1), Tile(128, 64, 8, 2, 1))


def on_meta(dtype=torch.bfloat16, head_dim=128, chunk=32, tiles=TILES):
    work = WorkList(Capacity(200, 1, 200), 2, 2, head_dim, tiles, "meta")
    q = torch.empty(200, 2, head_dim, dtype=dtype, device="meta")
    return q, torch.empty(9, 1, 2, 2, chunk, head_dim, dtype=dtype, device="meta"), work


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(prefill_kernel, "_on_hopper", lambda device: True)
    monkeypatch.setattr(prefill_kernel.triton, "__version__", prefill_kernel.TRITON[0] + "0")


def test_other_shapes_versions_and_gpus_use_the_twin(monkeypatch, hopper):
    assert prefill_kernel.fits(*on_meta())
    for other in (
        {"dtype": torch.float16},
        {"head_dim": 64},
        {"chunk": 16},
        {"tiles": TILES[:1]},
        {"tiles": TILES[:2]},
    ):
        assert not prefill_kernel.fits(*on_meta(**other)), other
    q, pool, work = on_meta()
    assert not prefill_kernel.fits(q, pool.to(torch.uint8), work)
    assert not prefill_kernel.fits(q, pool, work, window=4096)
    assert not prefill_kernel.fits(q, pool, work, sinks=torch.zeros(2))
    monkeypatch.setattr(prefill_kernel.triton, "__version__", "3.9.0")
    assert not prefill_kernel.fits(q, pool, work)
    monkeypatch.undo()
    assert not prefill_kernel.fits(q, pool, work)  # not a GPU


def test_the_share_of_multiprocessors_follows_from_the_kernel(hopper):
    _, pool, _ = on_meta()
    for given, cost in (
        (pool, prefill_kernel.TILE_COST),
        (pool.to(torch.uint8), work_list.LARGE_TILE_COST),
        (None, work_list.LARGE_TILE_COST),
    ):
        work = attention_kernel.make_work_list(
            Capacity(200, 1, 200), 2, 2, 128, torch.bfloat16, "meta", given
        )
        assert work.tile_cost == cost


@pytest.mark.parametrize("tokens, expected", [(200, ["prompts", 1, 0]), (60, [1, 0]), (10, [0])])
def test_it_takes_the_place_of_the_largest_class(monkeypatch, hopper, tokens, expected):
    started = []
    kernel, prompts = MagicMock(), MagicMock()
    kernel.__getitem__.return_value.side_effect = lambda *arguments, **settings: started.append(
        arguments[10]
    )
    prompts.run.side_effect = lambda: started.append("prompts")
    monkeypatch.setattr(attention_kernel, "_attend", kernel)
    monkeypatch.setattr(prefill_kernel, "launch", lambda *arguments: prompts)
    q, pool, work = on_meta()
    attention_kernel.multi_token_attention(
        q[:tokens], torch.empty(1, 9, device="meta"), pool, 0, 1.0, work
    )
    assert started == expected


@pytest.mark.gpu
@pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (10, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_its_twin(monkeypatch, heads, kv_heads, seed):
    """Ragged prompts over several splits, with NaN where no token is; each launch leaves its
    counters at zero."""
    lengths = (129, 128, 2333, 6001, 9000, 100, 1)
    q, segments, block_table, pool = random_batch(
        seed, heads, kv_heads, 128, torch.bfloat16, lengths
    )
    capacity = Capacity(len(q), len(segments), max(lengths))
    work = attention_kernel.make_work_list(capacity, heads, kv_heads, 128, q.dtype)
    if not prefill_kernel.fits(q, pool, work):
        pytest.skip("another version of Triton")
    work.build(segments)
    scale = 1 / math.sqrt(128)

    def attend(layer):
        return attention_kernel.multi_token_attention(q, block_table, pool, layer, scale, work)

    fast = [attend(layer) for layer in (0, 1, 0)]
    assert not work.arrivals.any() and not work.counters[1:3].any()
    monkeypatch.setattr(prefill_kernel, "fits", lambda *arguments: False)
    assert torch.equal(fast[0], fast[2])
    for layer in (0, 1):
        assert error(fast[layer], attend(layer)) < 5e-3
