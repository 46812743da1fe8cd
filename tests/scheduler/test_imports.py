"""The scheduler decides with the standard library alone: no torch, numpy, CUDA or MPI, and no other
room."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pensieve.scheduler

FOLDER = Path(pensieve.scheduler.__file__).parent

PROBE = """
import importlib, importlib.util, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        own = name.startswith("pensieve.scheduler.")
        if not own and name.partition(".")[0] not in sys.stdlib_module_names:
            raise ImportError(f"the scheduler may not import {name}")

sys.meta_path.insert(0, Refuse())
folder, *modules = sys.argv[1:]
sys.modules["pensieve"] = types.ModuleType("pensieve")
sys.modules["pensieve"].__path__ = []
spec = importlib.util.spec_from_file_location(
    "pensieve.scheduler", folder + "/__init__.py", submodule_search_locations=[folder]
)
package = sys.modules["pensieve.scheduler"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
for module in modules:
    importlib.import_module("pensieve.scheduler." + module)
print(len(modules))
"""


def probe(folder, modules):
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROBE, str(folder), *modules],
        capture_output=True,
        text=True,
    )


def test_the_scheduler_imports_the_standard_library_only():
    """In a fresh interpreter without site packages."""
    paths = [
        path.relative_to(FOLDER) for path in FOLDER.rglob("*.py") if path.name != "__init__.py"
    ]
    modules = [".".join(path.with_suffix("").parts) for path in paths]
    assert "scheduler" in modules and "plan" in modules
    done = probe(FOLDER, modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(modules))]


def test_the_probe_refuses_everything_else(tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "numbers_of_others.py").write_text("import numpy\n")
    (tmp_path / "other_room.py").write_text("from ..runtime import device\n")
    for module, refused in (("numbers_of_others", "numpy"), ("other_room", "pensieve.runtime")):
        done = probe(tmp_path, [module])
        assert done.returncode != 0 and f"may not import {refused}" in done.stderr


ORDER = (
    {
        "types",
        "declaration",
        "plan",
        "plan_contexts",
        "context_window",
        "config",
        "cost",
        "cost_estimate",
        "swap_out_mark",
        "draft_timing",
        "step_timing",
        "work",
    },
    {"kv"},
    {"turns"},
    {"planning"},
    {"invariants"},
    {"scheduler"},
    {"sim"},
)
"""Each part imports itself and earlier ones."""


def imports_within(path):
    """The scheduler's modules that a module imports, those for type checks included, as paths below
    the scheduler."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(FOLDER)
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from (folder.joinpath(*name.split(".")) for name in names)


def test_modules_import_earlier_parts_and_form_no_circle():
    place = {part: number for number, parts in enumerate(ORDER) for part in parts}
    paths = [path for path in FOLDER.rglob("*.py") if path.name != "__init__.py"]
    imports = {
        path.relative_to(FOLDER).with_suffix(""): set(imports_within(path)) for path in paths
    }
    for module, imported in imports.items():
        assert all(place[other.parts[0]] <= place[module.parts[0]] for other in imported), (
            module,
            imported,
        )
    while imports:
        leaves = [module for module, imported in imports.items() if not imported & imports.keys()]
        assert leaves, f"these modules import each other in a circle: {sorted(map(str, imports))}"
        for module in leaves:
            del imports[module]
