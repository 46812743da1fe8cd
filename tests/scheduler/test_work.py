"""Work that is done in pieces over several steps: prompts, forks, pins, deletions, releases,
time-outs."""

from array import array

import pytest

from pensieve.scheduler.kv import chunk_keys
from pensieve.scheduler.types import Erasure, Request, RequestError
from pensieve.scheduler.work import LARGEST_PIECE, Backlog, WorkBudget

from .harness import Harness

CHUNKS = 4 * LARGEST_PIECE  # of a conversation whose work takes several pieces
LENGTH = 4 * CHUNKS
LARGE = {
    "gpu_kv_chunks": 4 * CHUNKS,
    "max_model_len": 3 * LENGTH,
    "max_num_batched_tokens": 2 * LENGTH,
}


def large(**settings):
    """A harness with a conversation "a" of CHUNKS full chunks and no chunk more."""
    harness = Harness(check=False, **(LARGE | settings))
    harness.turn(range(LENGTH), 1, "a")
    return harness


class Unhurried(Harness):
    """Conversations may end later than their time."""

    def _expire(self):
        self.logs = {
            name: log for name, log in self.logs.items() if name in self.scheduler.conversations
        }


def used_up(harness):
    """No unit is left before the next step, so work that begins now waits."""
    harness.scheduler.work.left = 0


def little(harness, most=LARGEST_PIECE):
    harness.scheduler.work.most = most
    used_up(harness)


def submit(harness, prompt, conversation=None, **fields):
    """Submits like `Harness.submit`, but the prompt is prepared in pieces."""
    harness.ids += 1
    request = Request(harness.ids, array("i", prompt), 4, conversation=conversation, **fields)
    harness.salts[request.id] = request.salt
    harness.scheduler.submit(request, harness.now)
    harness.open[request.id] = request, []
    return request.id


def claims(harness, name="a"):
    return [chunk.claims for chunk in harness.scheduler.conversations.get(name).chunks]


def plan(harness):
    """One step, without more work for others than its share."""
    harness.tick()
    harness.scheduler.check()


def rest(harness):
    while harness.scheduler.has_work(harness.now):
        plan(harness)


def test_a_backlog_does_its_work_in_order_and_in_pieces():
    budget = WorkBudget(5)
    done = []

    def work(name, pieces, units):
        for piece in range(pieces):
            done.append((name, piece))
            yield units

    backlog = Backlog(budget)
    backlog.begin(work("a", 3, 2))
    assert (len(done), budget.left) == (2, 1), (
        "half of the budget is for messages, but for the rest of a piece"
    )
    backlog.begin(work("b", 2, 1))
    backlog.go_on()
    assert (len(done), budget.left) == (3, -1) and backlog, "one piece more than the budget"
    budget.renew()
    backlog.go_on(4)
    assert done[3:] == [("b", 0)], "the rest of the budget is for others"
    backlog.go_on()
    assert done[4:] == [("b", 1)] and not backlog


def test_work_waits_for_what_an_earlier_backlog_had_when_it_began():
    budget = WorkBudget(4)
    done = []

    def work(name, pieces):
        for _ in range(pieces):
            done.append(name)
            yield 1

    claims = Backlog(budget)
    deletions = Backlog(budget, claims)
    budget.left = 0
    claims.begin(work("claim", 2))
    deletions.begin(work("deletion", 1))
    claims.begin(work("later claim", 4))
    budget.renew()
    deletions.go_on()
    assert done == []
    claims.go_on(1)
    deletions.go_on()
    assert done == ["claim", "claim", "later claim", "deletion"]


def test_a_fork_does_not_wait_for_a_long_deletion():
    harness = large()
    harness.turn(range(100, 120), 1, "other")
    little(harness, most=6 * LARGEST_PIECE)
    harness.delete("a")
    harness.fork("other", "b")
    plan(harness)
    assert harness.scheduler._deletion_work and set(claims(harness, "b")) == {2}
    rest(harness)


