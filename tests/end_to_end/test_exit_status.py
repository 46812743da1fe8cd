"""The exit status of `pensieve serve`: supervisors that restart failed servers depend on it
(systemd's Restart=on-failure)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.launch import serving
from pensieve.runtime.launch.settings import ServeSettings
from pensieve.runtime.messages import Ready
from pensieve.runtime.ranks.launch import DRAIN
from pensieve.runtime.system import descendants, running

from ..pausing import pause
from .server import HTTP, Server


@pytest.mark.parametrize("http_exit, status", [(0, 0), (None, 0), (1, 1), (-9, 1)])
def test_a_server_fails_with_its_http_process(http_exit, status, tmp_path, monkeypatch, caplog):
    """None: it still waited for slow clients when the drain was over."""
    assert serve_nothing(tmp_path, monkeypatch, exitcode=http_exit) == status
    assert ("HTTP process has ended" in caplog.text) == bool(status)


def test_no_signal_is_lost_while_the_http_process_is_started(tmp_path, monkeypatch):
    """The HTTP process must not receive the signal that mpirun passes on to rank 0."""
    heard = []
    before = signal.signal(DRAIN, lambda *_: heard.append(DRAIN))
    try:
        serve_nothing(tmp_path, monkeypatch, start=lambda: os.kill(os.getpid(), DRAIN))
    finally:
        signal.signal(DRAIN, before)
    assert heard == [DRAIN]


def serve_nothing(tmp_path, monkeypatch, exitcode=0, start=lambda: None):
    """The return value of `serve` with such an HTTP process."""
    process = SimpleNamespace(
        start=start, join=lambda seconds: None, kill=lambda: None, exitcode=exitcode
    )
    monkeypatch.setattr(
        multiprocessing.get_context("spawn"), "Process", lambda **_: process, raising=False
    )
    ready = Ready("demo", 9, 9, (), "", 32, 9)
    service = SimpleNamespace(run=lambda ready: None)
    monkeypatch.setattr(serving, "assemble", lambda *_: SimpleNamespace(ready=ready))
    monkeypatch.setattr(serving, "make_service", lambda *_: service)
    monkeypatch.setattr(serving, "drain_on_signals", lambda *_: None)
    return serving.serve(ServeSettings("demo", port=0, state_dir=tmp_path))


@pytest.mark.slow
def test_a_server_whose_http_process_is_killed_says_so(tmp_path):
    with Server(tmp_path) as server:
        pid = server.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (http,) = [
            child
            for child in children
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        os.kill(int(http), signal.SIGKILL)
        assert server.process.wait(120) == 1
    assert any("HTTP process has ended" in line for line in server.log)


@pytest.mark.slow
def test_a_server_whose_http_process_hangs_ends_when_told_to(tmp_path):
    """The pipe between them is full."""
    with Server(tmp_path, "--shutdown-timeout", 1) as server:
        (http,) = [
            child
            for child in descendants(server.process.pid)
            if b"spawn_main" in command_line(child)
        ]
        body = dict(
            model="demo", prompt=[5] * 4, max_tokens=1500, ignore_eos=True, stream=True, logprobs=20
        )
        sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        text = json.dumps(body).encode()
        address = server.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as client:
            client.sendall(sent % (len(text), text))
            client.recv(1000)
            pause(http)
            time.sleep(3)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(120) == 0


def command_line(process):
    return Path(f"/proc/{process}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_computes_says_where_its_threads_are_and_goes_on(workers, tmp_path):
    """All its processes are told, as by mpirun and systemd, for as long as streams run."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    with Server(tmp_path, "--api-server-count", workers) as server:
        talk = [{"role": "user", "content": "x"}]
        checked = server.post("/v1/chat/completions", messages=talk, response_format=form)
        assert checked.status_code == 200  # it started a grammar checker
        processes = [server.process.pid, *descendants(server.process.pid)]
        assert any(b"grammar_check" in command_line(process) for process in processes)
        prompts = [[number] * 9 for number in range(5, 9)]
        quiet = [stream(server, prompt) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            streams = [threads.submit(stream, server, prompt) for prompt in prompts]
            sent = 0
            http = "http/workers/worker.py" if workers > 1 else "http/process.py"
            unseen = {"service.py", http}
            while sent < 300 or unseen or not all(one.done() for one in streams):
                for process in processes:
                    os.kill(process, signal.SIGUSR2)
                    sent += 1
                time.sleep(0.001)
                log = server.log  # the last lines: those of one process may fill it later
                unseen = {place for place in unseen if not any(place in line for line in log)}
        assert [one.result() for one in streams] == quiet
        assert [running(process) for process in processes] == [True] * len(processes)


def stream(server, prompt):
    """The text of a streamed completion that takes many steps."""
    body = dict(model="demo", prompt=prompt, max_tokens=500, ignore_eos=True, temperature=0.0)
    url = f"{server.url}/v1/completions"
    with HTTP.stream("POST", url, json=body | {"stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.mark.slow
def test_a_damaged_tokenizer_is_a_wrong_setting(tmp_path):
    engine = tmp_path / "engine"
    build_engine(DEMO_CHECKPOINT, engine, dtype="float32")
    (engine / "tokenizer_config.json").write_text('{"chat_template')
    words = [*Server.COMMAND, "--engine", engine, "--port", "0", "--state-dir", tmp_path]
    ended = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "--engine: the tokenizer in" in ended.stderr and "Traceback" not in ended.stderr
