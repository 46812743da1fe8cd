"""The servers that `versus` compares: how each starts with equal memory, rows and model.

Pensieve runs with its defaults. vLLM and SGLang run from folders of packages or from Pythons of
their own, with a prefix cache and, but for `vllm` and `sglang-gpu`, with KV on the host.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.scheduler.types import SettingError

from .servers import READY, SERVE

VLLM_SERVER = Path(__file__).with_name("vllm_server.py")
SGLANG_SERVER = Path(__file__).with_name("sglang_server.py")
SGLANG_PAGE = 64  # tokens

CONNECTORS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "vllm": None,
    "vllm-offload": ("OffloadingConnector", {"offload_prompt_only": False}),
    "vllm-simple-offload": ("SimpleCPUOffloadConnector", {}),
}
SGLANG = ("sglang", "sglang-gpu")
KINDS = ("pensieve", *CONNECTORS, *SGLANG)

DUMMY = ("--load-format", "dummy", "--skip-tokenizer-init")

VERSIONS = (
    "import importlib.metadata as m, json, sys; "
    "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
)


class ComparedServer(NamedTuple):
    """`shown` in tables; `rates` empty: those of the run."""

    kind: str
    rates: tuple[float, ...]
    options: list[str]
    shown: str

    @classmethod
    def read(cls, text: str) -> ComparedServer:
        """Of KIND[@RATES][:OPTIONS]; SettingError."""
        head, colon, options = text.partition(":")
        kind, _, rates = head.partition("@")
        if kind not in KINDS:
            raise SettingError("--servers", f"{kind!r} is none of {', '.join(KINDS)}")
        try:
            own = tuple(float(rate) for rate in rates.split(",") if rate)
        except ValueError:
            raise SettingError(
                "--servers", f"{text!r}: {rates!r} are no rates with commas between"
            ) from None
        return cls(kind, own, shlex.split(options), f"{kind}{colon}{options}")

    @property
    def package(self) -> str | None:
        """The package to import for it; None: Pensieve."""
        if self.kind in CONNECTORS:
            return "vllm"
        return "sglang" if self.kind in SGLANG else None

    def option(self, name: str, default: str) -> str:
        """Its last value: NAME VALUE or NAME=VALUE. SettingError without one."""
        value = default
        for place, word in enumerate(self.options):
            if word == name:
                if place + 1 == len(self.options):
                    raise SettingError("--servers", f"{self.shown!r}: {name} needs a value")
                value = self.options[place + 1]
            elif word.startswith(f"{name}="):
                value = word.partition("=")[2]
        return value


class SharedModel(NamedTuple):
    """What all servers of a run have in common.

    directory   a checkpoint; or with a config.json alone, and weights are `random`
    gpu_bytes   of KV; None: as much as each server takes
    """

    directory: Path
    random: bool
    config: Mapping[str, Any]
    dtype: str
    device: str
    gpu_bytes: int | None
    host_bytes: int
    max_num_seqs: int

    def bytes_per_token(self, kv_type: str) -> int:
        """KV of one token: in 8 bits with a type named fp8..., else in 16."""
        config = self.config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        itemsize = 1 if kv_type.startswith("fp8") else 2
        return int(2 * itemsize * config["num_hidden_layers"] * kv_heads * head_dim)


class Installation(NamedTuple):
    """A Python and the variables with which it has the packages of another server."""

    python: list[str]
    variables: dict[str, str]
    versions: dict[str, str]

    @classmethod
    def of(cls, package: str, path: Path | None) -> Installation:
        """`path`: a Python, a folder of packages, or None for this Python. Packages that Pensieve
        alone needs are not on its path. SettingError if the package is missing."""
        option = f"--{package}"
        cure = f"install {package} (DIR/bin/pip install {package}) and name DIR/bin/python"
        variables = {**VARIABLES[package]}
        python = [sys.executable, "-P"]
        if path is not None and path.is_dir():
            variables["PYTHONPATH"] = str(path.resolve())
        elif path is not None:
            if not path.is_file():
                raise SettingError(option, f"there is no {path}: {cure}")
            python = [str(path.absolute()), "-P"]
            variables["PYTHONPATH"] = ""
        command = [*python, "-c", VERSIONS, package, "torch"]
        completed = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if completed.returncode:
            last = (completed.stderr.strip() or f"status {completed.returncode}").splitlines()[-1]
            raise SettingError(option, f"{last}: {cure}")
        return cls(python, variables, json.loads(completed.stdout))


# Of vLLM: its sampler would be compiled at the start, and greedy sampling needs none.
VARIABLES = {
    "vllm": {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    "sglang": {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    },
}


def pensieve_command(
    server: ComparedServer, model: SharedModel, engine: Path, state: Path
) -> tuple[list[str], str]:
    """But for the port; and the path that answers when the server is ready."""
    words = [*SERVE, "--engine", str(engine), "--device", model.device]
    words += ["--state-dir", str(state), "--shutdown-timeout", "1"]
    if model.gpu_bytes is not None:
        words += ["--gpu-kv-bytes", str(model.gpu_bytes)]
    words += ["--host-kv-bytes", str(model.host_bytes)]
    words += ["--max-num-seqs", str(model.max_num_seqs)]
    return [*words, *server.options], READY


def vllm_command(
    server: ComparedServer, model: SharedModel, installation: Installation
) -> tuple[list[str], str]:
    words = [*installation.python, str(VLLM_SERVER), "--model", str(model.directory)]
    words += ["--served-model-name", "model"]
    words += [*(DUMMY if model.random else ()), "--dtype", model.dtype]
    words += ["--attention-backend", "FLASH_ATTN", "--enable-prefix-caching"]
    words += ["--enable-prompt-tokens-details", "--max-num-seqs", str(model.max_num_seqs)]
    if model.gpu_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(model.gpu_bytes)]
    if offload := CONNECTORS[server.kind]:
        name, extra = offload
        transfer = {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": model.host_bytes, **extra},
        }
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return [*words, *server.options], "/health"


def sglang_command(
    server: ComparedServer, model: SharedModel, installation: Installation
) -> tuple[list[str], str]:
    """The hierarchical cache has its recommended settings; the last of two equal options counts."""
    words = [*installation.python, str(SGLANG_SERVER), "--model-path", str(model.directory)]
    words += [*(DUMMY if model.random else ()), "--dtype", model.dtype]
    words += ["--served-model-name", "model", "--host", "127.0.0.1"]
    words += ["--attention-backend", "fa3", "--sampling-backend", "pytorch"]
    words += ["--enable-cache-report", "--incremental-streaming-output"]
    rows = str(model.max_num_seqs)
    words += ["--page-size", str(SGLANG_PAGE), "--max-running-requests", rows]
    words += ["--cuda-graph-max-bs-decode", rows]
    size = ["--hicache-size", f"{model.host_bytes / 1e9:.0f}"]
    if model.gpu_bytes is not None:
        bytes_per_token = model.bytes_per_token(server.option("--kv-cache-dtype", "auto"))
        tokens = model.gpu_bytes // (bytes_per_token * SGLANG_PAGE) * SGLANG_PAGE
        words += ["--max-total-tokens", str(tokens)]
        # --hicache-size takes whole gigabytes alone
        ratio = model.host_bytes / bytes_per_token / tokens
        size = ["--hicache-ratio", f"{ratio:.5f}"]
    if server.kind == "sglang":
        words += ["--enable-hierarchical-cache", *size, "--hicache-write-policy", "write_through"]
        words += ["--hicache-io-backend", "kernel", "--hicache-mem-layout", "page_first"]
    return [*words, *server.options], "/health"


def sglang_variables(installation: Installation) -> dict[str, str]:
    """It compiles kernels at its start, with the nvcc of CUDA_HOME."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    home = os.environ.get("CUDA_HOME") or str(Path(nvcc).resolve().parents[1])
    path = f"{home}/bin{os.pathsep}{os.environ.get('PATH', '')}"
    return {**installation.variables, "CUDA_HOME": home, "PATH": path}
