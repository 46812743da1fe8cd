"""Builds an engine directory, from a checkpoint or a config.json alone: written aside, made durable, then renamed into
place.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..scheduler.types import SettingError
from .architectures import OPT, decoder_config
from .checkpoint import parameter_shapes, read_json, read_weights
from .config import DecoderConfig
from .manifest import (
    DTYPES,
    RANDOM,
    TOKENIZER_FILES,
    WEIGHTS,
    Manifest,
    Parts,
    code_digest,
    files_digest,
    published_fingerprint,
    versions,
)
from .tokenizer import copy_tokenizer
from .weights import save_weights, weight_bytes, weights_digest

BACKENDS = ("reference",)
DEVICES = ("cpu", "cuda")
MOST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Built:
    """outcome: "built", "replaced" (another engine was there) or "reused" (the same engine was there).

    has_tokenizer False: there is none that we read; the engine takes and gives token ids only.
    """

    manifest: Manifest
    outcome: str
    weight_bytes: int
    has_tokenizer: bool


def build_engine(
    checkpoint: str | Path,
    output: str | Path,
    backend: str = "reference",
    dtype: str | None = None,
    tensor_parallel: int = 1,
    device: str = "cpu",
) -> Built:
    """Makes `output` the engine of a Hugging Face checkpoint. `dtype` None: the checkpoint's own.

    `output` may be missing, empty, or an engine: the same one is left alone, another is replaced. Anything else is
    refused. Until the very end nothing is to be seen at `output`. Raises SettingError.
    """
    checkpoint, output = Path(checkpoint), Path(output).absolute()
    _check_settings(backend, tensor_parallel, device)
    _check_output(output)
    hf_config = read_json(checkpoint / "config.json")
    dtype = _checked_dtype(dtype or _own_dtype(hf_config))
    decoder = decoder_config(hf_config)
    torch_dtype = getattr(torch, dtype)
    weights = read_weights(checkpoint, decoder, torch_dtype)
    shapes = parameter_shapes(decoder)
    with _beside(output) as aside:
        has_tokenizer = copy_tokenizer(checkpoint, aside, opt=decoder.architecture == OPT)
        tokenizer = files_digest([aside / name for name in TOKENIZER_FILES if (aside / name).exists()])
        parts = Parts(weights_digest(weights), tokenizer, code_digest(), **versions())
        stop_ids = _stop_ids(hf_config, checkpoint / "generation_config.json")
        manifest = Manifest(backend, dtype, device, tensor_parallel, decoder, stop_ids, parts)
        outcome = "reused"
        if published_fingerprint(output) != manifest.fingerprint:
            save_weights(weights, shapes, torch_dtype, aside / WEIGHTS)
            outcome = _publish(manifest, aside, output)
    return Built(manifest, outcome, weight_bytes(shapes, torch_dtype), has_tokenizer)


def build_random_engine(
    config: str | Path,
    output: str | Path,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    backend: str = "reference",
    dtype: str | None = None,
    tensor_parallel: int = 1,
    device: str = "cpu",
) -> Built:
    """Like `build_engine`, of a Hugging Face config.json alone, for measuring: its weights are random, made by
    `open_engine`, and it has no tokenizer.

    `overrides` replace keys of config.json, or add some; one that nothing reads is refused.
    """
    output = Path(output).absolute()
    _check_settings(backend, tensor_parallel, device)
    _check_output(output)
    if not 0 <= seed <= MOST_SEED:
        raise SettingError("--seed", f"must be between 0 and {MOST_SEED}, not {seed}")
    hf_config = _Read(read_json(Path(config), "--config") | dict(overrides or {}))
    dtype = _checked_dtype(dtype or _own_dtype(hf_config))
    decoder = _decoder_of_config(hf_config)
    stop_ids = _stop_ids(hf_config)
    unread = sorted(set(overrides or {}) - hf_config.read)
    if unread:
        raise SettingError("--set", f"{', '.join(unread)}: nothing of {decoder.architecture} is set by that")
    parts = Parts(f"{RANDOM}{seed}", files_digest([]), code_digest(), **versions())
    manifest = Manifest(backend, dtype, device, tensor_parallel, decoder, stop_ids, parts)
    outcome = "reused"
    if published_fingerprint(output) != manifest.fingerprint:
        with _beside(output) as aside:
            outcome = _publish(manifest, aside, output)
    return Built(manifest, outcome, weight_bytes(parameter_shapes(decoder), getattr(torch, dtype)), has_tokenizer=False)


class _Read(UserDict[str, Any]):
    """Remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, Any]):
        self.read: set[str] = set()
        super().__init__(values)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def _decoder_of_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    try:
        return decoder_config(hf_config)
    except SettingError as error:  # which blames --checkpoint, where a config.json comes from otherwise
        raise SettingError("--config", str(error).removeprefix(f"{error.setting}: ")) from None


def _check_settings(backend: str, tensor_parallel: int, device: str) -> None:
    for setting, value, allowed in (("--backend", backend, BACKENDS), ("--device", device, DEVICES)):
        if value not in allowed:
            raise SettingError(setting, f"{value!r} does not exist; there is {', '.join(allowed)}")
    if tensor_parallel != 1:
        raise SettingError("--tensor-parallel", f"engines of {tensor_parallel} ranks do not exist yet; only 1 works")


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise SettingError("--output", f"{output} is a file")
    if output.is_dir() and any(output.iterdir()) and published_fingerprint(output) is None:
        raise SettingError("--output", f"{output} is neither empty nor an engine; name another directory")


def _own_dtype(hf_config: Mapping[str, Any]) -> str:
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def _checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise SettingError("--dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return dtype


def _stop_ids(hf_config: Mapping[str, Any], generation: Path | None = None) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json, if there is one, knows them best."""
    ids = read_json(generation).get("eos_token_id") if generation and generation.exists() else None
    ids = hf_config.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A new directory beside `output`, gone at the end if nobody has renamed it."""
    aside = output.with_name(f".{output.name}.{secrets.token_hex(4)}.building")
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise SettingError("--output", f"cannot be made: {error}") from None
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _publish(manifest: Manifest, aside: Path, output: Path) -> str:
    """Completes the engine and renames it into place; returns "built" or "replaced".

    An engine already there steps aside first, and comes back if that fails.
    """
    manifest.write(aside)
    for path in (*aside.iterdir(), aside):
        _sync(path)
    replaced = published_fingerprint(output) is not None
    if replaced:
        old = aside.with_suffix(".replaced")
        os.rename(output, old)
        try:
            os.rename(aside, output)
        except OSError:
            os.rename(old, output)
            raise
        shutil.rmtree(old)
    else:
        os.rename(aside, output)
    _sync(output.parent)
    return "replaced" if replaced else "built"


def _sync(path: Path) -> None:
    """Returns once a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
