"""Two servers behind Dynamo's own frontend: their KV events bring each turn to the server that has
the conversation's KV."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

import pensieve
from benchmarks.ports import free_ports

from .server import HTTP, Server

FOLDER = Path(sys.prefix) / "kv-events"
"""Dynamo is large, and wants an older pydantic than ours: `make kv-events` gives it a folder."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / "dynamo" / "frontend").exists(),
        reason=f"no Dynamo in {FOLDER}: run `make kv-events`",
    ),
]
EVENTS = (
    '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0", '
    '"replay_endpoint": "tcp://127.0.0.1:0"}'
)
CHECKPOINT = Path(pensieve.__file__).parent / "builder" / "demo_models" / "llama"
PATIENCE = 120.0
TOPICS = ("tea", "coffee", "rice", "bread")


@contextmanager
def dynamo(directory, *words):
    """A process with Dynamo's packages, whose discovery is a folder of files."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        "DYN_FILE_KV": str(directory / "discovery"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_SELF_HOST_METADATA": "0",
    }
    with (directory / f"{words[0]}-{words[-1].rpartition(':')[2]}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words], env=environment, stdout=log, stderr=log
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE)


def until(holds, directory):
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            logs = [path.read_text()[-3000:] for path in sorted(directory.glob("*.log"))]
            pytest.fail("\n".join(logs))
        time.sleep(0.05)


def counted(url, metric):
    """The sum of a metric's values."""
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(metric))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The frontend's address, those of its servers, the folder of the logs, and the first server
    with its worker."""
    directory = tmp_path_factory.mktemp("dynamo")
    (directory / "discovery").mkdir()
    (port,) = free_ports(1)
    frontend = f"http://127.0.0.1:{port}"
    with ExitStack() as running:
        servers = []
        processes = []
        for name in ("first", "second"):
            server = Server(directory / name, "--kv-events-config", EVENTS)
            servers.append(running.enter_context(server).url)
            (events,) = re.findall(r"KV events at (\S+),", " ".join(server.log))
            words = ("--url", server.url, "--checkpoint", str(CHECKPOINT), "--kv-events", events)
            worker = running.enter_context(
                dynamo(directory, "pensieve.scripts.pensieve", "dynamo-worker", *words)
            )
            processes.append((server, worker))
        words = ("--router-mode", "kv", "--http-port", str(port))
        running.enter_context(dynamo(directory, "dynamo.frontend", *words))

        def both_serve():
            instances = HTTP.get(f"{frontend}/health").json()["instances"]
            if len({instance["instance_id"] for instance in instances}) < 2:
                return False
            return ask(frontend, [{"role": "user", "content": "Hi"}]).status_code == 200

        until(lambda: reachable(both_serve), directory)
        yield frontend, servers, directory, processes[0]


def reachable(holds):
    try:
        return holds()
    except (httpx.TransportError, KeyError):  # it starts
        return False


def ask(frontend, messages, **options):
    body = {"model": "demo", "messages": messages, "max_tokens": 40, "temperature": 0} | options
    return HTTP.post(f"{frontend}/v1/chat/completions", json=body)


def test_each_turn_goes_to_the_server_that_has_the_conversation(cluster):
    frontend, servers, directory, _ = cluster
    opening = "I like long stories about it. " * 20
    chats = {topic: [f"Tell me about {topic}. {opening}"] for topic in TOPICS}
    prompts = dict.fromkeys(TOPICS, 0)
    for turn in range(3):
        for number, (topic, texts) in enumerate(chats.items()):
            roles = ("user", "assistant") * len(texts)
            # the first turns are not the router's to place: it may find one server enough
            answer = ask(
                frontend if turn else servers[number % 2],
                [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)],
            )
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            whole_chunks = prompts[topic] // 32 * 32
            assert usage["prompt_tokens_details"]["cached_tokens"] >= whole_chunks, (turn, topic)
            prompts[topic] = usage["prompt_tokens"]
            texts += [answer.json()["choices"][0]["message"]["content"], "And more?"]

            def router_knows():
                stored = sum(
                    counted(url, 'pensieve:kv_events_total{kind="stored"}') for url in servers
                )
                applied = "dynamo_component_kv_cache_events_applied"
                lines = HTTP.get(f"{frontend}/metrics").text.splitlines()
                values = [
                    float(line.split()[-1])
                    for line in lines
                    if line.startswith(applied)
                    and 'event_type="stored"' in line
                    and 'status="ok"' in line
                ]
                return stored and sum(values) == stored

            until(router_knows, directory)
    served = [counted(url, "vllm:request_success_total") for url in servers]
    assert sum(served) >= 3 * len(TOPICS) and all(served)


def test_what_the_worker_cannot_pass_on_is_refused(cluster):
    frontend, *_ = cluster
    message = [{"role": "user", "content": "Tell me about tea."}]
    assert ask(frontend, message, logprobs=True).status_code == 400
    whole = ask(frontend, message, max_tokens=None)
    assert whole.json()["choices"][0]["finish_reason"] == "stop"


def test_a_client_that_leaves_aborts_its_request(cluster):
    frontend, servers, directory, _ = cluster
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Tell me about tea."}],
        "max_tokens": 4000,
        "min_tokens": 3900,
        "stream": True,
    }
    with HTTP.stream("POST", f"{frontend}/v1/chat/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    until(lambda: sum(counted(url, aborted) for url in servers) == 1, directory)


def test_the_worker_of_a_killed_server_ends(cluster):
    """So Dynamo sends the other one all requests."""
    frontend, _, directory, (server, worker) = cluster
    server.stop(signal.SIGKILL)
    until(lambda: worker.poll() is not None, directory)
    assert worker.returncode == 1
    message = [{"role": "user", "content": "Tell me about tea."}]
    until(lambda: ask(frontend, message).status_code == 200, directory)
    assert all(ask(frontend, message).status_code == 200 for _ in range(4))
