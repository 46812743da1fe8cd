"""Models by their names of the Hugging Face Hub, from a server of its endpoints on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pensieve.builder.hub import INDEX, QUANTISATION
from tests.hub_server import HubRepository, HubServer

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
CHECKPOINT = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"about it",
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "pytorch_model.bin": WEIGHTS,
    "original/params.json": b"{}",
    "original/consolidated.00.pth": WEIGHTS,
    "onnx/model.onnx": WEIGHTS,
}
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[0]}}
    ).encode(),
    SHARDS[0]: b"1",
    SHARDS[1]: b"2",
    "optimizer.safetensors": b"3",
}
GGUF = {
    ".gitattributes": b"*.gguf filter=lfs",
    "tiny-Q4_K.gguf": b"k",
    "tiny-Q4_K_M.gguf": b"k m",
    "tiny-q8_0.gguf": b"8",
    "BF16/tiny-BF16-00001-of-00002.gguf": b"part 1",
    "BF16/tiny-BF16-00002-of-00002.gguf": b"part 2",
    "tiny-F16-00001-of-00003.gguf": b"part 1 of 3",
    "mmproj-tiny-Q4_K_M.gguf": b"of images",
}
STRAYING = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "there.safetensors", "b": "../../../../etc/passwd", "c": "x/y"}}
    ).encode(),
    "there.safetensors": b"1",
}
FIND = """
import json, sys
from pensieve.builder.model_names import find_model
from pensieve.scheduler.types import SettingError
for text in sys.argv[1:]:
    try:
        path, *rest = find_model(text, lambda text: print(text, file=sys.stderr))
        print(json.dumps([str(path), *rest]))
    except SettingError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def hub():
    repositories = {
        "org/chat": HubRepository({"main": CHECKPOINT, "v1": SHARDED}),
        "org/tiny-GGUF": HubRepository({"main": GGUF}),
        "org/one-GGUF": HubRepository({"main": {"one.Q4_1.gguf": b"1"}}),
        "org/pickles": HubRepository({"main": {"config.json": b"{}", "model.bin": b"1"}}),
        "org/straying": HubRepository({"main": STRAYING}),
        "org/odd": HubRepository({"main": STRAYING | {INDEX: b'{"weight_map": {"a": 1}}'}}),
        "org/halves": HubRepository({"main": CHECKPOINT, "bf16": SHARDED}),
        "org/gated": HubRepository({"main": CHECKPOINT}, gate=401),
        "org/waiting": HubRepository({"main": CHECKPOINT}, gate=403),
    }
    with HubServer(repositories) as server:
        yield server


