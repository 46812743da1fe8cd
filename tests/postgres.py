"""A PostgreSQL of the tests' own. Tests that need it are skipped where it is not installed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.check import postgres


class PrivatePostgres(postgres.PrivatePostgres):
    def __init__(self) -> None:
        try:
            super().__init__()
        except postgres.NotInstalled as error:
            pytest.skip(str(error))

    def pause(self, number: int = signal.SIGSTOP) -> None:
        """SIGSTOP: it does not answer any more, with all its connections open; SIGCONT: it goes
        on."""
        (main, *_) = Path(self.data, "postmaster.pid").read_text().split()
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        for process in (main, *children):
            with suppress(ProcessLookupError):
                os.kill(int(process), number)
