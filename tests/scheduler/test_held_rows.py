"""Rows whose replies have ended and wait for their length. A plain model says what they pin, and
what a log gets."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.turns.drafts import MOST_DRAFTS
from pensieve.scheduler.types import GPU

from .driver import STATES, Driver

OPERATIONS = 900
RUNS = [
    {"seed": 1, "host_kv_chunks": 0},
    {"seed": 2, "host_kv_chunks": 16, "chunk_tokens": 1, "gpu_kv_chunks": 72},
    {
        "seed": 3,
        "host_kv_chunks": 16,
        "disk_kv_chunks": 40,
        "save": "async",
        "copies_may_fail": True,
    },
    {"seed": 4, "host_kv_chunks": 16, "disk_kv_chunks": 90, "save": "sync"},
    {"seed": 5, "host_kv_chunks": 16, "disk_kv_chunks": 20, "save": "sync", "batching": "separate"},
    {"seed": 6, "host_kv_chunks": 16, "speculate": "lookup"},
]


def plain_keys(config, salt, tokens):
    """The keys of the full chunks of `tokens`, a context from position 0 that fits into the model's
    length."""
    size = config.chunk_tokens
    parts = (config.seed, size.to_bytes(4, "little"), salt)
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    keys = []
    for end in range(size, len(tokens) + 1, size):
        key = hashlib.sha256(key + tokens[end - size : end].tobytes()).digest()
        keys.append(key)
    return keys


def reply_ended(request, reply):
    stopped = bool(reply) and reply[-1] in request.stop_ids and len(reply) >= request.min_tokens
    return stopped or len(reply) == request.max_tokens


class HeldRows(Driver):
    """Turns of which most are confirmed. After each operation the pinned chunks are those of the
    model."""

    def __init__(self, **settings):
        # with small steps, so that a row is often met while it computes its history
        super().__init__(truncates=0.0, max_queue=12, max_num_batched_tokens=6, **settings)

    def step(self):
        self.now += self.random.choice((0.001, 0.01, 0.5))
        operations = {
            self.add: 14,
            self.plan: 40,
            self.apply: 40,
            self.abort_one: 3,
            self.finish_one: 5,
            self.suspend_one: 4,
            self.move_histories: 10,
            self.fork_one: 1,
            self.delete_one: 1,
            self.lose_some: 1,
        }
        self.random.choices(list(operations), list(operations.values()))[0]()
        self.check()

    def suspend_one(self):
        rows = [row for row in self.scheduler._queues.rows if not row.leaving and not row.spans]
        if rows:
            self.scheduler._queues.suspend(self.random.choice(rows))

    def move_histories(self):
        """Those of suspended requests are lost, or are on HOST only: when the requests resume, they
        compute them or swap them in."""
        if any(turn.resumes for turn in self.scheduler._queues.waiting):
            if self.random.random() < 0.5:
                self.lose(lambda idle: idle)
            else:
                self.stow()

    def model_held(self):
        """The ids of ended replies whose length is not confirmed, told or kept back."""
        return {
            request_id
            for request_id, (request, reply) in self.open.items()
            if request.confirm and reply_ended(request, reply)
        }

    def context(self, request_id, reply):
        """The prompt and so many tokens of the reply."""
        request, tokens = self.open[request_id]
        return request.prompt + self.tokens(tokens[:reply])

    def check(self):
        super().check()
        scheduler = self.scheduler
        store = self.scheduler._store
        held = self.model_held()
        assert set(scheduler._held) == held
        users = Counter(chunk for row in scheduler._queues.joined() for chunk in row.chunks)
        for request_id in held:
            users.update(self.pinned_by(request_id))
        assert all(chunk.users == users[chunk] for chunk in store.resident_chunks())
        assert scheduler.stats().slots["gpu"]["in_use"] == len(users)
        self.counts["most held"] = max(self.counts["most held"], len(held))

    def pinned_by(self, request_id):
        """The chunks of a held reply: all its full chunks, each the owner of its key or a copy of
        it, and then a tail and the chunks into which the row had gone on."""
        request, reply = self.open[request_id]
        context = self.context(request_id, len(reply))
        chunks = self.scheduler._held[request_id].chunks
        size = self.config.chunk_tokens
        full = (len(context) - 1) // size
        for chunk, key in zip(
            chunks[:full], plain_keys(self.config, request.salt, context), strict=False
        ):
            assert chunk.key in (key, None) and chunk.tokens == size and chunk.slots[GPU] != NO_SLOT
            self.counts["copies held"] += chunk.key is None
        assert full <= len(chunks) <= full + 2 + MOST_DRAFTS // size
        return chunks

    def finish(self, request_id, tokens):
        request, reply = self.open[request_id]
        row = self.scheduler._held.get(request_id)
        size = self.config.chunk_tokens
        copies = row is not None and any(
            chunk.key is None and chunk.tokens == size for chunk in row.chunks
        )
        computed = len(request.prompt) + len(reply) - 1
        context = self.context(request_id, tokens)
        super().finish(request_id, tokens)
        if row is not None and request.conversation is not None and not copies:
            self.check_committed(request, context, computed)

    def check_committed(self, request, context, computed):
        """The conversation claims all of its KV. Its tail is missing only if its chunk belongs to a
        longer context."""
        conversation = self.scheduler.conversations.get(request.conversation)
        assert conversation.tokens == context
        full, rest = divmod(len(context) - 1, self.config.chunk_tokens)
        keys = plain_keys(self.config, request.salt, context)
        assert [chunk.key for chunk in conversation.chunks] in (keys[:full], keys)
        chunk_end = (full + 1) * self.config.chunk_tokens
        if rest and computed < chunk_end - 1:
            assert conversation.tail is not None and conversation.tail.tokens == rest
            self.counts["tails"] += 1
        if rest and computed >= chunk_end:
            assert conversation.tail is None
            self.counts["tails of longer contexts"] += 1


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"seed {run['seed']}")
def test_held_rows_pin_what_the_model_says(run, totals):
    HeldRows(**run).play(OPERATIONS, totals)


def test_all_of_it_happened(totals):
    if totals["runs"] < len(RUNS):
        pytest.skip("only some of the runs were selected")
    states = [state for state in STATES if state not in ("waiting", "loading")]
    wanted = [*(f"finished {state}" for state in states), *(f"aborted {state}" for state in STATES)]
    wanted += ["tails", "tails of longer contexts", "branches", "deletes"]
    assert not [event for event in wanted if not totals[event]], sorted(totals.items())