@pytest.fixture
def start(hub, tmp_path):
    """Starts a program that looks a name up."""

    def start(*names, program=FIND, **environment):
        settings = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, **environment}
        return subprocess.Popen(
            [sys.executable, "-c", program, *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | settings,
        )

    return start


@pytest.fixture
def find_all(start):
    """Returns for each name the path, name and origin of its model, or the refusal; and at the end
    what was shown."""

    def find_all(*names, **environment):
        out, shown = start(*names, **environment).communicate(timeout=120)
        return [*map(json.loads, out.splitlines()), shown]

    return find_all


@pytest.fixture
def find(find_all):
    """Returns the path, name and origin of a model, and what was shown; or the refusal."""

    def find(name, **environment):
        answer, shown = find_all(name, **environment)
        if isinstance(answer, str):
            return answer
        path, *rest = answer
        return Path(path), *rest, shown

    return find


def held(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_only_needed_files_come_once_and_then_from_the_cache(hub, find, tmp_path):
    folder, name, origin, shown = find("org/chat")
    assert (name, origin) == ("org/chat", "hf://org/chat")
    assert held(folder) == [
        ".gitattributes",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert f"downloading org/chat from {hub.url}: model.safetensors (1 MiB)" in shown
    hub.requests.clear()
    again, *_, shown = find("hf://org/chat")
    assert again == folder and not hub.fetched() and "downloading" not in shown
    hub.requests.clear()
    (listing,) = tmp_path.glob("hf/hub/models--org--chat/trees/*")
    listing.unlink()  # older versions of huggingface_hub keep none
    assert find("org/chat", HF_HUB_OFFLINE="1")[0] == folder and not hub.requests


def test_a_changed_repository_is_noticed(hub, find):
    first = find("org/chat")[0]
    hub.repositories["org/chat"].revisions["main"] = CHECKPOINT | {"config.json": b'{"new": 1}'}
    hub.requests.clear()
    second = find("org/chat")[0]
    assert second != first and (second / "config.json").read_bytes() == b'{"new": 1}'


def test_a_revision_follows_a_colon(find):
    folder, name, origin, _ = find("org/chat:v1")
    assert (name, origin) == ("org/chat", "hf://org/chat:v1")
    assert held(folder) == ["config.json", *SHARDS, "model.safetensors.index.json"]


def test_a_gguf_file_is_chosen_by_its_quantisation(hub, find_all):
    chosen = {
        "org/tiny-GGUF:Q4_K_M": ["tiny-Q4_K_M.gguf"],
        "org/tiny-GGUF:Q4_K": ["tiny-Q4_K.gguf"],
        "org/tiny-GGUF:Q8_0": ["tiny-q8_0.gguf"],
        "org/tiny-GGUF:bf16": [
            "BF16/tiny-BF16-00001-of-00002.gguf",
            "BF16/tiny-BF16-00002-of-00002.gguf",
        ],
        "org/one-GGUF": ["one.Q4_1.gguf"],
    }
    *models, _ = find_all(*chosen)
    for (text, files), (path, name, _) in zip(chosen.items(), models, strict=True):
        assert name == text.partition(":")[0] and path.endswith("/" + files[0])
    downloaded = [file for file in hub.fetched() if file.endswith(".gguf")]
    assert downloaded == sorted(Path(file).name for files in chosen.values() for file in files)


def test_a_quantisation_is_a_revision_where_no_file_is_gguf(find):
    assert SHARDS[0] in held(find("org/halves:bf16")[0])


def test_a_refusal_says_what_to_do(find_all):
    expected = {
        "org/tiny-GGUF": ["has several GGUF files: BF16/tiny-BF16.gguf, ", "tiny-Q4_K_M.gguf"],
        "org/tiny-GGUF:Q5_K_M": ["has no GGUF file of Q5_K_M", "tiny-Q4_K_M.gguf"],
        "org/tiny-GGUF:F16": ["has only 1 of 3 parts"],
        "org/pickles": ["has neither config.json with model.safetensors", "model.bin"],
        "org/straying": ["its index names ../../../../etc/passwd, x/y, which it does not have"],
        "org/odd": ["its index names 1, which it does not have"],
        "org/chat:v2": ["org/chat has no revision v2"],
        "org/caht": ["neither a directory org/caht here nor a repository http", "HF_TOKEN"],
        "org/gated": ["org/gated is gated: accept its terms at http", "HF_TOKEN"],
        "org/waiting": ["the account of your token may not read org/waiting yet"],
    }
    *refusals, _ = find_all(*expected)
    for words, refusal in zip(expected.values(), refusals, strict=True):
        assert refusal.startswith("PATH: ") and all(word in refusal for word in words), refusal


def test_a_token_opens_a_gated_repository(find):
    assert (find("org/gated", HF_TOKEN="right")[0] / "model.safetensors").read_bytes() == WEIGHTS


def test_without_network_and_cache_the_refusal_names_both(find):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    refusal = find("org/chat", **nowhere)
    assert (
        "org/chat is not, or not wholly, in " in refusal
        and "http://127.0.0.1:9 cannot be reached" in refusal
    )
    assert "HF_HUB_OFFLINE forbids downloads" in find("org/chat", HF_HUB_OFFLINE="1")


def test_a_model_of_the_cache_needs_no_network(find):
    folder = find("org/chat")[0]
    assert find("org/chat", HF_ENDPOINT="http://127.0.0.1:9")[0] == folder


def test_a_hub_that_never_answers_is_not_waited_for_long(find, find_all):
    folder = find("org/chat")[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {"HF_ENDPOINT": url, "HF_HUB_ETAG_TIMEOUT": "1"}
        cached, missing, shown = find_all("org/chat", "org/one-GGUF", **environment)
        silent.setblocking(False)
        while (connection := accepted(silent)) is not None:
            connection.close()
        environment["HF_HUB_OFFLINE"] = "1"
        *_, offline = find("org/chat", **environment)
        assert "asking" not in offline and accepted(silent) is None
    assert cached[0] == str(folder)
    assert f"asking {url} for the state of org/chat (HF_HUB_OFFLINE=1 asks nothing)" in shown
    assert f"{url} cannot be reached (ReadTimeout)" in missing


def test_a_list_of_files_that_never_comes_is_not_waited_for_long(hub, find):
    """Newer versions of huggingface_hub ask for it again at once."""
    goes_on = threading.Event()
    hub.held["tree"] = goes_on
    answer = find("org/chat", HF_HUB_ETAG_TIMEOUT="1")
    assert isinstance(answer, tuple) or "cannot be reached (ReadTimeout)" in answer
    assert not hub.held
    goes_on.set()
    assert (find("org/chat")[0] / "model.safetensors").read_bytes() == WEIGHTS


def test_the_programs_own_requests_to_the_hub_get_no_time_limit(start):
    """A commit of large files may be answered late. The HTTP client is shared with the program."""
    program = (
        "from huggingface_hub import get_session\n"
        "before = list(get_session().event_hooks['request'])\n"
        f"{FIND}\n"
        "assert get_session().event_hooks['request'] == before\n"
    )
    process = start("org/chat", "org/caht", program=program)
    out, shown = process.communicate(timeout=120)
    assert process.returncode == 0 and len(out.splitlines()) == 2, shown


def accepted(server):
    """A connection that waits at the server, or None."""
    try:
        return server.accept()[0]
    except BlockingIOError:
        return None


def test_a_connection_that_breaks_is_resumed_where_it_broke(hub, find):
    large = WEIGHTS * 24  # huggingface_hub keeps what it got in pieces of 10 MiB
    hub.repositories["org/one-GGUF"].revisions["main"] = {"one.gguf": large}
    hub.cut["one.gguf"] = None
    assert find("org/one-GGUF")[0].read_bytes() == large
    ranges = [given for kind, _, given in hub.requests if kind == "GET" and given]
    assert ranges == [f"bytes={10 * 2**20}-"]


def test_a_start_that_was_killed_leaves_what_was_complete(hub, start, find):
    goes_on = threading.Event()
    hub.cut["model.safetensors"] = goes_on
    process = start("org/chat")
    assert hub.half_sent.wait(60)
    process.kill()
    process.communicate()
    goes_on.set()
    refusal = find("org/chat", HF_HUB_OFFLINE="1")
    assert "org/chat is not, or not wholly, in " in refusal
    hub.requests.clear()
    assert (find("org/chat")[0] / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched() == ["model.safetensors"]


def test_names_of_quantisations():
    names = "Q4_K_M Q8_0 IQ2_XXS UD-Q4_K_XL TQ1_0 MXFP4_MOE BF16 F16 fp16 F32 q4_0"
    others = "main v1.0 refs/pr/1 float16 step1000 quantized Q"
    assert all(QUANTISATION.fullmatch(name) for name in names.split())
    assert not any(QUANTISATION.fullmatch(name) for name in others.split())
