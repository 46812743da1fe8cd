"""Figures as files: matplotlib, loaded by the commands that draw."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..scheduler.types import SettingError


def subplots(
    option: str, rows: int = 1, columns: int = 1, *, figsize: tuple[float, float], **how: Any
) -> tuple[Any, Any]:
    """A figure and its axes, as `matplotlib.pyplot.subplots` makes them, but for no display.

    SettingError names `option` if matplotlib is not installed.
    """
    check_matplotlib(option)
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout="tight")
    return figure, figure.subplots(rows, columns, **how)


def check_matplotlib(option: str) -> None:
    """SettingError as `subplots`: to be known before anything is measured."""
    if find_spec("matplotlib") is None:
        raise SettingError(option, "needs matplotlib: pip install 'pensieve[bench]'")
