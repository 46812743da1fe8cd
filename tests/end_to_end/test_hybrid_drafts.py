"""Drafts of a model with linear attention: each token of a reply has the log probability that plain
transformers gives it, with right drafts and with wrong ones."""

from __future__ import annotations

import random
import time
from array import array
from collections import deque

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.plugins.state.pool import state_chunks
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.runtime.loop import EngineLoop
from pensieve.scheduler.config import StateConfig
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.planning.live_states import LiveStates
from pensieve.scheduler.turns.drafts import Drafts
from pensieve.scheduler.types import GREEDY, InvariantError, Request
from tests.models import save_random, tiny_config
from tests.scheduler.draft_policy import always_draft, decide_by_chance

from .chatter import TIGHT, Chatter, Open, check_logprobs
from .sharing import SharingDevice

DRAFTS = dict(speculate="lookup", max_num_seqs=40, max_num_batched_tokens=170)
WITHIN = 1e-4
EVENTS = ("gpu", "host", "recomputed", "drafted", "accepted")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory of the engine, the model in transformers)."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("hybrid")
    reference = save_random(tiny_config("qwen3-5"), directory / "checkpoint", gain=1.0)
    build_engine(directory / "checkpoint", directory / "engine")
    return directory / "engine", reference


@pytest.fixture(autouse=True)
def always(monkeypatch):
    always_draft(monkeypatch)


class LogitsDevice(SharingDevice):
    """Keeps the logits of each step's samples."""

    def load(self, *args):
        self.logits = deque()
        super().load(*args)

    def sample(self):
        count = len(self._uploaded.sample_seats)
        self._issue_work(Lane.COMPUTE, lambda: self.logits.append(self._logits[:count].clone()))
        return super().sample()


class LogitsChatter(Chatter):
    """Compares the log probability of each token of a reply, from the logits that it was drawn
    from."""

    def __init__(self, model, seed, **settings):
        directory, reference = model
        self._plans = deque()
        self._of_rows = {}
        super().__init__(
            open_engine(directory), reference, seed, make_device=LogitsDevice, **(DRAFTS | settings)
        )

    def _begin(self):
        super()._begin()
        self._plans.clear()
        self._logits = {}

    def launch(self, plan):
        super().launch(plan)
        self._plans.append(plan)

    def wait(self):
        result = super().wait()
        plan = self._plans.popleft()
        self._of_rows = {}
        if plan.tokens:
            for row, logits in zip(plan.samples, self._device.logits.popleft(), strict=True):
                self._of_rows.setdefault(row.request, []).append(logits)
        return result

    def _apply(self, applied):
        for row in applied.results():
            kept = self._of_rows.get(row.request, [])[: len(row.tokens)]
            assert len(kept) == len(row.tokens)
            self._logits.setdefault(row.request, []).extend(kept)
        super()._apply(applied)

    def _ended(self, turn):
        tokens = [*turn.request.prompt, *turn.reply]
        logits = torch.stack(self._logits.pop(turn.request.id))
        chosen = torch.tensor(turn.reply)[:, None]
        ours = logits.log_softmax(dim=-1).gather(1, chosen)[:, 0]
        check_logprobs(self.reference, tokens, ours.tolist(), WITHIN)
        super()._ended(turn)

    def talk(self, prompt, count, name=None):
        """Plays one turn and returns its reply."""
        self.requests += 1
        request = Request(
            self.requests, array("i", prompt), count, sampling=GREEDY, conversation=name
        )
        turn = self.open[request.id] = Open(request)
        self.scheduler.add(request, time.monotonic())
        loop = EngineLoop(self.scheduler, self)
        while self.open or not self.scheduler.idle:
            applied = loop.step()
            if applied is not None:
                self._apply(applied)
            self.scheduler.check()
        return turn.reply