def test_the_end_of_the_process_waits_for_deletions_and_not_for_claims():
    harness = large()
    little(harness)
    harness.fork("a", "b")
    assert harness.scheduler.has_work(harness.now) and not harness.scheduler.lower.unfinished
    harness.delete("b")
    assert harness.scheduler.lower.unfinished
    rest(harness)
    assert not harness.scheduler.lower.unfinished


def test_every_kind_of_work_gets_its_share_of_each_step():
    harness = Unhurried(check=False, conversation_ttl=50.0, **LARGE)
    scheduler = harness.scheduler
    for name, start in (("source", 0), ("deleted", 1)):
        harness.turn(range(start, start + LENGTH), 1, name)
        scheduler.conversations.keep(name, 1e9, 0.0, harness.now)
    harness.turn(range(9), 1, "old")
    deleted = scheduler.conversations.get("deleted")
    row = harness.submit(range(2, LENGTH + 2), 100)
    harness.run_until(lambda: harness.open[row][1])
    used_up(harness)
    scheduler.abort(row, harness.now)
    del harness.open[row]
    harness.delete("deleted")
    harness.fork("source", "fork")
    fork = scheduler.conversations.get("fork")
    request = submit(harness, range(3 * LENGTH - 8))
    harness.now += 100.0
    scheduler.conversations.keep("fork", 1e9, 0.0, harness.now)
    scheduler.go_on(harness.now)
    assert 0 < len(next(iter(scheduler._queues.releasing.values()))) < CHUNKS
    assert 0 < len(scheduler._preparing._turns[scheduler._turns[request]].keys) < 3 * CHUNKS - 2
    assert 0 < fork.walked < CHUNKS
    assert 0 < deleted.walked < CHUNKS
    assert "old" not in scheduler.conversations
    assert scheduler.work.left > 0, "messages get their share"


def test_a_fork_claims_its_chunks_in_pieces():
    harness = large()
    little(harness)
    harness.fork("a", "b")
    assert "b" in harness.scheduler.conversations and set(claims(harness)) == {1}
    plan(harness)
    assert set(claims(harness)) == {1, 2}
    rest(harness)
    assert claims(harness) == claims(harness, "b") == [2] * CHUNKS


def test_a_fork_shares_tokens_keys_and_chunks():
    harness = large()
    harness.fork("a", "b")
    source, fork = map(harness.scheduler.conversations.get, "ab")
    assert (
        fork.tokens is source.tokens and fork.keys is source.keys and fork.chunks is source.chunks
    )


def test_a_chunk_that_is_dropped_before_its_fork_claims_it_ends_the_fork_s_claims():
    harness = large()
    chunks = list(harness.scheduler.conversations.get("a").chunks)
    little(harness, most=3)
    harness.fork("a", "b")
    harness.turn([96] * 9, 1, "a")  # another branch: "a" gives its chunks up
    assert set(claims(harness, "b")) == {0, 1}
    harness.scheduler._store.drop(chunks[70])
    harness.scheduler.work.most = 1024
    rest(harness)
    assert claims(harness, "b") == [1] * 70 and chunks[71].claims == 0


def test_a_turn_that_ends_while_its_fork_claims_chunks_keeps_all_claims():
    harness = large()
    request = harness.submit([*harness.logs["a"], 5], 2, "b")
    little(harness)
    harness.fork("a", "c")
    harness.fork("a", "d")
    harness.scheduler.conversations.keep("d", None, 1e9, harness.now)
    harness.run(request)
    later = harness.submit([*harness.logs["a"], 7], 2, "d")
    harness.run(later)
    assert harness.scheduler.conversations._leaving, "the first claims of d are not all counted yet"
    rest(harness)
    assert claims(harness)[:CHUNKS] == [4] * CHUNKS  # a, b, c and d
    assert {chunk.pins for chunk in harness.scheduler.conversations.get("d").chunks} == {1}


