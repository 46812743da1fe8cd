"""Servers that live for a measurement, and the commands that put a load on them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pensieve.runtime.device.memory import GIB, host_memory
from pensieve.scripts import chat

from .ports import free_ports

SERVE = (sys.executable, "-m", "pensieve.scripts.pensieve", "serve")
READY = "/ready"  # of Pensieve
STOP_SECONDS = 60.0
KILL_SECONDS = 10.0


class MetricsServer(chat.Server):
    """The HTTP API, with the server's metrics."""

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, by name with labels."""
        lines = [
            line for line in self.text("/metrics").splitlines() if line and not line.startswith("#")
        ]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def run(module: str, *words: object, seconds: float | None = None) -> None:
    """Runs one of our commands; CalledProcessError if it fails, TimeoutExpired if it takes
    longer."""
    command = [sys.executable, "-m", module, *map(str, words)]
    with _started(command) as process:
        if status := process.wait(seconds):
            raise subprocess.CalledProcessError(status, command)


@contextmanager
def serving(
    command: Sequence[object],
    log: Path,
    seconds: float,
    ready: str = READY,
    variables: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The address of a server that is ready: `command` with `--port`. It writes to `log`, and ends
    with the block.

    ready       the path that answers with 200 from then on
    variables   the whole environment (default: this process's)

    TimeoutError if the server is not ready in time, or ends before.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    with (
        log.open("wb") as out,
        _started(
            [*map(str, command), "--port", str(port)], stdout=out, stderr=out, env=variables
        ) as process,
    ):
        while not _answers(f"{url}{ready}"):
            if process.poll() is not None or time.monotonic() - started > seconds:
                raise TimeoutError(f"no server after {time.monotonic() - started:.0f} s")
            time.sleep(0.5)
        print(f"{log.stem}: ready after {time.monotonic() - started:.0f} s", flush=True)
        yield url


def tell_end(log: Path, error: Exception) -> None:
    """What went wrong, and the end of the server's log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    print(f"{log.stem}: {error}; the server's log ends:", *lines[-30:], sep="\n", flush=True)


def use_memory(size: int) -> None:
    """Touches memory until `size` bytes are free: some virtual machines get memory only when they
    use it, and little at a time."""
    held: list[np.ndarray] = []
    patience = 90
    while (free := host_memory().free) + len(held) * GIB < size and patience:
        if free > 2 * GIB:
            held.append(np.ones(GIB, np.uint8))
        else:
            patience -= 1
            time.sleep(1.0)
    print(f"{free / GIB + len(held):.0f} GiB of host memory for {size / GIB:.0f}", flush=True)


@contextmanager
def _started(command: Sequence[str], **how: object) -> Iterator[subprocess.Popen[bytes]]:
    """Yields a process in its own group; ends the whole group after the block."""
    process = subprocess.Popen(command, start_new_session=True, **how)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also on a second Ctrl-C
            _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Returns when the group is gone: until then its processes may hold memory."""
    until = time.monotonic() + KILL_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False
