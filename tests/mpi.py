"""Runs a test's own programs on several ranks, with a real mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from pensieve.runtime.ranks.launch import environment, find_mpirun

SCRATCH = tempfile.TemporaryDirectory(prefix="pensieve-mpi-", ignore_cleanup_errors=True)


def command(ranks, module, *arguments):
    """The command `python -m module arguments` on this number of ranks."""
    return [find_mpirun(), "-n", str(ranks), sys.executable, "-m", module, *map(str, arguments)]


def variables(ranks):
    return environment({"OMP_NUM_THREADS": "1", **os.environ}, ranks, SCRATCH.name)


def run_ranks(ranks, module, *arguments, seconds=600):
    """Runs the command; returns its output after a successful end."""
    ended = subprocess.run(
        command(ranks, module, *arguments),
        env=variables(ranks),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
