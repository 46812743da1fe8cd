"""Sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from ..scheduler.types import SettingError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter + "B": 1000**_power, _letter + "IB": 1024**_power}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str, setting: str) -> int:
    """Bytes of "40GiB", "1.5 MB" or "4096"; KiB is 1024 and KB 1000, in any case. SettingError names `setting`."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise SettingError(setting, f"{text!r} is not a size; write 40GiB, 512MiB, 1.5GB or a number of bytes")
    return int(Fraction(match[1]) * unit)
