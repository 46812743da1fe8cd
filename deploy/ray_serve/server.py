"""`pensieve serve` as a child process of a replica. It ends when the replica ends, in any way."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

KV_EVENTS = "--kv-events-config"
OURS = ("--host", "--port", "--state-dir")
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """Starts the server. `url` is its address on this host, `kv_events` the addresses of its KV
    events, if it has any. `ended` is called when it ends without `stop`."""

    def __init__(self, options: Sequence[str], states: Path, ended: Callable[[], None]):
        for option in OURS:
            if any(word.partition("=")[0] == option for word in options):
                raise ValueError(f"{option}: each replica chooses its own; leave it out")
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options, self.kv_events = with_own_ports(options)
        state_dir, self._lock = claim_state_dir(states)
        self._command = [sys.executable, "-P", "-m", "pensieve.scripts.pensieve", "serve", *options]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--state-dir", str(state_dir)]
        self._ended = ended
        self._stopping = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pensieve serve", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        """The system signals the child when the thread that started it ends, so this thread waits
        for the child."""
        prctl = ctypes.CDLL(None).prctl  # loaded before the fork
        try:
            self._child = subprocess.Popen(
                self._command,
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
                pass_fds=[self._lock],  # the directory stays claimed until the child has ended too
            )
        finally:
            os.close(self._lock)
            self._started.set()
        self._child.wait()
        if not self._stopping:
            self._ended()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs."""
        return self._child.poll()

    def stop(self) -> None:
        """Returns when the server has ended. It finishes its requests within its
        --shutdown-timeout."""
        self._stopping = True
        with suppress(ProcessLookupError):
            self._child.terminate()
        self._thread.join()


def with_own_ports(options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Gives each address of KV events with port 0 a free port. Returns the options, and the
    addresses by their names in `--kv-events-config`. Options that publish nothing, or that the
    server will refuse, stay as they are."""
    words = list(options)
    addresses = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != KV_EVENTS:
            continue
        place = index if equals else index + 1
        try:
            config = json.loads(value if equals else words[place])
        except (ValueError, IndexError):
            continue
        publishes = isinstance(config, dict) and config.get("enable_kv_cache_events") is True
        if not publishes or config.get("publisher") == "null":
            continue
        config = {"endpoint": "tcp://127.0.0.1:0"} | config
        for field in ("endpoint", "replay_endpoint"):
            if isinstance(address := config.get(field), str):
                if address.endswith(":0"):
                    address = f"{address.removesuffix('0')}{free_port()}"
                config[field] = addresses[field] = address
        words[place] = f"{KV_EVENTS}={json.dumps(config)}" if equals else json.dumps(config)
    return words, addresses


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def claim_state_dir(states: Path) -> tuple[Path, int]:
    """Returns the first directory below `states` that no server uses, and the descriptor of its
    lock.

    A replica that takes the place of another one on the same host finds the KV that is on disk
    there.
    """
    for number in itertools.count():
        directory = states / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "in-use", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return directory, lock
    raise AssertionError("there is always a next number")
