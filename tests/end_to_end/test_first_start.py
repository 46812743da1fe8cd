"""`pensieve serve PATH` with few words: checkpoints are built, and servers keep their state
apart."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from tests.models import tiny_checkpoint

from .server import HTTP, Server


@pytest.fixture
def environment(tmp_path):
    return os.environ | {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def first_tokens(server, model):
    body = dict(
        model=model,
        prompt=[5, 6, 7, 8],
        max_tokens=8,
        temperature=0,
        return_token_ids=True,
        ignore_eos=True,
    )
    answer = server.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def told(server, text):
    return any(text in line for line in server.log)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "opt"])
def test_a_checkpoint_is_built_once_and_anew_when_a_weight_changes(kind, environment, tmp_path):
    checkpoint = tmp_path / f"my-{kind}"
    tiny_checkpoint(kind, checkpoint)

    def serve():
        with Server(None, checkpoint, engine=None, environment=environment) as server:
            return first_tokens(server, checkpoint.name), told(server, "the engine of")

    tokens, built = serve()
    assert built
    assert serve() == (tokens, False)
    weights = load_file(checkpoint / "model.safetensors")
    changed = {
        name: torch.flip(value, [0]) if value.dim() == 2 else value
        for name, value in weights.items()
    }
    save_file(changed, checkpoint / "model.safetensors", {"format": "pt"})
    other, built = serve()
    assert built and other != tokens


@pytest.mark.slow
def test_a_checkpoint_is_divided_and_cast_as_asked(environment, tmp_path):
    checkpoint = tmp_path / "my-llama"
    tiny_checkpoint("llama", checkpoint)
    options = (checkpoint, "-tp", 2, "--dtype", "bfloat16")
    with Server(None, *options, engine=None, environment=environment) as server:
        assert len(first_tokens(server, "my-llama")) == 8
        assert server.stop() == 0
    assert sum("my-llama: device cache" in line for line in server.log) == 1


@pytest.mark.slow
def test_servers_of_different_engines_start_side_by_side(environment, tmp_path):
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine")
    with (
        Server(None, environment=environment) as one,
        Server(None, tmp_path / "engine", engine=None, environment=environment) as other,
    ):
        assert one.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
        assert (
            other.post("/v1/completions", model="engine", prompt="x", max_tokens=1).status_code
            == 200
        )


@pytest.mark.slow
def test_conversations_of_earlier_versions_are_found_again(environment, tmp_path):
    """These kept the state of all engines in one directory."""
    with Server(tmp_path / "state" / "pensieve", environment=environment) as earlier:
        assert (
            earlier.post(
                "/v1/completions", prompt="x", max_tokens=3, conversation="tea"
            ).status_code
            == 200
        )
    with Server(None, environment=environment) as server:
        assert told(server, "conversations of earlier versions are found again in")
        listed = HTTP.get(f"{server.url}/v1/conversations").json()["data"]
    assert [entry["id"] for entry in listed] == ["tea"]
