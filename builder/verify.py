"""Whether an engine directory still is what its build made it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from ..scheduler.types import SettingError
from .manifest import TOKENIZER_FILES, Manifest, files_digest, weights_file
from .weights import load_weights, weights_digest


def intact_engine(directory: Path, fingerprint: str) -> Manifest | None:
    """The manifest of the engine there, if it is the one of this fingerprint and every file is as it was built.

    Reads it all: whoever is told to build a damaged engine again must not be left with the damaged one.
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
        manifest.compiled is None or files_digest([directory / manifest.package]) != manifest.compiled.package
    ):
        return False
    return manifest.random_seed is not None or all(
        weights_digest(load_weights(directory / weights_file(rank, manifest.tensor_parallel))) == built
        for rank, built in enumerate(manifest.parts.weights)
    )
