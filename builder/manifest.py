"""The manifest of an engine directory: what was built, from what, and how the runtime must feed it.

Plain data, JSON on disk, readable without torch. Its fingerprint guards loading and seeds the keys of the KV cache:
engines of equal fingerprint compute equal KV.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..scheduler.types import SettingError
from .config import DecoderConfig, Rotary

FORMAT = 1
MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
RANDOM = "random:"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
DTYPES = ("float32", "bfloat16", "float16")
KV_LAYOUT = ("slot", "layers", "2", "kv_heads", "chunk_tokens", "head_dim")


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine was made from: SHA-256 digests and versions. A change of any makes it another engine.

    weights     their digest, or "random:<seed>": they are made when the engine is opened, as the decoder's shape says
    """

    weights: str
    tokenizer: str
    code: str
    torch: str
    pensieve: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """kv_layout: dimensions of the KV pool, one contiguous record a slot; the chunk size is the runtime's choice."""

    backend: str
    dtype: str
    device: str
    tensor_parallel: int
    decoder: DecoderConfig
    stop_ids: tuple[int, ...]
    parts: Parts
    kv_layout: tuple[str, ...] = KV_LAYOUT

    @property
    def architecture(self) -> str:
        return self.decoder.architecture

    @property
    def layers(self) -> int:
        return self.decoder.layers

    @property
    def kv_heads(self) -> int:
        """KV heads of one rank."""
        return self.decoder.kv_heads // self.tensor_parallel

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
    def random_seed(self) -> int | None:
        """None: the weights are in WEIGHTS."""
        weights = self.parts.weights
        return int(weights.removeprefix(RANDOM)) if weights.startswith(RANDOM) else None

    @property
    def fingerprint(self) -> str:
        """SHA-256, hexadecimal, over everything above."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        value = {"format": FORMAT, **asdict(self), "fingerprint": self.fingerprint}
        (directory / MANIFEST).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises SettingError('--engine', ...) if there is none, or it is of another format or was changed."""
        path = directory / MANIFEST
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise SettingError("--engine", f"{directory} is no engine: it has no {MANIFEST}") from None
        except (OSError, ValueError) as error:
            raise SettingError("--engine", f"{path} cannot be read: {error}") from None
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise SettingError("--engine", f"{path} is not of format {FORMAT}; build the engine again")
        fingerprint = value.pop("fingerprint", None)
        try:
            manifest = cls._from_json(value)
        except (KeyError, TypeError) as error:
            raise SettingError("--engine", f"{path} is damaged ({error}); build the engine again") from None
        if manifest.fingerprint != fingerprint:
            raise SettingError("--engine", f"{path} was changed after the build; build the engine again")
        return manifest

    @classmethod
    def _from_json(cls, value: dict[str, Any]) -> Manifest:
        rotary = value["decoder"].pop("rotary")
        decoder = DecoderConfig(rotary=Rotary(**rotary) if rotary else None, **value.pop("decoder"))
        lists = {name: tuple(value.pop(name)) for name in ("stop_ids", "kv_layout")}
        return cls(decoder=decoder, parts=Parts(**value.pop("parts")), **lists, **value)


def published_fingerprint(directory: Path) -> str | None:
    """The fingerprint an engine directory was published with, or None: it is no engine."""
    try:
        return str(json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def code_digest() -> str:
    """SHA-256 over the files that define the forward pass, and weights that are random."""
    room = Path(__file__).parent
    files = [room / name for name in ("config.py", "model.py", "random_weights.py")]
    paths = [*files, *sorted((room.parent / "plugins").glob("*.py"))]
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
    return {name: version(name) for name in ("torch", "pensieve")}
