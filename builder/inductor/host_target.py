"""The target of compiled code: the processor's vector extensions, or the GPU's compute
capability."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ..tensorrt.installed import tensorrt_version

EXTENSIONS = ("sse", "avx", "amx", "fma", "f16c", "bmi", "asimd", "sve")
"""Prefixes of the processor's features that compilers use. Others are left out, because they change
with the kernel's version."""


def this_target(device: str, backend: str = "inductor") -> str:
    """The target of this machine, for an engine of the device "cpu" or "cuda".

    A TensorRT plan runs only with the version that built it. SettingError('--backend', ...) if
    TensorRT is missing.
    """
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        capability = f"compute capability {major}.{minor}"
        return (
            f"{capability} with TensorRT {tensorrt_version()}"
            if backend == "tensorrt"
            else capability
        )
    return " ".join([platform.machine(), *_extensions()])


def why_not_here(target: str, device: str, backend: str = "inductor") -> str | None:
    """Returns the reason why code compiled for `target` cannot run here, or None."""
    here = this_target(device, backend)
    if device == "cuda":
        return None if target == here else f"it was compiled for {target}, and this GPU has {here}"
    wanted = target.split()
    features = here.split()
    if wanted[:1] != features[:1]:
        return f"it was compiled for {wanted[0]}, and this is {features[0]}"
    missing = [name for name in wanted if name not in features]
    return (
        f"it was compiled for a processor with {', '.join(missing)}, which this one lacks"
        if missing
        else None
    )


def _extensions() -> list[str]:
    """In alphabetical order; none if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(word for word in words.split() if word.startswith(EXTENSIONS))
    return []
