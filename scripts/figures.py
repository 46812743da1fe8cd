"""Figures as files: matplotlib without a display, loaded by the commands that draw."""

from __future__ import annotations

from types import ModuleType

from ..scheduler.types import SettingError


def pyplot(option: str) -> ModuleType:
    """`matplotlib.pyplot`. SettingError names `option` if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise SettingError(option, f"needs {error.name}, which is not installed") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
