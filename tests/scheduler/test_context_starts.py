"""Where an overflowed context starts. Each place that derives it is compared with one plain
definition (docs/design/overflow.md), in random conversations with branches, forks, losses and
suspensions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import cache
from random import Random

import pytest

from pensieve.scheduler.context_window import OVERFLOW_MODES, RECOMPUTE
from pensieve.scheduler.turns.conversations import common_prefix

from .harness import Harness

RUNS = [  # chunk size, context length, share of it that a step drops
    (4, 32, 0.5),
    (4, 38, 0.3),
    (2, 21, 0.8),
    (1, 16, 0.2),
]
TURNS = 30


@cache
def sees_from(position, base, length, step):
    """The first position that `position` sees: the window moves on by a step whenever it is
    full."""
    start = base
    for filled in range(base, position + 1):
        if filled - start == length:
            start += step
    return start


class Starts(Harness):
    """One turn after the other. `lowest`: the starts at which the choice of waiting turns
    begins."""

    def __init__(self, seed, size, length, ratio, mode):
        self.random = Random(seed)
        chunks = -(-length // size) + 3
        super().__init__(
            chunk_tokens=size,
            max_model_len=length,
            overflow=mode,
            overflow_ratio=ratio,
            gpu_kv_chunks=4 * chunks,
            host_kv_chunks=self.random.choice((0, 3 * chunks)),
            generation_reserve=0.0,
        )
        self.recomputes = mode == RECOMPUTE
        self.chosen = {}

    # -- the definition

    def sees_from(self, position, base):
        return sees_from(position, base, self.windows.length, self.windows.step)

    def chain(self, tokens, base):
        """The keys of the full chunks of a context that starts at `base`, by the index of the
        chunk."""
        size = self.config.chunk_tokens
        digest = self.windows.digest
        parts = (self.config.seed, size.to_bytes(4, "little"), b"")
        key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
        if base:
            key = hashlib.sha256(key + digest + base.to_bytes(8, "little")).digest()
        keys = {}
        outgrown = False
        for end in range(base + size, len(tokens) + 1, size):
            if not outgrown and self.sees_from(end - 1, base) > base:
                outgrown = True
                key = hashlib.sha256(key + digest).digest()
            key = hashlib.sha256(key + tokens[end - size : end].tobytes()).digest()
            keys[end // size - 1] = key
        return keys

    def remembered(self, prompt, conversation):
        """The start at which the choice begins: the conversation's, if the prompt goes on behind it
        and may start there."""
        if conversation is None:
            return 0
        base = conversation.context_start
        common = common_prefix(conversation.tokens, prompt)
        return base if common > base and self.sees_from(len(prompt) - 1, 0) >= base else 0

    def choice(self, prompt, conversation):
        """The first start from which fewer tokens must be computed than the last position sees."""
        last = len(prompt) - 1
        if last < self.windows.length:
            return 0
        anew = self.sees_from(last, 0)
        if self.recomputes:
            return anew
        lowest = self.remembered(prompt, conversation)
        for base in range(lowest, anew, self.windows.step):
            computed = base == lowest or self.scheduler._store.was_computed(
                self.chain(prompt, base)[base // self.config.chunk_tokens]
            )
            if computed and self.to_compute(prompt, conversation, base) < last - anew + 1:
                return base
        return anew

    def to_compute(self, prompt, conversation, base):
        """Tokens that must be computed from this start. Each missing position needs all that it
        saw. What lies behind the first window of such a row is computed too."""
        count = len(prompt)
        there = self.there(prompt, conversation, base)
        start = self.sees_from(count - 1, base)
        while True:
            missing = [position for position in range(start, count) if position not in there]
            earlier = self.sees_from(missing[0] if missing else count, base)
            if earlier >= start:
                break
            start = earlier
        behind = start + self.windows.length
        computed = {*missing, *range(behind, count), count - 1}
        return len(computed)

    def there(self, prompt, conversation, base):
        """The positions whose KV is in a tier."""
        size = self.config.chunk_tokens
        store = self.scheduler._store
        positions = set()
        for index, key in self.chain(prompt, base).items():
            if (chunk := store.find(key)) is not None and chunk.resident:
                positions.update(range(index * size, (index + 1) * size))
        tail = conversation.tail if conversation is not None else None
        if tail is not None and tail.resident and conversation.context_start == base:
            common = common_prefix(conversation.tokens, prompt)
            positions.update(range(tail.end - size, min(tail.end - size + tail.tokens, common)))
        return positions

    # -- the places

    def submit(self, prompt, max_tokens=4, conversation=None, **fields):
        request_id = super().submit(prompt, max_tokens, conversation, **fields)
        turn = self.scheduler._turns[request_id]
        stored = self.scheduler.conversations.get(conversation) if conversation else None
        assert turn.context_start == self.remembered(turn.tokens, stored)
        unseen = self.sees_from(len(prompt) - 1, turn.context_start) // self.config.chunk_tokens
        assert self.scheduler._lookup.seen_keys(turn) == turn.keys[unseen:]
        return request_id

    def launch(self):
        waiting = [turn for turn in self.scheduler._queues.waiting if turn.usage is None]
        conversations = self.scheduler.conversations
        expected = {
            turn: self.choice(turn.request.prompt, conversations.of(turn.request))
            for turn in waiting
        }
        plan = super().launch()
        for turn, base in expected.items():
            if turn.usage is not None:
                assert turn.context_start == base
                self.counts["starts chosen"] += 1
                self.counts["later starts"] += 0 < base < self.sees_from(len(turn.tokens) - 1, 0)
        if plan is not None:
            self.check_rows(plan)
        return plan

    def check_rows(self, plan):
        size = self.config.chunk_tokens
        planned = {
            seat: {position} for seat, position in zip(plan.generate, plan.positions, strict=True)
        }
        for span in plan.spans:
            planned.setdefault(span.seat, set()).update(range(span.start, span.end))
        for row in self.scheduler._queues.rows:
            base = row.turn.context_start
            first = row.first * size
            assert (
                self.sees_from(row.window_end - 1, base)
                == first
                < self.sees_from(row.window_end, base)
            )
            assert {self.sees_from(position, base) for position in planned.get(row.seat, ())} <= {
                first
            }
            self.counts["windows moved on"] += base < first

    def apply(self):
        before = dict(self.open)
        applied = super().apply()
        for event in applied.rows if applied is not None else ():
            request, reply = before[event.request]
            count = len(request.prompt) + len(reply)
            assert event.truncated == self.sees_from(count - 2, self.bases[event.request])
        return applied

    def _ended(self, request_id, tokens):
        request, _ = self.open[request_id]
        super()._ended(request_id, tokens)
        if request.conversation is not None:
            self.check_log(request.conversation, self.bases[request_id])

    def check_log(self, name, base):
        """What the conversation claims is what its next turn sees; a deletion knows all of its
        keys."""
        conversation = self.scheduler.conversations.get(name)
        size = self.config.chunk_tokens
        tokens = conversation.tokens
        assert conversation.context_start == base
        assert conversation.first == self.sees_from(len(tokens) - 1, base) // size
        chain = self.chain(tokens, base)
        keys = list(chain.values())
        # the last token has no KV, unless the row had gone on
        full = (len(tokens) - 1) // size - base // size
        assert conversation.keys[base // size :] in (keys[:full], keys)
        deleted = set(self.scheduler.lower.keys(tokens, b""))
        assert deleted.issuperset(chain.values())

    # -- the play

    def suspend_now(self):
        queues = self.scheduler._queues
        for row in [row for row in queues.rows if not row.leaving and not row.spans]:
            queues.suspend(row)
            self.counts["suspended"] += 1

    def play(self):
        for _ in range(TURNS):
            name = self.random.choice(
                ("a", "b", None, *(name for name in self.logs if name.startswith("f")))
            )
            log = self.logs.get(name) or self.random.choice([*self.logs.values(), []])
            if log and self.random.random() < 0.2:
                log = log[: self.random.randrange(1, len(log) + 1)]
            most = self.windows.length
            new = [
                self.random.randrange(97)
                for _ in range(self.random.choice((1, 2, 5, most // 2, most, 2 * most)))
            ]
            request = self.submit(
                [*log, *new], self.random.choice((1, 3, most // 2, most)), name, truncate=True
            )
            while request in self.open:
                if self.random.random() < 0.05:
                    self.suspend_now()
                if self.random.random() < 0.1:
                    self.lose(
                        lambda idle: self.random.sample(idle, self.random.choice((1, len(idle))))
                    )
                self.tick()
            if self.random.random() < 0.3:
                self.lose(lambda idle: self.random.sample(idle, self.random.randint(1, len(idle))))
            if self.logs and self.random.random() < 0.2:
                self.fork_one()
        self.drain()

    def fork_one(self):
        source = self.random.choice(list(self.logs))
        new = f"f{self.random.randrange(3)}"
        if new not in self.logs:
            self.fork(source, new)
            self.check_log(new, self.scheduler.conversations.get(source).context_start)


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
@pytest.mark.parametrize(("size", "length", "ratio"), RUNS)
def test_each_place_agrees_with_the_definition(size, length, ratio, mode, totals):
    harness = Starts(RUNS.index((size, length, ratio)), size, length, ratio, mode)
    harness.play()
    totals.update(harness.counts)
    totals["runs"] += 1


def test_all_of_it_happened(totals):
    if totals["runs"] < len(RUNS) * len(OVERFLOW_MODES):
        pytest.skip("only some of the runs were selected")
    wanted = (
        "starts chosen",
        "later starts",
        "windows moved on",
        "suspended",
        "lost",
        "branches",
        "forks",
        "begun anew",
    )
    assert not [event for event in wanted if not totals[event]], sorted(totals.items())
