"""TensorRT engines of two ranks on two GPUs, served: the reference backend's greedy replies."""

from __future__ import annotations

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.plugins.tensorrt.installation import find_tensorrt
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

from .server import Server
from .triton_server import TritonServer, needs_triton

CACHE = ("--gpu-kv-chunks", 60, "--host-kv-chunks", 100, "--max-num-seqs", 4)
DEVICE = ("--device", "cuda")
REPLY = 12


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
    tiny_checkpoint(request.param, folder / "hf")
    common = dict(dtype="float32", device="cuda")
    build_engine(folder / "hf", folder / "two", backend="tensorrt", tensor_parallel=2, **common)
    build_engine(folder / "hf", folder / "one", backend="reference", **common)
    with Server(folder / "state", *CACHE, *DEVICE, engine=folder / "one") as server:
        return folder / "two", turns(by_http(server, "one"))


def turns(reply_to):
    """The replies of three turns, each behind all earlier ones."""
    ids = []
    replies = []
    for turn in range(3):
        ids += [(7 * turn + place) % 150 + 3 for place in range(30)]
        replies.append(reply_to(ids))
        ids += replies[-1]
    return replies


def by_http(server, name):
    body = dict(
        model=name,
        max_tokens=REPLY,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )

    def reply_to(ids):
        answer = server.post("/v1/completions", prompt=ids, **body)
        return answer.json()["choices"][0]["token_ids"]

    return reply_to


def test_pensieve_serve_starts_both_ranks(divided, tmp_path):
    engine, expected = divided
    with Server(tmp_path, *CACHE, *DEVICE, engine=engine) as server:
        assert turns(by_http(server, "two")) == expected


@needs_triton
def test_triton_inference_server_starts_both_ranks(divided, tmp_path):
    engine, expected = divided
    inputs = dict(
        sampling_param_max_tokens=REPLY,
        sampling_param_temperature=0.0,
        sampling_param_ignore_eos=True,
    )
    options = ("--engine", engine, "--state-dir", tmp_path / "state", *CACHE, *DEVICE)
    with TritonServer(tmp_path, *options) as triton:

        def reply_to(ids):
            return triton.post(input_ids=ids, conversation_id="mine", **inputs).json()["output_ids"]

        assert turns(reply_to) == expected
