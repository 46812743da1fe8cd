"""The decoder on a GPU: the CPU's logits, no waiting for the device, and one captured graph for any
mixture."""

from dataclasses import replace

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import LlamaConfig

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.forward_batch import INPUTS
from pensieve.builder.forward_batch import TOKENS as TOKENS_OF_A_BATCH
from pensieve.builder.manifest import WEIGHTS
from pensieve.builder.model import Decoder
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.builder.quantised import dequantised, names_in_int4, projections
from pensieve.builder.random_weights import random_weights
from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.plugins.torch_ops import register_pool, release_pool
from tests.gguf_files import write_gguf
from tests.models import LLAMA_SHAPE, save_random

from .test_random_weights import CONFIGS

WIDE = LLAMA_SHAPE | {"hidden_size": 256, "intermediate_size": 512}  # whole tiles of int4
CHUNK, SEATS, BLOCKS, TOKENS = 32, 3, 4, 100
STEPS = (  # of each seat the positions [start, end) that are computed; in all TOKENS a step, padded
    ((0, 60), (0, 1), (0, 20)),
    ((60, 61), (1, 40), (20, 53)),
    ((61, 62), (40, 41), (53, 54)),
)


def inputs(step, table, device):
    """A batch, padded to TOKENS tokens with a segment of each seat, and how many tokens are not
    padding."""
    pieces = [SeatSpan(seat, start, end) for seat, (start, end) in enumerate(step)]
    ids = torch.cat(
        [(torch.arange(start, end) * 37 + seat) % 150 for seat, (start, end) in enumerate(step)]
    )
    batch = batch_of(pieces, ids, table, torch.arange(TOKENS), CHUNK)
    padded = {}
    for name, one in INPUTS.items():
        if one.sizes == (TOKENS_OF_A_BATCH,):
            own = getattr(batch, name)
            padded[name] = torch.full((TOKENS,), one.padding, dtype=torch.int32)
            padded[name][: len(own)] = own
    return replace(batch, **padded).map(lambda part: part.to(device)), len(ids)


class Model:
    """A decoder or one rank's shard, and its pool; `run` computes a step and returns the logits of
    its tokens."""

    def __init__(self, config, weights, dtype, device, ranks=1):
        self.device = device
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self.decoder = Decoder.from_weights(config, weights, ranks)
        shard = Shard(config, ranks)
        shape = (SEATS * BLOCKS, config.layers, 2, shard.kv_heads, CHUNK, config.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.table = torch.randperm(SEATS * BLOCKS, generator=torch.Generator().manual_seed(0))
        self.table = self.table.view(SEATS, BLOCKS).int()
        self.work = self._work(shard, dtype) if device == "cuda" else None
        self.handle = register_pool(self.pool, work=self.work)

    def _work(self, shard, dtype):
        from pensieve.plugins.attention.kernel import make_work_list
        from pensieve.plugins.attention.work_list import Capacity

        capacity = Capacity(TOKENS, SEATS, SEATS * BLOCKS * CHUNK)
        return make_work_list(capacity, shard.heads, shard.kv_heads, shard.config.head_dim, dtype)

    @torch.inference_mode()
    def run(self, step):
        batch, count = inputs(step, self.table, self.device)
        return self.forward(batch)[:count]

    def forward(self, batch):
        if self.work is not None:
            self.work.build(batch.segments)
        return self.decoder(batch, self.handle)


@pytest.fixture(params=CONFIGS)
def config(request):
    return decoder_config(CONFIGS[request.param])


@pytest.fixture
def models():
    """Makes models, and releases their pools."""
    opened = []

    def make(*arguments):
        opened.append(Model(*arguments))
        return opened[-1]

    yield make
    for model in opened:
        release_pool(model.handle)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_computes_what_the_cpu_does(config, models):
    weights = random_weights(config, torch.float32, "cpu", 0)
    cpu, gpu = (models(config, weights, torch.float32, device) for device in ("cpu", "cuda"))
    for step in STEPS:
        torch.testing.assert_close(gpu.run(step).cpu(), cpu.run(step), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name)
def test_a_gguf_file_s_projections_stay_in_int4(kind, tmp_path, models):
    save_random(LlamaConfig(**WIDE), tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", kind)
    manifest = build_engine(tmp_path / "model.gguf", tmp_path / "engine", device="cuda").manifest
    assert (manifest.int4, manifest.dtype) == (32, "bfloat16")
    weights = load_file(tmp_path / "engine" / WEIGHTS)
    assert names_in_int4(weights.keys()) == projections(manifest.decoder)
    wide = {name: tensor.bfloat16() for name, tensor in dequantised(weights).items()}
    packed, plain = (
        models(manifest.decoder, each, torch.bfloat16, "cuda") for each in (weights, wide)
    )
    for step in STEPS:
        expected = plain.run(step)
        assert (packed.run(step) - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.gpu
@needs_gpu
@torch.inference_mode()
def test_a_step_never_waits_and_one_graph_serves_any_mixture(config, models):
    weights = random_weights(config, torch.bfloat16, "cuda", 0)
    eager, captured = (models(config, weights, torch.bfloat16, "cuda") for _ in range(2))
    expected = [eager.run(step) for step in STEPS]
    static, _ = inputs(STEPS[0], captured.table, "cuda")
    captured.forward(static)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured.forward(static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = captured.forward(static)
    captured.pool.zero_()
    for step, wanted in zip(STEPS, expected, strict=True):
        batch, count = inputs(step, captured.table, "cuda")
        for target, source in zip(static.tensors(), batch.tensors(), strict=True):
            target.copy_(source)
        graph.replay()
        torch.testing.assert_close(logits[:count], wanted, atol=0.03, rtol=0.03)


@pytest.fixture(params=[2, 4])
def group(request):
    ranks = ThreadRanks(request.param)
    register_group(TENSOR_PARALLEL, ranks)
    yield ranks
    release_group(TENSOR_PARALLEL)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
)
def test_shards_compute_what_one_rank_does(device, config, group, models):
    whole = models(config, random_weights(config, torch.float32, "cpu", 0), torch.float32, "cpu")
    expected = [whole.run(step) for step in STEPS]
    shards = []
    for rank in range(group.ranks):
        weights = random_weights(config, torch.float32, "cpu", 0, rank, group.ranks)
        shards.append(models(config, weights, torch.float32, device, group.ranks))
    for outputs in group.run(lambda rank: [shards[rank].run(step).cpu() for step in STEPS]):
        for logits, wanted in zip(outputs, expected, strict=True):
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_padding_changes_nothing(name, models):
    config = decoder_config(CONFIGS[name])
    model = models(config, random_weights(config, torch.float32, "cpu", 0), torch.float32, "cpu")
    logits = [model.run(step) for step in STEPS]
    alone = models(config, model.decoder.state_dict(), torch.float32, "cpu")
    for start, end in ((0, 30), (30, 41)):  # one seat's context in other pieces, without neighbours
        piece = alone.run(((0, 0), (start, end), (0, 0)))
    torch.testing.assert_close(piece[-1:], logits[2][1:2], atol=1e-5, rtol=1e-5)
    assert [len(part) for part in logits] == [81, 73, 3]
