"""check.house: counts the figures that docs/design/house.md has goals for, and prints its table.

python -m benchmarks.check.house

It needs a checkout. For one of the figures the demo model answers a chat: see `request_files.py`.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .request_files import files_of_a_request

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("scheduler", "plugins", "builder", "runtime", "scripts")
PATH_PAGE = ROOT / "docs" / "design" / "architecture.md"


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def reading_path() -> list[Path]:
    """The files of the section of that name, in their order."""
    _, _, section = PATH_PAGE.read_text(encoding="utf-8").partition("## Reading path")
    return [ROOT / file for file in re.findall(r"^\| `([\w/]+\.py)`", section.partition("\n## ")[0], re.MULTILINE)]


def modules() -> dict[str, Path]:
    """Files by their dotted names in `pensieve`; folders' own files are left out."""
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources(*ROOMS)}
    return {name: path for name, path in named.items() if path.name != "__init__.py"}


def planners(*folders: str) -> set[str]:
    """Files that plan steps themselves. The scheduler's own files, benchmark and tests are left out."""
    own = ("scheduler/", "benchmarks/scheduler.py", "tests/scheduler/")
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources(*folders)}
    return {name for name, text in files.items() if re.search(r"\.next_plan\(", text) and not name.startswith(own)}


def loosely_checked() -> list[str]:
    """Rooms whose functions mypy allows to have no annotations."""
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    loose = {module for entry in overrides if entry.get("disallow_untyped_defs") is False for module in entry["module"]}
    return [room for room in ROOMS if f"pensieve.{room}.*" in loose]


def table() -> str:
    folders = Counter(path.parent for path in modules().values())
    loose = ", ".join(f"{room}/" for room in loosely_checked())
    on_the_way = files_of_a_request() & {str(path) for path in sources(*ROOMS[:4])}
    rows = [
        ("lines of the reading path", "6,600", "6,000", f"{lines(reading_path()):,}"),
        ("lines of Python without tests and benchmarks", "37,400", "33,000", f"{lines(sources(*ROOMS)):,}"),
        ("lines of scripts/", "13,700", "7,000", f"{lines(sources('scripts')):,}"),
        ("most modules in one folder", "76", "14", f"{max(folders.values())}"),
        ("files that run from a chat's arrival to the kernel", "52", "32", f"{len(on_the_way)}"),
        ("places that plan steps: in the product, in tests", "4, 2", "1, 0",
         f"{len(planners(*ROOMS))}, {len(planners('tests'))}"),
        ("rooms type-checked `strict`", "scheduler/", "all but scripts/", f"all but {loose}" if loose else "all"),
    ]  # fmt: skip
    head = ["| what | before | goal | now |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    print(table())
