"""One life of the server that `soak` kills: its processes, what they say of themselves, and their end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from ..runtime.system import descendants, running

START_SECONDS = 120.0


class Wrong(Exception):
    """Something that must never be: what the soak is for."""


class Life:
    """One process of `pensieve serve`, from its start to its end."""

    def __init__(self, state: Path, engine: str, options: Sequence[str]):
        command = [sys.executable, "-m", "pensieve.scripts.pensieve", "serve", "--engine", engine, "--port", "0"]
        self.log = state / "server.log"
        self._file = self.log.open("a")
        offset = self.log.stat().st_size
        self.process = subprocess.Popen([*command, "--state-dir", str(state), *options], stderr=self._file)
        until = time.monotonic() + START_SECONDS
        self.url = ""
        while time.monotonic() < until and self.process.poll() is None:
            with self.log.open() as lines:
                lines.seek(offset)
                found = re.search(r"serving (\S+) on (http://\S+)", lines.read())
            if found:
                self.model, self.url = found[1], found[2]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready", timeout=5):
                    break
            time.sleep(0.1)
        else:
            raise Wrong(f"the server did not start; see {self.log}")
        self.processes = [self.process.pid, *descendants(self.process.pid)]

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def memory(self) -> int:
        """Bytes resident, of all its processes."""
        return sum(_status(process, "VmRSS:") * 1024 for process in self.processes)

    def files(self) -> int:
        return sum(len(list(Path(f"/proc/{process}/fd").iterdir())) for process in self.processes)

    def kill(self, everything: bool) -> None:
        """All of its processes, or only the first: then the others must end by themselves."""
        for process in reversed(self.processes if everything else self.processes[:1]):
            with contextlib.suppress(ProcessLookupError):  # it cannot be without the one just killed
                os.kill(process, signal.SIGKILL)
        self._ended()

    def end(self) -> None:
        """Wrong if SIGTERM does not end it cleanly."""
        self.process.send_signal(signal.SIGTERM)
        if status := self._ended():
            raise Wrong(f"the server ended with status {status}; see {self.log}")

    def _ended(self) -> int:
        """Its exit status. Wrong if any of its processes is left."""
        status = self.process.wait(90)
        self._file.close()
        until = time.monotonic() + 30
        while left := [process for process in self.processes[1:] if running(process)]:
            if time.monotonic() > until:
                raise Wrong(f"processes {left} outlive their server")
            time.sleep(0.1)
        return status


def _status(process: int, name: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