def test_a_deletion_behind_a_fork_drops_what_the_fork_does_not_claim():
    harness = large()
    chunks = harness.scheduler.conversations.get("a").chunks
    little(harness)
    harness.fork("a", "b")
    harness.delete("a")
    assert "a" not in harness.scheduler.conversations
    rest(harness)
    assert [chunk.claims for chunk in chunks] == [1] * CHUNKS and all(
        chunk.resident for chunk in chunks
    )
    harness.delete("b")
    plan(harness)
    assert any(chunk.resident for chunk in chunks) and harness.scheduler.lower.take_erased() == [
        Erasure.WHOLLY
    ]
    rest(harness)
    assert not any(
        chunk.resident for chunk in chunks
    ) and harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]


def test_a_name_may_be_used_again_while_its_deletion_goes_on():
    harness = large()
    little(harness)
    harness.delete("a")
    harness.turn(range(50, 60), 2, "a")
    rest(harness)
    assert claims(harness) == [1, 1] and harness.scheduler.lower.take_erased() == [Erasure.WHOLLY]
    harness.check_logs()


def test_pins_that_change_many_times_cost_one_walk():
    harness = large()
    little(harness)
    conversations = harness.scheduler.conversations
    for number in range(101):
        conversations.keep("a", None, 1e9 if number % 2 else 0.0, harness.now)
    conversations.keep("a", None, 1e9, harness.now)
    plans = 0
    while harness.scheduler.has_work(harness.now):
        plan(harness)
        plans += 1
    assert {chunk.pins for chunk in conversations.get("a").chunks} == {
        1
    } and plans < 2 * CHUNKS / LARGEST_PIECE + 3


def test_conversations_that_expire_together_end_over_several_steps():
    harness = Unhurried(conversation_ttl=10.0, gpu_kv_chunks=200)
    for number in range(30):
        harness.turn([number] * 9, 1, str(number))
    little(harness, most=9)
    harness.now += 100.0
    plan(harness)
    left = len(harness.scheduler.conversations)
    assert 20 < left < 30
    # the last to end by itself: a turn must not revive it
    request = harness.submit([29] * 9, 1, "29")
    assert "29" not in harness.scheduler.conversations
    harness.run(request)
    rest(harness)
    assert len(harness.scheduler.conversations) == 1


def test_logs_that_are_too_large_are_dropped_over_several_steps():
    harness = Unhurried(
        log_chunks=200, gpu_kv_chunks=200, max_model_len=600, max_num_batched_tokens=600
    )
    for number in range(60):
        harness.turn([number] * 9, 1, str(number))
    little(harness, most=9)
    harness.turn(range(500), 1, "large")
    assert len(harness.scheduler.conversations) > 30
    rest(harness)
    assert len(harness.scheduler.conversations) < 30


def test_a_long_prompt_is_prepared_in_pieces_and_passed_by_a_short_one():
    harness = Harness(check=False, **LARGE)
    little(harness)
    long = submit(harness, range(3 * LENGTH - 8))
    short = submit(harness, range(9))
    assert harness.scheduler.stats().waiting == 2 and not harness.scheduler._queues.waiting
    harness.run_until(lambda: harness.open[short][1])
    assert harness.scheduler._turns[long] in harness.scheduler._preparing
    harness.run(long)
    harness.check()


def test_a_submit_works_for_its_own_prompt_alone():
    harness = Harness(check=False, max_queue=20, **LARGE)
    submit(harness, range(3 * LENGTH - 8))
    budget = harness.scheduler.work
    assert budget.spent <= 2 * LARGEST_PIECE
    budget.renew()
    for first in range(15):
        submit(harness, range(first, first + 9))
    assert len(harness.scheduler._queues.waiting) == 15 and budget.left > budget.most // 2


