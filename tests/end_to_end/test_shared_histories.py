"""Two servers and one PostgreSQL under a random driver of turns, forks, deletions, kills and
database restarts.

    pytest tests/end_to_end/test_shared_histories.py --seconds 600

No acknowledged turn is lost, none is there twice, every reply is the one of an undisturbed server,
and nothing that was deleted is served, nor its KV. `-s` prints what was done.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore

from ..postgres import PrivatePostgres
from .chatter import UNDECIDED
from .server import HTTP, Server, smallest_gap

SECONDS = 10.0
WORKERS = 4
# seconds between two disturbances, beside as many as the first one took: servers may start slowly
PAUSE = (1.0, 4.0)
# seconds for a server to start, or a conversation to be free again: the machine may have other work
PATIENCE = 600.0
AWAY = 0.2  # seconds until a client tries a server again that does not answer
CHUNK = 32  # tokens: two dialogues that begin with different messages have none in common
TOPICS = ("tea", "coffee", "rice", "bread", "music")


@pytest.fixture
def seconds(request):
    return request.config.getoption("--seconds") or SECONDS


@dataclass
class Dialogue:
    """What is known of one conversation. `replies`: turns that were answered with 200, by their
    unique text; `perhaps`: that got no such answer. `branched`: which raced with another one, so
    that it may be in a branch."""

    name: str
    replies: dict[str, str] = field(default_factory=dict)
    perhaps: set[str] = field(default_factory=set)
    branched: set[str] = field(default_factory=set)
    deleted: bool = False  # or perhaps
    gone: bool = False  # a server has said so
    copied: bool = False  # a fork, or forked: KV is shared
    messages: list[dict] = field(default_factory=list)  # when last seen


class Driver:
    def __init__(self, directory: Path, database: PrivatePostgres, seed: int):
        self.directory = directory
        self.database = database
        self.draw = random.Random(seed)
        self.servers = [self.server(0), self.server(1)]
        self.dialogues: list[Dialogue] = []
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.counts: Counter[str] = Counter()

    def server(self, number):
        tiers = (
            "--gpu-kv-chunks",
            60,
            "--host-kv-chunks",
            60,
            "--disk-kv-chunks",
            200,
            "--max-num-seqs",
            8,
        )
        environment = os.environ | {"PENSIEVE_HISTORY_URL": self.database.url}
        tiers += ("--shutdown-timeout", 0)
        state = self.directory / f"state-{number}"
        return Server(state, *tiers, environment=environment, start_seconds=PATIENCE)

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def ask(self, method, path, server=None, **body):
        """The status and the answer; 0 if there is none, because a server was killed or is
        starting."""
        with self.lock:
            url = self.servers[self.draw.randrange(2) if server is None else server].url
        try:
            answer = HTTP.request(method, f"{url}{path}", json=body or None, timeout=60)
        except httpx.TransportError:
            self.count("no answer")
            time.sleep(AWAY)
            return 0, {}
        return self.judge(method, answer), answer.json()

    def judge(self, method, answer):
        """The status. No other one may come."""
        status = answer.status_code
        self.count(f"{method} {status}")
        assert status in (200, 404, 409, 503) or (method, status) == ("DELETE", 500), answer.text
        if status == 503:
            time.sleep(AWAY)
        return status

    def work(self, seed):
        draw = random.Random(seed)
        while not self.ended.is_set():
            with self.lock:
                living = [dialogue for dialogue in self.dialogues if not dialogue.deleted]
            if len(living) < 6 or draw.random() < 0.05:
                self.create()
                continue
            dialogue = draw.choice(living)
            match draw.choices(("turn", "race", "fork", "delete", "look"), (10, 2, 1, 1, 4))[0]:
                case "turn":
                    self.turn(
                        dialogue, f"{uuid.uuid4().hex[:8]}: tell me about {draw.choice(TOPICS)}."
                    )
                case "race":
                    self.race(draw.choice(TOPICS))
                case "fork":
                    self.fork(dialogue)
                case "delete":
                    self.delete(dialogue)
                case "look":
                    self.look(dialogue)

    def create(self):
        dialogue = Dialogue(uuid.uuid4().hex[:8])
        status, _ = self.ask("POST", "/v1/conversations", id=dialogue.name)
        if status == 200:
            with self.lock:
                self.dialogues.append(dialogue)

    def chat(self, messages, server=None, **body):
        """The status and the reply. Every second reply is streamed: it counts with its end only."""
        body |= dict(model="demo", messages=messages, max_tokens=12, temperature=0)
        with self.lock:
            number = self.draw.randrange(2) if server is None else server
            url = self.servers[number].url
            streamed = self.draw.random() < 0.5
        if streamed:
            return self.stream(f"{url}/v1/chat/completions", body | {"stream": True})
        status, answer = self.ask("POST", "/v1/chat/completions", number, **body)
        return status, answer["choices"][0]["message"]["content"] if status == 200 else ""

    def stream(self, url, body):
        reply = None  # before the status
        try:
            with HTTP.stream("POST", url, json=body, timeout=60) as answer:
                if answer.status_code != 200:
                    answer.read()
                    return self.judge("stream", answer), ""
                reply = ""
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return self.judge("stream", answer), reply
                    event = json.loads(line.removeprefix("data: ") or "{}")
                    if "error" in event:
                        break
                    for choice in event.get("choices", ()):
                        reply += choice["delta"].get("content") or ""
        except httpx.TransportError:
            time.sleep(AWAY)
        self.count("no answer" if reply is None else "cut streams")
        return 0, ""

    def turn(self, dialogue, text):
        with self.lock:
            dialogue.perhaps.add(text)
        messages = [{"role": "user", "content": text}]
        status, reply = self.chat(messages, conversation=dialogue.name, history="server")
        with self.lock:
            if status == 200:
                dialogue.perhaps.discard(text)
                dialogue.replies[text] = reply
                self.counts["turns"] += 1
            assert status != 404 or dialogue.deleted, f"{dialogue} is lost"

    def race(self, topic):
        """Two clients send the same conversation at the same time, to both servers."""
        dialogue = Dialogue(uuid.uuid4().hex[:8])
        texts = [f"{uuid.uuid4().hex[:8]}: tell me about {topic}." for _ in range(2)]
        dialogue.branched.update(texts)

        def send(server, text):
            return self.chat(
                [{"role": "user", "content": text}], server, conversation=dialogue.name
            )

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(send, range(2), texts))
        for text, (status, reply) in zip(texts, answers, strict=True):
            if status == 200:
                dialogue.replies[text] = reply
            else:
                dialogue.perhaps.add(text)
        if dialogue.replies:
            with self.lock:
                self.dialogues.append(dialogue)
                self.counts["races"] += len(dialogue.replies) == 2

    def fork(self, dialogue):
        """Of turns that were answered before, all are there."""
        fork = Dialogue(uuid.uuid4().hex[:8], copied=True)
        with self.lock:
            before = dict(dialogue.replies)
            dialogue.copied = True
        status, _ = self.ask("POST", f"/v1/conversations/{dialogue.name}/fork", id=fork.name)
        if status == 200:
            with self.lock:
                fork.replies = {
                    text: reply for text, reply in before.items() if text not in dialogue.branched
                }
                fork.perhaps = dialogue.perhaps | set(dialogue.replies) | dialogue.branched
                self.dialogues.append(fork)
                self.counts["forks"] += 1

    def delete(self, dialogue):
        self.look(dialogue)
        with self.lock:
            dialogue.deleted = True
        status, _ = self.ask("DELETE", f"/v1/conversations/{dialogue.name}")
        if status in (200, 500):
            dialogue.gone = status == 200  # 500: all but its KV on disk
            for server in range(2):  # a turn in flight may not bring it back either
                assert self.ask("GET", f"/v1/conversations/{dialogue.name}", server)[0] in (
                    404,
                    503,
                    0,
                )
                text = [{"role": "user", "content": "and?"}]
                assert self.chat(text, server, conversation=dialogue.name, history="server")[0] in (
                    404,
                    503,
                    0,
                )
            self.count("deletions")

    def look(self, dialogue):
        with self.lock:
            acknowledged = dict(dialogue.replies)
            possible = set(dialogue.perhaps)
        status, answer = self.ask("GET", f"/v1/conversations/{dialogue.name}")
        if status == 200:
            with self.lock:  # what was sent meanwhile may be there
                possible |= dialogue.perhaps | set(dialogue.replies)
                dialogue.messages = answer["messages"]
            check(dialogue, acknowledged, possible, answer["messages"], dialogue.branched)
        assert status != 404 or dialogue.deleted, f"{dialogue} is lost"

    def disturb(self):
        match self.draw.choice(("one", "both", "database", "database", "database")):
            case "one":
                self.restart(self.draw.randrange(2))
            case "both":
                self.restart(0, 1)
            case "database":
                self.database.stop(self.draw.choice(("fast", "immediate")))
                time.sleep(self.draw.uniform(0, 2))
                self.database.start()
                self.count("database restarts")

    def restart(self, *numbers):
        for number in numbers:
            kill(self.servers[number])
            self.count("kills")
            self.servers[number].__exit__()
        for number in numbers:
            self.servers[number] = self.server(number)  # without an address until it listens
        for number in numbers:
            self.servers[number].__enter__()


def check(dialogue, acknowledged, possible, messages, branched):
    """The history has each answered turn once, with its reply, and no other text."""
    questions, replies = messages[::2], messages[1::2]
    assert len(questions) == len(replies) and all(
        message["role"] == "user" for message in questions
    )
    texts = [message["content"] for message in questions]
    assert len(texts) == len(set(texts)), f"doubled in {dialogue.name}: {texts}"
    there = dict(zip(texts, (message["content"] for message in replies), strict=True))
    lost = {text for text in acknowledged if text not in there and text not in branched}
    assert not lost, f"lost from {dialogue.name}: {lost}, there is {texts}"
    assert all(there[text] == reply for text, reply in acknowledged.items() if text in there)
    assert set(there) <= possible | set(acknowledged), (
        f"{dialogue.name} has texts that no client sent"
    )


def kill(server):
    """Everything of this server, at once and without warning."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for number in (pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    server.process.wait(30)


