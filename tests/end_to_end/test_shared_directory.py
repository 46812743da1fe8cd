"""Servers that share a directory of KV."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from random import Random

import pytest

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT

from .server import HTTP, Server
from .shared_kv import (
    CHUNKS,
    SOME,
    WRITTEN,
    SharedServerTests,
    SharingServer,
    options,
    prompt,
    turn,
)
from .test_server import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path):
    return {"engine": "directory", "path": str(tmp_path / "kv"), "max_bytes": 2**30}


@pytest.fixture
def files(tmp_path):
    return lambda: sorted(file for file in (tmp_path / "kv").rglob("*") if file.is_file())


@pytest.fixture
def keys(files):
    return files


class TestSharedDirectory(SharedServerTests):
    """As every engine."""


def test_a_record_with_wrong_bytes_is_computed_again(tmp_path, store, files):
    with SharingServer(tmp_path / "a", *options(store)) as a:
        replies = [turn(a, prompt(number))[0] for number in SOME]
        wait_for(lambda: a.metric(WRITTEN) >= len(SOME) * CHUNKS)
    for number, file in enumerate(files()):
        content = bytearray(file.read_bytes())
        if number % 2:
            content[-100] ^= 1  # of the payload
        else:
            content[20] ^= 1  # of the key in the header
        file.write_bytes(content)
    with SharingServer(tmp_path / "b", *options(store)) as b:
        for number, reply in zip(SOME, replies, strict=True):
            again, sources = turn(b, prompt(number))
            assert again == reply and sources["shared"] == 0
        rejected = b.metric('pensieve:kv_shared_faults_total{kind="rejected"}')
        assert rejected > 0
        # the wrong ones are gone, and right ones have taken their place
        wait_for(lambda: b.metric(WRITTEN) >= rejected)
    with SharingServer(tmp_path / "c", *options(store)) as c:
        assert sum(turn(c, [*prompt(number), 3])[1]["shared"] for number in SOME) > 0


def test_conversations_that_go_to_and_fro_have_right_replies(tmp_path, store):
    """Five at a time, with pools for a few of them."""
    random = Random(3)
    new = [
        [[random.randrange(5, 900) for _ in range(random.choice((40, 90, 150)))] for _ in range(4)]
        for _ in range(10)
    ]
    expected = []
    with Server(tmp_path / "alone", "--chunk-tokens", 16, "--gpu-kv-chunks", 900) as alone:
        for tokens in new:
            logs = [[]]
            for more in tokens:
                log = logs[-1] + more
                logs.append(log + turn(alone, log)[0])
            expected.append(logs)
    small = ("--gpu-kv-chunks", 60, "--host-kv-chunks", 40, "--max-model-len", 800)
    settings = (*options(store), *small)
    with (
        SharingServer(tmp_path / "a", *settings) as a,
        SharingServer(tmp_path / "b", *settings) as b,
    ):

        def play(number):
            servers = Random(number)
            shared = 0
            for log, more, after in zip(
                expected[number], new[number], expected[number][1:], strict=False
            ):
                reply, sources = turn(servers.choice((a, b)), log + more)
                assert log + more + reply == after
                shared += sources["shared"]
            return shared

        with ThreadPoolExecutor(5) as threads:
            assert sum(threads.map(play, range(len(new)))) > 0


def test_ranks_have_records_of_their_own(tmp_path, store, files):
    engine = tmp_path / "engine"
    build_engine(DEMO_CHECKPOINT, engine, "reference", dtype="float32", tensor_parallel=2)
    with SharingServer(tmp_path / "a", *options(store), engine=engine) as a:
        replies = {}
        for number in SOME:
            body = {"model": "engine", "conversation": f"moved-{number}"}
            replies[number], _ = turn(a, [*prompt(number), 7], **body)
        wait_for(lambda: len(files()) == 2 * len(SOME) * CHUNKS)
        a.stop(signal.SIGKILL)
    files()[0].unlink()  # of one rank: the chunk is not there
    with SharingServer(tmp_path / "b", *options(store), engine=engine) as b:
        fetched = 0
        for number, reply in replies.items():
            body = {"model": "engine", "conversation": f"moved-{number}"}
            again, sources = turn(b, [*prompt(number), 7], **body)
            assert again == reply
            fetched += sources["shared"]
            path = f"/v1/conversations/moved-{number}"
            HTTP.delete(f"{b.url}{path}", timeout=30).raise_for_status()
        assert 0 < fetched < 16 * len(SOME) * CHUNKS
        assert files() == []


def test_a_full_directory_hurts_nobody(tmp_path, store):
    with SharingServer(tmp_path / "a", *options(store | {"max_bytes": 100_000})) as a:
        for number in range(4):
            turn(a, prompt(number))
        assert a.metric("pensieve:kv_shared_off") == 0


def test_a_directory_that_is_gone_hurts_nobody(tmp_path, store):
    with Server(tmp_path / "a", *options(store)) as a:
        reply, _ = turn(a, prompt(1))
        (tmp_path / "kv").rename(tmp_path / "elsewhere")
        numbers = count(2)

        def off():
            """A server without work reports no metrics."""
            turn(a, prompt(next(numbers)), max_tokens=1)
            return a.metric("pensieve:kv_shared_off")

        wait_for(lambda: off() == 1)
        (tmp_path / "elsewhere").rename(tmp_path / "kv")
        wait_for(lambda: off() == 0)
        assert turn(a, prompt(1))[0] == reply