def test_a_short_prompt_waits_for_a_piece_of_each_long_one():
    harness = Harness(check=False, max_queue=20, **LARGE)
    used_up(harness)
    for first in range(10):
        submit(harness, range(first, first + 2 * LENGTH))
    short = submit(harness, range(50, 90))
    harness.scheduler.work.left = 10 * 2 * LARGEST_PIECE + 20
    harness.scheduler._preparing.go_on()
    assert harness.scheduler._turns[short] in harness.scheduler._queues.waiting


def test_choices_share_their_prompt_and_hash_it_once(monkeypatch):
    harness = Harness(check=False, max_queue=20, **LARGE)
    hashed = []
    chunk_key = chunk_keys.chunk_key
    monkeypatch.setattr(
        chunk_keys, "chunk_key", lambda *args: hashed.append(args) or chunk_key(*args)
    )
    prompt = array("i", range(LENGTH))
    for choice in range(20):
        conversation = "a" if choice == 0 else None
        harness.scheduler.submit(Request(choice, prompt, 4, conversation, choice=choice), 0.0)
    while harness.scheduler.has_work(0.0):
        harness.scheduler.go_on(0.0)
    turns = harness.scheduler._turns.values()
    assert len(hashed) == CHUNKS and len({id(turn.keys) for turn in turns}) == 1
    assert all(turn.tokens._prompt is prompt for turn in turns)


def test_what_is_prepared_counts_as_waiting():
    harness = Harness(check=False, max_queue=2, **LARGE)
    used_up(harness)
    submit(harness, range(LENGTH))
    submit(harness, range(9))
    with pytest.raises(RequestError, match="2 requests wait already"):
        submit(harness, range(9))


@pytest.mark.parametrize("how", ["abort", "time out"])
def test_a_request_may_end_while_it_is_prepared(how):
    harness = large(queue_timeout=5.0, max_num_seqs=1)
    running = harness.submit([1, 2, 3], 100)
    harness.tick()
    little(harness, most=3 * LARGEST_PIECE)
    request = submit(harness, [*harness.logs["a"], 5], "a")
    while not harness.scheduler._turns[request].awaited:
        harness.tick()
    assert harness.scheduler._turns[request] in harness.scheduler._preparing
    used_up(harness)
    if how == "abort":
        harness.scheduler.abort(request, harness.now)
    else:
        harness.scheduler.work.renew()
        harness.now += 10.0
        assert harness.scheduler.time_out(harness.now) == [request]
    del harness.open[request]
    harness.scheduler.check()
    assert harness.scheduler.open_requests() == [running]
    rest(harness)
    assert not any(chunk.queue_places for chunk in harness.scheduler.conversations.get("a").chunks)


def test_the_chunks_of_an_aborted_row_are_released_in_pieces():
    harness = Harness(check=False, **LARGE)
    request = harness.submit(range(LENGTH), 100)
    harness.tick()
    little(harness)
    harness.scheduler.abort(request, harness.now)
    del harness.open[request]
    assert harness.scheduler.stats().slots["gpu"]["in_use"] == CHUNKS
    plan(harness)
    assert 0 < harness.scheduler.stats().slots["gpu"]["in_use"] < CHUNKS
    rest(harness)
    assert harness.scheduler.stats().slots["gpu"]["in_use"] == 0


def test_a_row_that_is_released_in_pieces_publishes_no_keys():
    harness = Harness(check=False, **(LARGE | {"max_num_batched_tokens": LENGTH // 4 + 4}))
    request = harness.submit(range(LENGTH), 100)
    harness.launch()
    harness.launch()
    little(harness)
    harness.scheduler.work.left = 1  # for one piece
    harness.scheduler.abort(request, harness.now)
    del harness.open[request]
    harness.apply()
    rest(harness)
    harness.turn(range(LENGTH), 3)  # finds no KV of other positions


def test_a_look_counts_what_it_passes_and_sees():
    harness = large()
    harness.scheduler.work.renew()
    harness.scheduler.conversations.residency(0, 100)
    assert 10 < harness.scheduler.work.spent < 50
