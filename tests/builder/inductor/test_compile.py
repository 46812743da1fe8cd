"""Compiled decoders: the compiler's input, and equal results of the package for any batch, pool and
weights."""

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.inductor.compile import Compilable, export
from pensieve.builder.inductor.package import Package, laid_out
from pensieve.builder.manifest import PACKAGE, WEIGHTS, Manifest
from pensieve.builder.model import Decoder
from pensieve.builder.parity import SeatSpan, batch_of, check_parity, random_batches, registered
from pensieve.builder.random_weights import random_weights
from pensieve.builder.weights import load_weights
from pensieve.runtime.engine import open_engine
from tests.compiled import compiled_engine
from tests.models import ScatteredRunner, tiny_checkpoint, tiny_config

pytestmark = pytest.mark.slow

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3-windows": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "opt": "OPTForCausalLM",
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_compiler_gets_plain_arithmetic_experts_and_the_two_operations_of_the_pool(kind):
    config = decoder_config(tiny_config(kind).to_dict() | {"architectures": [ARCHITECTURES[kind]]})
    weights = laid_out(random_weights(config, torch.bfloat16, "cpu", 0))
    program = export(Compilable.from_weights(config, weights))
    calls = [
        str(node.target) for node in program.graph.nodes if str(node.target).startswith("pensieve")
    ]
    of_a_layer = ["write_kv", "multi_token_attention", "experts"][: 3 if config.experts else 2]
    assert calls == [f"pensieve.{name}.default" for name in of_a_layer] * config.layers
    assert set(program.state_dict) == set(weights)


@pytest.fixture(
    scope="module", params=["llama", "qwen3-windows", "opt", "qwen3-moe", "gemma3", "gpt-oss"]
)
def compiled(request, tmp_path_factory):
    """(engine directory, transformers' model)."""
    return compiled_engine(request.param, tmp_path_factory)


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 160, (length,), generator=generator) for length in lengths]


def check(runner, model):
    for seat, prompt in enumerate(runner.prompts):
        expected = model(prompt.unsqueeze(0)).logits[0]
        torch.testing.assert_close(runner.all_logits(seat), expected, atol=1e-4, rtol=1e-4)


def test_a_package_computes_any_batch(compiled):
    directory, model = compiled
    engine = open_engine(directory)
    runner = ScatteredRunner(
        engine.forward, engine.kv_shape(96, 4), prompts(37, 90, 1), engine.dtype
    )
    runner.step((0, 0, 1))  # one token alone
    runner.step((0, 1, 10))
    runner.step((1, 0, 33), (0, 10, 11), (2, 0, 1))
    runner.step((0, 11, 12), (1, 33, 80))
    runner.step((0, 12, 37), (1, 80, 81))
    runner.drop(1, 2)
    runner.step((1, 8, 12), (1, 81, 90))  # disjoint spans of one seat
    runner.step((0, 36, 37), unwritten=((0, 36),))
    check(runner, model)


def test_a_step_that_samples_nothing(compiled):
    engine = open_engine(compiled[0])
    runner = ScatteredRunner(engine.forward, engine.kv_shape(4, 8), prompts(5), engine.dtype)
    table = runner.block_table
    none = torch.zeros(0)
    batch = batch_of([SeatSpan(0, 0, 5)], torch.arange(5), table, none, 8)
    logits = engine.forward(batch, runner.handle)
    assert logits.shape == (0, 160) and not runner.pool[table[0, 0], :, :, :, :5].isnan().any()


def test_pools_of_one_process_do_not_mix(compiled):
    """The handle is no constant of the package: steps of two pools, and of two engines, in
    turns."""
    directory, model = compiled
    first, second = open_engine(directory), open_engine(directory)
    runners = [
        ScatteredRunner(
            engine.forward, engine.kv_shape(32, 4), prompts(40, seed=seed), engine.dtype
        )
        for seed, engine in enumerate((first, first, second))
    ]
    assert len({runner.handle for runner in runners}) == 3
    for start in range(0, 40, 10):
        for runner in runners:
            runner.step((0, start, start + 10))
    for runner in runners:
        check(runner, model)


def test_the_weights_are_not_copied(compiled):
    """Changing the weights in place changes the package's results."""
    directory, _ = compiled
    config = Manifest.read(directory).decoder
    stored = {name: tensor.clone() for name, tensor in load_weights(directory / WEIGHTS).items()}
    weights = laid_out(stored)
    package = Package(directory / PACKAGE, config, weights)
    check_parity(package, config, weights)
    for name, tensor in weights.items():
        assert torch.equal(tensor, stored[name])
        tensor.mul_(1.1)
    check_parity(package, config, weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["llama", "opt", "qwen3-moe", "gemma3", "gpt-oss"])
@torch.inference_mode()
def test_on_a_gpu_captured_steps_are_as_near_to_float32_as_the_reference(kind, tmp_path):
    """And the weights are there once."""
    tiny_checkpoint(kind, tmp_path / "checkpoint")
    engines = {}
    for backend in ("reference", "inductor"):
        build_engine(
            tmp_path / "checkpoint", tmp_path / backend, backend, dtype="bfloat16", device="cuda"
        )
        before = torch.cuda.memory_allocated()
        engines[backend] = open_engine(tmp_path / backend, "cuda")
        weights = (tmp_path / backend / WEIGHTS).stat().st_size
        assert torch.cuda.memory_allocated() - before < 1.2 * weights + 50_000
    reference, inductor = engines.values()
    config = reference.manifest.decoder
    wide = {name: tensor.float() for name, tensor in reference._decoder.state_dict().items()}
    batches = random_batches(config, "cuda")
    exact = logits_and_kv(Decoder.from_weights(config, wide), config, batches, torch.float32)
    naive = logits_and_kv(reference.forward, config, batches, torch.bfloat16)
    ours = logits_and_kv(inductor.forward, config, batches, torch.bfloat16, captured)
    for own, other, truth in zip(ours, naive, exact, strict=True):
        assert (own - truth).norm() <= 2 * (other - truth).norm()


def logits_and_kv(forward, config, batches, dtype, how=lambda step: step()):
    """Results of all steps; both float32. how(step): runs a step and returns its logits."""
    shape = (batches[0].block_table.numel(), config.layers, 2, config.kv_heads, 16, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device="cuda")
    logits = []
    with registered(pool, Shard(config), batches) as (handle, plan):
        for batch in batches:

            def step(batch=batch):
                plan(batch.segments)
                return forward(batch, handle)

            logits.append(how(step).float())
        torch.cuda.synchronize()
    return torch.cat(logits), pool.float()


def captured(step):
    step()  # work that cannot be captured happens now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    logits.zero_()
    graph.replay()
    return logits.clone()  # the graph's memory goes with it
