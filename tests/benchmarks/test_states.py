"""The benchmark of linear attention, as far as it runs without a GPU: its steps compute with
states, and its bytes are those of the tensors."""

import json

import pytest
import torch

from benchmarks.states import LinearLayers, StateStep, StateStepRun
from tests.models import QWEN3_5_SHAPE

pytest.importorskip("triton")
from pensieve.plugins.state.work_list import StateWork


@pytest.fixture
def layers(tmp_path, monkeypatch):
    monkeypatch.setattr(StateWork, "build", lambda *arguments: None)  # needs a GPU
    path = tmp_path / "config.json"
    named = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    path.write_text(json.dumps(QWEN3_5_SHAPE | named))
    torch.manual_seed(0)
    return LinearLayers(path, "cpu")


@pytest.mark.parametrize("step", [StateStep(rows=3), StateStep(prompt=70)], ids=lambda s: s.name)
@torch.inference_mode()
def test_a_step_writes_the_states_of_all_layers(layers, step):
    assert len(layers.layers) == layers.count == 3
    measured = StateStepRun(layers, step)
    measured.run_layers()
    for part in (*measured.states.matrices, *measured.states.columns):
        assert part.isfinite().all() and part.flatten(1).any(dim=1).all()
    measured.run_states()
    measured.close()


def test_bytes_are_those_of_the_tensors(layers):
    """Of two rows: two states read and written; each channel is read and written by the convolution
    and read again."""
    values = 4 * 24
    channels = 2 * 2 * 16 + values
    state = 4 * 16 * 24 * 4 + 3 * channels * 2
    expected = 4 * state + 2 * (3 * channels + values) * 2
    assert layers.state_bytes(StateStep(rows=2)) == expected
    weights = (channels + values + 8) * 64 + channels * 4 + values * 64 + 24
    assert layers.weight_bytes() == 2 * weights + 2 * 4 * 4
