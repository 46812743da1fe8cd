"""Conversations on a real server: no cache lost to tokenizing again, restarts of every kind,
separate tenants."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig

from pensieve.builder.build import build_engine

from ..models import LLAMA_SHAPE, save_random
from . import server as server_module
from .chatter import UNDECIDED
from .server import HTTP, Server, gap_of

DIALOGUES = Path(__file__).parents[3] / "shared" / "data" / "mtbench101_text.jsonl.gz"
SPECIAL = ("<|end|>", "<|turn|>", "<|done|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message.role + '\n' + message.content + "
    "'<|done|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
CHUNK = 32
TURNS, CONVERSATIONS, CLIENTS = 3, 100, 16


@pytest.fixture(scope="module")
def questions():
    """The users' messages of 50 dialogues, turn by turn, shortened."""
    if not DIALOGUES.exists():
        pytest.skip(f"{DIALOGUES} is not here")
    with gzip.open(DIALOGUES, "rt", encoding="utf-8") as lines:
        dialogues = [json.loads(line)["messages"] for line in itertools.islice(lines, 50)]
    return [
        [turn["content"][:120] for turn in turns if turn["role"] == "user"][:3]
        for turns in dialogues
    ]


@pytest.fixture(scope="module")
def babbler(tmp_path_factory):
    """An engine whose replies are random ids of a vocabulary with merges: their text rarely
    tokenizes to the same ids."""
    directory = tmp_path_factory.mktemp("babbler")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text(), server_module.__doc__], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    done = tokenizer.token_to_id("<|done|>")
    shape = LLAMA_SHAPE | dict(
        vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096, eos_token_id=done
    )
    save_random(LlamaConfig(**shape), directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    build_engine(directory, directory / "engine")
    return directory / "engine"


@pytest.fixture(scope="module")
def server(tmp_path_factory, babbler):
    with Server(
        tmp_path_factory.mktemp("state"), "--gpu-kv-chunks", 3000, engine=babbler
    ) as running:
        yield running


def ask(server, model, messages, **body):
    response = server.post(
        "/v1/chat/completions", model=model, messages=messages, max_tokens=16, **body
    )
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("named", [False, True])
def test_whole_history_clients_lose_no_cache_to_tokenising(server, questions, named):
    """Every full chunk that a conversation has computed is reused, in 50 conversations, with any
    generated ids."""
    differs = []

    def talk(number):
        messages = []
        stored = 0
        for question in questions[number]:
            messages.append({"role": "user", "content": question})
            body = dict(conversation=f"talk {number}") if named else {}
            answer = ask(
                server,
                "engine",
                messages,
                seed=number + 1000 * named,
                temperature=1.0,
                return_token_ids=True,
                **body,
            )
            usage = answer["usage"]
            choice = answer["choices"][0]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached >= max(0, stored - 1) // CHUNK * CHUNK, (number, stored, usage)
            stored = usage["total_tokens"]
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
            body = dict(messages=messages, add_generation_prompt=False)
            plain = server.post("/tokenize", model="engine", **body).json()["tokens"]
            log = [*answer["prompt_token_ids"], *choice["token_ids"]]
            differs.append(plain[: len(log)] != log)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(talk, range(len(questions))))
    assert sum(differs) > 0.9 * len(differs), "tokenising the text would have given other ids"


def test_the_demo_loses_no_cache_either(tmp_path, questions):
    def talk(number):
        messages = []
        stored = 0
        for question in questions[number]:
            messages.append({"role": "user", "content": question})
            answer = ask(server, "demo", messages)
            usage = answer["usage"]
            assert (
                usage["prompt_tokens_details"]["cached_tokens"]
                >= max(0, stored - 1) // CHUNK * CHUNK
            )
            stored = usage["total_tokens"]
            messages.append(answer["choices"][0]["message"] | {"role": "assistant"})

    with Server(tmp_path, "--gpu-kv-chunks", 4000) as server, ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(talk, range(len(questions))))


# -- restarts


def question(number, turn):
    return f"Question {turn} of {number}."


