"""Tiny random models for tests: transformers' own implementation, saved as a checkpoint, and a way
to run ours."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from pensieve.builder.forward_batch import NOT_WRITTEN, Forward
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.plugins.state.pool import StatePool
from pensieve.plugins.torch_ops import register_pool, release_pool

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
LLAMA_SHAPE = {**SHAPE, "intermediate_size": 128, "num_key_value_heads": 2}
QWEN3_WINDOWS = {
    **LLAMA_SHAPE,
    "head_dim": 32,
    "use_sliding_window": True,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"],
}
QWEN3_MOE_SHAPE = {
    **LLAMA_SHAPE,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
# Windows far below the lengths of the tests' conversations, in one layer of two
GEMMA3_SHAPE = {
    **LLAMA_SHAPE,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 13,
    "sliding_window_pattern": 2,
}
GPT_OSS_SHAPE = {
    **LLAMA_SHAPE,
    "head_dim": 32,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 11,
}
# A head's result is nearly zero for a token whose query and key are nearly orthogonal, and is then
# normalised. So float32 would not be enough for a comparison with the usual rms_norm_eps.
QWEN3_5_SHAPE = {
    **LLAMA_SHAPE,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
QWEN3_5_MOE_SHAPE = {
    **{name: value for name, value in QWEN3_5_SHAPE.items() if name != "intermediate_size"},
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
OPT_SHAPE = {**SHAPE, "ffn_dim": 128}


def tiny_config(kind: str) -> PretrainedConfig:
    match kind:
        case "llama":
            return LlamaConfig(**LLAMA_SHAPE)
        case "qwen3":
            return Qwen3Config(head_dim=32, tie_word_embeddings=True, **LLAMA_SHAPE)
        case "mistral-window":
            return MistralConfig(sliding_window=37, **LLAMA_SHAPE)
        case "qwen3-windows":
            return Qwen3Config(**QWEN3_WINDOWS)
        case "mixtral":
            return MixtralConfig(num_local_experts=4, **LLAMA_SHAPE)
        case "qwen3-moe":
            return Qwen3MoeConfig(**QWEN3_MOE_SHAPE)
        case "gemma3":
            return Gemma3TextConfig(**GEMMA3_SHAPE)
        case "gpt-oss":
            return GptOssConfig(**GPT_OSS_SHAPE)
        case "qwen3-5":
            return Qwen3_5TextConfig(**QWEN3_5_SHAPE)
        case "qwen3-5-moe":
            return Qwen3_5MoeTextConfig(**QWEN3_5_MOE_SHAPE)
        case "qwen3-next":
            return Qwen3NextConfig(**QWEN3_5_MOE_SHAPE)
        case "opt":
            return OPTConfig(**OPT_SHAPE)
    raise ValueError(kind)


def tiny_checkpoint(kind: str, directory: Path, seed: int = 0) -> PreTrainedModel:
    """Saves a random model of a kind that `tiny_config` knows in float32 and returns it in eval
    mode."""
    return save_random(tiny_config(kind), directory, seed)


def save_random(
    config: PretrainedConfig, directory: Path, seed: int = 0, gain: float = 2.0, **options: str
) -> PreTrainedModel:
    """Every parameter, norms and biases too, is random, and large enough for logits that are well
    spread. gain: by which projections multiply a vector's length."""
    torch.manual_seed(seed)
    model = (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))
        else:
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory, **options)
    return model


class ScatteredRunner:
    """Runs a forward pass over several requests whose chunks lie in random slots of a pool full of
    NaN.

    `logits[seat][position]` is the result of the last step that computed the position.
    """

    def __init__(
        self,
        forward: Forward,
        kv_shape: tuple[int, ...],
        prompts: list[Tensor],
        dtype: torch.dtype,
        states: StatePool | None = None,
    ):
        self.forward = forward
        self.prompts = prompts
        self.chunk_tokens = kv_shape[4]
        self.pool = torch.full(
            kv_shape, 0xFF if dtype == torch.uint8 else float("nan"), dtype=dtype
        )
        self.handle = register_pool(self.pool, states=states)
        weakref.finalize(self, release_pool, self.handle)
        blocks = -(-max(len(prompt) for prompt in prompts) // self.chunk_tokens)
        self.free = torch.randperm(kv_shape[0]).tolist()
        self.block_table = torch.tensor(
            [[self.free.pop() for _ in range(blocks)] for _ in prompts], dtype=torch.int32
        )
        self.logits: list[dict[int, Tensor]] = [{} for _ in prompts]

    def drop(self, seat: int, block: int) -> None:
        """Loses a chunk: its slot is overwritten and the seat gets another, empty one."""
        self.pool[self.block_table[seat, block]] = float("nan")
        self.block_table[seat, block] = self.free.pop()

    def step(
        self,
        *spans: tuple[int, int, int] | SeatSpan,
        unwritten: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Computes (seat, start, end) spans in one batch; (seat, position) pairs in `unwritten` get
        slot -1."""
        pieces = [SeatSpan(*span) for span in spans]
        tokens = [(one.seat, position) for one in pieces for position in range(*one[1:3])]
        ids = torch.cat([self.prompts[one.seat][one.start : one.end] for one in pieces])
        batch = batch_of(
            pieces, ids, self.block_table, torch.arange(len(tokens)), self.chunk_tokens
        )
        batch.slots[[token in unwritten for token in tokens]] = NOT_WRITTEN
        rows = iter(self.forward(batch, self.handle))
        for one in pieces:
            self.logits[one.seat] |= {position: next(rows) for position in range(*one[1:3])}

    def all_logits(self, seat: int) -> Tensor:
        return torch.stack(
            [self.logits[seat][position] for position in range(len(self.prompts[seat]))]
        )
