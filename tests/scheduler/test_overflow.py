"""Contexts that outgrow the model's: the KV that is kept, contexts that begin again, and right
replies in all cases."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import product

import pytest

from pensieve.scheduler.config import BATCHING_MODES
from pensieve.scheduler.context_window import (
    KEEP,
    LONGEST_LOG,
    OVERFLOW_MODES,
    RECOMPUTE,
    check_length,
)
from pensieve.scheduler.types import ErrorKind, Request, RequestError

from .driver import Driver
from .harness import Harness

WINDOW, STEP = 32, 16


def a_harness(**settings):
    sizes = {"max_model_len": WINDOW, "gpu_kv_chunks": 60, "generation_reserve": 0.0} | settings
    return Harness(**sizes)


def talk(harness, name, turns, new=3, reply=6):
    """A conversation of `turns` turns; returns the usage of each."""
    usages = []
    for turn in range(turns):
        prompt = [*harness.logs.get(name, []), *range(50 + turn, 50 + turn + new)]
        usages.append(harness.turn(prompt, reply, name, truncate=True))
    return usages


def test_a_prompt_cannot_have_any_length():
    harness = a_harness()
    with pytest.raises(RequestError, match="1048576") as refused:
        harness.submit([7] * (LONGEST_LOG + 1), 4, truncate=True)
    assert (refused.value.kind, refused.value.subject) == (ErrorKind.INVALID, "prompt")
    check_length(
        Request(1, array("i", bytes(4 * LONGEST_LOG)), 4, truncate=True), WINDOW, harness.windows
    )


def test_the_predicted_work_is_that_of_the_tokens_seen():
    """The last position of each prompt sees as many tokens, however long the prompt is."""
    work = []
    for tokens in (5 * WINDOW, 50 * WINDOW):
        harness = a_harness()
        turn = harness.scheduler._turns[harness.submit(range(tokens), 4, truncate=True)]
        work.append((turn.work, turn.reply_work))
    assert work[0] == work[1]


def test_kept_kv_serves_on_however_long_a_conversation_becomes():
    """Each turn computes its new tokens and the last one's last sample, in prompts and replies that
    cross windows."""
    harness = a_harness(overflow=KEEP)
    for number, usage in enumerate(talk(harness, "a", 20)):
        assert usage.get("new") == 3 + (number > 0) and "recomputed" not in usage
    assert harness.counts["moved on"] > 8 and set(harness.bases.values()) == {0}
    harness.drain()


def test_without_kept_kv_a_window_is_computed_anew_at_each_step():
    harness = a_harness(overflow=RECOMPUTE)
    usages = talk(harness, "a", 20)
    assert all(usage.get("new") == 3 + (number > 0) for number, usage in enumerate(usages))
    assert sum(usage.get("recomputed", 0) for usage in usages) > 30
    assert harness.counts["moved on"] == 0 and max(harness.bases.values()) > 100
    harness.drain()


@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_a_reply_alone_goes_on_in_its_next_window_though_nothing_else_happens(batching):
    """It was queued again in a plan of generation, after the queue had been checked, and stayed
    there until a message came."""
    harness = a_harness(overflow=RECOMPUTE, batching=batching)
    harness.submit(range(WINDOW - 4), 12, truncate=True)
    while harness.open:
        assert harness.tick() is not None
    harness.drain()


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_a_client_without_an_id_finds_the_same_chunks(mode):
    harness = a_harness(overflow=mode)
    talk(harness, "a", 12)
    usage = harness.turn([*harness.logs["a"], 1, 2, 3], 2, truncate=True)
    assert usage["gpu"] >= 12 and usage["new"] <= 4 + 3  # the log's tail is its conversation's own


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_both_find_what_began_at_another_base(mode):
    """A prompt longer than all windows begins a new context; the id remembers its start, without
    one each base is tried."""
    harness = a_harness(overflow=mode)
    prompt = list(range(100))
    assert harness.turn(prompt, 6, "a", truncate=True) == {"new": 100 - 80}
    assert harness.bases[1] == 80
    again = [*harness.logs["a"], 1, 2]
    usages = [harness.turn(again, 1, name, truncate=True) for name in ("a", None)]
    assert [harness.bases[request] for request in (2, 3)] == [80, 80]
    assert usages[0] == {"gpu": 25, "new": 3}
    assert usages[1]["gpu"] >= 24


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_a_fork_goes_on_beside_the_original(mode):
    harness = a_harness(overflow=mode)
    talk(harness, "a", 12)
    harness.fork("a", "b")
    for name in ("a", "b", "a"):
        usage = harness.turn([*harness.logs[name], 9, 9], 6, name, truncate=True)
        assert usage["gpu"] >= 10 and usage["new"] <= 3 + 3
    harness.drain()


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_a_branch_back_into_an_older_window(mode):
    harness = a_harness(overflow=mode)
    talk(harness, "a", 12)
    for kept in (70, 33, 20):
        harness.turn([*harness.logs["a"][:kept], 5, 6], 6, "a", truncate=True)
        talk(harness, "a", 4)
    harness.drain()


def test_what_only_older_positions_saw_is_not_claimed():
    harness = a_harness(overflow=KEEP)
    talk(harness, "a", 20)
    conversation = harness.scheduler.conversations.get("a")
    assert conversation.first * 4 == harness.windows.start(len(harness.logs["a"]) - 1)
    assert all(chunk.past_window for chunk in conversation.chunks)
    assert len(conversation.chunks) <= WINDOW // 4
    (whereabouts,) = harness.scheduler.conversations.residency(0, 100).conversations
    assert sum(whereabouts.chunks.values()) <= WINDOW // 4


@pytest.mark.parametrize("host", [0, 40])
def test_an_older_windows_chunk_that_is_lost_costs_the_visible_context(host):
    """It cannot be recomputed alone, because the positions that it saw are gone as well."""
    harness = a_harness(overflow=KEEP, host_kv_chunks=host)
    talk(harness, "a", 12)
    seen = harness.scheduler.conversations.get("a").chunks
    harness.lose(lambda idle: [chunk for chunk in idle if chunk is seen[0] or chunk not in seen])
    usage = harness.turn([*harness.logs["a"], 1, 2, 3], 2, "a", truncate=True)
    assert "gpu" not in usage and usage["recomputed"] > 8 and harness.bases[harness.ids] > 0
    talk(harness, "a", 8)
    harness.drain()


def test_a_newer_chunk_that_is_lost_is_computed_alone():
    harness = a_harness(overflow=KEEP)
    talk(harness, "a", 12)
    seen = harness.scheduler.conversations.get("a").chunks
    last = seen[-1]
    assert (
        last.end - 4
        >= harness.windows.end(harness.windows.start(len(harness.logs["a"]) - 1)) - STEP
    )
    harness.lose(lambda idle: [last])
    usage = harness.turn([*harness.logs["a"], 1, 2, 3], 2, "a", truncate=True)
    assert (
        usage["recomputed"] >= 4
        and usage["gpu"] >= 4 * (len(seen) - 1)
        and harness.bases[harness.ids] == 0
    )


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
@pytest.mark.parametrize("lost", [False, True])
def test_a_reply_suspended_beyond_its_window_goes_on_as_it_would_have(mode, lost):
    """Its base is fixed: with all of it lost it is recomputed from there, window by window."""
    harness = a_harness(overflow=mode, gpu_kv_chunks=26, host_kv_chunks=40)
    for number, length in enumerate((6, 5, 4)):
        harness.submit(range(number, number + length), 32, truncate=True)
    harness.tick()
    young = harness.submit(range(40, 70), 32, "young", truncate=True)
    harness.run_until(lambda: young in harness.open and harness.state(young) == "suspended")
    assert len(harness.reply(young)) > 4
    if lost:
        harness.lose(lambda idle: idle)
    harness.run()
    assert len(harness.logs["young"]) == 62
    harness.drain()


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_an_abort_at_every_step_of_a_reply_that_crosses_windows(mode):
    for steps in range(1, 30, 3):
        harness = a_harness(overflow=mode)
        talk(harness, "a", 4)
        request = harness.submit([*harness.logs["a"], 3], 30, "a", truncate=True)
        for _ in range(steps):
            harness.launch()
            if len(harness.results) == 3:
                harness.apply()
        harness.abort(request)
        talk(harness, "a", 2)
        harness.drain()


def test_what_may_not_overflow_is_refused_as_ever():
    harness = a_harness()
    for length, max_tokens, truncate, param in (
        (32, 1, False, "prompt"),
        (30, 3, False, "max_tokens"),
        (30, WINDOW + 1, True, "max_tokens"),
    ):
        with pytest.raises(RequestError) as error:
            harness.submit(range(length), max_tokens, truncate=truncate)
        assert (error.value.kind, error.value.subject) == (ErrorKind.INVALID, param)
    with pytest.raises(RequestError, match="of which the model sees 32 at most"):
        harness.submit(range(40), 1, truncate=True, prompt_logprobs=0)
    harness.submit(range(32), WINDOW, truncate=True, prompt_logprobs=0)


def test_contexts_too_short_to_move_on_are_refused():
    harness = Harness(max_model_len=7)
    with pytest.raises(RequestError, match="context is 7 tokens"):
        harness.submit(range(7), 1, truncate=True)


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_nothing_is_left_of_a_deleted_conversation(mode):
    """This includes KV that only older positions saw and that no conversation claims."""
    harness = a_harness(overflow=mode, host_kv_chunks=0)
    harness.turn(range(90), 6, "a", truncate=True)
    talk(harness, "a", 8)
    assert (
        len([chunk for chunk in harness.scheduler._store.resident_chunks() if chunk.resident])
        > WINDOW // 4
    )
    harness.delete("a")
    while harness.scheduler.has_work(harness.now):
        harness.scheduler.go_on(harness.now)
    assert not [chunk for chunk in harness.scheduler._store.resident_chunks() if chunk.resident]


def test_kept_chunks_on_disk_serve_contexts_that_overflow():
    """They are read at any cost, because they cannot be recomputed alone."""
    harness = a_harness(overflow=KEEP, host_kv_chunks=8, disk_kv_chunks=80, gpu_kv_chunks=10)
    for _ in range(3):
        for name in ("a", "b", "c"):
            talk(harness, name, 5)
    assert harness.counts["disk tokens"] > 40 and harness.counts["moved on"] > 8
    # of 45: tails do not go to DISK, and some are lost
    assert list(harness.bases.values()).count(0) > 30
    harness.drain()


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_a_stored_conversation_goes_on_under_the_other_mode(mode):
    """DISK has KV of both modes after that. Neither mode finds the other's, except that of contexts
    that have not overflowed."""
    (other,) = {*OVERFLOW_MODES} - {mode}
    harness = a_harness(overflow=mode, host_kv_chunks=40, disk_kv_chunks=120)
    talk(harness, "short", 2)
    talk(harness, "long", 12)

    logs = dict(harness.logs)

    def cached(name, mode):
        """Tokens that the next turn finds after a restart."""
        for _ in range(50):
            harness.tick()
        harness.restart(overflow=mode)
        log = logs[name]
        usage = harness.turn([*log, 1, 2, 3], 1, name, truncate=True, stored_tokens=len(log))
        assert usage["new"] <= 3
        return usage.get("host", 0) + usage.get("disk", 0)

    assert cached("long", other) == 0
    assert cached("long", mode) >= WINDOW - STEP
    assert cached("long", other) >= WINDOW - STEP
    assert cached("short", mode) >= 16
    assert cached("short", other) >= 16
    harness.turn([*logs["long"], 1], WINDOW, "long", truncate=True)
    harness.drain()


RUNS = list(product(OVERFLOW_MODES, range(4)))


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize(("mode", "seed"), RUNS)
def test_random_conversations_over_many_windows(mode, seed, totals):
    driver = Driver(
        seed,
        truncates=0.95,
        overflow=mode,
        overflow_ratio=(0.5, 0.25, 0.7, 0.5)[seed],
        max_model_len=(32, 30, 33, 48)[seed],
        gpu_kv_chunks=(18, 64, 40, 13)[seed],
        host_kv_chunks=(16, 0, 60, 24)[seed],
        chunk_tokens=(4, 1, 4, 8)[seed],
        reuse=seed != 2,
    )
    for _ in range(500):
        driver.step()
    driver.drain()
    totals.update({f"{mode} {event}": count for event, count in driver.counts.items()})
    totals["runs"] += 1


@pytest.mark.parametrize("mode", OVERFLOW_MODES)
def test_everything_happened(mode, totals):
    if totals["runs"] < len(RUNS):
        pytest.skip("only some of the runs were selected")
    events = [
        "overflows",
        "begun anew",
        "suspensions",
        "host tokens",
        "gpu tokens",
        "recomputed tokens",
        "drops",
    ]
    for event in [*events, *(["moved on"] if mode != RECOMPUTE else [])]:
        assert totals[f"{mode} {event}"], f"{event} never occurred with {mode}"
