"""Stops a process in the middle of its work, as a machine that hangs would."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def pause(process: int) -> None:
    """Returns when all threads of the process (its id) stand still. SIGCONT lets them go on."""
    os.kill(process, signal.SIGSTOP)
    while any(map(_runs, Path(f"/proc/{process}/task").glob("*/stat"))):
        time.sleep(0.001)


def _runs(stat: Path) -> bool:
    """False for a thread that is stopped, or gone. The state follows the name, which may contain
    spaces and brackets."""
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] not in ("T", "t", "Z", "X")
