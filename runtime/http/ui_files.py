"""The page's files, read once: which file an address gives is written here, not worked out from the request."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    kind: str
    content: bytes


KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
NAMES = ("api.js", "app.js", "charts.js", "chat.js", "conversations.js", "icon.svg", "map.js", "strip.js", "style.css")


def _read(name: str) -> File:
    return File(KINDS[name.rpartition(".")[2]], (Path(__file__).parent / "ui" / name).read_bytes())


UI_FILES = {"/ui": _read("index.html")} | {f"/ui/{name}": _read(name) for name in NAMES}
"""By address."""
