"""Dynamo's router, fed by a live server with small pools: every score agrees with the page's
counts of chunks, and equals what other views of the server say."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections import Counter
from itertools import accumulate
from random import Random

import pytest

from ..runtime.kv_events.routers import FOLDER, DynamoRouter, LossyProxy
from .server import HTTP, Server

SIZE = 16
REPLY = 8
CONFIG = (
    '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:0", '
    '"replay_endpoint": "tcp://127.0.0.1:0", "buffer_steps": 20}'
)
OPTIONS = ("--chunk-tokens", SIZE, "--gpu-kv-chunks", 24, "--host-kv-chunks", 16)
DISK = ("--disk-kv-chunks", 20)
EVENTS = ("--kv-events-config", CONFIG)
PATIENCE = 60.0
DIRECT, LOSSY, LATE = 1, 2, 3  # workers: three views of the server


class Views:
    """The server, and the router's views of it."""

    def __init__(self, server):
        self.server = server
        line = next(line for line in server.log if "KV events at" in line)
        ends = re.findall(r"tcp://[\d.:]+", line)
        self.endpoint, self.replay_endpoint = ends
        self.proxy = LossyProxy(self.endpoint, lambda number: number % 5 == 3)
        self.workers = []

    async def join(self, router, worker):
        endpoint = self.proxy.endpoint if worker == LOSSY else self.endpoint
        await router.join(worker, endpoint, self.replay_endpoint)
        self.workers.append(worker)

    async def leave(self, router):
        for worker in self.workers:
            await router.leave(worker)
        self.proxy.close()


class Client:
    """Conversations whose logs, but for the last token, are whole chunks.

    logs    by name
    salts   by name
    """

    def __init__(self, random):
        self.random = random
        self.logs, self.salts = {}, {}
        self.number = 0

    def turn(self, server, name, salt=None, prompt=None):
        """The next turn of that conversation."""
        if name not in self.logs:
            self.salts[name] = salt
            count = SIZE * self.random.randint(3, 9) + 1 - REPLY
        else:
            count = SIZE - REPLY
        prompt = prompt or [self.random.randrange(5, 900) for _ in range(count)]
        body = dict(prompt=prompt, max_tokens=REPLY, ignore_eos=True, temperature=0)
        body |= dict(return_token_ids=True, conversation=name)
        if name in self.logs:
            body["history"] = "server"
        if self.salts[name] is not None:
            body["cache_salt"] = self.salts[name]
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        self.logs[name] = (
            self.logs.get(name, []) + prompt + answer.json()["choices"][0]["token_ids"]
        )
        return prompt

    def further_batch(self, server):
        prompt = [self.random.randrange(5, 900) for _ in range(SIZE)]
        server.post("/v1/completions", prompt=prompt, max_tokens=1)

    def delete(self, server, name):
        HTTP.delete(f"{server.url}/v1/conversations/{name}", timeout=60).raise_for_status()
        del self.salts[name]
        return self.logs.pop(name)


