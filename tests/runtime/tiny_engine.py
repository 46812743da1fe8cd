"""Random engines small enough for any device, made without files: the CPU's answers are those the
GPU's must equal."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from pensieve.builder.checkpoints.config import DecoderConfig, Rotary
from pensieve.builder.model import Decoder
from pensieve.builder.parity import SeatSpan, batch_of
from pensieve.plugins.attention.fp8_pool import pool_width
from pensieve.plugins.torch_ops import register_pool, release_pool

SHAPE = dict(
    vocab_size=160,
    hidden_size=64,
    layers=5,
    heads=4,
    head_dim=16,
    mlp_size=128,
    max_positions=512,
    embedding_size=64,
    norm_eps=1e-5,
    norm_affine=True,
    norm_first=True,
    final_norm=True,
    qk_norm=False,
)
CONFIGS = {
    "llama": DecoderConfig(
        architecture="LlamaForCausalLM",
        kv_heads=2,
        rotary=Rotary(16, 10000.0),
        position_offset=0,
        norm="rms",
        activation="silu",
        gated=True,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        tied_embeddings=False,
        **SHAPE,
    ),
    "opt": DecoderConfig(
        architecture="OPTForCausalLM",
        kv_heads=4,
        rotary=None,
        position_offset=2,
        norm="layer",
        activation="relu",
        gated=False,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        **SHAPE,
    ),
}


class TinyEngine:
    """Equal weights for equal kinds on every device; large enough for well spread logits."""

    dtype = torch.float32
    state_shape = None

    def __init__(self, kind: str, device: str = "cpu", kv_dtype: torch.dtype = torch.float32):
        self.kv_dtype = kv_dtype
        self.config = CONFIGS[kind]
        self.vocab_size = self.config.vocab_size
        self.manifest = SimpleNamespace(
            device=device,
            vocab_size=self.vocab_size,
            decoder=self.config,
            layers=self.config.layers,
            tensor_parallel=1,
        )
        with torch.device("meta"):
            shapes = {
                name: tensor.shape for name, tensor in Decoder(self.config).state_dict().items()
            }
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, shape in shapes.items():
            random = torch.randn(shape, generator=generator)
            if len(shape) == 2:
                random *= 2.0 * shape[1] ** -0.5
            else:
                random = 0.2 * random + (1.0 if name.endswith("weight") else 0.0)
            weights[name] = random.to(device)
        self._decoder = Decoder.from_weights(self.config, weights).to(device)

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        width = pool_width(self.config.head_dim, self.kv_dtype)
        return (slots, self.config.layers, 2, self.config.kv_heads, chunk_tokens, width)

    def chunk_bytes(self, chunk_tokens: int) -> int:
        return math.prod(self.kv_shape(1, chunk_tokens)) * self.kv_dtype.itemsize

    @torch.inference_mode()
    def forward(self, *arguments: Tensor | int) -> Tensor:
        return self._decoder(*arguments)


class Reference:
    """A whole context at once on the CPU, as `chatter.check_greedy` asks for it."""

    def __init__(self, kind: str, kv_dtype: torch.dtype = torch.float32):
        self._engine = TinyEngine(kind, kv_dtype=kv_dtype)

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        """tokens [1, n]; `logits` [1, n, vocab]."""
        count = tokens.shape[1]
        chunk = 32
        pool = torch.zeros(
            self._engine.kv_shape(-(-count // chunk), chunk), dtype=self._engine.kv_dtype
        )
        handle = register_pool(pool)
        table = torch.arange(len(pool)).view(1, -1)
        batch = batch_of([SeatSpan(0, 0, count)], tokens[0], table, torch.arange(count), chunk)
        logits = self._engine.forward(batch, handle)
        release_pool(handle)
        return SimpleNamespace(logits=logits.unsqueeze(0))
