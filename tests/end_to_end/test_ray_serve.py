"""Pensieve under a real Ray Serve, with histories in a real PostgreSQL."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import pytest

from ..postgres import PrivatePostgres
from .chatter import UNDECIDED
from .ray_cluster import RAY, RayCluster, descendants, until
from .server import HTTP, Server, smallest_gap

CONVERSATIONS = 20
# room for all conversations: nothing is evicted
TIERS = "--gpu-kv-chunks 800 --host-kv-chunks 100 --max-num-seqs 8"
KEY = "the-key"
EVENTS = """'{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}'"""
BEGAN = time.monotonic()
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 120.0  # for a conversation to be answered after a kill, on a machine with other work
PAUSE = 1.0  # between two turns of each of the two clients that go on while replicas change
TOPICS = ("tea", "coffee", "rice", "bread", "music")


@dataclass
class Turn:
    text: str
    reply: str
    cached: int
    replica: str
    tokens: list  # of the reply, each with the two likeliest ones


@dataclass
class Dialogue:
    name: str
    topic: str
    turns: list[Turn] = field(default_factory=list)
    sticky: int = 0  # a turn on the same replica as the one before
    lock: threading.Lock = field(default_factory=threading.Lock)

    def body(self, **further):
        text = f"{self.name}, {len(self.turns)}: tell me about {self.topic}."
        body = dict(
            model="demo",
            messages=[{"role": "user", "content": text}],
            conversation=self.name,
            temperature=0,
        )
        body |= dict(
            history="server" if self.turns else "client",
            max_tokens=12,
            logprobs=True,
            top_logprobs=2,
        )
        return body | further

    def send(self, url):
        """One turn, with the header that brings it to the conversation's replica. Returns the
        status."""
        headers = {"X-Session-ID": self.name} | AUTHORIZED
        body = self.body()
        try:
            answer = HTTP.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        except httpx.TransportError as error:
            return repr(error)
        if answer.status_code == 200:
            self.note(body, answer)
        return f"{answer.status_code} {answer.text}" if answer.status_code != 200 else "200"

    def note(self, body, answer):
        answer_body = answer.json()
        cached = answer_body["usage"]["prompt_tokens_details"]["cached_tokens"]
        (choice,) = answer_body["choices"]
        reply = choice["message"]["content"]
        tokens = choice["logprobs"]["content"]
        replica = answer.headers.get("x-pensieve-replica", "")
        self.turns.append(Turn(body["messages"][0]["content"], reply, cached, replica, tokens))


@pytest.fixture(scope="module")
def database():
    with PrivatePostgres() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(database):
    with RayCluster({"PENSIEVE_HISTORY_URL": database.url}) as running:
        yield running


def step(what):
    """For `pytest -s`: how long the steps take."""
    print(f"{time.monotonic() - BEGAN:5.0f} s  {what}", flush=True)


def each(dialogues, act):
    """Four at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(act, dialogues))


@pytest.mark.slow
@pytest.mark.skipif(not RAY.exists(), reason=f"no Ray in {RAY.parent}: run `make ray`")
def test_conversations_outlive_replicas(cluster, tmp_path):
    """One replica, then three; one of them is killed in mid-reply; all are replaced in turn; one
    again."""
    options = f"demo --api-key {KEY} --max-body-bytes 100000 {TIERS} --kv-events-config {EVENTS}"
    dialogues = [
        Dialogue(f"{number:02} chat", TOPICS[number % len(TOPICS)])
        for number in range(CONVERSATIONS)
    ]
    cluster.deploy(options, 1)
    cluster.until_replicas(1)
    step("one replica serves")
    with Traffic(cluster, dialogues) as traffic:
        traffic.wait_for(2)
        cluster.deploy(options, 3)
        replicas = cluster.until_replicas(3)
        traffic.wait_for(2)
    step("three serve")

    for _ in range(2):
        assert each(dialogues, lambda one: one.send(cluster.url)) == ["200"] * CONVERSATIONS
    for dialogue in dialogues:
        dialogue.sticky = len(dialogue.turns) - 1
        assert dialogue.turns[-1].replica == dialogue.turns[-2].replica
    homes = Counter(one.turns[-1].replica for one in dialogues)
    assert homes.keys() <= replicas.keys() and len(homes) > 1
    check_limits_and_metrics(cluster, replicas)
    elsewhere(cluster, dialogues[0])
    step("turns find their KV")

    ((lost, _),) = homes.most_common(1)
    kill_in_mid_reply(
        cluster, lost, replicas[lost], [one for one in dialogues if one.turns[-1].replica == lost]
    )
    replicas = cluster.until_replicas(3, but=[lost])
    step("a new replica in place of the killed one")

    with Traffic(cluster, dialogues) as traffic:
        traffic.wait_for(2)
        cluster.deploy(f"{options} --max-num-seqs 7", 3)
        cluster.until_replicas(3, but=replicas)
        step("three new replicas")
        traffic.wait_for(2)
        cluster.deploy(f"{options} --max-num-seqs 7", 1)
        cluster.until_replicas(1)
        traffic.wait_for(2)
    assert all(one.send(cluster.url) == "200" for one in dialogues)
    step("one is left")
    replay(dialogues, tmp_path)
    step("an undisturbed server has said the same")


