"""Runs a test's own programs on several ranks, with a real mpirun."""

from __future__ import annotations

import os
import subprocess
import sys

from pensieve.runtime.ranks_launch import environment, find_mpirun


def command(ranks, module, *arguments):
    """`python -m module arguments` on so many ranks."""
    return [find_mpirun(), "-n", str(ranks), sys.executable, "-m", module, *map(str, arguments)]


def variables(ranks):
    return environment({"OMP_NUM_THREADS": "1", **os.environ}, ranks)


def run_ranks(ranks, module, *arguments, seconds=600):
    """What it says, once it has ended well."""
    ended = subprocess.run(
        command(ranks, module, *arguments), env=variables(ranks), capture_output=True, text=True, timeout=seconds
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
