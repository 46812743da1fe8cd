"""A PostgreSQL of a check's own: a temporary directory, a Unix socket, no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path


class NotInstalled(Exception):
    """What is missing, and how it is installed."""


def programs() -> Path | None:
    """The directory with `initdb`: Debian keeps it off the PATH."""
    initdb = shutil.which("initdb")
    places = [Path(initdb).parent] if initdb else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return places[-1] if places else None


class PrivatePostgres:
    """Use as a context manager. `url` is the database's; `stop` and `start` as often as wanted."""

    def __init__(self) -> None:
        """Raises NotInstalled, and RuntimeError if `initdb` fails."""
        if find_spec("psycopg") is None:
            raise NotInstalled("psycopg is not installed (pip install 'pensieve[postgres]')")
        directory = programs()
        if directory is None:
            raise NotInstalled("PostgreSQL is not installed (apt-get install postgresql)")
        self._programs = directory
        # Not below the caller's directories: only their owner may enter them, and a socket's path
        # must be short.
        self._home = Path(tempfile.mkdtemp(prefix="pensieve-pg-"))
        self._user = "postgres" if os.getuid() == 0 else None  # it refuses to run as root
        if self._user is not None:
            shutil.chown(self._home, self._user)
        options = ["-A", "trust", "-U", "postgres", "-E", "UTF8", "--no-locale", "--no-sync"]
        self._run("initdb", "-D", self.data, *options)
        self.url = f"postgresql://postgres@/postgres?host={self._home}"

    @property
    def data(self) -> str:
        return str(self._home / "data")

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        done = subprocess.run(
            command, user=self._user, cwd=self._home, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed: {done.stderr}{done.stdout}")

    def start(self) -> None:
        settings = f"-c listen_addresses='' -c unix_socket_directories={self._home} -c fsync=off"
        self._control("start", "-l", str(self._home / "log"), "-o", settings)

    def stop(self, how: str = "fast") -> None:
        """`immediate`: as a crash."""
        self._control("stop", "-m", how)

    def _control(self, *words: str) -> None:
        """Waits, and on a busy machine for longer than the usual minute."""
        self._run("pg_ctl", *words, "-w", "-t", "600", "-D", self.data)

    def __enter__(self) -> PrivatePostgres:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if Path(self.data, "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self._home, ignore_errors=True)
