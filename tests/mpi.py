"""Runs a test's own programs on several ranks, with a real mpirun."""

from __future__ import annotations

import os
import subprocess
import sys

from pensieve.runtime.ranks_launch import environment, find_mpirun


def start_ranks(ranks, module, *arguments, **variables):
    """`python -m module arguments` on so many ranks; both outputs are pipes of text."""
    words = [find_mpirun(), "-n", str(ranks), sys.executable, "-m", module, *map(str, arguments)]
    given = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(
        words, env=environment(given, ranks), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_ranks(ranks, module, *arguments, seconds=120, **variables):
    """Its standard output, once it has ended well."""
    process = start_ranks(ranks, module, *arguments, **variables)
    try:
        said, complained = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, complained
    return said
