"""What commands share: the exit status of a wrong option, bounds of numbers, results as lines of
JSON and as tables."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ..builder.choices import KV_CACHE_DTYPES
from ..runtime.launch.settings import HISTORY_URL, in_flags
from ..scheduler.declaration import flag
from ..scheduler.types import SettingError

Number = TypeVar("Number", int, float)


def exit_status(
    prog: str, work: Callable[[], int | None], wrong: tuple[type[Exception], ...] = (SettingError,)
) -> int:
    """Returns the result of `work` (None: 0), or 2 after one of the errors `wrong`, which is
    printed in one line."""
    try:
        return work() or 0
    except wrong as error:
        words = in_flags(error) if isinstance(error, SettingError) else error
        print(f"{prog}: {words}", file=sys.stderr)
        return 2


def check_above_0(args: argparse.Namespace, names: Iterable[str]) -> None:
    """SettingError for the first number that is not above 0. Names that are missing or None are
    skipped."""
    for name in names:
        value = getattr(args, name, None)
        if value is not None and not 0 < value < math.inf:
            raise SettingError(flag(name), f"must be above 0, not {value}")


def check_least(args: argparse.Namespace, **least: float) -> None:
    """SettingError for the first number that is less, or not finite; as `check_above_0`."""
    for name, bound in least.items():
        value = getattr(args, name, None)
        if value is not None and not bound <= value < math.inf:
            raise SettingError(flag(name), f"must be at least {bound}, not {value}")


def add_kv_cache_dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES,
                      help="as `pensieve serve` (default %(default)s)")  # fmt: skip


def add_history_url(command: argparse.ArgumentParser, use: str) -> None:
    command.add_argument("--history-url", metavar="URL", help=f"{use} (default: {HISTORY_URL})")
    command.add_argument(
        "--history-url-file", type=Path, metavar="FILE", help="that URL, which may have a password"
    )


def numbers(text: str, option: str, kind: type[Number]) -> list[Number]:
    """Of a text with commas between. SettingError."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise SettingError(
            option, f"{text!r} is not a list of numbers with commas between"
        ) from None


# Tables.


Columns = Mapping[str, tuple[str, str]]
"""By a value's name: its title, and how it is written: a format with its width, such as `8.1f`."""


def title_line(columns: Columns) -> str:
    return "  ".join(
        f"{title:{_side(form)}{_width(title, form)}}" for title, form in columns.values()
    ).rstrip()


def result_line(columns: Columns, values: Mapping[str, Any]) -> str:
    """None, nothing to tell, is a dash."""
    shown = (
        "-" if values[name] is None else format(values[name], form)
        for name, (_, form) in columns.items()
    )
    places = ((_side(form), _width(title, form)) for title, form in columns.values())
    return "  ".join(
        f"{cell:{side}{width}}" for cell, (side, width) in zip(shown, places, strict=True)
    ).rstrip()


def _side(form: str) -> str:
    return "<" if form.startswith("<") else ">"


def _width(title: str, form: str) -> int:
    return max(len(title), *map(int, re.findall(r"^[<>]?(\d+)", form)))


# Figures.


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
