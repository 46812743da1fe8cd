"""DecoderConfig: all differences between decoders. Plain data; it is stored in the manifest.

Shard: the part of it that one of several ranks holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ...scheduler.types import SettingError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding; `factor` 1 is unscaled.

    By default every frequency is divided by `factor` (linear scaling).
    With `low_freq_factor` as in Llama 3: waves longer than original_positions / low_freq_factor are
    scaled, those shorter than original_positions / high_freq_factor are not, and between the two
    the scaling increases gradually. With `unscaled_to` as in YaRN: pairs up to this number are not
    scaled, those from `scaled_from` on are, and between the two the scaling increases gradually.
    Rotated queries and keys are multiplied by `length`.
    """

    dims: int
    theta: float
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float = 1.0
    original_positions: int = 0
    unscaled_to: float | None = None
    scaled_from: float = 0.0
    length: float = 1.0

    def frequencies(self) -> list[float]:
        """Radians per position of each of the dims / 2 pairs."""
        return [self._scaled(i, self.theta ** (-2 * i / self.dims)) for i in range(self.dims // 2)]

    def _scaled(self, pair: int, frequency: float) -> float:
        if self.low_freq_factor is not None:
            # over the context of the original training
            turns = self.original_positions * frequency / (2 * math.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        elif self.unscaled_to is not None:
            kept = (self.scaled_from - pair) / (self.scaled_from - self.unscaled_to)
        else:
            kept = 0.0
        kept = min(max(kept, 0.0), 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layers, as config.json names them."""


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta net layers: in place of keys and values a sequence has a state of fixed size.

    key_heads, value_heads  heads of queries and keys, and of values; a key head serves
                            value_heads / key_heads value heads that follow each other
    key_dim, value_dim      numbers of a head
    conv_width              tokens that the causal convolution of queries, keys and values sees
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and variant of a decoder-only transformer.

    max_positions     longest context that the model was trained for, tokens
    embedding_size    width of the token embeddings; if it is not hidden_size they are projected in
                      and out
    rotary            None: learned absolute positions; their table begins with `position_offset`
                      unused rows
    window_rotary     of the layers with a window; None: as all others
    norm              "rms" or "layer"; `norm_affine` False: without weights
    norm_plus_one     RMS norms multiply by 1 + weight
    norm_first        norm in front of attention and MLP (else behind the residual sum);
                      `final_norm` before the head
    norm_results      the results of attention and MLP are normed before they are added
    qk_norm           RMS norm over each head's query and key
    embedding_factor  token embeddings are multiplied by it
    query_size        attention scores are divided by its square root; 0: head_dim
    activation        a name in model.ACTIVATIONS; `gated`: act(gate(x)) * up(x)
    gate_limit        of experts: gate(x) is at most this, up(x) is between -gate_limit and
                      gate_limit, and up(x) + 1 is multiplied by gate(x) sigmoid(gate_slope
                      gate(x)); 0: plain SiLU gates
    experts           MLPs of a layer, each `mlp_size` wide, of which a token uses
                      `experts_per_token`; 0: one MLP for all tokens
    experts_sum_to_1  the weights of a token's experts are divided by their sum
    shared_expert_size  width of an MLP that each token uses beside its experts; its result is
                      multiplied by the sigmoid of a gate. 0: there is none
    mlp_bias          also of experts; `router_bias` of the router that chooses them
    windows           of each layer: its queries see only so many of the latest keys, their own
                      among them; 0: all of them. Empty: no layer has a window
    sinks             each head of a layer has a logit that joins the softmax of every query, and
                      has no value
    gated_attention   each head's result is multiplied by the sigmoid of a gate, which is projected
                      beside the head's query
    kinds             of each layer: FULL attention, or LINEAR attention as `linear` describes it.
                      Empty: all layers have full attention
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
    router_bias: bool = False
    gate_limit: float = 0.0
    gate_slope: float = 0.0
    window_rotary: Rotary | None = None
    norm_plus_one: bool = False
    norm_results: bool = False
    embedding_factor: float = 1.0
    query_size: float = 0.0
    gated_attention: bool = False
    kinds: tuple[str, ...] = ()
    linear: LinearAttention | None = None
    shared_expert_size: int = 0

    def is_linear(self, layer: int) -> bool:
        return bool(self.kinds) and self.kinds[layer] == LINEAR

    @property
    def linear_layers(self) -> int:
        return self.kinds.count(LINEAR)

    @property
    def kv_layers(self) -> int:
        """The layers that have KV."""
        return self.layers - self.linear_layers

    def place(self, layer: int) -> int:
        """The layer's number among those of its kind: its place in the KV pool, or in a state."""
        return self.kinds[:layer].count(self.kinds[layer]) if self.kinds else layer

    def window(self, layer: int) -> int:
        """0: the layer has none."""
        return self.windows[layer] if self.windows else 0

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """All that differ; empty for learned positions."""
        return tuple(
            dict.fromkeys(rotary for rotary in (self.rotary, self.window_rotary) if rotary)
        )

    def rotary_of(self, layer: int) -> Rotary | None:
        return self.window_rotary or self.rotary if self.window(layer) else self.rotary

    def scale(self, layer: int) -> float:
        """Attention scores of keys and queries, rotated but not multiplied by their length, are
        multiplied by it."""
        rotary = self.rotary_of(layer)
        length = rotary.length if rotary else 1.0
        return length**2 / math.sqrt(self.query_size or self.head_dim)

    @property
    def silu_gated(self) -> bool:
        """Whether the MLP is gated by SiLU: then one projection makes gate and values, and
        `silu_gate` joins them."""
        return self.gated and self.activation == "silu"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a decoder, split as in Megatron: heads, the MLP's (or each expert's) width
    and the vocabulary are divided.

    With fewer KV heads than ranks, neighbouring ranks hold the same one. Every rank holds all other
    parameters whole. Sizes are the same on all ranks: the end of the vocabulary is padded with
    rows. SettingError('--tensor-parallel', ...) if the decoder cannot be divided among the ranks.
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
                f"{self._divided()} cannot be divided among {self.ranks} ranks, only among "
                f"{' or '.join(possible)}",
            )
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"there is no rank {self.rank} of {self.ranks}")

    def _divides(self, ranks: int) -> bool:
        config = self.config
        kv_heads = config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
        # value heads are a multiple of key heads
        sizes = [config.heads, config.mlp_size, config.shared_expert_size]
        sizes += [config.linear.key_heads] if config.linear else []
        return kv_heads and all(size % ranks == 0 for size in sizes)

    def _divided(self) -> str:
        config = self.config
        parts = [f"{config.heads} heads", f"{config.kv_heads} KV heads"]
        if config.linear:
            parts.append(f"{config.linear.key_heads} key heads of linear attention")
        if config.shared_expert_size:
            parts.append(f"a shared expert {config.shared_expert_size} wide")
        return f"{', '.join(parts)} and an MLP {config.mlp_size} wide"

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
    def shared_expert_size(self) -> int:
        return self.config.shared_expert_size // self.ranks

    @property
    def linear(self) -> LinearAttention | None:
        """The rank's heads: some key heads, and the value heads that they serve."""
        linear = self.config.linear
        return linear and replace(
            linear,
            key_heads=linear.key_heads // self.ranks,
            value_heads=linear.value_heads // self.ranks,
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head on a rank. Rank r has the tokens from r * vocab_rows
        on."""
        return -(-self.config.vocab_size // self.ranks)
