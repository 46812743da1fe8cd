"""An engine of two ranks behind the real Triton Inference Server, on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from pensieve.builder.build import build_engine
from tests.models import tiny_checkpoint

from .behind_triton import CACHE, BehindTriton, by_serve, small_checkpoint, turns, whole
from .server import HTTP, Server, wait_for
from .triton_server import TritonServer, needs_triton

pytestmark = [pytest.mark.slow, needs_triton]

EXPLICIT = ("--model-control-mode=explicit", "--load-model=pensieve")
LONG = dict(
    streaming=True,
    sampling_param_max_tokens=450,
    sampling_param_ignore_eos=True,
    return_finish_reason=True,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    tiny_checkpoint("llama", directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine", tensor_parallel=2)
    return directory / "engine"


@pytest.fixture(scope="module")
def running(engine, tmp_path_factory):
    """The server; at its end in any way no rank and no launching process is left behind."""
    directory = tmp_path_factory.mktemp("triton")
    options = ("--engine", engine, "--state-dir", directory / "state", *CACHE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with TritonServer(directory, *options, flags=EXPLICIT) as server:
            yield server
    wait_for(lambda: not processes_of(engine))


@pytest.fixture
def triton(running):
    """The server with its model loaded."""
    if not running.ready:
        loaded = HTTP.post(
            f"{running.url}/v2/repository/models/pensieve/load", json={}, timeout=120
        )
        assert loaded.status_code == 200, loaded.text
    return running


def processes_of(engine):
    """Processes that this module's servers have started: their command lines name the engine."""
    processes = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = file.read_bytes().decode(errors="replace")
            if str(engine) in words and "--attach" in words:
                processes.append(int(file.parent.name))
    return processes


@contextlib.contextmanager
def streaming(triton):
    """The lines of a reply of 450 tokens, of which the first has come."""
    address = f"{triton.url}/v2/models/pensieve/generate_stream"
    with HTTP.stream("POST", address, json={"input_ids": [7] * 20, **LONG}, timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        yield lines


def test_unloading_lets_replies_end_and_leaves_no_process(triton, engine):
    # the launching process, mpirun (which names the engine too), and the ranks
    assert len(processes_of(engine)) == 1 + 2 + 1
    with streaming(triton) as lines:
        unloaded = HTTP.post(
            f"{triton.url}/v2/repository/models/pensieve/unload", json={}, timeout=60
        )
        assert unloaded.status_code == 200
        assert '"finish_reason":"length"' in list(lines)[-1]
    wait_for(lambda: not processes_of(engine))
    assert not triton.ready


def test_a_rank_that_dies_ends_requests_and_the_model_is_not_ready(triton, engine):
    rank = max(processes_of(engine))  # the ranks are started last
    with streaming(triton) as lines:
        os.kill(rank, signal.SIGKILL)
        assert "the engine has shut down" in list(lines)[-1]
    wait_for(lambda: not triton.ready)
    wait_for(lambda: not processes_of(engine))


class TestCompiledOpt(BehindTriton):
    """An engine that a compiler made, beside one of the reference backend and one rank."""

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("opt")
        small_checkpoint("opt", folder / "hf")
        build_engine(folder / "hf", folder / "two", backend="inductor", tensor_parallel=2)
        build_engine(folder / "hf", folder / "one")
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls, folder):
        with Server(folder / "state", *CACHE, engine=folder / "one") as server:
            return turns(by_serve(server))

    @pytest.fixture(scope="class")
    @classmethod
    def triton(cls, folder, tmp_path_factory):
        directory = tmp_path_factory.mktemp("triton")
        options = ("--engine", folder / "two", "--state-dir", directory / "state", *CACHE)
        with TritonServer(directory, *options) as server:
            yield server


def test_tokens_are_those_of_the_http_server_with_two_ranks(triton, engine, tmp_path):
    """Two conversations at once, turn by turn; then the same prompts at `pensieve serve`."""
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(turns, [whole(triton, "one"), whole(triton, "two")])
    with Server(tmp_path, *CACHE, engine=engine) as server:
        assert one == two == turns(by_serve(server))


def test_a_setting_that_is_wrong_for_the_ranks_is_told_to_the_model(engine, tmp_path):
    options = ["--engine", engine, "--state-dir", tmp_path, "--max-model-len", 100_000]
    with Listener(str(tmp_path / "socket"), "AF_UNIX") as model:
        process = subprocess.Popen(
            [*map(str, [*Server.COMMAND, *options, "--attach", model.address])]
        )
        connection = model.accept()
        assert "--max-model-len" in connection.recv()
        assert process.wait(60) == 2
        with pytest.raises(EOFError):
            connection.recv()
