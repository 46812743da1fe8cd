"""The kernels' benchmark beside others, as far as it runs without a GPU: their inputs are those of
our kernel."""

import itertools
import sys
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import kernels
from benchmarks.kernels import CHUNK, HEAD_DIM, SCALE, Batch, KernelShape
from pensieve.scheduler.types import SettingError

HEADS, KV_HEADS, LAYER = 4, 2, 1
SHAPES = (
    KernelShape("uniform", ((8, 96),) * 3),
    KernelShape("ragged", ((1, 70), (5, 33), (40, 40))),
)


def random_batch(shape: KernelShape, dtype: torch.dtype = torch.bfloat16) -> Batch:
    torch.manual_seed(0)
    pool = torch.randn(shape.slots, 2, 2, KV_HEADS, CHUNK, HEAD_DIM).to(dtype)
    return Batch(shape, HEADS, pool)


def contexts(batch: Batch) -> list[torch.Tensor]:
    """KV of each request, read token by token: [2, kv_heads, context, head_dim]."""
    return [
        torch.stack(
            [
                batch.pool[batch.block_table[seat, i // CHUNK], LAYER, :, :, i % CHUNK]
                for i in range(context)
            ],
            dim=2,
        )
        for seat, (_, context) in enumerate(batch.shape.requests)
    ]


def attention(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Plain attention of a request's last tokens: q and result [queries, heads, head_dim]."""
    queries = len(q)
    context = kv.shape[2]
    keys, values = kv.float().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * SCALE
    seen = torch.ones(queries, context).tril(context - queries).bool()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_copy_out_of_the_chunks_has_the_contexts_bits(shape):
    """One context behind the other: [tokens, 2, kv_heads, head_dim]."""
    batch = random_batch(shape)
    copied = batch.copied(batch.places(), LAYER)
    expected = torch.cat([kv.permute(2, 0, 1, 3) for kv in contexts(batch)])
    assert copied.dtype == batch.pool.dtype and torch.equal(copied, expected)


class Gathers(TorchDispatchMode):
    """Bytes of an element of each gather."""

    def __init__(self):
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor:
            self.widths.append(args[0].element_size())
        return func(*args, **kwargs or {})


def test_the_copy_moves_sixteen_bytes_at_a_time():
    """Two at a time, the copy took six times as long as reading and writing the bytes takes."""
    batch = random_batch(SHAPES[0])
    places = batch.places()
    with Gathers() as gathers:
        batch.copied(places, LAYER)
    assert gathers.widths == [16]


def paged_attention(
    q, k_cache, v_cache, *, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q,
    softmax_scale, causal,
):  # fmt: skip
    """Stands for `flash_attn_with_kvcache`: caches are [pages, tokens, kv_heads, head_dim]."""
    assert k_cache.stride(-1) == v_cache.stride(-1) == 1  # else the real one copies all pages
    assert {x.dtype for x in (page_table, cache_seqlens, cu_seqlens_q)} == {torch.int32}
    assert softmax_scale == SCALE and causal
    starts = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(end - start for start, end in itertools.pairwise(starts))
    results = []
    for seat, length in enumerate(cache_seqlens.tolist()):
        pages = page_table[seat, : -(-length // k_cache.shape[1])]
        kv = torch.stack([x[pages].flatten(0, 1)[:length] for x in (k_cache, v_cache)])
        results.append(attention(q[starts[seat] : starts[seat + 1]], kv.transpose(1, 2)))
    return torch.cat(results)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_flash_attention_3_reads_the_same_chunks(shape, monkeypatch):
    package = ModuleType("sgl_kernel")
    module = ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = paged_attention
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    batch = random_batch(shape)
    result = batch.flash_attention_3()(LAYER)
    rows = batch.q.split([queries for queries, _ in shape.requests])
    expected = [attention(q, kv) for q, kv in zip(rows, contexts(batch), strict=True)]
    torch.testing.assert_close(result, torch.cat(expected))


def test_flash_attention_3_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)
    with pytest.raises(SettingError, match="install sglang-kernel"):
        random_batch(SHAPES[0]).flash_attention_3()


@pytest.mark.parametrize("other", [("--sharing",), ("--kv-cache-dtype", "fp8")])
def test_flash_attention_3_is_refused_where_it_would_not_be_timed(other, capsys):
    assert kernels.main(["--flash-attention-3", *other]) == 2
    assert "--flash-attention-3" in capsys.readouterr().err
