"""A file imports only its own folder and earlier parts of one list, and files import each other in
no circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("scheduler", "plugins", "builder", "runtime", "scripts", "benchmarks")

# Parts of one entry may import each other, as files of one folder may.
LAYERS = [
    "scheduler.types scheduler.declaration scheduler.plan scheduler.plan_contexts "
    "scheduler.context_window scheduler.config scheduler.cost scheduler.cost_estimate "
    "scheduler.swap_out_mark scheduler.step_timing scheduler.draft_timing scheduler.work",
    "scheduler.kv",
    "scheduler.turns",
    "scheduler.planning",
    "scheduler.invariants",
    "scheduler.scheduler",
    "scheduler.sim",
    "plugins",
    "builder",
    "runtime.counters runtime.openmp runtime.system runtime.gc_control runtime.cache_salt "
    "runtime.inbox",
    "runtime.kv_events",
    "runtime.text",
    "runtime.step",
    "runtime.disk",
    "runtime.shared",
    "runtime.device",
    "runtime.engine runtime.executor",
    "runtime.observe",
    "runtime.measure",
    "runtime.loop",
    "runtime.ranks",
    "runtime.messages",
    "runtime.engine_session",
    "runtime.service",
    "runtime.conversations",
    "runtime.frontend",
    "runtime.http runtime.http.workers",
    "runtime.triton",
    "runtime.launch",
    "runtime.offline",
    "runtime.llm",
    "scripts",
    "benchmarks",
]


def import_graph() -> dict[str, set[str]]:
    """For each file by its dotted name, the project's files that it imports, also under
    TYPE_CHECKING and in functions. Folders' own files are left out."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in paths
        if path.name != "__init__.py"
    }
    return {name: imported(name, path) & files.keys() for name, path in files.items()}


def imported(module: str, path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("pensieve.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            source = (
                ".".join([*base, *(node.module or "").split(".")])
                .strip(".")
                .removeprefix("pensieve.")
            )
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which reaches all others of its group."""
    reached = {name: set[str]() for name in graph}
    for name, seen in reached.items():
        left = list(graph[name])
        while left:
            if (module := left.pop()) not in seen:
                seen.add(module)
                left += graph[module]
    return {
        frozenset(other for other in seen if name in reached[other])
        for name, seen in reached.items()
        if name in seen
    }


RANK = {part: rank for rank, entry in enumerate(LAYERS) for part in entry.split()}
GRAPH = import_graph()


def rank(module: str) -> int:
    room = module.split(".")[0]
    folder = module.rpartition(".")[0]
    return next(RANK[part] for part in (module, folder, room) if part in RANK)


def test_a_file_imports_only_its_folder_and_earlier_layers() -> None:
    upward = {
        (module, other)
        for module, others in GRAPH.items()
        for other in others
        if rank(other) > rank(module)
    }
    assert upward == set()


def test_no_circle_of_files() -> None:
    assert circles(GRAPH) == set()


def test_a_circle_is_found_with_all_its_files() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == {frozenset("bc"), frozenset("d")}


def test_an_error_has_a_kind_and_no_status_of_http() -> None:
    numbers = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in ("scheduler", "runtime")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "RequestError"
        and isinstance(call.args[0], ast.Constant)
    ]
    assert numbers == []


def test_the_scheduler_and_the_ranks_name_no_flag() -> None:
    """Docstrings may, in examples of commands."""
    flags = []
    for folder in ("scheduler", "runtime/ranks"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
            flags += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
                for node in nodes
                if isinstance(node, ast.Constant)
                and node not in docstrings
                and re.search(r"--[a-z]", str(node.value))
            ]
    assert flags == []
