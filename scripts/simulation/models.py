"""Shapes of the simulated models, and the costs of their steps and KV: estimated, or from a
profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...builder.checkpoints.architectures import decoder_config
from ...builder.checkpoints.config import Shard
from ...scheduler.config import StateConfig
from ...scheduler.cost import CostProfile, analytic_profile
from ...scheduler.types import SettingError

ELEMENT_BYTES = 2  # bf16 weights and KV


class StatesInHost(NamedTuple):
    """How many states HOST holds. `few` says so if they are too few, and is empty otherwise."""

    text: str
    few: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """active_parameters: the parameters that one token uses; None: all of them. windows: as in
    `DecoderConfig`. state_bytes: a recurrent state's; 0: the model has none."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    active_parameters: int | None = None
    windows: tuple[int, ...] = ()
    state_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.parameters * ELEMENT_BYTES

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES

    def cost(
        self,
        chunk_tokens: int,
        max_context: int,
        flops_per_s: float,
        memory_bytes_per_s: float,
        link_bytes_per_s: float,
    ) -> CostProfile:
        """Every step reads the weights once, those of all experts too, as some dozens of tokens use
        nearly all of them. A row that generates reads its state and writes it. Arithmetic comes on
        top."""
        cost = analytic_profile(
            chunk_tokens=chunk_tokens,
            parameters=self.active_parameters or self.parameters,
            layers=self.layers,
            attention_width=self.heads * self.head_dim,
            chunk_bytes=self.token_bytes * chunk_tokens,
            max_context=max_context,
            flops_per_s=flops_per_s,
            link_bytes_per_s=link_bytes_per_s,
            step_base_seconds=self.weight_bytes / memory_bytes_per_s,
            windows=self.windows,
        )
        if not self.state_bytes:
            return cost
        moved = 2 * self.state_bytes / memory_bytes_per_s
        rows = tuple(
            (context, moved + cost.token_attention(context)) for context, _ in cost.attention
        )
        return replace(cost, row_attention=rows)

    def states(self, chunk_tokens: int, seats: int) -> StateConfig | None:
        """As `pensieve serve` keeps them; None: the model has none."""
        if not self.state_bytes:
            return None
        chunk_bytes = self.token_bytes * chunk_tokens
        return StateConfig.of_size(self.state_bytes, chunk_bytes, chunk_tokens, seats)

    def sizes(self) -> str:
        """Of one rank."""
        state = f", a state {self.state_bytes / 2**20:.1f} MiB" if self.state_bytes else ""
        weights = f"{self.weight_bytes / 2**30:.1f} GiB"
        return f"weights {weights}, KV {self.token_bytes / 2**10:g} KiB a token{state}"

    def states_in_host(self, chunk_tokens: int, seats: int, host_bytes: int) -> StatesInHost | None:
        """If HOST held nothing else; None: the model has none."""
        states = self.states(chunk_tokens, seats)
        if states is None:
            return None
        held = host_bytes // (states.chunks * self.token_bytes * chunk_tokens)
        state = f"{held} states in {host_bytes / 2**30:.4g} GiB of host memory"
        few = held < 2 * seats
        advice = f"fewer than two for each of --max-num-seqs {seats}: many turns will compute their"
        return StatesInHost(state, f"{advice} history again" if few else "")


MODELS = {
    "llama-3-8b": ModelShape(8_030_000_000, 32, 32, 8),
    "llama-2-13b": ModelShape(13_020_000_000, 40, 40, 40),
    "llama-2-13b-gqa": ModelShape(11_440_000_000, 40, 40, 10),
    "opt-13b": ModelShape(12_850_000_000, 40, 40, 40),
}


def read_shape(config: Path, ranks: int) -> ModelShape:
    """Returns one rank's part of the model with this config.json, of `ranks` equal parts. Raises
    SettingError."""
    from ...builder.checkpoints.hugging_face import read_json

    return shape_of(read_json(config, "--config"), ranks)


def shape_of(config: Mapping[str, Any], ranks: int) -> ModelShape:
    """As `read_shape`, of what config.json holds."""
    import torch

    from ...builder.checkpoints.hugging_face import active_parameters, parameter_shapes
    from ...builder.states import state_shape

    shard = Shard(decoder_config(config), ranks)
    parameters = sum(map(math.prod, parameter_shapes(shard.config, ranks).values()))
    active = active_parameters(shard.config, ranks)
    decoder = shard.config
    heads = shard.heads, shard.kv_heads, decoder.head_dim
    states = state_shape(shard, torch.bfloat16)
    state_bytes = 0 if states is None else states.nbytes
    return ModelShape(parameters, decoder.kv_layers, *heads, active, decoder.windows, state_bytes)


def read_costs(profile: Path, shape: ModelShape, chunk_tokens: int) -> tuple[CostProfile, str]:
    """The costs in a profile.json, for chunks of so many tokens; the hardware and date. Raises
    SettingError."""
    cost, source = read_profile(profile)
    if cost.chunk_bytes != shape.token_bytes * cost.chunk_tokens:
        message = (
            f"{profile} is of another model than --config, or of another number of GPUs; run "
            "`pensieve profile`"
        )
        raise SettingError("--profile", f"{message} with this model's engine in 16 bits")
    return scaled(cost, chunk_tokens), source


def read_profile(profile: Path) -> tuple[CostProfile, str]:
    """The costs as they were measured; the hardware and date. Raises SettingError."""
    from ...builder.checkpoints.hugging_face import read_json

    value = read_json(profile, "--profile")
    try:
        points = {
            name: tuple(map(tuple, entry))
            for name, entry in value["cost"].items()
            if isinstance(entry, list)
        }
        cost = CostProfile(**{**value["cost"], **points})
        source = f"{value['hardware']}, {value['date']}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SettingError(
            "--profile", f"{profile} is damaged ({error!r}); run `pensieve profile` again"
        ) from None
    return cost, source


def scaled(cost: CostProfile, chunk_tokens: int) -> CostProfile:
    """The same costs, for chunks of another size."""
    ratio = chunk_tokens / cost.chunk_tokens
    return replace(
        cost,
        chunk_tokens=chunk_tokens,
        chunk_seconds=cost.chunk_seconds * ratio,
        attention=tuple((context, seconds * ratio) for context, seconds in cost.attention),
        chunk_bytes=int(cost.chunk_bytes * ratio),
    )
