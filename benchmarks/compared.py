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

from pensieve.plugins.collectives.cuda import OFF
from pensieve.runtime.launch.settings import ServeSettings
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.models import ModelShape, shape_of

from .servers import READY, SERVE

VLLM_SERVER = Path(__file__).with_name("vllm_server.py")
SGLANG_SERVER = Path(__file__).with_name("sglang_server.py")
SGLANG_PAGE = 64  # tokens
SGLANG_STATES = "0.9"  # bytes of states for each byte of KV, its own default

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
    config      of the part that takes text
    gpu_bytes   of KV and states on each GPU; None: as much as each server takes
    host_bytes  of KV and states on the host, for each GPU
    ranks       GPUs of each server
    """

    directory: Path
    random: bool
    config: Mapping[str, Any]
    dtype: str
    device: str
    gpu_bytes: int | None
    host_bytes: int
    max_num_seqs: int
    ranks: int = 1

    @property
    def shape(self) -> ModelShape:
        """Of one rank, in 16 bits. SettingError."""
        return shape_of(self.config, self.ranks)

    def bytes_per_token(self, kv_type: str) -> int:
        """KV of one token on each GPU: in 8 bits with a type named fp8..., else in 16."""
        return self.shape.token_bytes // (2 if kv_type.startswith("fp8") else 1)


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether some layers have states in place of KV."""
    return "linear_num_value_heads" in config


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether vLLM and SGLang know the model only with its part for images: Qwen3.5."""
    return any(name.startswith("Qwen3_5") for name in config.get("architectures", ()))


def shared_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that all servers load. A part for images, which no request uses, is as small
    as it can be."""
    if not takes_images(config):
        return dict(config)
    (architecture,) = config["architectures"]
    vision = {"depth": 1, "out_hidden_size": config["hidden_size"], "deepstack_visual_indexes": []}
    model_type = config["model_type"].removesuffix("_text")
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "text_config": dict(config),
        "vision_config": {"model_type": model_type, **vision},
    }


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


# Ranks sum without NVLink multicast, as Pensieve's do. vLLM's sampler would be compiled first, and
# greedy sampling needs none.
VARIABLES = {
    "vllm": {
        **OFF,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",  # the other one uses multicast
    },
    "sglang": {
        **OFF,
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
        size = model.gpu_bytes - (of_seats := _seats_bytes(server, model))
        if size <= 0:
            message = f"the states of running requests alone take {of_seats} bytes"
            raise SettingError("--gpu-kv-bytes", message)
        words += ["--gpu-kv-bytes", str(size)]
    words += ["--host-kv-bytes", str(model.host_bytes)]
    words += ["--max-num-seqs", str(model.max_num_seqs)]
    return [*words, *server.options], READY


def _seats_bytes(server: ComparedServer, model: SharedModel) -> int:
    """Of the states of running requests, which Pensieve has beside --gpu-kv-bytes."""
    chunk_tokens = ServeSettings().chunk_tokens
    seats = int(server.option("--max-num-seqs", str(model.max_num_seqs)))
    states = model.shape.states(chunk_tokens, seats) if is_hybrid(model.config) else None
    if states is None:
        return 0
    return states.slots * states.chunks * model.shape.token_bytes * chunk_tokens


def vllm_command(
    server: ComparedServer, model: SharedModel, installation: Installation
) -> tuple[list[str], str]:
    words = [*installation.python, str(VLLM_SERVER), "--model", str(model.directory)]
    words += ["--served-model-name", "model"]
    words += [*(DUMMY if model.random else ()), "--dtype", model.dtype]
    words += ["--attention-backend", "FLASH_ATTN", "--enable-prefix-caching"]
    words += ["--enable-prompt-tokens-details", "--max-num-seqs", str(model.max_num_seqs)]
    words += ["--language-model-only"] if takes_images(model.config) else []
    words += ["--tensor-parallel-size", str(model.ranks)] if model.ranks > 1 else []
    if model.gpu_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(model.gpu_bytes)]
    if offload := CONNECTORS[server.kind]:
        name, extra = offload
        transfer = {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": model.host_bytes * model.ranks,  # of the whole server
                **extra,
            },
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
    words += ["--tp-size", str(model.ranks)] if model.ranks > 1 else []
    size = ["--hicache-size", f"{model.host_bytes / 1e9:.0f}"]
    if model.gpu_bytes is not None:
        states, tokens, used = _sglang_pools(server, model, model.gpu_bytes)
        words += ["--max-total-tokens", str(tokens)]
        words += ["--max-mamba-cache-size", str(states)] if states else []
        # --hicache-size takes whole gigabytes alone; the ratio is that of both pools
        size = ["--hicache-ratio", f"{model.host_bytes / used:.5f}"]
    if server.kind == "sglang":
        words += ["--enable-hierarchical-cache", *size, "--hicache-write-policy", "write_through"]
        words += ["--hicache-io-backend", "kernel", "--hicache-mem-layout", "page_first"]
    return [*words, *server.options], "/health"


def _sglang_pools(server: ComparedServer, model: SharedModel, size: int) -> tuple[int, int, int]:
    """States and tokens of KV that take `size` bytes, in its own proportion; the bytes that can be
    used of these. It allocates one state more."""
    states = state_bytes = 0
    if is_hybrid(model.config):
        state_bytes = model.shape.state_bytes
        share = float(server.option("--mamba-full-memory-ratio", SGLANG_STATES))
        states = int(size * share / (1 + share)) // state_bytes - 1
        size -= (states + 1) * state_bytes
    page_bytes = SGLANG_PAGE * model.bytes_per_token(server.option("--kv-cache-dtype", "auto"))
    pages = size // page_bytes
    return states, pages * SGLANG_PAGE, pages * page_bytes + states * state_bytes


def sglang_variables(installation: Installation) -> dict[str, str]:
    """It compiles kernels at its start, with the nvcc of CUDA_HOME."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    home = os.environ.get("CUDA_HOME") or str(Path(nvcc).resolve().parents[1])
    path = f"{home}/bin{os.pathsep}{os.environ.get('PATH', '')}"
    return {**installation.variables, "CUDA_HOME": home, "PATH": path}
