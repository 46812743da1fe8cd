"""Two servers, one Mooncake store and one PostgreSQL: KV outlives its server, and nothing that
fails in the store makes a request fail or changes its reply.

`pytest -s` prints how long turns took while the store failed, and before.
"""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from typing import NamedTuple

import pytest

from pensieve import LLM, SamplingParams

from ..mooncake import ENVIRONMENT, PrivateMooncake, kill
from ..pausing import pause
from ..postgres import PrivatePostgres
from .server import HTTP, Server
from .test_server import wait_for
from .test_shared_histories import kill as kill_server

pytestmark = pytest.mark.slow

CHUNKS = 12  # of a first prompt; its reply does not fill another one
PROMPT = 16 * CHUNKS  # tokens
NEW = 9
SIZES = ("--chunk-tokens", 16, "--gpu-kv-chunks", 200, "--host-kv-chunks", 200)
HUNG = 30.0  # seconds until Mooncake itself gives up
STORED = 3.0  # seconds until another conversation is tried: a failure may have lost records
PATIENCE = 900.0  # a store that is believed slow is tried again after two minutes
REJECTED = 'pensieve:kv_shared_faults_total{kind="rejected"}'


class Conversation(NamedTuple):
    """`first`, `second`: new tokens of two turns, as an engine without the store computes them."""

    name: str
    prompt: list[int]
    first: list[int]
    second: list[int]


class Cluster:
    """The servers `a` and `b`, with the store and the database."""

    def __init__(self, directory, stack):
        self._directory = directory
        self._numbers = count()
        self.store = stack.enter_context(PrivateMooncake())
        self.database = stack.enter_context(PrivatePostgres())
        self.a = self._server("a")
        self.b = self._server("b")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(stack.enter_context, (self.a, self.b)))
        self._alone = stack.enter_context(LLM("demo", gpu_kv_bytes="256MiB", host_kv_bytes="64MiB"))

    def _server(self, name):
        shared = {"engine": "mooncake", "master": self.store.master, "min_tokens": 64}
        options = [*SIZES, "--shutdown-timeout", 0, "--kv-shared-config", json.dumps(shared)]
        history = {"PENSIEVE_HISTORY_URL": self.database.url}
        environment = os.environ | ENVIRONMENT | history
        return Server(self._directory / name, *options, environment=environment)

    def conversation(self):
        """A new one, before its first turn."""
        number = next(self._numbers)
        prompt = [5 + (number * 37 + at * 11 + at // 90) % 900 for at in range(PROMPT)]
        first = self._continued(prompt)
        second = self._continued([*prompt, *first, 7])
        return Conversation(f"conversation-{number}", prompt, first, second)

    def _continued(self, tokens):
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        (output,) = self._alone.generate([{"prompt_token_ids": tokens}], params)
        return list(output.outputs[0].token_ids)

    def begin(self):
        """A conversation that the server `a` has begun."""
        conversation = self.conversation()
        reply, _ = turn(self.a, conversation.prompt, conversation=conversation.name)
        assert reply == conversation.first
        return conversation

    def go_on(self, conversation):
        """Its second turn, on `b`: how many tokens of it were cached."""
        reply, cached = turn(self.b, [7], conversation=conversation.name, history="server")
        assert reply == conversation.second
        return cached

    def stored(self):
        """A conversation that the server `a` has begun and the store has, and its keys."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            before = self.store.keys()
            conversation = self.begin()
            if keys := self._keys_but(before):
                return conversation, keys
        raise AssertionError(f"nothing is stored: {self.a.log[-20:]}")

    def _keys_but(self, before):
        """The keys of the latest conversation, or nothing after STORED seconds."""
        end = time.monotonic() + STORED
        while time.monotonic() < end:
            if len(keys := self.store.keys() - before) == CHUNKS:
                return keys
            time.sleep(0.05)
        return set()

    def until_fetched(self):
        """Conversations move from `a` to `b` until one is fetched."""
        end = time.monotonic() + PATIENCE
        while self.go_on(self.stored()[0]) < PROMPT:
            assert time.monotonic() < end, f"nothing is fetched: {self.b.log[-20:]}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def turn(server, prompt, **body):
    """The new tokens, and how many of the prompt were cached."""
    settings = dict(max_tokens=NEW, ignore_eos=True, temperature=0, return_token_ids=True)
    answer = server.post("/v1/completions", prompt=prompt, **settings | body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return choice["token_ids"], cached


def timed(call, *arguments):
    begun = time.monotonic()
    call(*arguments)
    return round(time.monotonic() - begun, 2)


def turns_while(cluster, word):
    """Turns on both servers, after something has happened to the store."""
    begun = [timed(cluster.begin) for _ in range(3)]
    print(f"{word}: {begun} s for three turns")
    assert max(begun) < HUNG


def test_an_owner_that_is_killed(cluster):
    cluster.until_fetched()
    turns_while(cluster, "before")
    conversation, _ = cluster.stored()
    kill(cluster.store.owner_process)
    print("owner killed:", timed(cluster.go_on, conversation), "s for a turn")
    turns_while(cluster, "owner killed")
    cluster.store.start_owner()
    cluster.until_fetched()


def test_a_master_that_hangs(cluster):
    conversation, _ = cluster.stored()
    pause(cluster.store.master_process.pid)
    print("master hangs:", timed(cluster.go_on, conversation), "s for a turn")
    turns_while(cluster, "master hangs")
    cluster.store.master_process.send_signal(signal.SIGCONT)
    cluster.until_fetched()


def test_a_master_that_is_killed_and_started_again(cluster):
    conversation, _ = cluster.stored()
    kill(cluster.store.master_process)
    print("master killed:", timed(cluster.go_on, conversation), "s for a turn")
    turns_while(cluster, "master killed")
    cluster.store.start_master()
    turns_while(cluster, "master started")
    cluster.until_fetched()


def test_records_with_wrong_bytes_are_computed_again(cluster):
    def rejected():
        """Spoils another conversation's records, since a late read does not look at them. A server
        without work reports no metrics: what the last turn counted is seen after the next one."""
        conversation, keys = cluster.stored()
        cluster.store.spoil(keys)
        assert cluster.go_on(conversation) == 0
        return cluster.b.metric(REJECTED) >= 1

    wait_for(rejected)


def test_a_killed_servers_conversation_is_fetched_until_it_is_deleted(cluster):
    stored = [cluster.stored() for _ in range(3)]  # a fetch that is late is computed instead
    kill_server(cluster.a)
    assert max(cluster.go_on(conversation) for conversation, _ in stored) >= PROMPT
    for conversation, keys in stored:
        address = f"{cluster.b.url}/v1/conversations/{conversation.name}"
        HTTP.delete(address, timeout=60).raise_for_status()
        assert not keys & cluster.store.keys()
