"""A PostgreSQL of the tests' own. Tests that need it are skipped where it is not installed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.check import postgres

from .pausing import pause


class PrivatePostgres(postgres.PrivatePostgres):
    def __init__(self) -> None:
        try:
            super().__init__()
        except postgres.NotInstalled as error:
            pytest.skip(str(error))

    def pause(self) -> None:
        """It does not answer any more, with all its connections open."""
        for process in self._processes():
            with suppress(ProcessLookupError):
                pause(process)

    def go_on(self) -> None:
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def _processes(self) -> list[int]:
        (main, *_) = Path(self.data, "postmaster.pid").read_text().split()
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [int(process) for process in (main, *children)]
