"""The scheduler decides with the standard library alone: no torch, numpy, CUDA or MPI, and no other room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pensieve.scheduler

FOLDER = Path(pensieve.scheduler.__file__).parent

PROBE = """
import importlib, importlib.util, sys, types

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("pensieve.scheduler.") and name.partition(".")[0] not in sys.stdlib_module_names:
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
        [sys.executable, "-I", "-S", "-c", PROBE, str(folder), *modules], capture_output=True, text=True
    )


def test_the_scheduler_imports_the_standard_library_only():
    """In a fresh interpreter without site packages."""
    paths = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.py") if path.name != "__init__.py"]
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
