"""Ctrl-C ends every command with one line, at any time. Signals are sent once the work to interrupt
has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.inductor.compile_parent import cpp_compiler
from pensieve.runtime.system import descendants, running

from .server import Server
from .test_server import wait_for

PENSIEVE = [sys.executable, "-m", "pensieve.scripts.pensieve"]
BUILD = [sys.executable, "-m", "pensieve.scripts.build_engine"]


class Command:
    """A command in its own process group, like a shell's foreground job; `lines`: its stderr so
    far."""

    def __init__(self, *words, flags=()):
        program, *rest = words
        self.process = subprocess.Popen(
            [program, *flags, *map(str, rest)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def printed(self, text):
        return any(text in line for line in self.lines)

    def interrupt(self):
        """Ctrl-C."""
        self._started = descendants(self.process.pid)
        os.killpg(self.process.pid, signal.SIGINT)

    def status(self):
        """The exit status, once all its processes are gone."""
        status = self.process.wait(120)
        wait_for(lambda: not any(map(running, self._started)))
        self._reader.join(60)
        assert not self.printed("Traceback") and not self.printed("KeyboardInterrupt"), self.lines
        return status


@pytest.fixture
def template(tmp_path):
    """A file that is read no faster than the test writes it: opening it for reading blocks."""
    path = tmp_path / "template"
    os.mkfifo(path)
    return path


def serve_one_read(path):
    """Answer one read. The next read gets its own pipe: until this reader closes its pipe, it would
    take the text."""
    with path.open("w") as file:
        path.unlink()
        os.mkfifo(path)
        file.write("{{ messages }}")


@contextmanager
def read_at_last(path, times):
    """Open once the file is being read for the `times`-th time. That read ends with this block:
    Python handles a signal that comes just before it waits only after the wait."""
    for _ in range(times - 1):
        serve_one_read(path)
    with path.open("w"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "times", [1, 2, 3], ids=["before the engine", "before the HTTP process", "beside it"]
)
def test_a_server_that_starts_is_interrupted(times, template, tmp_path):
    server = Command(
        *PENSIEVE,
        "serve",
        "demo",
        "--state-dir",
        tmp_path,
        "--port",
        0,
        "--chat-template",
        template,
    )
    with read_at_last(template, times):
        server.interrupt()
    assert server.status() == 130
    assert server.lines[-1] == "pensieve serve: interrupted"
    assert all(" INFO " in line for line in server.lines[:-1]), server.lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (*PENSIEVE, "serve", "demo"),
        (*PENSIEVE, "profile", "--engine", "engine"),
        (*BUILD, "--checkpoint", DEMO_CHECKPOINT, "--output", "built"),
    ],
    ids=["serve", "profile", "build_engine"],
)
def test_imports_are_interrupted(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine")  # a wrong one is refused before all imports
    command = Command(*words, flags=("-X", "importtime"))
    wait_for(lambda: command.printed("torch.") or command.process.poll() is not None)
    command.interrupt()
    assert command.status() == 130
    assert [line for line in command.lines if not line.startswith("import time:")][-1].endswith(
        ": interrupted"
    )


@pytest.mark.slow
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler")
def test_a_build_is_interrupted_and_leaves_nothing(tmp_path):
    build = Command(*BUILD, "--checkpoint", DEMO_CHECKPOINT, "--output", tmp_path / "engine")
    wait_for(lambda: build.printed("compiling") or build.process.poll() is not None)
    build.interrupt()
    assert build.status() == 130
    assert build.lines[-1] == "build_engine: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.slow
def test_ranks_that_start_are_interrupted(template, tmp_path):
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine", tensor_parallel=2)
    words = (tmp_path / "engine", "--state-dir", tmp_path, "--port", 0, "--chat-template", template)
    server = Command(*PENSIEVE, "serve", *words)
    serve_one_read(template)  # by the process that starts the ranks
    wait_for(lambda: descendants(server.process.pid))
    with read_at_last(template, 1):
        server.interrupt()
    assert server.status() == 130
    *before, line = server.lines
    assert line.endswith("ended by SIGINT before the ranks served")
    assert all(" INFO " in one for one in before), before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_serves_is_interrupted(ranks, tmp_path):
    """It drains; nothing runs, so it ends at once and well."""
    build_engine(DEMO_CHECKPOINT, tmp_path / "engine", tensor_parallel=ranks)
    server = Command(*PENSIEVE, "serve", tmp_path / "engine", "--state-dir", tmp_path, "--port", 0)
    wait_for(lambda: server.printed("serving engine on") or server.process.poll() is not None)
    server.interrupt()
    assert server.status() == 0
    assert server.lines[-1].endswith("shutting down")


@pytest.mark.slow
def test_a_running_reply_is_waited_for_and_ended_by_the_second_signal(tmp_path):
    """tests/end_to_end/test_operations.py has the client's side."""
    with Server(tmp_path, "--shutdown-timeout", 60) as server:
        body = dict(prompt=[40] * 10, max_tokens=3000, ignore_eos=True)
        thread = threading.Thread(target=lambda: server.post("/v1/completions", **body))
        thread.start()
        wait_for(lambda: server.metric("pensieve:num_requests_running") == 1)
        server.process.send_signal(signal.SIGINT)
        wait_for(
            lambda: any("waits for 1 running reply, at most 60 s" in line for line in server.log)
        )
        assert server.stop(signal.SIGINT) == 0
        thread.join(60)
    assert any("shut down with 1 requests unfinished" in line for line in server.log)