@pytest.mark.slow
def test_two_servers_under_kills_and_database_restarts(tmp_path, seconds, request):
    draw = random.Random(request.config.getoption("--seed"))
    with PrivatePostgres() as database:
        driver = Driver(tmp_path, database, draw.randrange(2**32))
        try:
            for server in driver.servers:
                server.__enter__()
            with ThreadPoolExecutor(WORKERS) as pool:
                workers = [pool.submit(driver.work, draw.randrange(2**32)) for _ in range(WORKERS)]
                try:
                    until = time.monotonic() + seconds
                    took = 0.0
                    while time.monotonic() < until and not any(worker.done() for worker in workers):
                        time.sleep(took + draw.uniform(*PAUSE))
                        began = time.monotonic()
                        driver.disturb()
                        took = time.monotonic() - began
                finally:
                    driver.ended.set()
                for worker in workers:
                    worker.result()
            finish(driver, database)
        finally:
            print(dict(driver.counts))
            for server in driver.servers:
                server.__exit__()
    replay(driver, tmp_path)
    print("replayed", driver.counts["replayed"])
    assert driver.counts["turns"] and driver.counts["kills"] + driver.counts["database restarts"]


def finish(driver, database):
    """After the last disturbance every conversation takes a turn once the leases of killed servers
    are over, and is whole on both servers."""
    living = [dialogue for dialogue in driver.dialogues if not dialogue.deleted]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda dialogue: finish_one(driver, dialogue), living))
    store = HistoryStore(database.url)
    for dialogue in living:
        check_branches(store, driver, dialogue)
    store.close()
    for dialogue in driver.dialogues:
        if dialogue.gone:
            stays_gone(driver, dialogue)


