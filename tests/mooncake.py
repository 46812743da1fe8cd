"""A Mooncake store of the tests' own: a master and one owner of memory. Tests that need it are
skipped where it is not installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.ports import free_ports

FOLDER = Path(sys.prefix) / "mooncake"
"""`make mooncake` fills it."""
START_SECONDS = 120
OWNED = "512 MB"
ENVIRONMENT = {"PYTHONPATH": str(FOLDER)}
"""Of processes that import it."""


def needs_mooncake() -> None:
    """Skips the test where it is not installed; else this process can import it."""
    program = [FOLDER / "bin" / "mooncake_master", "-version"]
    try:
        done = subprocess.run(program, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    except OSError:
        pytest.skip("Mooncake is not installed (make mooncake)")
    if done.returncode != 0:
        pytest.skip(f"Mooncake does not start: {done.stderr}")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


class PrivateMooncake:
    """Use as a context manager. `master`: its address. `kill`, `pause` and `start_*` as often as
    wanted."""

    def __init__(self) -> None:
        needs_mooncake()
        self._home = tempfile.TemporaryDirectory(prefix="pensieve-mooncake-")
        self._rpc, self._http, self._service = free_ports(3)
        self.master = f"127.0.0.1:{self._rpc}"
        self.master_process: subprocess.Popen[bytes] | None = None
        self.owner_process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrivateMooncake:
        try:
            self.start_master()
            self.start_owner()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.owner_process, self.master_process):
            if process is not None and process.poll() is None:
                kill(process)
        self._home.cleanup()

    def start_master(self) -> None:
        """Returns when it serves."""
        ports = ["-rpc_port", self._rpc, "-metrics_port", self._http]
        local = ["-rpc_address", "127.0.0.1", "-metrics_host", "127.0.0.1"]
        self.master_process = self._start("mooncake_master", *ports, *local)
        _until(lambda: self._ask("health").get("service_ready"), self.master_process, self.log)

    def start_owner(self) -> None:
        """Returns when records can be put into its memory."""
        self.owner_process = self._start(
            "mooncake_client",
            *("-host", "127.0.0.1", "-port", self._service),
            *("-master_server_address", self.master, "-metadata_server", "P2PHANDSHAKE"),
            *("-global_segment_size", OWNED),
        )
        _until(self._owner_listens, self.owner_process, self.log)

    def _owner_listens(self) -> bool:
        """The last thing that it does at its start."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._service), timeout=20):
            return True
        return False

    def _start(self, program: str, *words: object) -> subprocess.Popen[bytes]:
        command = [str(FOLDER / "bin" / program), *map(str, words), "-logtostderr"]
        with Path(self._home.name, "log").open("ab") as log:
            return subprocess.Popen(command, stderr=log, env=os.environ | ENVIRONMENT)

    def log(self) -> str:
        with suppress(FileNotFoundError):
            return Path(self._home.name, "log").read_text(errors="replace")
        return ""

    def keys(self) -> set[str]:
        """Of all whole records."""
        answer = httpx.get(f"http://127.0.0.1:{self._http}/get_all_keys", timeout=30)
        return set(answer.text.split())

    def spoil(self, keys: Iterable[str]) -> None:
        """Changes a byte of each record."""
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", self.master)
        assert code == 0
        for key in keys:
            content = bytearray(client.get(key))
            content[-100] ^= 1
            assert client.remove(key, True) == 0
            assert client.put(key, bytes(content)) == 0
        client.close()

    def _ask(self, path: str) -> dict[str, object]:
        with suppress(httpx.TransportError):
            return dict(httpx.get(f"http://127.0.0.1:{self._http}/{path}", timeout=30).json())
        return {}


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def _until(
    is_ready: Callable[[], object], process: subprocess.Popen[bytes], log: Callable[[], str]
) -> None:
    end = time.monotonic() + START_SECONDS
    while not is_ready():
        assert process.poll() is None and time.monotonic() < end, log()[-5000:]
        time.sleep(0.02)
