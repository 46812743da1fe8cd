"""The manifest of an engine directory: the engine, its sources, and its inputs at run time.

Plain data, JSON on disk, readable without torch. Its fingerprint is checked on loading and seeds
the keys of the KV cache: engines of equal fingerprint compute equal KV.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import __version__
from ..scheduler.types import SettingError
from .checkpoints.config import DecoderConfig, LinearAttention, Rotary, Shard

FORMAT = 8
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"  # of an engine with one rank
PACKAGE = "decoder.pt2"  # AOTInductor's
PLAN = "decoder.plan"  # TensorRT's
RANDOM = "random:"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
KV_LAYOUT = ("slot", "layers", "2", "kv_heads", "chunk_tokens", "head_dim")


@dataclass(frozen=True, slots=True)
class Parts:
    """Sources of an engine: SHA-256 digests and versions. A change of any makes it another engine.

    weights     for each rank, the digest of its weights, or "random:<seed>" if they are made when
                the engine is opened
    """

    weights: tuple[str, ...]
    tokenizer: str
    code: str
    torch: str
    pensieve: str


@dataclass(frozen=True, slots=True)
class Parity:
    """Relative errors (root mean square) of an engine's logits and KV, and the eager decoder's in
    the same dtype, both against the eager decoder in float32."""

    logits: float
    logits_eager: float
    kv: float
    kv_eager: float


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Relative errors (root mean square) of logits and KV of the eager decoder with FP8 weights, in
    the engine's dtype on its device, against the unquantised one in float32."""

    logits: float
    kv: float


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of compiling. package: the SHA-256 of its file, which differs from build to
    build."""

    package: str
    package_bytes: int
    compile_seconds: float
    load_seconds: float
    parity: Parity


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of an engine.

    target      the target of its compiled code, as in `host_target.this_target`; "" for the
                reference backend
    fp8         projections are in FP8 (all, unless the checkpoint was already quantised)
    group       inputs that share a scale in the checkpoint's projections: in int4, or in FP8 with a
                scale for each block; 0: otherwise
    kv_layout   dimensions of the KV pool, one contiguous record per slot; the chunk size is the
                runtime's choice
    weight_bytes  of one rank
    quantisation  the error of rounding to FP8; None if nothing was rounded here
    compiled    None for the reference backend, and until it is compiled
    """

    backend: str
    dtype: str
    device: str
    tensor_parallel: int
    decoder: DecoderConfig
    stop_ids: tuple[int, ...]
    parts: Parts
    weight_bytes: int
    target: str = ""
    fp8: bool = False
    group: int = 0
    kv_layout: tuple[str, ...] = KV_LAYOUT
    quantisation: Quantisation | None = None
    compiled: Compiled | None = None

    @property
    def int4(self) -> int:
        """Inputs that share a scale in projections in int4; 0: there are none."""
        return 0 if self.fp8 else self.group

    @property
    def architecture(self) -> str:
        return self.decoder.architecture

    @property
    def layers(self) -> int:
        return self.decoder.layers

    @property
    def kv_layers(self) -> int:
        """The layers that have KV."""
        return self.decoder.kv_layers

    @property
    def kv_heads(self) -> int:
        """KV heads of one rank."""
        return Shard(self.decoder, self.tensor_parallel).kv_heads

    @property
    def head_dim(self) -> int:
        return self.decoder.head_dim

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.decoder.max_positions

    @property
    def package(self) -> str:
        """The name of the compiled file."""
        return PLAN if self.backend == "tensorrt" else PACKAGE

    @property
    def random_seed(self) -> int | None:
        """None: each rank's weights are in its file."""
        weights = self.parts.weights[0]
        return int(weights.removeprefix(RANDOM)) if weights.startswith(RANDOM) else None

    @property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, over everything above that is known before the engine is measured
        and compiled."""
        value = asdict(self)
        del value["quantisation"], value["compiled"]
        return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        value = {"format": FORMAT, **asdict(self), "fingerprint": self.fingerprint}
        (directory / MANIFEST).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises SettingError('--engine', ...) if it is missing, was changed, or has another
        format."""
        path = directory / MANIFEST
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SettingError(
                "--engine", f"{directory} is no engine: it has no {MANIFEST}"
            ) from None
        except (OSError, ValueError) as error:
            raise SettingError("--engine", f"{path} cannot be read: {error}") from None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise SettingError(
                "--engine", f"{path} is not of format {FORMAT}; build the engine again"
            )
        fingerprint = value.pop("fingerprint", None)
        try:
            manifest = cls._from_json(value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SettingError(
                "--engine", f"{path} is damaged ({error}); build the engine again"
            ) from None
        if manifest.fingerprint != fingerprint:
            raise SettingError(
                "--engine", f"{path} was changed after the build; build the engine again"
            )
        return manifest

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        decoder = value.pop("decoder")
        for name in ("rotary", "window_rotary"):
            decoder[name] = Rotary(**decoder[name]) if decoder[name] else None
        for name in ("windows", "kinds"):
            decoder[name] = tuple(decoder[name])
        decoder["linear"] = LinearAttention(**decoder["linear"]) if decoder["linear"] else None
        lists: dict[str, Any] = {name: tuple(value.pop(name)) for name in ("stop_ids", "kv_layout")}
        parts = value.pop("parts")
        parts["weights"] = tuple(parts["weights"])
        compiled = value.pop("compiled")
        if compiled is not None:
            compiled = Compiled(parity=Parity(**compiled.pop("parity")), **compiled)
        quantisation = value.pop("quantisation")
        if quantisation is not None:
            quantisation = Quantisation(**quantisation)
        measured = {"quantisation": quantisation, "compiled": compiled}
        return cls(
            decoder=DecoderConfig(**decoder), parts=Parts(**parts), **measured, **lists, **value
        )


def weights_file(rank: int, ranks: int) -> str:
    """The name of the file that holds one rank's weights."""
    return WEIGHTS if ranks == 1 else f"weights.{rank}.safetensors"


def published_fingerprint(directory: Path) -> str | None:
    """The fingerprint in an engine directory, or None if the directory is not an engine."""
    try:
        return str(json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def code_digest() -> str:
    """SHA-256 over the files that define the forward pass, its compilation, the division of weights
    among ranks, their rounding, and random weights."""
    room = Path(__file__).parent
    names: tuple[str, ...] = (
        "checkpoints/hugging_face",
        "checkpoints/config",
        "quantised",
        "model",
        "layers/gated_delta",
        "layers/parts",
        "layers/sparse_mlp",
        "random_weights",
    )
    names += ("forward_batch",)
    names += (
        "checkpoints/fused_experts",
        "checkpoints/int4_weights",
        "checkpoints/sources",
        "int4_formats",
    )
    names += (
        "inductor/compile",
        "inductor/package",
        "tensorrt/compile",
        "tensorrt/network",
        "tensorrt/package",
    )
    files = [room / f"{name}.py" for name in names]
    plugins = room.parent / "plugins"
    paths = [
        *files,
        *sorted(plugins.rglob("*.py")),
        *sorted((plugins / "tensorrt" / "native").iterdir()),
    ]
    return files_digest(paths)


def files_digest(paths: list[Path]) -> str:
    """SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    return {"torch": version("torch"), "pensieve": __version__}