def check_limits_and_metrics(cluster, replicas):
    """Keys and limits are Pensieve's own. Each replica's metrics can be had."""
    body = dict(model="demo", messages=[{"role": "user", "content": "tea"}], max_tokens=1)
    path = f"{cluster.url}/v1/chat/completions"
    assert HTTP.post(path, json=body).status_code == 401
    assert HTTP.post(path, json=body, headers=AUTHORIZED).status_code == 200
    body["messages"][0]["content"] = "tea " * 30_000
    assert HTTP.post(path, json=body, headers=AUTHORIZED).status_code == 413
    assert requests(cluster, replicas, "length") > CONVERSATIONS
    labels = [target["labels"] for target in HTTP.get(f"{cluster.url}/replicas").json()]
    addresses = {one["__meta_kv_events_endpoint"] for one in labels}
    assert len(addresses) == len(replicas)
    assert all(re.fullmatch(r"tcp://[\d.]+:[1-9]\d+", address) for address in addresses)
    body |= dict(
        messages=[{"role": "user", "content": "tea"}], stream=True, max_tokens=1000, ignore_eos=True
    )
    with HTTP.stream("POST", path, json=body, headers=AUTHORIZED) as answer:
        next(answer.iter_lines())
    # A client that leaves ends its request.
    until(lambda: requests(cluster, replicas, "abort"), lambda: "the request goes on")
    assert HTTP.get(f"{cluster.url}/metrics", params={"replica": "none"}).status_code == 404


def requests(cluster, replicas, finish):
    """How many requests of all replicas have ended so."""

    def named():
        return {
            target["labels"]["instance"] for target in HTTP.get(f"{cluster.url}/replicas").json()
        }

    until(lambda: named() == replicas.keys(), lambda: f"{named()} are not {replicas.keys()}")
    texts = [HTTP.get(f"{cluster.url}/metrics", params={"replica": name}).text for name in replicas]
    samples = [
        dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#") for text in texts
    ]
    return sum(
        float(one.get(f'pensieve:requests_total{{finish="{finish}"}}', 0)) for one in samples
    )


def elsewhere(cluster, dialogue):
    """Without the header a request lands anywhere and is answered. The conversation itself is found
    everywhere."""
    path = f"{cluster.url}/v1/conversations/{dialogue.name.replace(' ', '%20')}"
    seen = set()
    for _ in range(30):
        answer = HTTP.get(path, headers=AUTHORIZED)
        assert len(answer.json()["messages"]) == 2 * len(dialogue.turns), answer.text
        seen.add(answer.headers["x-pensieve-replica"])
    assert len(seen) > 1


def kill_in_mid_reply(cluster, name, pid, dialogues):
    """The replica with all its processes goes, while the first conversation streams. Each
    conversation is answered by another replica. The conversation in mid-reply waits for the end of
    its lease."""
    headers = {"X-Session-ID": dialogues[0].name} | AUTHORIZED
    body = dialogues[0].body(stream=True, max_tokens=1000, ignore_eos=True)
    with HTTP.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body, headers=headers
    ) as answer:
        assert answer.headers["x-pensieve-replica"] == name
        lines = answer.iter_lines()
        for line in itertools.islice((line for line in lines if line.startswith("data: {")), 3):
            assert "error" not in json.loads(line[6:])
        for process in (pid, *descendants(pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(httpx.TransportError):  # an end that cannot be taken for a whole reply
            list(lines)

    def insist(dialogue):
        failures = []
        while (outcome := dialogue.send(cluster.url)) != "200":
            assert time.monotonic() < killed + PATIENCE, failures
            failures.append(outcome)
            time.sleep(0.1)
        return time.monotonic() - killed, len(failures)

    outcomes = each(dialogues, insist)
    assert all(dialogue.turns[-1].replica != name for dialogue in dialogues)
    print(f"        its conversations are answered after (s, failed attempts): {sorted(outcomes)}")


class Traffic:
    """Turns of all conversations, one after the other in each, until the end. None may fail."""

    def __init__(self, cluster, dialogues):
        self._cluster = cluster
        self._dialogues = dialogues
        self._ended = threading.Event()
        self._one_more = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(2)

    def _work(self, seed):
        draw = random.Random(seed)
        try:
            while not self._ended.wait(PAUSE):
                dialogue = draw.choice(self._dialogues)
                with dialogue.lock:
                    outcome = dialogue.send(self._cluster.url)
                assert outcome == "200", outcome
                self._one_more.release()
        finally:
            self._one_more.release(100)  # nothing waits for traffic that has ended

    def wait_for(self, turns):
        for _ in range(turns):
            self._one_more.acquire()
        for worker in self._workers:
            if worker.done():
                worker.result()

    def __enter__(self):
        self._workers = [self._pool.submit(self._work, seed) for seed in range(2)]
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._pool.shutdown()
        for worker in self._workers:
            worker.result()


def replay(dialogues, directory):
    """An undisturbed server gives the same replies, but where it is undecided. Turns that found
    their replica find as many tokens there."""

    def again(dialogue):
        same = Dialogue(dialogue.name, dialogue.topic, sticky=dialogue.sticky)
        for turn in dialogue.turns:
            assert same.send(server.url) == "200"
            last = same.turns[-1]
            assert last.text == turn.text
            if last.reply != turn.reply:
                assert smallest_gap(last.tokens, turn.reply) < UNDECIDED, (last, turn)
                return len(same.turns)  # what follows has another history
        assert same.turns[same.sticky].cached == dialogue.turns[same.sticky].cached > 0
        return len(same.turns)

    with Server(directory / "undisturbed", *TIERS.split(), "--api-key", KEY) as server:
        print(f"        {sum(each(dialogues, again))} turns")