def answered(driver, *words, **body):
    """The answer to `driver.ask`. It is asked again until there is one: a server whose database has
    failed answers 503 for a second."""
    until = time.monotonic() + PATIENCE
    while (answer := driver.ask(*words, **body))[0] in (0, 503):
        assert time.monotonic() < until, f"{words} gets no answer"
    return answer


def stays_gone(driver, dialogue):
    """It is not there, and a client that says the same again under its name finds none of its
    KV."""
    for server in range(2):
        assert answered(driver, "GET", f"/v1/conversations/{dialogue.name}", server)[0] == 404
    if not dialogue.messages or dialogue.copied:
        return
    for server in range(2):
        body = dict(messages=dialogue.messages[:3], conversation=dialogue.name, max_tokens=1)
        status, answer = answered(
            driver, "POST", "/v1/chat/completions", server, model="demo", **body
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert status == 200 and cached < CHUNK, f"{cached} tokens of {dialogue} are still there"
    driver.count("deleted said again")


def finish_one(driver, dialogue):
    text = f"{uuid.uuid4().hex[:8]}: the end."
    until = time.monotonic() + PATIENCE
    while text not in dialogue.replies:
        assert time.monotonic() < until, f"{dialogue.name} stays held"
        driver.turn(dialogue, text)
        if text not in dialogue.replies:
            time.sleep(0.2)
    both = [
        answered(driver, "GET", f"/v1/conversations/{dialogue.name}", server)[1]
        for server in range(2)
    ]
    assert both[0]["messages"] == both[1]["messages"]
    driver.look(dialogue)


def check_branches(store, driver, dialogue):
    """Of two turns that raced, the one that ended second is in a branch. One that began when the
    first had ended, as a server that starts lets requests wait, has replaced it: a history that the
    client sends may."""
    texts = Counter(message["content"] for message in dialogue.messages)
    named = "SELECT id FROM conversations WHERE kind = 'branch' AND parent = :name"
    for (id,) in store._db.execute(named, {"name": dialogue.name}):
        _, turn = store.find(Name("", id, "branch"), time.time())
        texts.update(message["content"] for message in turn.transcript().messages)
    raced = [texts[text] for text in dialogue.replies if text in dialogue.branched]
    assert not raced or (max(raced) == 1 and sum(texts[text] for text in dialogue.branched) >= 1), (
        dialogue,
        texts,
    )
    driver.counts["both of a race kept"] += raced == [1, 1]


def replay(driver, directory):
    """An undisturbed server says the same: in every conversation when last seen, and in races."""
    with Server(directory / "undisturbed") as server, ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda dialogue: replay_one(driver, server, dialogue), driver.dialogues))


