"""Checks that an engine directory is unchanged since its build."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from ..scheduler.types import SettingError
from .manifest import TOKENIZER_FILES, Manifest, files_digest, weights_file
from .weights import load_weights, weights_digest


def intact_engine(directory: Path, fingerprint: str) -> Manifest | None:
    """Returns the manifest of the engine there if it has this fingerprint and every file is
    undamaged, else None.

    Reads all files: a user who is told to rebuild a damaged engine must not get the damaged one
    again.
    """
    try:
        manifest = Manifest.read(directory)
        whole = manifest.fingerprint == fingerprint and _whole(directory, manifest)
    except (OSError, SafetensorError, SettingError):
        return None
    return manifest if whole else None


def _whole(directory: Path, manifest: Manifest) -> bool:
    tokenizer = [directory / name for name in TOKENIZER_FILES if (directory / name).exists()]
    if files_digest(tokenizer) != manifest.parts.tokenizer:
        return False
    if manifest.backend != "reference" and (
        manifest.compiled is None
        or files_digest([directory / manifest.package]) != manifest.compiled.package
    ):
        return False
    return manifest.random_seed is not None or all(
        weights_digest(load_weights(directory / weights_file(rank, manifest.tensor_parallel)))
        == built
        for rank, built in enumerate(manifest.parts.weights)
    )
