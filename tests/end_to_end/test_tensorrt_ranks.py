"""TensorRT engines of two ranks on two GPUs, served: the reference backend's greedy replies."""

from __future__ import annotations

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.plugins.tensorrt.installation import find_tensorrt
from pensieve.scheduler.types import SettingError

from .behind_triton import CACHE, BehindTriton, by_serve, small_checkpoint, turns
from .server import Server
from .triton_server import TritonServer, needs_triton

DEVICE = ("--device", "cuda")


def tensorrt_here():
    try:
        find_tensorrt()
    except SettingError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
    pytest.mark.skipif(not tensorrt_here(), reason="needs TensorRT and its headers"),
]


@pytest.fixture(scope="module", params=["llama", "opt"])
def divided(request, tmp_path_factory):
    """(the engine of two ranks, what the reference replies in each turn)."""
    folder = tmp_path_factory.mktemp(request.param)
    small_checkpoint(request.param, folder / "hf")
    common = dict(dtype="float32", device="cuda")
    build_engine(folder / "hf", folder / "two", backend="tensorrt", tensor_parallel=2, **common)
    build_engine(folder / "hf", folder / "one", backend="reference", **common)
    with Server(folder / "state", *CACHE, *DEVICE, engine=folder / "one") as server:
        return folder / "two", turns(by_serve(server))


def test_pensieve_serve_starts_both_ranks(divided, tmp_path):
    engine, expected = divided
    with Server(tmp_path, *CACHE, *DEVICE, engine=engine) as server:
        assert turns(by_serve(server)) == expected


@pytest.fixture(scope="module")
def expected(divided):
    return divided[1]


@pytest.fixture(scope="module")
def triton(divided, tmp_path_factory):
    directory = tmp_path_factory.mktemp("triton")
    options = ("--engine", divided[0], "--state-dir", directory / "state", *CACHE, *DEVICE)
    with TritonServer(directory, *options) as server:
        yield server


@needs_triton
class TestBehindTriton(BehindTriton):
    """Of the engine of two ranks."""