def replay_one(driver, server, dialogue):
    turns = [dialogue.messages[at : at + 2] for at in range(0, len(dialogue.messages), 2)]
    for at, (message, reply) in enumerate(turns):
        named = dict(conversation=dialogue.name, history="server" if at else "client")
        if not says_again(server, message, reply["content"], **named):
            driver.count("undecided")
            break  # what follows has another history
        driver.count("replayed")
    for text in dialogue.branched & set(dialogue.replies):
        says_again(server, {"role": "user", "content": text}, dialogue.replies[text])


def says_again(server, message, reply, **named):
    """True if the server gives this reply. It may give another one only where it is undecided."""
    body = dict(
        messages=[message], max_tokens=12, temperature=0, logprobs=True, top_logprobs=2, **named
    )
    (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    same = choice["message"]["content"] == reply
    assert same or smallest_gap(choice["logprobs"]["content"], reply) < UNDECIDED, (reply, choice)
    return same


@pytest.mark.parametrize(
    ("reply", "gap"), [("a", 0.5), ("ab", 0.25), ("abc", 0.25), ("ax", 0.5), ("x", 1.0)]
)
def test_the_smallest_gap_up_to_the_first_other_token(reply, gap):
    gaps = {"a": 1.0, "b": 0.5, "": 0.25}  # the last one ends the reply: it has no bytes
    tokens = [
        dict(
            bytes=list(text.encode()) or None,
            top_logprobs=[dict(logprob=-0.5), dict(logprob=-0.5 - gap)],
        )
        for text, gap in gaps.items()
    ]
    assert smallest_gap(tokens, reply) == gap
