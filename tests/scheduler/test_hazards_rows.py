"""Hazards (docs/design/hazards.md) of rows, keys and conversations, each a short story of a
possible failure.

The device model below checks every read, write, wait and token; the tests check further conditions.
"""

from __future__ import annotations

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.chunk_keys import chunk_key, root_key
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import GPU, RequestError

from .device_model import next_token
from .harness import Harness
from .stories import TIGHT, loading_early, off_gpu, suspended

# -- rows that end, leave and come back


def test_a_row_that_ended_runs_once_more_and_is_freed_once():
    """Three steps are in flight when the first one brings the stop id; the row's slots are freed
    once, after the third."""
    harness = Harness()
    prompt = list(range(15))
    stop = next_token(prompt)
    request = harness.submit(prompt, 9, "a", stop_ids=frozenset([stop]))
    plans = [harness.launch() for _ in range(3)]
    assert [len(plan.samples) for plan in plans] == [1, 1, 1]
    for _ in plans:
        harness.apply()
        harness.check()
    assert request not in harness.open and harness.logs["a"].tolist() == [*prompt, stop]
    tail = harness.scheduler.conversations.get("a").tail
    assert tail is None or tail.tokens == 15 % 4
    harness.turn([*harness.logs["a"], 3], 9, "a")
    harness.drain()


