"""The kernels' tests where there is no GPU: in Triton's interpreter, in a process of their own,
which takes seconds to start and is therefore shared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .kernel_cases import CUDA, INTERPRETED

pytest.importorskip("triton")

QUICK = (
    "linear/test_norm_kernel",
    "attention/test_kv_write_kernel",
    "kv_forms/test_host_copy_kernel",
)
LONG = (
    "attention/test_kernel",
    "linear/test_expert_kernel",
    "linear/test_fp8",
    "linear/test_int4",
    "kv_forms/test_fp8",
    "kv_forms/test_packed",
    "state/test_state_kernels",
)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run here directly")
@pytest.mark.parametrize(
    "kernels", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_in_the_interpreter(kernels):
    files = [Path(__file__).parent / f"{name}.py" for name in kernels]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
