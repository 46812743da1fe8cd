"""A real tritonserver in a process of its own.

The server is that of the package nvidia-pytriton. Its python backend was built before there was
numpy 2, so it and a numpy 1 for it live in a directory of their own, which `make triton-server`
fills.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from benchmarks.ports import free_ports
from pensieve.scripts.triton_repository import write_model

from .server import HTTP

PACKAGES = Path(sys.prefix) / "triton-server"
TRITON = PACKAGES / "pytriton" / "tritonserver"
STUB = (
    TRITON
    / "python_backend_stubs"
    / "{}.{}".format(*sys.version_info)
    / "triton_python_backend_stub"
)
NOTHING: Mapping[str, str] = MappingProxyType({})
TRIALS = 3
"""If a model's process sends nothing for a second while it loads, as on a paused machine,
tritonserver gives it up and waits for ever for its end."""

needs_triton = pytest.mark.skipif(
    not STUB.exists(), reason=f"no tritonserver in {PACKAGES}: run `make triton-server`"
)


class TritonServer:
    """A context manager. `grpc` is host:port, `url` and `metrics_url` are HTTP addresses.

    `name`, `tensors`: of the model. `broken`: further models by name, each with a Python program
    in place of its engine's process. `flags`: further flags of tritonserver.
    """

    def __init__(
        self,
        directory: Path,
        *options: object,
        name: str = "pensieve",
        tensors: str = "llmapi",
        broken: Mapping[str, str] = NOTHING,
        flags: Sequence[str] = (),
        start_seconds: float = 120,
    ):
        self._directory = directory
        self._name = name
        self._flags = flags
        self._start_seconds = start_seconds
        for model in (name, *broken):
            source = (
                write_model(directory / "repository", model, list(map(str, options)), tensors)
                / "1"
                / "model.py"
            )
            text = source.read_text()
            ours = f"import sys\n\nsys.path.insert(0, {str(PACKAGES)!r})\nfrom pensieve."
            source.write_text(text.replace("from pensieve.", ours, 1))
        for model, program in broken.items():
            change_engine(
                directory / "repository" / model / "config.pbtxt", [sys.executable, "-c", program]
            )
        backend = directory / "backends" / "python"
        backend.mkdir(parents=True)
        for file in [*(TRITON / "backends" / "python").iterdir(), STUB]:
            (backend / file.name).symlink_to(file)
        self._log = directory / "triton.log"
        self._memory = f"pensieve-{uuid.uuid4().hex}-"

    @property
    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def __enter__(self) -> TritonServer:
        for _ in range(TRIALS):
            self._start(*free_ports(3))
            answers = self._answers()
            with contextlib.suppress(httpx.TransportError):
                if answers and self.ready:
                    return self
            hangs = not answers and self.process.poll() is None
            self.kill()
            if not hangs:
                break
        # but its tables
        lines = [line for line in self.log.splitlines() if not line.startswith(("+", "|"))]
        raise RuntimeError("\n".join(["tritonserver did not start:", *lines]))

    def _start(self, http: int, grpc: int, metrics: int) -> None:
        self.grpc = f"127.0.0.1:{grpc}"
        self.url = f"http://127.0.0.1:{http}"
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        command = [
            TRITON / "bin" / "tritonserver",
            f"--model-repository={self._directory / 'repository'}",
            f"--backend-directory={self._directory / 'backends'}",
            f"--backend-config=python,shm-region-prefix-name={self._memory}",
            "--disable-auto-complete-config",
            "--exit-on-error=false",
            *self._flags,
            *(f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")),
            *(
                f"--{name}-port={port}"
                for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics))
            ),
        ]
        libraries = os.pathsep.join(
            filter(None, [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")])
        )
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=os.environ | {"LD_LIBRARY_PATH": libraries},
                start_new_session=True,  # its children die with it in `kill`
            )

    def _answers(self) -> bool:
        """It opens its ports when all models are loaded, or not to be loaded."""
        until = time.monotonic() + self._start_seconds
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                HTTP.get(f"{self.url}/v2/health/live", timeout=30)
                return True
            time.sleep(0.05)
        return False

    @property
    def ready(self) -> bool:
        """Whether the model is ready."""
        return HTTP.get(f"{self.url}/v2/models/{self._name}/ready", timeout=30).status_code == 200

    def why_not_loaded(self, model: str) -> str:
        index = HTTP.post(f"{self.url}/v2/repository/index", timeout=30).json()
        (reason,) = [entry["reason"] for entry in index if entry["name"] == model]
        return reason

    def stop(self, seconds: float = 60) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Leaves no process and no shared memory behind."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        for region in Path("/dev/shm").glob(f"{self._memory}*"):
            region.unlink(missing_ok=True)

    def __exit__(self, *_) -> None:
        self.kill()

    def post(self, path: str = "generate", seconds: float = 120, **inputs) -> httpx.Response:
        return HTTP.post(f"{self.url}/v2/models/{self._name}/{path}", json=inputs, timeout=seconds)

    def events(self, **inputs) -> Iterator[dict[str, Any]]:
        """The events of HTTP's generate_stream, each as soon as it comes."""
        address = f"{self.url}/v2/models/{self._name}/generate_stream"
        body = {"streaming": True, **inputs}
        with HTTP.stream("POST", address, json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    def metric(self, name: str, missing: float | None = None) -> float:
        """The value of one sample of Triton's /metrics, named with its labels; of an unknown one
        `missing`."""
        for line in HTTP.get(self.metrics_url, timeout=30).text.splitlines():
            if line.startswith(name) and line[len(name)] == " ":
                return float(line.split()[-1])
        if missing is None:
            raise KeyError(name)
        return missing


def change_engine(config: Path, command: list[str]) -> None:
    lines = config.read_text("utf-8").splitlines()
    (at,) = [
        number
        for number, line in enumerate(lines)
        if line.startswith('parameters { key: "engine_command"')
    ]
    lines[at] = (
        f'parameters {{ key: "engine_command" value {{ string_value: '
        f"{json.dumps(json.dumps(command))} }} }}"
    )
    config.write_text("\n".join(lines), "utf-8")
