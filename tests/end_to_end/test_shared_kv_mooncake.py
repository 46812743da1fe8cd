"""Two servers, one Mooncake store and one PostgreSQL: KV outlives its server, and nothing that
fails in the store makes a request fail or change its reply.

`pytest -s` prints how long requests took while the store failed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest

from pensieve.runtime.shared.config import MooncakeOptions
from pensieve.runtime.shared.engine import StoreOutcome
from pensieve.runtime.shared.mooncake import MooncakeEngine

from ..mooncake import ENVIRONMENT, PrivateMooncake, kill
from ..postgres import PrivatePostgres
from .server import HTTP, Server
from .test_server import wait_for
from .test_shared_histories import kill as kill_server

pytestmark = pytest.mark.slow

CHUNK = 32
PROMPT = 320  # tokens
NEW = 9
KEYS = PROMPT // CHUNK  # records of a first turn
HUNG = 30.0  # seconds until Mooncake itself gives up


class Cluster:
    """The servers `a` and `b`, with the store and the database."""

    def __init__(self, directory, stack):
        self._directory = directory
        self._stack = stack
        self._states = count()
        self._prompts = count()
        self.store = stack.enter_context(PrivateMooncake())
        self.database = stack.enter_context(PrivatePostgres())
        self.a = self.start()
        self.b = self.start()

    def start(self):
        """A further server, with nothing in its own tiers."""
        shared = {"engine": "mooncake", "master": self.store.master, "min_tokens": 64}
        options = ["--gpu-kv-chunks", 200, "--host-kv-chunks", 100, "--chunk-tokens", CHUNK]
        options += ["--shutdown-timeout", 0, "--kv-shared-config", json.dumps(shared)]
        history = {"PENSIEVE_HISTORY_URL": self.database.url}
        state = self._directory / f"state-{next(self._states)}"
        server = Server(state, *options, environment=os.environ | ENVIRONMENT | history)
        return self._stack.enter_context(server)

    def prompt(self):
        """One that no conversation has had."""
        number = next(self._prompts)
        return [5 + (number * 37 + at * 11 + at // 90) % 900 for at in range(PROMPT)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


def turn(server, prompt, **body):
    """The new tokens, and how many of the prompt were cached."""
    settings = dict(max_tokens=NEW, ignore_eos=True, temperature=0, return_token_ids=True)
    answer = server.post("/v1/completions", prompt=prompt, **settings | body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
    return said["choices"][0]["token_ids"], cached


def expected(server, prompt):
    """The new tokens of two turns, the second one of one token, computed by the server itself."""
    apart = dict(cache_salt=f"apart-{prompt}")
    first, _ = turn(server, prompt, **apart)
    second, _ = turn(server, [*prompt, *first, 7], **apart)
    return first, second


def first_turns(cluster, server, names):
    """Returns what each conversation's two turns must say, once the store has their KV."""
    told = {}
    before = cluster.store.keys()
    for name in names:
        prompt = cluster.prompt()
        told[name] = turn(server, prompt, conversation=name)[0], prompt
    wait_for(lambda: len(cluster.store.keys() - before) >= KEYS * len(names))
    return told


def second_turns(cluster, server, told):
    """The cached tokens of each conversation's second turn, and the greatest time of one."""
    found = []
    longest = 0.0
    for name, (first, prompt) in told.items():
        begun = time.monotonic()
        reply, cached = turn(server, [7], conversation=name, history="server")
        longest = max(longest, time.monotonic() - begun)
        found.append(cached)
        assert expected(server, prompt) == (first, reply)
    return found, longest


def names(word):
    """Several, for a machine with other work: a fetch that is late is computed instead."""
    return [f"{word}-{number}" for number in range(4)]


def test_a_killed_servers_conversations_are_fetched_until_they_are_deleted(cluster):
    told = first_turns(cluster, cluster.a, names("moved"))
    kill_server(cluster.a)
    found, _ = second_turns(cluster, cluster.b, told)
    assert max(found) >= PROMPT, found
    for name in told:
        HTTP.delete(f"{cluster.b.url}/v1/conversations/{name}", timeout=60).raise_for_status()
    cluster.a = cluster.start()
    for name, (first, prompt) in told.items():
        _, cached = turn(cluster.a, [*prompt, *first], conversation=f"{name}-again")
        assert cached == 0
