"""check.house: counts the figures that docs/design/house.md has goals for, and prints its table.

python -m benchmarks.check.house

It needs a checkout. For one of the figures the demo model answers a chat: see `request_files.py`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from .request_files import files_of_a_request

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("builder", "plugins", "runtime", "scheduler", "deploy")
SHIPPED = (*PROGRAM, "scripts")
PYTHON = (*SHIPPED, "benchmarks", "tests")
COLUMNS = 100
FOR_CHECKERS = re.compile(r"  # (noqa|type: ignore).*")
PATH_PAGE = ROOT / "docs" / "design" / "architecture.md"
PAGES = ("README.md", "BENCHMARKS.md", "CONTRIBUTING.md")
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
"""Tokens that are no code."""


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def tokens(paths: Iterable[Path]) -> int:
    """Counts Python's tokens, without comments, docstrings and layout."""
    return sum(_tokens(path.read_text(encoding="utf-8")) for path in paths)


def _tokens(source: str) -> int:
    docstrings = {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and _is_text(node.value)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(
        token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start in docstrings)
        for token in tokens
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def long_lines(paths: Iterable[Path]) -> list[str]:
    """Lines of more than COLUMNS columns, not counting a comment for ruff or mypy."""
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(FOR_CHECKERS.sub("", line)) > COLUMNS
    ]


def tuple_assignments(paths: Iterable[Path]) -> list[str]:
    """Assignments of a tuple of values of several kinds to a tuple of names that do not depend on
    each other. Such a line holds more than one idea."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assign) and _of_unlike_things(node)
    ]


def _of_unlike_things(node: ast.Assign) -> bool:
    target = node.targets[0]
    value = node.value
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
        return False
    if any(not isinstance(part, ast.Name | ast.Attribute) for part in target.elts):
        return False
    names = {ast.unparse(part) for part in target.elts}
    read = {
        ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.Name | ast.Attribute)
    }
    return not names & read and len({_kind(part) for part in value.elts}) > 1


def _kind(node: ast.expr) -> object:
    """Equal for values that are alike: numbers, parts of one thing, calls of one function."""
    match node:
        case ast.Constant(value=int() | float()):
            return "number"
        case ast.Constant():
            return type(node.value)
        case ast.UnaryOp():
            return _kind(node.operand)
        case ast.Call():
            return "call", ast.dump(node.func)
        case ast.Subscript() | ast.Attribute():
            return type(node), ast.dump(node.value)
        case ast.BinOp():
            return type(node.op), _kind(node.left), _kind(node.right)
        case ast.List() | ast.Set() | ast.Tuple():
            return type(node), len(node.elts)
        case ast.Dict():
            return type(node), len(node.keys)
        case ast.Name():
            return node.id
    return type(node)


def reading_path() -> list[Path]:
    """The files of the section of that name, in their order."""
    _, _, rest = PATH_PAGE.read_text(encoding="utf-8").partition("## Reading path")
    section, _, _ = rest.partition("\n## ")
    return [ROOT / file for file in re.findall(r"^\| `([\w/]+\.py)`", section, re.MULTILINE)]


def modules() -> dict[str, Path]:
    """Files of the program by their dotted names; folders' own files are left out."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in sources(*SHIPPED)
        if path.name != "__init__.py"
    }


def planners(*folders: str) -> set[str]:
    """Files that plan steps themselves. The scheduler's own files, benchmark and tests are left
    out."""
    own = ("scheduler/", "benchmarks/scheduler.py", "tests/scheduler/")
    return {
        name
        for path in sources(*folders)
        if re.search(r"\.next_plan\(", path.read_text(encoding="utf-8"))
        and not (name := path.relative_to(ROOT).as_posix()).startswith(own)
    }


def loosely_checked() -> list[str]:
    """Folders whose functions mypy allows to have no annotations."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    loose = {
        module
        for entry in settings["tool"]["mypy"]["overrides"]
        if entry.get("disallow_untyped_defs") is False
        for module in entry["module"]
    }
    return [folder for folder in SHIPPED if f"pensieve.{folder}.*" in loose]


def words() -> int:
    """Words of the documentation, without comments, such as the marks of tables."""
    paths = [*(ROOT / page for page in PAGES), *(ROOT / "docs").rglob("*.md")]
    texts = (re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8")) for path in paths)
    return sum(len(text.split()) for text in texts)


def rows() -> Iterator[tuple[str, str, str, str]]:
    """What is counted, the figure before, the goal, the figure now."""
    folders = Counter(path.parent for path in modules().values())
    loose = ", ".join(f"{folder}/" for folder in loosely_checked())
    chat = files_of_a_request() & {str(path) for path in sources(*PROGRAM)}
    planning = f"{len(planners(*SHIPPED))}, {len(planners('tests'))}"
    yield (
        "tokens of builder, plugins, runtime, scheduler, deploy",
        "241,900",
        "218,000",
        _count(tokens(sources(*PROGRAM))),
    )
    yield "tokens of scripts", "96,600", "17,000", _count(tokens(sources("scripts")))
    yield "tokens of the reading path", "40,600", "43,500", _count(tokens(reading_path()))
    yield "lines over 100 columns", "7,581", "0", _count(len(long_lines(sources(*PYTHON))))
    unlike = len(tuple_assignments(sources(*PYTHON)))
    yield "tuple assignments of unlike things", "796", "0", _count(unlike)
    yield "most modules in one folder", "14", "14", _count(max(folders.values()))
    yield "files from a chat's arrival to the kernel", "67", "40", _count(len(chat))
    yield "places that plan steps: in the product, in tests", "1, 0", "1, 0", planning
    yield (
        "folders type-checked `strict`",
        "all but scripts/",
        "all but scripts/",
        (f"all but {loose}" if loose else "all"),
    )
    yield "words of the documentation", "104,800", "80,000", _count(words())


def _count(number: int) -> str:
    return f"{number:,}"


def table() -> str:
    head = ["| what | before | goal | now |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows())])


if __name__ == "__main__":
    print(table())