class Clients:
    """Users of `CONVERSATIONS` dialogues whose history the server keeps; they go on after every
    restart."""

    def __init__(self):
        self.replies = {}
        self.undecided = set()  # turns in which two tokens were almost equally likely
        self.ended = threading.Event()

    def run(self, server, until=TURNS):
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda number: self._talk(server, number, until), range(CONVERSATIONS)))

    def _talk(self, server, number, until):
        """The server's state of the conversation counts, not the client's."""
        try:
            path = f"{server.url}/v1/conversations/c{number}"
            stored = HTTP.get(path, timeout=60)
            if stored.status_code == 404:
                HTTP.post(f"{server.url}/v1/conversations", json={"id": f"c{number}"}, timeout=60)
            messages = stored.json().get("messages", [])
            assert len(messages) % 2 == 0
            for turn in range(len(messages) // 2):
                question_sent, reply = messages[2 * turn : 2 * turn + 2]
                assert question_sent["content"] == question(number, turn)
                assert self.replies.setdefault((number, turn), reply["content"]) == reply["content"]
            assert all(
                turn < len(messages) // 2 for other, turn in list(self.replies) if other == number
            )
            for turn in range(len(messages) // 2, until):
                body = dict(
                    model="engine",
                    conversation=f"c{number}",
                    history="server",
                    max_tokens=4,
                    temperature=0,
                )
                body |= dict(logprobs=True, top_logprobs=2)
                first_messages = [{"role": "user", "content": question(number, turn)}]
                answer = server.post("/v1/chat/completions", messages=first_messages, **body)
                if answer.status_code == 503:
                    return
                assert answer.status_code == 200, answer.text
                (choice,) = answer.json()["choices"]
                self.replies[number, turn] = choice["message"]["content"]
                if min(map(gap_of, choice["logprobs"]["content"])) < UNDECIDED:
                    self.undecided.add((number, turn))
        except httpx.TransportError:
            assert self.ended.is_set(), "the server went away by itself"


@pytest.fixture(scope="module")
def uninterrupted(server):
    clients = Clients()
    clients.run(server)
    assert len(clients.replies) == TURNS * CONVERSATIONS
    return clients


def kill(server):
    """Everything of this server, at once and without warning."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for number in (pid, *map(int, children)):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    server.process.wait(30)


@pytest.mark.slow
def test_restarts_lose_nothing_double_nothing_and_change_no_reply(tmp_path, babbler, uninterrupted):
    """SIGTERM, then kill -9 twice, each in the middle of the turns and of their commits."""
    draw = random.Random(1)
    clients = Clients()
    for end in (lambda server: server.stop(), kill, kill):
        clients.ended.clear()
        with Server(tmp_path, "--shutdown-timeout", 0, engine=babbler) as server:
            before = len(clients.replies)
            work = threading.Thread(target=clients.run, args=(server,))
            work.start()
            wanted = before + draw.randrange(40, 70)
            while len(clients.replies) < wanted:
                assert work.is_alive()
                work.join(0.002)
            clients.ended.set()
            end(server)
            work.join(60)
            assert not work.is_alive()
    assert len(clients.replies) < TURNS * CONVERSATIONS, (
        "the last one came too late to interrupt anything"
    )
    clients.ended.clear()
    with Server(tmp_path, engine=babbler) as server:
        clients.run(server)
    assert clients.replies.keys() == uninterrupted.replies.keys()
    for number in range(CONVERSATIONS):
        for turn in range(TURNS):
            if (number, turn) in uninterrupted.undecided:
                break  # this reply and those after it may be other ones
            assert clients.replies[number, turn] == uninterrupted.replies[number, turn]
    assert len(uninterrupted.undecided) < CONVERSATIONS / 10


@pytest.mark.slow
def test_what_is_computed_again_after_a_restart_is_not_new(tmp_path):
    """Without a disk: chats with the server's history, a fork's, the client's; completions by text
    and by ids."""

    def turn(server, path, name, **body):
        """Ids of its prompt and its reply, the reply's text, where the prompt came from. Salts keep
        turns apart."""
        body |= dict(
            conversation=name,
            cache_salt=name[0],
            max_tokens=16,
            return_token_ids=True,
            return_sources=True,
        )
        answer = server.post(path, temperature=0, **body).json()
        choice = answer["choices"][0]
        sources = answer["usage"]["prompt_tokens_details"]
        prompt = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return (
            prompt,
            choice["token_ids"],
            text,
            [sources[name] for name in ("cached_tokens", "recomputed", "new")],
        )

    chat, completion, question = "/v1/chat/completions", "/v1/completions", "Tell me about tea."
    messages = [{"role": "user", "content": question}]
    with Server(tmp_path) as server:
        before = {name: turn(server, chat, name, messages=messages) for name in ("a", "b")}
        before |= {name: turn(server, completion, name, prompt=question) for name in ("c", "d")}
    more = {"role": "user", "content": "And coffee?"}
    answer = {"role": "assistant", "content": before["b"][2]}
    with Server(tmp_path) as server:
        HTTP.post(
            f"{server.url}/v1/conversations/a/fork", json={"id": "a fork"}, timeout=60
        ).raise_for_status()
        for path, name, body in (
            (chat, "a fork", dict(messages=[more], history="server")),
            (chat, "b", dict(messages=[*messages, answer, more])),
            (completion, "c", dict(prompt=f"{question}{before['c'][2]} And coffee?")),
            (completion, "d", dict(prompt=[*before["d"][0], *before["d"][1], 7])),
        ):
            # the last token of a reply has had no KV
            stored = [*before[name[0]][0], *before[name[0]][1][:-1]]
            prompt, *_, sources = turn(server, path, name, **body)
            assert prompt[: len(stored)] == stored
            assert sources == [0, len(stored), len(prompt) - len(stored)], name


def test_a_conversation_deleted_during_a_turn_leaves_no_kv(server):
    messages = [{"role": "user", "content": "A long question, of several chunks. " * 8}]
    body = dict(model="engine", conversation="short-lived", max_tokens=16, temperature=0)
    first = server.post("/v1/chat/completions", messages=messages, **body).json()
    messages += [
        first["choices"][0]["message"],
        {"role": "user", "content": "And more of it. " * 8},
    ]
    more = body | dict(
        messages=messages[-1:], history="server", stream=True, max_tokens=2000, ignore_eos=True
    )
    with HTTP.stream("POST", f"{server.url}/v1/chat/completions", json=more, timeout=60) as answer:
        events = answer.iter_lines()
        next(events)
        HTTP.delete(f"{server.url}/v1/conversations/short-lived", timeout=60).raise_for_status()
        assert any("comes too late" in event for event in events)
    again = server.post("/v1/chat/completions", messages=messages, **body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] < CHUNK


@pytest.mark.slow
def test_tenants_share_nothing_unless_they_say_so(tmp_path, babbler):
    prompt = [{"role": "user", "content": "The same long question of two tenants. " * 8}]

    with Server(tmp_path, "--api-key", "one", "two", engine=babbler) as server:

        def turn(key, **body):
            headers = {"authorization": f"Bearer {key}"}
            body = dict(model="engine", messages=prompt, max_tokens=8, temperature=0, **body)
            answer = HTTP.post(
                f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60
            ).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0][
                "message"
            ]["content"]

        assert server.post("/v1/chat/completions", messages=prompt).status_code == 401
        (first, reply), (again, _) = (
            turn("one", conversation="same"),
            turn("one", conversation="same"),
        )
        assert first == 0 and again > 100
        other, equal = turn("two", conversation="same")
        assert other == 0 and equal == reply
        assert turn("two", cache_salt="ours")[0] == 0
        assert turn("one", cache_salt="ours")[0] > 100
        assert turn("one", cache_salt="mine")[0] == 0
        for key in ("one", "two"):
            headers = {"authorization": f"Bearer {key}"}
            listed = HTTP.get(f"{server.url}/v1/conversations", headers=headers, timeout=60).json()[
                "data"
            ]
            assert [entry["id"] for entry in listed] == ["same"]
        gone = HTTP.delete(f"{server.url}/v1/conversations/same", headers=headers, timeout=60)
        assert gone.json()["deleted"] and turn("one", conversation="same")[0] > 100
