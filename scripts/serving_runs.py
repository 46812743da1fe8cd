"""Servers that live for a measurement, and the load that is put on them: what experiments share."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_SECONDS = 60.0


def run(name: str, *words: object, seconds: float | None = None) -> None:
    """One of our commands; CalledProcessError if it fails, TimeoutExpired if it takes longer."""
    command = [sys.executable, "-m", f"pensieve.scripts.{name}", *map(str, words)]
    subprocess.run(command, check=True, timeout=seconds)


@contextmanager
def serving(
    words: Sequence[object], log: Path, seconds: float, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a `pensieve serve` with these options that is ready; it writes to `log`, and ends with the block.

    TimeoutError if it is not ready in time, or ends before.
    """
    command = [sys.executable, "-m", "pensieve.scripts.pensieve", "serve", "--port", 0, *words]
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*map(str, command)], stdout=out, stderr=subprocess.STDOUT, env=os.environ | (variables or {})
        )
    try:
        while not ((url := _address(log)) and _ready(url)):
            if process.poll() is not None or time.monotonic() - started > seconds:
                raise TimeoutError(f"no server after {time.monotonic() - started:.0f} s")
            time.sleep(0.5)
        print(f"{log.stem}: ready after {time.monotonic() - started:.0f} s", flush=True)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell_end(log: Path, error: Exception) -> None:
    """What went wrong, and the end of the server's log."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    print(f"{log.stem}: {error}; the server's log ends:", *lines[-30:], sep="\n", flush=True)


def _address(log: Path) -> str | None:
    found = re.search(r"serving .* on (http://[\w.:]+)", log.read_text(errors="replace"))
    return found and found[1]


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2):
            return True
    except (OSError, urllib.error.URLError):
        return False