def truth(server, client):
    """By conversation: the page's counts of its chunks, from the fastest tier on."""
    state = HTTP.get(f"{server.url}/ui/state", timeout=30).json()
    counts = dict(map(as_pair, state["conversations"]))
    chunks = {}
    for name, log in client.logs.items():
        tiers = counts.get(name, {"dropped": len(log) // SIZE})
        chunks[name] = [tiers.get(kind, 0) for kind in ("gpu", "host", "disk", "dropped")]
    return chunks


def agrees(runs, chunks, log):
    """Whether the page is of this log, and leading runs (on the GPU; there or on HOST; anywhere)
    can be those of so many chunks. Where a tier and the faster ones have all of them, the run is
    certain."""
    whole = sum(chunks)
    return whole == len(log) // SIZE and all(
        run == there if there in (0, whole) else run <= there
        for run, there in zip(runs, accumulate(chunks[:3]), strict=True)
    )


def as_pair(entry):
    return entry if isinstance(entry, list) else (entry["conversation"], entry["chunks"])


async def scores(router, client, worker):
    salted = {
        name: await router.scores(log, client.salts[name]) for name, log in client.logs.items()
    }
    return {name: score.get(worker, (0, 0, 0)) for name, score in salted.items()}


async def agree(router, views, client, counts):
    """Returns when every view's scores are the server's."""
    until = time.monotonic() + PATIENCE
    while True:
        chunks = truth(views.server, client)
        told = {worker: await scores(router, client, worker) for worker in views.workers}
        direct = told[DIRECT]
        if all(agrees(direct[name], chunks[name], client.logs[name]) for name in chunks):
            if all(view == direct for view in told.values()):
                break
            client.further_batch(views.server)  # shows that the one before it is lost
        assert time.monotonic() < until, (chunks, told)
        await asyncio.sleep(0.02)
    counts["states"] += 1
    counts["scores"] += len(chunks) * len(told)
    for name, (gpu, host, disk) in direct.items():
        counts["on the GPU"] += gpu > 0
        counts["on HOST"] += host > gpu
        counts["on disk"] += disk > host
        counts["holes"] += chunks[name][-1] > 0
        counts["salted"] += client.salts[name] is not None and disk > 0
        counts["certain"] += all(
            there in (0, sum(chunks[name])) for there in accumulate(chunks[name][:3])
        )


async def life(server, router, client, states, counts):
    views = Views(server)
    await views.join(router, DIRECT)
    await views.join(router, LOSSY)
    random = client.random
    await agree(router, views, client, counts)
    for state in range(states):
        if state == states // 2:
            await views.join(router, LATE)
        if state % 6 == 5:
            name = random.choice(list(client.logs))
            salt = client.salts[name]
            log = client.delete(server, name)
            gone = time.monotonic() + PATIENCE
            while (await router.scores(log, salt)).get(DIRECT, (0, 0, 0)) != (0, 0, 0):
                assert time.monotonic() < gone
                await asyncio.sleep(0.01)
            counts["deletions"] += 1
        elif state % 6 == 3:
            client.number += 1
            prompt = client.turn(server, f"c{client.number}", "one")
            client.turn(server, f"d{client.number}", "two", prompt)
        elif state % 6 == 1:
            client.turn(server, random.choice(list(client.logs)))
        else:
            client.number += 1
            client.turn(server, f"c{client.number}")
        await agree(router, views, client, counts)
    counts["lost batches"] += views.proxy.lost
    await views.leave(router)


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / "dynamo").exists(), reason=f"no Dynamo in {FOLDER}: run `make kv-events`"
)
def test_a_router_follows_a_live_server(tmp_path):
    """With a tier on disk and a restart; then with holes only."""
    counts = Counter()
    router = DynamoRouter(SIZE)
    client = Client(Random(1))
    for _ in range(2):
        with Server(tmp_path / "disk", *OPTIONS, *DISK, *EVENTS) as server:
            asyncio.run(life(server, router, client, 13, counts))
    client = Client(Random(2))
    with Server(tmp_path / "host", *OPTIONS, *EVENTS) as server:
        asyncio.run(life(server, router, client, 11, counts))
        names = ('pensieve:kv_events_total{kind="stored"}', "pensieve:kv_events_resets_total")
        published, resets = server.metrics(*names)
    router.close()
    print(f"\n{dict(counts)}")
    assert counts["states"] == 40 and published > 10 and resets == 0
    kinds = ("on the GPU", "on HOST", "on disk", "holes", "salted", "deletions", "lost batches")
    assert min(counts[kind] for kind in kinds) > 0, counts


def test_wrong_settings_of_kv_events_end_the_start(tmp_path):
    command = [*Server.COMMAND, "--engine", "demo", "--state-dir", tmp_path, "--port", 0]
    for config, words in (
        ('{"enable_kv_cache_events": true, "snapshots": 1}', "there is no field 'snapshots'"),
        ('{"enable_kv_cache_events": true, "endpoint": "here"}', "cannot bind here"),
    ):
        ended = subprocess.run(
            [*map(str, command), "--kv-events-config", config],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 2
        assert "--kv-events-config" in ended.stderr and words in ended.stderr