def test_a_resumed_row_gets_a_new_epoch_and_all_its_slots_anew():
    """Its chunks have moved meanwhile: not one slot of its first stay may be taken for granted."""
    harness = Harness(**TIGHT)
    younger = suspended(harness)
    tokens = 20 + len(harness.reply(younger))
    while harness.state(younger) == "suspended":
        plan = harness.tick()
    (join,) = plan.joins
    assert join.row == (younger, 3)
    (blocks,) = (update for update in plan.blocks if update.seat == join.seat)
    assert blocks.first == 0 and len(blocks.slots) == -(-tokens // 4)
    harness.drain()


def test_a_reply_cut_while_its_dropped_history_is_recomputed_leaves_no_false_tail():
    """Suspended, dropped, resumed: then a stop string ends it before its tail is computed again.
    The tail's slot contains another request's data."""
    harness = Harness(**TIGHT | {"host_kv_chunks": 0, "max_num_batched_tokens": 4})
    older = harness.submit(range(20), 44, "old")
    younger = harness.submit(range(40, 60), 30, "young", confirm=True)
    harness.run_until(lambda: harness.scheduler.stats().suspensions)
    harness.run_until(lambda: older not in harness.open and harness.state(younger) == "resuming")
    kept = next(k for k in range(len(harness.reply(younger)), 0, -1) if (20 + k - 1) % 4)
    harness.finish(younger, kept)
    harness.turn([*harness.logs["young"], 7, 8, 9], 4, "young")
    harness.drain()


@pytest.mark.parametrize("tokens", [20, 21])  # with a tail, and without
def test_a_suspended_request_that_finishes_while_it_waits_keeps_its_tail(tokens):
    """All but its last token has KV: not one token less is found again, and not one more."""
    harness = Harness(**TIGHT)
    younger = suspended(harness, tokens, confirm=True)
    harness.finish(younger, len(harness.reply(younger)))
    log = harness.logs["young"]
    tail = harness.scheduler.conversations.get("young").tail
    assert (tail.tokens if tail else 0) == (len(log) - 1) % 4
    request = harness.submit([*log, 7], 2, "young")
    harness.run(request)
    harness.drain()


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_reply_cut_while_its_history_is_loading(monkeypatch, kept):
    """Suspended, moved to HOST, on its way back: the tail has a GPU slot that holds nothing yet
    when the turn ends."""
    harness = Harness(chunks_a_step=1)
    harness.submit([50, 51], 40)
    request = harness.submit(range(20), 20, "a", confirm=True)
    harness.run_until(lambda: len(harness.reply(request)) == 6)
    with monkeypatch.context() as no_room:
        no_room.setattr(harness.scheduler._admission, "_fits", lambda *_: False)
        harness.scheduler._queues.suspend(harness.scheduler._queues.rows[-1])
        harness.tick()
    for chunk in list(harness.scheduler._store.only[GPU]):
        harness.place(chunk, "host")
    harness.launch()
    assert harness.state(request) == "loading"
    harness.finish(request, kept)
    harness.check()
    usage = harness.turn([*harness.logs["a"], 7, 8], 2, "a")
    assert usage.get("gpu", 0) + usage["host"] >= 20
    harness.drain()


def test_an_abort_of_a_suspended_request_drops_its_tail():
    """It could never be used again."""
    harness = Harness(**TIGHT)
    younger = suspended(harness)
    (turn,) = harness.scheduler._queues.waiting
    tail = turn.tail
    assert tail.resident and tail.key is None
    harness.abort(younger)
    assert not tail.resident
    harness.drain()


def test_a_tail_that_another_row_completed_is_not_left_behind(monkeypatch):
    """A client sends its history with the reply that is still being generated, and is suspended in
    mid-chunk. The other row completes the same chunk, so the returning row holds that chunk. Its
    own chunk is then unused."""
    harness = Harness(max_num_seqs=2, max_num_batched_tokens=12)
    older = harness.submit(range(28), 28)
    reply = []
    while len(reply) < 16:
        reply.append(next_token([*range(28), *reply]))
    harness.run_until(lambda: len(harness.reply(older)) > 2)
    younger = harness.submit([*range(28), *reply, *range(10, 16)], 4)
    harness.tick()
    queues = harness.scheduler._queues
    with monkeypatch.context() as no_room:
        no_room.setattr(harness.scheduler._admission, "_fits", lambda *_: False)
        queues.suspend(queues.rows[-1])
        harness.tick()
        (turn,) = queues.waiting
        tail = turn.tail
        assert turn.request.id == younger and tail.tokens % 4 and tail.resident
        harness.run_until(lambda: older not in harness.open)
    harness.tick()
    assert harness.state(younger) in ("running", "resuming") and not tail.resident
    harness.drain()


@pytest.mark.parametrize("reached", ["gated", "early", "unissued"])
def test_an_abort_with_a_swap_in_in_flight(reached):
    """The client leaves while its history is being copied. The slots are free at once; their next
    user waits."""
    harness = Harness(chunks_a_step=1, **TIGHT)
    if reached == "gated":
        request = harness.submit(off_gpu(harness), 4, "a")
        swap_in = next(batch for batch in harness.launch().copies if batch.gated)
    else:
        _, request, swap_in = loading_early(harness)
    row = next(
        row
        for row in (*harness.scheduler._queues.rows, *harness.scheduler._queues.swapping_in)
        if row.turn.request.id == request
    )
    unissued = [chunk.slots[GPU] for chunk in row.swap_ins]
    assert bool(unissued) == (reached != "gated")
    harness.abort(request)
    harness.check()
    assert harness.scheduler.stats().slots["gpu"]["free"] >= len(unissued)
    before = harness.device.issued.swap_in
    assert before == swap_in.ticket
    taker = harness.submit(range(200, 252) if reached != "unissued" else range(200, 220), 8)
    harness.run(taker)
    again = harness.turn([*harness.logs["a"], 7, 8], 4, "a")
    assert again["new"] <= 3
    harness.drain()


def test_a_seat_waits_for_what_was_loaded_early():
    """Nothing gates an early swap-in: the step in which the request joins names its ticket."""
    harness = Harness(chunks_a_step=1, **TIGHT)
    _, loading, early = loading_early(harness)
    while harness.state(loading) == "loading":
        plan = harness.launch()
        harness.apply()
    (last,) = (batch for batch in plan.copies if batch.gated)
    assert early.ticket <= plan.after.swap_in < last.ticket
    harness.drain()


def test_an_id_used_again_does_not_get_the_old_row_s_tokens():
    """The epoch tells the two apart."""
    harness = Harness()
    harness.submit(range(9), 8, id=5)
    harness.launch()
    harness.abort(5)
    harness.submit(range(30, 43), 8, id=5)
    harness.launch()
    applied = harness.apply()
    assert not list(applied.results())
    (row,) = harness.apply().results()
    assert len(row.tokens) == 1
    with pytest.raises(RequestError, match="being served"):
        harness.submit(range(3), 8, id=5)
    harness.drain()


# -- another conversation's KV


def test_equal_text_under_another_salt_shares_nothing():
    """Same prompt, same conversation id, another owner's salt: neither chunks nor the tail."""
    harness = Harness()
    harness.turn(range(18), 2, "a", salt=b"one")
    usage = harness.turn(range(18), 2, "b", salt=b"two")
    assert usage == {"new": 18}
    usage = harness.turn([*harness.logs["a"], 1], 2, "a", salt=b"two")
    assert usage.get("gpu", 0) == 16  # the chunks of b, which has that salt; not a's tail
    harness.drain()


def test_a_tail_serves_its_own_conversation_only():
    """Two conversations end in equal tails behind different openings."""
    harness = Harness()
    same = [60, 61]
    harness.turn([*range(16), *same], 1, "a")
    harness.turn([*range(20, 36), *same], 1, "b")
    usage = harness.turn([*range(20, 36), *same, 5], 1, "c")
    assert usage == {"gpu": 16, "new": 3}
    usage = harness.turn([*harness.logs["b"], 5], 1, "b")
    assert usage == {"gpu": 18, "new": 2}
    harness.drain()


def test_a_key_holds_everything_that_changes_kv():
    prompt = Harness.tokens(range(8))
    roots = {
        "as is": root_key(b"weights", 4, b"salt"),
        "other weights": root_key(b"weights 2", 4, b"salt"),
        "other chunk size": root_key(b"weights", 8, b"salt"),
        "other salt": root_key(b"weights", 4, b"salt 2"),
        "bytes moved from seed to salt": root_key(b"weight", 4, b"ssalt"),
    }
    assert len(set(roots.values())) == len(roots)
    first = chunk_key(roots["as is"], prompt, 0, 4)
    assert first == chunk_key(root_key(b"weights", 4, b"salt"), Harness.tokens(range(9)), 0, 4)
    keys = [chunk_key(root, prompt, 0, 4) for root in roots.values()]
    keys += [
        chunk_key(first, prompt, 0, 4),
        chunk_key(first, prompt, 4, 8),
        chunk_key(roots["as is"], prompt, 4, 8),
    ]
    assert len(set(keys)) == len(keys)


def test_the_seed_of_the_settings_reaches_the_keys():
    keys = set()
    for seed in (b"", b"other"):
        harness = Harness(seed=seed)
        harness.turn(range(9), 1, "a")
        keys.update(harness.scheduler.conversations.get("a").keys)
    assert len(keys) == 4


# -- one conversation, several requests


def test_two_requests_of_one_conversation_in_flight_at_once():
    """Only one of them can append to the tail; the other computes its own. The id names the branch
    that ends last."""
    harness = Harness()
    harness.turn(range(18), 2, "a")
    log = harness.logs["a"]
    tail = harness.scheduler.conversations.get("a").tail
    first = harness.submit([*log, 1], 9, "a")
    second = harness.submit([*log, 2], 6, "a")
    harness.launch()
    holders = [row for row in harness.scheduler._queues.rows if tail in row.chunks]
    assert [row.turn.request.id for row in holders] == [first]
    harness.run()
    assert harness.logs["a"][: len(log) + 1].tolist() == [*log, 1] and first > 0 and second > 0
    harness.turn([*harness.logs["a"], 3], 3, "a")
    harness.drain()


@pytest.mark.parametrize("kept", range(1, 9))
def test_a_reply_cut_in_the_middle_of_a_chunk_is_continued(kept):
    """A stop string ends the reply after `kept` tokens; more were generated, and more is in
    flight."""
    harness = Harness()
    request = harness.submit(range(10), 20, "a", confirm=True)
    while len(harness.reply(request)) < 8:
        harness.tick()
    harness.launch()
    harness.finish(request, kept)
    harness.apply()
    assert len(harness.logs["a"]) == 10 + kept
    usage = harness.turn([*harness.logs["a"], 90, 91], 6, "a")
    assert usage["gpu"] >= (10 + kept - 1) // 4 * 4
    harness.drain()


# -- the herd, the full hit


def test_a_second_request_with_the_same_long_prompt_waits_and_then_hits():
    """Twenty clients send the same new document: it is computed once."""
    harness = Harness(max_num_batched_tokens=12)
    first = harness.submit(range(30), 2)
    second = harness.submit([*range(30), 77], 2)
    harness.tick()
    assert (harness.state(first), harness.state(second)) == ("running", "waiting")
    before = harness.counts["new tokens"]
    harness.run()
    assert harness.counts["new tokens"] - before == 30 + 3 and harness.counts["gpu tokens"] == 28


def test_a_scored_prompt_is_computed_again_in_pieces_and_written_nowhere():
    """Its chunks are cached and perhaps others read them now: suppression must survive every cut of
    the span."""
    harness = Harness(max_num_batched_tokens=6)
    harness.turn(range(16), 1)
    harness.submit(range(16), 3, prompt_logprobs=0)
    spans = [span for _ in range(3) for span in harness.launch().spans]
    assert [(span.start, span.end, span.write_from) for span in spans] == [
        (0, 6, 16),
        (6, 12, 16),
        (12, 16, 16),
    ]


def test_a_chunk_that_is_still_loading_is_waited_for():
    """Its GPU slot is reserved, but holds nothing yet."""
    harness = Harness(chunks_a_step=1)
    harness.turn(range(21), 1, "a")
    for chunk in harness.scheduler.conversations.get("a").chunks:
        harness.place(chunk, "host")
    harness.submit([50, 51], 40)
    harness.tick()
    loading = harness.submit([*harness.logs["a"], 7], 2, "a")
    second = harness.submit([*range(21), 60], 2)
    harness.launch()
    (row,) = harness.scheduler._queues.swapping_in
    assert row.turn.request.id == loading and row.swap_ins[0].slots[GPU] != NO_SLOT
    assert harness.state(second) == "waiting"
    harness.drain()
    assert harness.counts["waits for keys"]


def test_a_suspended_request_that_waits_for_a_key_lets_no_later_arrival_pass(monkeypatch):
    """Two requests of one document are suspended and their chunks dropped. The older one recomputes
    it, the younger one waits for that. A new request, small enough to fit, stays behind it."""
    harness = Harness(max_num_batched_tokens=6)
    elder = harness.submit(range(20), 20)
    younger = harness.submit([*range(20), 70], 20)
    harness.run_until(lambda: harness.reply(elder) and harness.reply(younger))
    queues = harness.scheduler._queues
    with monkeypatch.context() as no_room:
        no_room.setattr(harness.scheduler._admission, "_fits", lambda *_: False)
        for row in queues.rows:
            queues.suspend(row)
        harness.tick()
    harness.lose(list)
    newcomer = harness.submit([90], 2)
    waited = False
    while harness.state(younger) == "suspended":
        assert harness.state(newcomer) == "waiting"
        waited = waited or queues.waiting[0].waiting_for is not None
        harness.tick()
    assert waited and harness.state(elder) == "running"
    harness.drain()


def test_a_request_that_waits_for_a_key_is_released_when_its_row_is_aborted():
    harness = Harness(max_num_batched_tokens=12)
    first = harness.submit(range(30), 2)
    second = harness.submit([*range(30), 77], 2)
    harness.tick()
    harness.abort(first)
    harness.tick()
    assert harness.state(second) == "running"
    harness.drain()


def test_a_fully_cached_prompt_computes_its_last_token_and_writes_nothing():
    """Its KV is there and shared; computing it once more gives the sample, but must not touch the
    chunk."""
    harness = Harness()
    harness.turn(range(16), 1)
    harness.submit(range(16), 3)
    plan = harness.tick()
    (span,) = plan.spans
    assert (span.start, span.end, span.write_from, span.samples) == (15, 16, 16, True)
    assert harness.device.last_writer["gpu", plan.blocks[0].slots[3]] != (Lane.COMPUTE, plan.step)
    assert (harness.counts["gpu tokens"], harness.counts["recomputed tokens"]) == (15, 1)
    harness.drain()
