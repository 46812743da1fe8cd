"""A bar for what takes seconds at the start; on a terminal only."""

from __future__ import annotations

import sys

_WIDTH = 30


def show_progress(what: str, done: float, total: float, unit: str = "") -> None:
    """Draws the bar anew on stderr; once all is done the line ends."""
    if not sys.stderr.isatty():
        return
    filled = round(_WIDTH * done / total)
    bar = "#" * filled + "." * (_WIDTH - filled)
    end = "\n" if done >= total else ""
    print(f"\r{what} [{bar}] {done:.3g} of {total:.3g}{unit} ", end=end, file=sys.stderr, flush=True)
