"""Which processes another one has started, and which of them still run. Linux."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children(process: int) -> list[int]:
    """Those of threads that end meanwhile may be left out; those that nobody has waited for are there."""
    found = list[int]()
    with contextlib.suppress(FileNotFoundError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(process: int) -> list[int]:
    """Its children, theirs, and so on."""
    found = children(process)
    return [*found, *(one for child in found for one in descendants(child))]


def running(process: int) -> bool:
    """False too for one that has ended and that nobody has waited for."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False
