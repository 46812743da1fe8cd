"""TensorRT itself, where it is installed, on an NVIDIA GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from pensieve.builder.build import build_engine
from tests.models import tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
def test_an_engine_is_compiled_and_computes_what_the_reference_does(kind, tmp_path):
    if "TENSORRT_HOME" not in os.environ:
        pytest.skip("needs TENSORRT_HOME")
    tiny_checkpoint(kind, tmp_path / "hf")
    build_engine(tmp_path / "hf", tmp_path / "engine", backend="reference", dtype="float16", device="cuda")
    command = [sys.executable, "-m", "pensieve.builder.tensorrt.compile", str(tmp_path / "engine")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "compiled" in json.loads(done.stdout.splitlines()[-1]), done.stderr
