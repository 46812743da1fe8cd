"""A file imports only its own folder and earlier parts of one list, and files import each other in no circle."""

from pensieve.scripts.check.house import circles, import_graph

# Parts of one entry may import each other, as files of one folder may.
LAYERS = [
    "scheduler.types scheduler.plan scheduler.context_window scheduler.config scheduler.cost scheduler.step_timing "
    "scheduler.work",
    "scheduler.kv",
    "scheduler.turns",
    "scheduler.planning",
    "scheduler.invariants",
    "scheduler.scheduler",
    "scheduler.sim",
    "plugins",
    "builder",
    "runtime.counters runtime.openmp runtime.system runtime.gc_control",
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
GRAPH = import_graph()


def rank(module: str) -> int:
    room, folder = module.split(".")[0], module.rpartition(".")[0]
    return next(RANK[part] for part in (module, folder, room) if part in RANK)


def test_a_file_imports_only_its_folder_and_earlier_layers() -> None:
    upward = {(module, other) for module, others in GRAPH.items() for other in others if rank(other) > rank(module)}
    assert upward == set()


def test_no_circle_of_files() -> None:
    assert circles(GRAPH) == set()


def test_a_circle_is_found_with_all_its_files() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == {frozenset("bc"), frozenset("d")}
