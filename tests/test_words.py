"""Names say what they hold, a class has a name of its own, and KV is not saved or loaded
(docs/design/words.md)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pensieve.runtime.observe.metrics import Metrics

ROOT = Path(__file__).parents[1]
PROGRAM = ("builder", "plugins", "runtime", "scheduler", "scripts", "benchmarks", "deploy")
VAGUE = {"asked", "made", "found", "known", "said"}
FILES_ONLY = {"save", "saves", "saved", "saving", "unsaved", "load", "loads", "loaded", "loading"}
# methods of argparse and asyncio, and a status of HTTP
NAMES_OF_OTHERS = {"parse_known_args", "connection_made", "NOT_FOUND"}
OPTION = {"save", "SAVE_MODES"}  # `--save`, which keeps its name


def test_no_name_is_vague() -> None:
    names = (name for file in files(*PROGRAM, "tests") for name in defined(file))
    vague = [name for name in names if words(name) & VAGUE]
    # tests' names are sentences
    kept = [name for name in vague if not last(name).startswith("test_")]
    assert [name for name in kept if last(name) not in NAMES_OF_OTHERS] == []


def test_the_scheduler_neither_saves_nor_loads() -> None:
    names = (name for file in files("scheduler") for name in defined(file))
    assert [name for name in names if words(name) & FILES_ONLY and last(name) not in OPTION] == []


def test_no_metric_is_vague_or_saves_or_loads() -> None:
    names = {family.name for family in Metrics().collect()}
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.*"), ROOT / "README.md"]:
        names.update(re.findall(r"pensieve:\w+", page.read_text()))
    own = {name for name in names if name.startswith("pensieve:")}
    assert len(own) > 30
    assert [name for name in sorted(own) if words(name) & (VAGUE | FILES_ONLY)] == []


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(set)
    for file in files(*PROGRAM):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(str(file.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_rules_see_every_kind_of_name(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "class MadeUp:\n    found: int\n"
        "def asked(known, *said_args, **made):\n    self.found_it = 1\n"
        "for said, (known_x, _) in ():\n    pass\n"
        "y = made_up.found\nprint(asked=1)\n"
    )
    names = [last(name) for name in defined(file) if words(name) & VAGUE]
    expected = {"MadeUp", "found", "asked", "known", "said_args", "made"}
    assert set(names) == expected | {"found_it", "said", "known_x"}


def files(*folders: str) -> Iterator[Path]:
    for top in folders:
        yield from sorted((ROOT / top).rglob("*.py"))


def defined(file: Path) -> Iterator[str]:
    """The names that the file gives, each with its place: "file:line name"."""
    for node in ast.walk(ast.parse(file.read_text())):
        name = None
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        if name is not None:
            yield f"{file}:{node.lineno} {name}"


def last(name: str) -> str:
    return name.rpartition(" ")[2]


def words(name: str) -> set[str]:
    """The words of a name, in lower case: "made" and "up" of `MadeUp`, `made_up` and `MADE_UP`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", last(name))}
