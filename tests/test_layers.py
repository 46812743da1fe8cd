"""A file imports only its own folder and earlier parts of one list, and files import each other in no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("scheduler", "plugins", "builder", "runtime", "scripts")
# Parts of one entry may import each other, as files of one folder may.
LAYERS = [
    "scheduler.types scheduler.plan scheduler.context_window scheduler.config scheduler.cost scheduler.step_timing",
    "scheduler.kv",
    "scheduler.turns",
    "scheduler.planning",
    "scheduler.invariants",
    "scheduler.scheduler",
    "scheduler.sim",
    "plugins",
    "builder",
    "runtime.counters runtime.system runtime.gc_control",
    "runtime.text",
    "runtime.step",
    "runtime.disk",
    "runtime.device",
    "runtime.engine runtime.executor",
    "runtime.observe",
    "runtime.measure",
    "runtime.loop",
    "runtime.ranks",
    "runtime.messages",
    "runtime.service",
    "runtime.conversations",
    "runtime.frontend",
    "runtime.http",
    "runtime.triton",
    "runtime.launch",
    "runtime.offline",
    "runtime.llm",
    "scripts",
]
RANK = {part: rank for rank, entry in enumerate(LAYERS) for part in entry.split()}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if path.name != "__init__.py"
}


def imports(module: str) -> set[str]:
    """The project's modules that a module imports, also under TYPE_CHECKING and in functions."""
    named = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name.removeprefix("pensieve.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).strip(".").removeprefix("pensieve.")
            named |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return named & MODULES.keys()


GRAPH = {module: imports(module) for module in MODULES}


def rank(module: str) -> int:
    room, folder = module.split(".")[0], module.rpartition(".")[0]
    return next(RANK[part] for part in (module, folder, room) if part in RANK)


def test_a_file_imports_only_its_folder_and_earlier_layers() -> None:
    upward = {(module, other) for module, others in GRAPH.items() for other in others if rank(other) > rank(module)}
    assert upward == set()


def test_no_circle_of_files() -> None:
    TopologicalSorter(GRAPH).prepare()
