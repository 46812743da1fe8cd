"""A tiny hybrid engine on a GPU: the CPU's log probabilities, and equal bits whichever way a state
took."""

from __future__ import annotations

import json
import statistics
from array import array

import pytest
import torch

from pensieve.builder.build import build_random_engine
from pensieve.builder.checkpoints.config import Shard
from pensieve.builder.model import Decoder
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.builder.random_weights import random_weights
from pensieve.builder.states import state_shape
from pensieve.plugins.state.pool import StatePool
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.runtime.engine import open_engine
from pensieve.runtime.launch import sizing
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.scheduler.turns.drafts import Drafts
from tests.scheduler.draft_policy import always_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CHUNK = 32
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """The directory of an engine for each dtype."""
    root = tmp_path_factory.mktemp("hybrid")
    (root / "config.json").write_text(json.dumps(CONFIG))
    built = {dtype: root / dtype for dtype in ("float32", "bfloat16")}
    for dtype, directory in built.items():
        build_random_engine(root / "config.json", directory, dtype=dtype, device="cuda")
    return built


@pytest.fixture(autouse=True)
def reuse_pays(monkeypatch):
    """A GPU computes this model's tokens in less time than it copies a state."""
    monkeypatch.setitem(sizing.ESTIMATES, "cuda", sizing.ESTIMATES["cpu"])


class CpuTwin:
    """The same weights on the CPU, in float32."""

    def __init__(self, directory):
        manifest = open_engine(directory, "cuda").manifest
        kind = getattr(torch, manifest.dtype)
        weights = random_weights(manifest.decoder, kind, "cuda", manifest.random_seed)
        self.config = manifest.decoder
        self.decoder = Decoder.from_weights(
            self.config, {name: tensor.cpu().float() for name, tensor in weights.items()}
        )

    @torch.inference_mode()
    def log_probabilities(self, tokens):
        """[n, vocab] of n tokens, computed at once."""
        config = self.config
        chunks = -(-len(tokens) // CHUNK)
        pool = torch.zeros(chunks, config.kv_layers, 2, config.kv_heads, CHUNK, config.head_dim)
        shape = state_shape(Shard(config), torch.float32)
        states = StatePool(torch.zeros(1, shape.nbytes, dtype=torch.uint8), shape)
        handle = register_pool(pool, states=states)
        try:
            batch = batch_of(
                [SeatSpan(0, 0, len(tokens))],
                torch.tensor(tokens),
                torch.arange(chunks).view(1, -1),
                torch.arange(len(tokens)),
                CHUNK,
            )
            return self.decoder(batch, handle).log_softmax(dim=-1)
        finally:
            release_pool(handle)


def opened(directory, **settings) -> LLM:
    sizes = {"gpu_kv_chunks": 400, "host_kv_chunks": 6000, "chunk_tokens": CHUNK}
    return LLM(str(directory), device="cuda", **(sizes | settings))


def random_prompts(*lengths: int) -> list[list[int]]:
    torch.manual_seed(5)
    return [torch.randint(3, 160, (length,)).tolist() for length in lengths]


def differences(twin: CpuTwin, output, choice) -> list[float]:
    """Of the log probability of each token of the reply."""
    tokens = output.prompt_token_ids + choice.token_ids
    expected = twin.log_probabilities(tokens)
    begin = len(tokens) - len(choice.logprobs)
    theirs = expected[range(begin - 1, len(tokens) - 1), choice.token_ids].tolist()
    ours = [
        one[token].logprob for one, token in zip(choice.logprobs, choice.token_ids, strict=True)
    ]
    return [abs(own - other) for own, other in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_those_of_the_cpu(directories, dtype, eager):
    """Prompts in pieces of up to 128 tokens, several rows, and a second turn that begins at a
    state."""
    twin = CpuTwin(directories[dtype])
    errors = []
    params = SamplingParams(n=2, max_tokens=20, logprobs=1, ignore_eos=True)
    prompts = random_prompts(1, 2, 17, 63, 64, 65, 129, 145, 300)
    with opened(directories[dtype], max_num_batched_tokens=128, enforce_eager=eager) as llm:
        for turn in range(2):
            outputs = llm.generate(prompts, params)
            for output in outputs:
                begins = len(output.prompt_token_ids) >= 64 + 20  # a state before the reply
                assert (output.usage.cached > 0) == (turn == 1 and begins)
                for choice in output.outputs:
                    errors += differences(twin, output, choice)
            prompts = [output.prompt_token_ids + output.outputs[1].token_ids for output in outputs]
    if dtype == "float32":
        assert max(errors) <= 1e-4
    else:
        assert statistics.mean(errors) <= 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_swapped_conversation_gives_the_same_bits(directories, dtype):
    """Its states are on HOST in any case; its KV stays on the GPU, or leaves it."""
    prompt, *others = random_prompts(*[150] * 8)
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    results = []
    for chunks in (400, 12):
        sizes = dict(gpu_kv_chunks=chunks, max_num_batched_tokens=64, max_num_seqs=1)
        with opened(directories[dtype], **sizes) as llm:
            (first,) = llm.generate([prompt], params)
            llm.generate(others, params)
            (second,) = llm.generate([prompt + first.outputs[0].token_ids + [7]], params)
        results.append(second.outputs[0])
        assert (second.usage.gpu > 0, second.usage.host > 0) == (chunks == 400, chunks == 12)
    stayed, moved = results
    assert stayed.token_ids == moved.token_ids
    assert stayed.logprobs == moved.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_eager_steps_give_the_same_bits(directories, dtype):
    params = SamplingParams(max_tokens=70, temperature=0.0, logprobs=0, ignore_eos=True)
    results = []
    for eager in (False, True):
        with opened(directories[dtype], max_num_batched_tokens=128, enforce_eager=eager) as llm:
            outputs = llm.generate(random_prompts(1, 80, 150), params)
        results.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert results[0] == results[1]


@pytest.mark.parametrize("right", [0, 3, 16])
def test_drafts_change_no_reply(directories, right, monkeypatch):
    """Of 16 drafts the first `right` come true. In float32, where roundings decide no token. The
    second turn begins at a state of the first."""
    twin = CpuTwin(directories["float32"])
    always_draft(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    whole: list[list[int]] = []

    def draft(tokens):
        text = next(one for one in whole if one[: len(tokens)] == tokens)
        drafts = text[len(tokens) : len(tokens) + 16]
        return drafts[:right] + [(token + 1) % 160 for token in drafts[right:]]

    monkeypatch.setattr(Drafts, "next", lambda self, tokens: array("i", draft([*tokens[:]])))
    replies = []
    for speculate in ("off", "lookup"):
        with opened(directories["float32"], speculate=speculate) as llm:
            outputs = llm.generate(random_prompts(65, 130, 200), params)
            replies.append([output.outputs[0].token_ids for output in outputs])
            whole = [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
            again = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
            for output in llm.generate(whole, again):
                assert output.usage.cached > 0
                assert max(differences(twin, output, output.outputs[0])) <= 1e-4
    assert replies[0] == replies[1]
