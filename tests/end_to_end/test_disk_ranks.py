"""The disk tier of a server of two ranks: kills, deletions, and records that only one rank has
lost."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

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
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.disk.directory import RecordOrigin
from pensieve.runtime.disk.record import PAGE, read_header, record_bytes
from pensieve.runtime.system import descendants

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
    "--disk-kv-chunks",
    100,
    "--save",
    "sync",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks") / "engine"
    build_engine(DEMO_CHECKPOINT, directory, "reference", dtype="float32", tensor_parallel=2)
    return directory


@pytest.fixture(scope="module")
def reference():
    torch.set_num_threads(1)
    return Reference(DEMO_CHECKPOINT)


def turn(server, prompt, **body):
    """Returns the log after the turn, and the sources of its prompt."""
    body = (
        dict(
            prompt=prompt, max_tokens=9, ignore_eos=True, return_token_ids=True, return_sources=True
        )
        | body
    )
    answer = server.post("/v1/completions", model="engine", temperature=0, **body).json()
    return prompt + answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]


def prompt(number):
    return [5 + (number * 37 + at * 11) % 900 for at in range(160)]


class Files:
    """The records of one rank, as they are on the disk."""

    def __init__(self, state, rank):
        folder = state / "kv" / f"rank-{rank}"
        origin = RecordOrigin(**json.loads((folder / "about.json").read_text()))
        self.file = folder / "000000.kv"
        self._origin = origin.digest
        self._payload = origin.chunk_bytes
        self.record = record_bytes(origin.chunk_bytes)

    def records(self):
        """By slot, the places with a whole header; everywhere else there must be zeros."""
        records = {}
        content = self.file.read_bytes()
        for slot in range(len(content) // self.record):
            page = content[slot * self.record :][:PAGE]
            if header := read_header(page, self._origin, self._payload):
                records[slot] = header.key
            else:
                assert not any(page)
        return records

    def damage(self, slot, offset, size=1):
        with open(self.file, "r+b") as file:
            file.seek(slot * self.record + offset)
            before = file.read(size)
            file.seek(-size, os.SEEK_CUR)
            file.write(bytes(byte ^ 0xFF for byte in before))


def kill(server):
    """All of its processes, at once."""
    for process in reversed([server.process.pid, *descendants(server.process.pid)]):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    server.process.wait(60)


def test_a_deletion_is_answered_when_no_rank_has_a_record(engine, tmp_path):
    """Also if the server fails right after the answer."""
    with Server(tmp_path, *CACHE, engine=engine) as server:
        turn(server, prompt(1), conversation="kept")
        ranks = [Files(tmp_path, rank) for rank in (0, 1)]
        kept = [files.records() for files in ranks]
        assert len(kept[0]) == 10 and kept[0] == kept[1]
        log, _ = turn(server, prompt(2), conversation="gone")
        assert [len(files.records()) for files in ranks] == [20, 20]
        HTTP.delete(f"{server.url}/v1/conversations/gone", timeout=60).raise_for_status()
        kill(server)
    assert [files.records() for files in ranks] == kept
    with Server(tmp_path, *CACHE, engine=engine) as server:
        assert turn(server, log)[1]["cached_tokens"] == 0
        HTTP.delete(f"{server.url}/v1/conversations/kept", timeout=60).raise_for_status()
        kill(server)
    assert not any(key in kept[0].values() for files in ranks for key in files.records().values())


def test_a_record_that_one_rank_has_lost_is_lost_to_all(engine, reference, tmp_path):
    """One record without its header and one with a torn payload, both on rank 1 alone."""
    with Server(tmp_path, *CACHE, engine=engine) as server:
        log, _ = turn(server, prompt(1), conversation="c")
        assert server.stop() == 0
    first, second = Files(tmp_path, 0), Files(tmp_path, 1)
    gone, torn, *_ = keys = first.records()
    assert len(keys) == 10 and second.records() == keys
    second.damage(gone, 0, 64)
    second.damage(torn, PAGE + 100)
    with Server(tmp_path, *CACHE, engine=engine) as server:
        wait_for(lambda: any("9 of them from earlier" in line for line in server.log))
        assert gone not in first.records(), "what only one rank has is erased"
        whole, sources = turn(server, [7], conversation="c", history="server")
        assert sources["disk"] <= 8 * 16
        reference.check([*log, *whole], len(log) + 1)


def test_no_wrong_token_across_kills_in_the_middle_of_turns(
    engine, reference, tmp_path, monkeypatch
):
    """A minute of `benchmarks/check/soak.py --engine`, through five restarts."""
    for limit in ("LONGEST_GAP", "LONGEST_WAIT"):  # the machine may have other work
        monkeypatch.setattr(soak_faults, limit, 60.0)
    sizes = dict(chunk_tokens=CHUNK_TOKENS, gpu_kv_chunks=GPU_CHUNKS, host_kv_chunks=HOST_CHUNKS)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += [f"--disk-kv-chunks={DISK_CHUNKS}", f"--max-model-len={LONGEST}", "--max-num-seqs=8"]
    counts = Soak(reference, seed=8).run(tmp_path, 60.0, 6, str(engine), options)
    print(counts)
    assert (counts["kills"], counts["ends"]) == (4, 2)
    assert counts["disk"] > 0 and counts["turns"] > 20
