"""Compiled engines of tiny models: each is compiled once in a test run, by the process that needs
it first.

Tests that compile are skipped without a C++ compiler.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pensieve.builder.build import build_engine
from pensieve.builder.inductor.compile_parent import cpp_compiler

from .models import tiny_checkpoint

NO_COMPILER = "needs a C++ compiler: g++, or the one that CXX names"
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason=NO_COMPILER)


def compiled_engine(kind: str, factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """(Engine directory, to be left as it is; transformers' model). Processes wait for the one that
    compiles."""
    if cpp_compiler() is None:
        pytest.skip(NO_COMPILER)
    base = factory.getbasetemp()
    return _compiled(kind, base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)


@cache
def _compiled(kind: str, base: Path) -> tuple[Path, PreTrainedModel]:
    own = base / f"compiled-{kind}-{os.getpid()}"
    reference = tiny_checkpoint(kind, own)
    build_engine(own, base / f"compiled-{kind}", "inductor")
    return base / f"compiled-{kind}", reference
