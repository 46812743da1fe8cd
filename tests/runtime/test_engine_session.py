"""What surrounds the loop, once for the server, `LLM` and the benchmarks."""

from __future__ import annotations

import re
from array import array
from concurrent.futures import Future

import pytest

from benchmarks.check.house import ROOT, sources
from pensieve.runtime.engine_session import EngineSession
from pensieve.runtime.messages import Forget, Fork, Keep
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import (
    Erasure,
    ErrorKind,
    FinishReason,
    InvariantError,
    Request,
    RequestId,
    RowResult,
    Sampling,
)

COST = CostProfile(8, 0.0, ((1, 1e-3), (64, 1e-2)), 0.0, chunk_bytes=1, link_bytes_per_s=1.0)


class Sevens:
    """An executor that samples token 7; the test ends the compiling of grammars."""

    def __init__(self):
        self.launched, self.compiling, self.kept = [], [], []

    def launch(self, plan):
        self.launched.append(plan)

    def wait(self):
        plan = self.launched.pop(0)
        return StepResult(plan.step, plan.samples, (7,) * len(plan.samples))

    def done(self):
        return False

    def begin_grammar(self, grammar):
        self.compiling.append(Future())
        return self.compiling[-1]

    def keep_grammar(self, request, compiled):
        self.kept.append((request, compiled))


def make_session(**settings):
    config = SchedulerConfig(
        gpu_kv_chunks=8, host_kv_chunks=0, max_model_len=64, chunk_tokens=8, max_queue=2
    )
    return EngineSession(Scheduler(config, COST), Sevens(), **settings)


def request(number, max_tokens=3, **fields):
    return Request(RequestId(number), array("i", [1, 2, 3]), max_tokens, **fields)


def play(session):
    """The results of each step that has some, until no request is open."""
    steps = []
    while session.open_requests() or not session.idle:
        applied = session.step()
        if applied is not None:
            steps.append(list(applied.results()))
    return steps


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_request_has_one_result_in_each_step(in_pieces):
    session = make_session(in_pieces=in_pieces)
    session.add(request(1))
    first, second, third = [row for rows in play(session) for row in rows]
    assert first.usage.new == 3 and first.tokens == (7,)
    assert second == RowResult(RequestId(1), (7,))
    assert third == RowResult(RequestId(1), (7,), FinishReason.LENGTH)


def test_a_request_that_cannot_be_served_has_a_result_with_its_error():
    session = make_session()
    for number in (1, 2, 3):
        session.add(request(number))
    rows = [row for rows in play(session) for row in rows]
    (refused,) = [row for row in rows if row.error]
    assert (refused.request, refused.error.kind) == (3, ErrorKind.TOO_MANY)
    assert rows[0] == refused, "it comes with the first step that has results"


def test_an_end_between_two_steps_comes_with_the_next_one_or_is_taken():
    session = make_session()
    for number in (1, 2):
        session.add(request(number, 9, confirm=True))
    while (applied := session.step()) is None or len(list(applied.results())) < 2:
        pass
    session.finish(RequestId(1), 1)
    assert session.take_results() == [RowResult(RequestId(1), finish=FinishReason.STOP)]
    session.finish(RequestId(2), 1)
    assert RowResult(RequestId(2), finish=FinishReason.STOP) in session.step().rows
    session.finish(RequestId(2), 1)
    assert session.take_results() == [], "it has ended already"


def test_a_request_waits_for_its_grammar_without_delaying_others():
    woken = []
    session = make_session(wake=lambda: woken.append(True))
    grammar = Sampling(grammar="g")
    session.add(request(1, sampling=grammar))
    session.add(request(2))
    session.add(request(3, sampling=grammar))
    assert session.open_requests() == [1, 3, 2]
    while 2 in session.open_requests():
        session.step()
    session.abort(RequestId(3))
    for compiling in session.executor.compiling:
        compiling.set_result("compiled")
    assert woken == [True, True]
    assert {row.request for rows in play(session) for row in rows} == {1}
    assert session.executor.kept == [(1, "compiled")]


def test_it_sleeps_until_a_grammar_is_compiled():
    session = make_session()
    with pytest.raises(InvariantError, match="nothing is left to do"):
        session.sleep()
    session.add(request(1, sampling=Sampling(grammar="g")))
    assert session.step() is None and session.idle
    session.executor.compiling[0].set_result("compiled")
    session.sleep()
    assert session.scheduler.open_requests() == [1]


def test_changes_and_deletions_of_conversations():
    session = make_session()
    answers = []
    session.add(request(1, conversation="a"))
    play(session)
    session.change(Fork("a", "b"))
    session.change(Fork("unknown", "c"))
    session.change(Keep("unknown", 1.0, 0.0))
    conversations = session.scheduler.conversations
    assert "b" in conversations and "c" not in conversations
    tokens = conversations.tokens("a")
    session.change(Keep("a", None, 1000.0))
    session.forget(Forget("a", tokens, 8, b"", 8), lambda erasure: answers.append(("cut", erasure)))
    assert conversations.tokens("a") == tokens[:8] and conversations.get("a").pinned
    session.forget(Forget("a", tokens, 0, b""), lambda erasure: answers.append(("a", erasure)))
    session.forget(
        Forget(None, tokens, 0, b"other"), lambda erasure: answers.append((None, erasure))
    )
    while len(answers) < 3:
        session.step()
    assert answers == [(what, Erasure.WHOLLY) for what in ("cut", "a", None)]
    assert "a" not in conversations


def test_the_end_of_a_session_keeps_what_another_one_uses():
    """The end of a session tells the loop no tokens: the loop has the log."""
    session = make_session()
    answers = []
    for number, tokens in ((1, range(24)), (2, (*range(8), *range(40, 56)))):
        name = f"session::{number}"
        session.add(Request(RequestId(number), array("i", tokens), 3, conversation=name))
        play(session)
    store = session.scheduler._store
    first, second = (session.scheduler.conversations.get(f"session::{n}") for n in (1, 2))
    shared = [chunk for chunk in first.chunks if chunk in second.chunks]
    own = [chunk for chunk in first.chunks if chunk not in second.chunks]
    assert shared and own
    for name in ("session::1", "session::unknown"):
        session.forget(Forget(name, array("i"), 0, b""), answers.append)
    while len(answers) < 2:
        session.step()
    assert answers == [True, True]
    assert all(store.has(chunk) for chunk in second.chunks)
    assert not any(store.has(chunk) or chunk.resident for chunk in own)
    session.scheduler.check()


def test_only_the_session_surrounds_the_loop():
    makers = [
        path
        for path in sources("runtime")
        if re.search(r"\bEngineLoop\(", path.read_text(encoding="utf-8"))
    ]
    assert [path.relative_to(ROOT).as_posix() for path in makers] == ["runtime/engine_session.py"]
