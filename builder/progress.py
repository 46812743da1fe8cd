"""How far long work is: a bar on a terminal, lines in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time

WIDTH = 30
GIB = 2**30
LINE_SECONDS = 10.0  # between lines of the log
DRAW_SECONDS = 0.1  # between drawings of the bar

log = logging.getLogger("pensieve")


def show_progress(what: str, done: float, total: float, unit: str = "") -> None:
    """Draws the bar anew on stderr; once all is done the line ends."""
    if not sys.stderr.isatty():
        return
    filled = round(WIDTH * done / total)
    bar = "#" * filled + "." * (WIDTH - filled)
    end = "\n" if done >= total else ""
    print(f"\r{what} [{bar}] {done:.3g} of {total:.3g}{unit} ", end=end, file=sys.stderr, flush=True)


class Progress:
    """Tells on stderr, if that is a terminal, or else in the log how far the stages of one piece of work are.

    name    what each line begins with
    """

    def __init__(self, name: str):
        self._name, self._stage = name, ""
        self._terminal = sys.stderr.isatty()
        self._open = False  # a line of the terminal that has not ended
        self._told = 0.0

    def say(self, stage: str) -> None:
        """A stage begins."""
        self.close()
        self._stage, self._told = f"{self._name}: {stage}", time.monotonic()
        if self._terminal:
            print(self._stage, end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            log.info("%s", self._stage)

    def advance(self, done: int, total: int) -> None:
        """So many of the stage's bytes are done."""
        now, ended = time.monotonic(), done >= total
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
