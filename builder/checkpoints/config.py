"""DecoderConfig: all differences between decoders. Plain data; it is stored in the manifest.

Shard: the part of it that one of several ranks holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...scheduler.types import SettingError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding; `factor` 1 is unscaled.

    With `low_freq_factor` None every frequency is divided by `factor` (linear scaling). Otherwise as in Llama 3: waves
    longer than original_positions / low_freq_factor are scaled, those shorter than original_positions /
    high_freq_factor are not, and between the two the scaling increases gradually.
    """

    dims: int
    theta: float
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float = 1.0
    original_positions: int = 0

    def frequencies(self) -> list[float]:
        """Radians per position of each of the dims / 2 pairs."""
        return [self._scaled(self.theta ** (-i / self.dims)) for i in range(0, self.dims, 2)]

    def _scaled(self, frequency: float) -> float:
        if self.low_freq_factor is None:
            return frequency / self.factor
        turns = self.original_positions * frequency / (2 * math.pi)  # over the context of the original training
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and variant of a decoder-only transformer.

    max_positions     longest context that the model was trained for, tokens
    embedding_size    width of the token embeddings; if it is not hidden_size they are projected in and out
    rotary            None: learned absolute positions; their table begins with `position_offset` unused rows
    norm              "rms" or "layer"; `norm_affine` False: without weights
    norm_first        norm in front of attention and MLP (else behind the residual sum); `final_norm` before the head
    qk_norm           RMS norm over each head's query and key
    activation        a name in model.ACTIVATIONS; `gated`: act(gate(x)) * up(x)
    experts           MLPs of a layer, each `mlp_size` wide, of which a token uses `experts_per_token`; 0: one MLP for
                      all tokens
    experts_sum_to_1  the weights of a token's experts are divided by their sum
    windows           of each layer: its queries see only so many of the latest keys, their own among them; 0: all of
                      them. Empty: no layer has a window
    sinks             each head of a layer has a logit that joins the softmax of every query, and has no value
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    embedding_size: int
    rotary: Rotary | None
    position_offset: int
    norm: str
    norm_eps: float
    norm_affine: bool
    norm_first: bool
    final_norm: bool
    qk_norm: bool
    activation: str
    gated: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    experts: int = 0
    experts_per_token: int = 0
    experts_sum_to_1: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False

    @property
    def silu_gated(self) -> bool:
        """Whether the MLP is gated by SiLU: then one projection makes gate and values, and `silu_gate` joins them."""
        return self.gated and self.activation == "silu"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a decoder, split as in Megatron: heads, the MLP's (or each expert's) width and the
    vocabulary are divided.

    With fewer KV heads than ranks, neighbouring ranks hold the same one. Every rank holds all other parameters whole.
    Sizes are the same on all ranks: the end of the vocabulary is padded with rows. SettingError('--tensor-parallel',
    ...) if the decoder cannot be divided among the ranks.
    """

    config: DecoderConfig
    ranks: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not (self.ranks >= 1 and self._divides(self.ranks)):
            config = self.config
            possible = [str(n) for n in range(1, config.heads + 1) if self._divides(n)]
            raise SettingError(
                "--tensor-parallel",
                f"{config.heads} heads, {config.kv_heads} KV heads and an MLP {config.mlp_size} wide cannot be divided "
                f"among {self.ranks} ranks, only among {' or '.join(possible)}",
            )
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"there is no rank {self.rank} of {self.ranks}")

    def _divides(self, ranks: int) -> bool:
        config = self.config
        kv_heads = config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
        return kv_heads and config.heads % ranks == 0 and config.mlp_size % ranks == 0

    @property
    def heads(self) -> int:
        return self.config.heads // self.ranks

    @property
    def kv_heads(self) -> int:
        return max(1, self.config.kv_heads // self.ranks)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.config.kv_heads // self.ranks

    @property
    def mlp_size(self) -> int:
        return self.config.mlp_size // self.ranks

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head on a rank. Rank r has the tokens from r * vocab_rows on."""
        return -(-self.config.vocab_size // self.ranks)
