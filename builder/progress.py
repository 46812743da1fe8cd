"""Progress of long work: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

WIDTH = 30
GIB = 2**30
LINE_SECONDS = 10.0  # between lines of the log
DRAW_SECONDS = 0.1  # between updates of the bar

log = logging.getLogger("pensieve")


def is_terminal(stream: TextIO) -> bool:
    """False also for a stream that is closed or has no such method: `sys.stderr` in some
    consoles."""
    if getattr(stream, "closed", False) or not hasattr(stream, "isatty"):
        return False
    return stream.isatty()


def show_progress(what: str, done: float, total: float, unit: str = "") -> None:
    """Draws the bar on stderr again; ends the line when all is done."""
    if not is_terminal(sys.stderr):
        return
    filled = round(WIDTH * done / total)
    bar = "#" * filled + "." * (WIDTH - filled)
    end = "\n" if done >= total else ""
    print(
        f"\r{what} [{bar}] {done:.3g} of {total:.3g}{unit} ", end=end, file=sys.stderr, flush=True
    )


class Progress:
    """Shows the progress of one piece of work in stages: on stderr if it is a terminal, else in the
    log.

    name    the beginning of each line
    """

    def __init__(self, name: str):
        self._name = name
        self._stage = ""
        self._terminal = is_terminal(sys.stderr)
        self._open = False  # True while the terminal's line has not ended
        self._told = 0.0

    def say(self, stage: str) -> None:
        """Begins a stage."""
        self.close()
        self._stage = f"{self._name}: {stage}"
        self._told = time.monotonic()
        if self._terminal:
            print(self._stage, end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            log.info("%s", self._stage)

    def advance(self, done: int, total: int) -> None:
        """Reports that `done` of the stage's `total` bytes are done."""
        now = time.monotonic()
        ended = done >= total
        if self._terminal and (ended or now - self._told >= DRAW_SECONDS):
            show_progress(self._stage, done / GIB, total / GIB, " GiB")
            self._open = not ended
        elif not self._terminal and not ended and now - self._told >= LINE_SECONDS:
            log.info("%s, %.0f%%", self._stage, 100 * done / total)
        else:
            return
        self._told = now

    def close(self) -> None:
        """Ends the terminal's line. Idempotent."""
        if self._open:
            print(file=sys.stderr)
            self._open = False
