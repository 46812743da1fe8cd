"""The random weights that vLLM gets in `versus`."""

import importlib.util
import sys

import pytest
import torch

from benchmarks.compared import VLLM_SERVER
from tests.benchmarks.fake_vllm import make_site


@pytest.fixture
def initialize(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(make_site(tmp_path / "site")))
    spec = importlib.util.spec_from_file_location("vllm_server", VLLM_SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.dummy_loader.initialize_dummy_weights
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.router = torch.nn.Linear(64, 8)
        self.w13_weight = torch.nn.Parameter(torch.zeros(8, 96, 64, dtype=torch.bfloat16))
        self.w13_bias = torch.nn.Parameter(torch.ones(8, 96))
        self.sinks = torch.nn.Parameter(torch.ones(4))
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.packed = torch.nn.Parameter(torch.ones(8, 4, dtype=torch.int32), requires_grad=False)


def test_weights_keep_the_size_of_their_input(initialize):
    layer = Layer()
    # as vLLM does: children first as a part of their parent, then by themselves
    for module in layer.modules():
        initialize(module, None)
    assert layer.filled and (layer.norm.weight == 1).all() and (layer.norm.bias == 0).all()
    assert (
        (layer.router.bias == 0).all() and (layer.w13_bias == 0).all() and (layer.sinks == 0).all()
    )
    assert layer.scale == 0.5 and (layer.packed == 1).all()
    for weight in (layer.router.weight, layer.w13_weight):
        assert weight.float().std().item() == pytest.approx(64**-0.5, rel=0.15)
    assert not torch.equal(layer.w13_weight[0], layer.w13_weight[1]), "experts differ"