@torch.inference_mode()
def greedy(reference, tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def propose(monkeypatch, draft):
    """`draft(tokens)` gives the drafts behind these tokens."""
    monkeypatch.setattr(Drafts, "next", lambda self, tokens: array("i", draft([*tokens[:]])))


def knows(truth, right, vocabulary):
    """Of 16 drafts the first `right` come true."""

    def draft(tokens):
        drafts = truth[len(tokens) : len(tokens) + 16]
        return drafts[:right] + [(token + 1) % vocabulary for token in drafts[right:]]

    return draft


@pytest.mark.parametrize("right", [0, 1, 5, 16], ids=lambda right: f"{right} right")
@pytest.mark.parametrize("length", [62, 63, 64, 65])
def test_drafts_that_come_true_in_part(model, right, length, monkeypatch):
    """The first check begins at these positions, 64 tokens are a piece, and states are kept at 128
    and 192. The second turn begins at the first one's state."""
    directory, reference = model
    torch.manual_seed(length)
    prompt = torch.randint(3, 160, (length,)).tolist()
    truth = greedy(reference, prompt, 134)
    propose(monkeypatch, knows(truth, right, 160))
    engine = open_engine(directory)
    chunks = state_chunks(engine.state_shape, engine.chunk_bytes(8))
    states = StateConfig(chunks, 42, spacing=64, generated=64, multiple=64)
    sizes = dict(host_kv_chunks=60 * chunks, max_model_len=240)
    chatter = LogitsChatter(model, 1, states=states, **sizes)
    reply = chatter.talk(prompt, 134, "c")
    stats = chatter.scheduler.stats()
    assert stats.drafted > 100 and (right < 16 or stats.accepted == stats.drafted)
    assert (stats.accepted == 0) == (right == 0)
    assert reply == truth[length:]
    ends = sorted(state.end for state in chatter.scheduler._states.kept.by_key.values())
    assert ends[-1] == 192, "the newest one of the reply"
    chatter.scheduler.conversations.fork("c", "d", time.monotonic())
    for name in ("c", "d"):
        begins = chatter.scheduler.stats().states["swapped_in"]
        chatter.talk([*truth, 9], 1, name)
        assert chatter.scheduler.stats().states["swapped_in"] > begins
    chatter.executor.close()


def guesses(reference, seed):
    """Drafts that the model itself would draw, up to a place chosen by chance."""
    dice = random.Random(seed)

    def draft(tokens):
        right = dice.choice((0, 0, 1, 2, 6))
        drafts = greedy(reference, tokens, right)[len(tokens) :]
        return drafts + [dice.randrange(3, 160) for _ in range(dice.choice((0, 1, 4)))]

    return draft


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize("host", [0, 300])
def test_replies_of_random_conversations(model, disturbed, host, monkeypatch):
    decide_by_chance(monkeypatch, 3)
    propose(monkeypatch, guesses(model[1], 7))
    sizes = dict(gpu_kv_chunks=60, host_kv_chunks=host)
    chatter = LogitsChatter(model, 4, disturbed=disturbed, **sizes)
    counts = chatter.run(24, events=("forked", *(EVENTS if host else EVENTS[3:])))
    assert (counts["gpu"] + counts["host"] > 0) == (host > 0)


def test_replies_of_suspended_requests(model, monkeypatch):
    propose(monkeypatch, guesses(model[1], 8))
    chatter = LogitsChatter(model, 9, gpu_kv_chunks=29, host_kv_chunks=200, **TIGHT)
    chatter.run(12, events=("suspended", *EVENTS))


def test_replies_across_restarts_with_a_disk(model, tmp_path, monkeypatch):
    propose(monkeypatch, guesses(model[1], 9))
    disk = DiskSettings(tmp_path, 1500, "ab")
    sizes = dict(gpu_kv_chunks=29, host_kv_chunks=120, disk_kv_chunks=1500)
    chatter = LogitsChatter(model, 5, disk=disk, **sizes)
    chatter.run(24, restarts=3, events=("disk", "drafted", "accepted"))


def keeps_rejected_tokens(monkeypatch):
    check = LiveStates.check_drafts
    monkeypatch.setattr(LiveStates, "check_drafts", lambda *args: (check(*args)[0],) * 2)


def applies_accepted_tokens_twice(monkeypatch):
    reply = LiveStates.reply

    def stays(self, row, start, end, builder):
        slots = reply(self, row, start, end, builder)
        if end - start > 1:
            row.state.at = start
            row.drafts.checked = builder.step
        return slots

    monkeypatch.setattr(LiveStates, "reply", stays)


@pytest.mark.parametrize("mutate", [keeps_rejected_tokens, applies_accepted_tokens_twice])
def test_an_error_is_found(model, mutate, monkeypatch):
    """By the check of each plan."""
    mutate(monkeypatch)
    propose(monkeypatch, guesses(model[1], 8))
    with pytest.raises(InvariantError, match=r"behind drafts|of other tokens"):
        LogitsChatter(model, 4, gpu_kv_chunks=60, host_kv_chunks=300).run(24)


def test_the_option_is_taken(model):
    """A reply that repeats itself has the tokens that it has without drafts."""
    directory, _ = model
    torch.manual_seed(5)
    prompt = torch.randint(3, 160, (30,)).tolist() * 5
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    replies = []
    for speculate in ("off", "lookup"):
        with LLM(str(directory), speculate=speculate, host_kv_chunks=400) as llm:
            (output,) = llm.generate([prompt], params)
            replies.append(output.outputs[0].token_ids)
    assert replies[0] == replies[1]
