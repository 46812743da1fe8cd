"""The settings of OpenMP's threads: there before torch loads, whatever imports it, unless the user has set them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pensieve.runtime import openmp
from pensieve.runtime.launch.assemble import make_device
from pensieve.runtime.openmp import SPINS, VARIABLE, WAITING

FAKE_TORCH = f"""
import os
print("torch is loaded with", os.environ.get("{VARIABLE}"), flush=True)
os._exit(0)
"""
SERVE = ("-m", "pensieve.scripts.pensieve", "serve", "demo", "--port=0")
ENTRIES = {
    "server": SERVE,
    "rank": SERVE,
    "LLM": ("-c", "from pensieve import LLM"),
    "build_engine": ("-m", "pensieve.scripts.build_engine", "--checkpoint=missing", "--output=made"),
    "compiler": ("-m", "pensieve.builder.inductor.compile", "missing"),
    "profile": ("-m", "pensieve.scripts.pensieve", "profile", "--engine=missing"),
}


def python(*words, cwd=None, **variables):
    """Runs Python without the variables that tell threads how to wait, but with `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run(
        [sys.executable, *words],
        env=kept | variables,
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def at_torch(tmp_path):
    """Runs Python with a torch that tells the variable's value and ends the process."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE_TORCH)

    def run(*words, **variables):
        return python(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path), **variables).stdout

    return run


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_is_set_before_torch_loads(entry, at_torch):
    launched = {"PENSIEVE_RANKS": "2"} if entry == "rank" else {}
    assert at_torch(*ENTRIES[entry], **launched) == f"torch is loaded with {SPINS}\n"


@pytest.mark.parametrize(("name", "value", "seen"), [(VARIABLE, "7", "7"), ("OMP_WAIT_POLICY", "active", "None")])
def test_a_variable_of_the_user_wins(name, value, seen, at_torch):
    assert at_torch("-c", "import pensieve.runtime.llm", **{name: value}) == f"torch is loaded with {seen}\n"


def test_the_library_of_torch_reads_it():
    """libgomp prints its settings when it is loaded."""
    said = python("-c", "import pensieve, torch", OMP_DISPLAY_ENV="verbose").stderr
    if "GOMP" not in said:
        pytest.skip("this torch has another OpenMP than libgomp")
    assert f"{VARIABLE} = '{SPINS}'" in said


def test_one_warning_names_it_if_torch_was_imported_before(monkeypatch, caplog):
    """In this process torch is loaded."""
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    openmp.limit_spinning()
    for _ in range(2):
        make_device("cpu").close()
    (warning,) = caplog.records
    assert f"{VARIABLE}={SPINS}" in warning.getMessage()
    assert VARIABLE not in os.environ  # it would be read by no one


def test_no_warning_if_the_user_has_chosen(monkeypatch, caplog):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    openmp.limit_spinning()
    make_device("cpu").close()
    assert not caplog.records
