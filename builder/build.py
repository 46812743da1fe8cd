"""Builds an engine directory from a checkpoint: written aside, made durable, then renamed into place."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..scheduler.types import SettingError
from .architectures import OPT, decoder_config
from .checkpoint import read_json, read_weights
from .manifest import (
    DTYPES,
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
from .weights import save_weights, weights_digest

BACKENDS = ("reference",)
DEVICES = ("cpu",)


@dataclass(frozen=True, slots=True)
class Built:
    """outcome: "built", "replaced" (another engine was there) or "reused" (the same engine was there).

    has_tokenizer False: the checkpoint has none that we read; the engine takes and gives token ids only.
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
    dtype = dtype or _own_dtype(hf_config)
    if dtype not in DTYPES:
        raise SettingError("--dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    decoder = decoder_config(hf_config)
    weights = read_weights(checkpoint, decoder, getattr(torch, dtype))
    weight_bytes = sum(tensor.nbytes for tensor in weights.values())

    aside = output.with_name(f".{output.name}.{secrets.token_hex(4)}.building")
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise SettingError("--output", f"cannot be made: {error}") from None
    try:
        has_tokenizer = copy_tokenizer(checkpoint, aside, opt=decoder.architecture == OPT)
        parts = Parts(
            weights=weights_digest(weights),
            tokenizer=files_digest([aside / name for name in TOKENIZER_FILES if (aside / name).exists()]),
            code=code_digest(),
            **versions(),
        )
        stop_ids = _stop_ids(checkpoint, hf_config)
        manifest = Manifest(backend, dtype, device, tensor_parallel, decoder, stop_ids, parts)
        published = published_fingerprint(output)
        if published == manifest.fingerprint:
            return Built(manifest, "reused", weight_bytes, has_tokenizer)
        save_weights(weights, aside / WEIGHTS)
        manifest.write(aside)
        _publish(aside, output)
        return Built(manifest, "replaced" if published else "built", weight_bytes, has_tokenizer)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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


def _own_dtype(hf_config: dict[str, Any]) -> str:
    return hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"


def _stop_ids(checkpoint: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json knows them best."""
    path = checkpoint / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    ids = hf_config.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _publish(aside: Path, output: Path) -> None:
    """Renames into place. An engine already there steps aside first, and comes back if that fails."""
    for path in (*aside.iterdir(), aside):
        _sync(path)
    if published_fingerprint(output) is None:
        os.rename(aside, output)
    else:
        old = aside.with_suffix(".replaced")
        os.rename(output, old)
        try:
            os.rename(aside, output)
        except OSError:
            os.rename(old, output)
            raise
        shutil.rmtree(old)
    _sync(output.parent)


def _sync(path: Path) -> None:
    """Returns once a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
