"""The disk tier of a real server: the data that must survive SIGTERM and SIGKILL, and the data that
must not."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.check import soak_faults
from benchmarks.check.soak import (
    CHUNK_TOKENS,
    DISK_CHUNKS,
    GPU_CHUNKS,
    HOST_CHUNKS,
    LONGEST,
    Reference,
    Soak,
)
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT

from .server import HTTP, Server
from .test_server import wait_for

pytestmark = pytest.mark.slow

CACHE = (
    "--chunk-tokens",
    16,
    "--gpu-kv-chunks",
    60,
    "--host-kv-chunks",
    40,
    "--disk-kv-bytes",
    "40MB",
)
SAVED = 'pensieve:kv_disk_records_total{direction="spill"}'
ON_DISK = 'pensieve:kv_slots{state="idle",tier="disk"}'


def turn(server, prompt, **body):
    """Returns the log after the turn, and the sources of its prompt."""
    body = (
        dict(
            prompt=prompt, max_tokens=9, ignore_eos=True, return_token_ids=True, return_sources=True
        )
        | body
    )
    answer = server.post("/v1/completions", **body).json()
    return prompt + answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


def prompt(number):
    return [5 + (number * 37 + at * 11) % 900 for at in range(160)]


def test_what_a_restart_finds_and_what_a_deletion_leaves(tmp_path):
    with Server(tmp_path, *CACHE) as server:
        turn(server, prompt(1), conversation="kept")
        gone, _ = turn(server, prompt(2), conversation="gone")
        command = [
            sys.executable,
            "-m",
            "pensieve.scripts.pensieve",
            "serve",
            "--engine",
            "demo",
            "--port",
            "0",
        ]
        second = subprocess.run(
            [*command, "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=300
        )
        assert second.returncode == 2 and "--state-dir" in second.stderr
        assert f"in use by process {server.process.pid}" in second.stderr
        assert server.stop(signal.SIGTERM) == 0, "what is left to save is saved now"
    with Server(tmp_path, *CACHE) as server:
        wait_for(lambda: server.metric(ON_DISK) == 20)
        HTTP.delete(f"{server.url}/v1/conversations/gone", timeout=30).raise_for_status()
        wait_for(lambda: server.metric(ON_DISK) == 10)
        _, sources = turn(server, [7], conversation="kept", history="server")
        assert sources["disk"] == 160
        wait_for(lambda: server.metric(SAVED) == 1)  # and its eleventh chunk
        server.stop(signal.SIGKILL)
    with Server(tmp_path, *CACHE) as server:
        _, sources = turn(server, [*prompt(1), 4])
        assert sources["disk"] == 160
        _, sources = turn(server, gone)
        assert sources["cached_tokens"] == 0 and sources["recomputed"] == 0, (
            "its records are erased"
        )
    with Server(tmp_path, *CACHE, "--chunk-tokens", 8) as server:
        wait_for(lambda: any("dropped 1 files of KV" in line for line in server.log))
        assert server.metric(ON_DISK) == 0


def limit_files(process, size):
    """No file of this process may grow beyond so many bytes, as if the disk were full."""
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def user_of(path, server):
    """The process of the server that has the file open."""
    main = server.process.pid
    for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split():
        if str(path) in map(os.path.realpath, Path(f"/proc/{pid}/fd").iterdir()):
            return int(pid)
    raise AssertionError(f"no process of the server has {path} open")


def test_a_full_disk_hurts_what_needs_it_only_and_ends_by_itself(tmp_path):
    with Server(tmp_path, *CACHE) as server:

        def health():
            return HTTP.get(f"{server.url}/health", timeout=30).json()

        assert not health()["kv_disk_full"]
        limit_files(server.process.pid, 2**16)  # of the engine, which writes KV
        turn(server, prompt(1), conversation="a")
        wait_for(lambda: health()["kv_disk_full"] and server.metric("pensieve:kv_disk_full") == 1)
        turn(server, prompt(2), conversation="b")
        limit_files(server.process.pid, resource.RLIM_INFINITY)
        number = itertools.count(3)  # the tier pauses for some seconds after a refused record

        def saved():
            turn(server, prompt(next(number)), conversation="c")
            return not health()["kv_disk_full"]

        wait_for(saved)
        assert server.metric(SAVED) > 0

        frontend = user_of(tmp_path / "history.sqlite", server)
        limit_files(frontend, (tmp_path / "history.sqlite-wal").stat().st_size)
        body = dict(prompt=[7], max_tokens=9, ignore_eos=True)
        named = body | dict(conversation="a", history="server")
        assert server.post("/v1/completions", **named).status_code == 507
        wait_for(lambda: not health()["histories"]["healthy"])
        computed = server.metric("pensieve:generation_tokens_total")
        refused = server.post("/v1/completions", **named)
        assert refused.status_code == 507
        assert refused.json()["error"]["message"] == health()["histories"]["reason"]
        assert server.metric("pensieve:generation_tokens_total") == computed
        assert server.post("/v1/completions", **body).is_success
        HTTP.delete(f"{server.url}/v1/conversations/b", timeout=30).raise_for_status()
        assert server.metric("pensieve:histories_healthy") == 0

        limit_files(frontend, resource.RLIM_INFINITY)
        wait_for(lambda: health()["histories"]["healthy"])
        assert server.metric("pensieve:histories_healthy") == 1
        assert server.post("/v1/completions", **named).is_success


def test_sigterm_saves_within_the_grace_time_and_no_longer(tmp_path):
    with Server(tmp_path, *CACHE, "--shutdown-timeout", 600) as server:
        for number in range(3):
            turn(server, prompt(number), max_tokens=1)
        assert server.stop(signal.SIGTERM, seconds=120) == 0
    with Server(tmp_path, *CACHE) as server:
        wait_for(lambda: server.metric(ON_DISK) == 30)


def test_no_wrong_token_across_kills_in_the_middle_of_turns(tmp_path, monkeypatch):
    """A minute of `benchmarks/check/soak.py`, whose command runs for as long as one likes."""
    for limit in ("LONGEST_GAP", "LONGEST_WAIT"):  # the machine may have other work
        monkeypatch.setattr(soak_faults, limit, 60.0)
    torch.set_num_threads(1)
    sizes = dict(chunk_tokens=CHUNK_TOKENS, gpu_kv_chunks=GPU_CHUNKS, host_kv_chunks=HOST_CHUNKS)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += [f"--disk-kv-chunks={DISK_CHUNKS}", f"--max-model-len={LONGEST}", "--max-num-seqs=8"]
    counts = Soak(Reference(DEMO_CHECKPOINT), seed=7).run(tmp_path, 50.0, 6, "demo", options)
    print(counts)
    assert (counts["kills"], counts["ends"]) == (4, 2)
    assert counts["disk"] > 0 and counts["turns"] > 20
