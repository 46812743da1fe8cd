"""The needs of a request, for chunks in each tier and in none."""

from __future__ import annotations

from itertools import product

import pytest

from pensieve.scheduler.planning.lookup import RequestNeeds

from ..harness import Harness

SIZE = 4
PROMPT = range(22)  # five full chunks and two tokens


def find(harness, request):
    turn = harness.scheduler._turns[request]
    return harness.scheduler._lookup.look_up(
        turn, harness.scheduler.conversations.of(turn.request), 0
    )


def spread(harness, places):
    """Moves a finished conversation's chunks to the tiers in `places`, one letter for each chunk.
    Returns the prompt's chunks."""
    for chunk, place in zip(harness.scheduler.conversations.get("a").chunks, places, strict=True):
        harness.place(chunk, {"g": "gpu", "h": "host", "b": "both", "-": "dropped"}[place])
    harness.check()


def spans(needs):
    return [(span.start, span.end) for span in needs.spans]


@pytest.mark.parametrize("places", ["".join(places) for places in product("gh-", repeat=5)])
def test_holes_anywhere(places):
    """Every mixture of GPU, HOST and dropped: missing chunks are computed, each token counts once,
    the reply is right."""
    harness = Harness(host_kv_chunks=32)
    harness.turn(range(21), 1, "a")
    spread(harness, places)
    prompt = [*harness.logs["a"], *range(50, 56)]
    request = harness.submit(prompt, 3, "a")
    needs = find(harness, request)
    assert isinstance(needs, RequestNeeds)
    assert needs.tail_tokens == 1 and needs.tail.end == 24
    hits = [place != "-" for place in places]
    missing = {
        p
        for index, hit in enumerate(hits)
        if not hit
        for p in range(index * SIZE, (index + 1) * SIZE)
    }
    covered = [p for start, end in spans(needs) for p in range(start, end)]
    assert covered == sorted(missing | set(range(21, 28)))
    assert all(
        left[1] < right[0] for left, right in zip(spans(needs), spans(needs)[1:], strict=False)
    )
    assert [span.samples for span in needs.spans] == [False] * (len(needs.spans) - 1) + [True]
    assert [needs.chunks[index] in needs.swap_ins for index in range(5)] == [
        place == "h" for place in places
    ]
    usage = needs.usage
    assert (usage.gpu, usage.host) == (SIZE * places.count("g") + 1, SIZE * places.count("h"))
    assert (usage.recomputed, usage.new) == (SIZE * places.count("-"), 7)
    assert needs.new_slots == 1 + places.count("-") + places.count("h")
    harness.drain()


def test_the_work_of_a_turn_is_what_a_step_grows_by():
    """In proportion to the tokens that are in no tier; the step's fixed part, which two tokens take
    too, is no part."""
    harness = Harness()
    harness.turn(range(40), 2, "a")
    request = harness.submit([*harness.logs["a"], 7], 2, "a")
    turn = harness.scheduler._turns[request]
    lookup = harness.scheduler._lookup
    kept = lookup.work(turn, 10)
    assert lookup.work(turn, 0) / kept == pytest.approx(43 / 3)
    harness.drain()


def test_idle_hits_count_as_no_longer_obtainable():
    harness = Harness()
    harness.turn(range(21), 1, "a")
    spread(harness, "gb-hb")
    needs = find(harness, harness.submit([*harness.logs["a"], 1], 3, "a"))
    # the tail is the second one without a copy
    assert (needs.idle_spare, needs.idle_only) == (2, 1 + 1)
    harness.drain()


def test_looking_changes_nothing():
    harness = Harness()
    harness.turn(range(21), 1, "a")
    spread(harness, "gh-gh")
    request = harness.submit([*harness.logs["a"], 1], 3, "a")
    before = harness.scheduler.stats()
    assert find(harness, request) == find(harness, request)
    assert harness.scheduler.stats() == before
    harness.check()
    harness.drain()


@pytest.mark.parametrize(
    ("common", "hits", "tail_tokens"),
    [(22, 20, 2), (21, 20, 1), (20, 20, 0), (19, 16, 0), (3, 0, 0)],
)
def test_a_branch_keeps_what_it_has_in_common(common, hits, tail_tokens):
    """A log of 23 tokens, 22 with KV; the new prompt leaves it after `common` tokens."""
    harness = Harness()
    harness.turn(PROMPT, 1, "a")
    request = harness.submit([*harness.logs["a"][:common], *range(70, 75)], 3, "a")
    needs = find(harness, request)
    assert (needs.usage.gpu, needs.tail_tokens) == (hits + tail_tokens, tail_tokens)
    harness.run(request)
    harness.drain()


def test_recomputed_counts_what_was_here_before():
    """A dropped tail counts too; the last token of the reply never had KV, so it is new."""
    harness = Harness()
    harness.turn(PROMPT, 1, "a")
    harness.lose(list)
    assert harness.turn([*harness.logs["a"], 1, 2], 1, "a") == {"recomputed": 22, "new": 3}
    harness.lose(list)
    assert harness.turn(PROMPT, 1, "b") == {"recomputed": 20, "new": 2}  # b never had a tail here
    harness.drain()


@pytest.mark.parametrize("in_first_chunks", [0, 8])
def test_what_an_earlier_process_computed_is_recomputed(in_first_chunks):
    """Without the chunks that are resident again; everything behind is new. A branch ends it
    earlier."""
    harness = Harness()
    if in_first_chunks:
        harness.turn(range(in_first_chunks), 1, "b")
    usage = harness.turn([*PROMPT, *range(40, 48)], 1, "a", stored_tokens=21)
    from_gpu = {"gpu": in_first_chunks} if in_first_chunks else {}
    assert usage == from_gpu | {"recomputed": 21 - in_first_chunks, "new": 9}
    log = harness.logs["a"]
    assert harness.turn([*log, 1], 1, "a", stored_tokens=len(log) - 1) == {"gpu": 30, "new": 2}, (
        "it is here now"
    )
    harness.lose(list)
    assert harness.turn([*PROMPT, 9], 1, "a", stored_tokens=20) == {"recomputed": 22, "new": 1}, (
        "of that this process knows more"
    )
    harness.drain()


def test_a_prompt_that_is_all_known_is_recomputed_to_its_end():
    harness = Harness()
    assert harness.turn(PROMPT, 1, "a", stored_tokens=22) == {"recomputed": 22}
    assert harness.turn(range(20), 1, "b", stored_tokens=20) == {"gpu": 19, "recomputed": 1}
    harness.drain()


def test_without_reuse_nothing_is_known():
    harness = Harness(reuse=False)
    assert harness.turn(PROMPT, 1, "a", stored_tokens=21) == {"new": 22}
    harness.drain()


def test_of_a_known_context_that_overflows_only_what_is_seen_counts():
    harness = Harness(max_model_len=16)  # half of it goes at once
    usage = harness.turn(range(22), 1, "a", truncate=True, stored_tokens=20)
    assert usage == {"recomputed": 20 - 8, "new": 2}
    harness.drain()


def test_a_chunk_is_computed_where_that_is_quicker_than_loading():
    """Early chunks cost less to compute than late ones; with this link the line lies in the middle
    of the history."""
    harness = Harness(chunks_a_step=0.88, host_kv_chunks=32)
    harness.turn(range(41), 1, "a")
    spread(harness, "h" * 10)
    needs = find(harness, harness.submit([*harness.logs["a"], 1], 3, "a"))
    ends = [chunk.end for chunk in needs.swap_ins]
    assert ends == list(range(ends[0], 41, SIZE)) and 4 < ends[0] < 40
    assert spans(needs)[0] == (0, ends[0] - SIZE) and needs.usage.recomputed == ends[0] - SIZE
    harness.run()
    assert len(harness.scheduler._store.find(needs.swap_ins[0].key).key) == 32
    harness.drain()


def test_what_was_chosen_is_counted_with_both_predictions():
    """When the turn gets its room, once, however often it was looked at before."""
    harness = Harness(chunks_a_step=0.88, host_kv_chunks=32)
    harness.turn(range(41), 1, "a")
    spread(harness, "h" * 10)
    request = harness.submit([*harness.logs["a"], 1], 3, "a")
    loads = [chunk.end for chunk in find(harness, request).swap_ins]
    passed_over = range(SIZE, loads[0], SIZE)
    find(harness, request)
    harness.run()
    cost = harness.scheduler._admission._cost
    assert harness.scheduler.stats().choices == {
        choice: {
            "chunks": len(ends),
            "swap_in": pytest.approx(len(ends) * cost.swap_in()),
            "recompute": pytest.approx(sum(map(cost.recompute, ends))),
        }
        for choice, ends in {"swap_in": loads, "recompute": passed_over}.items()
    }
    assert passed_over and loads
    harness.drain()


def test_without_reuse_everything_is_new():
    harness = Harness(reuse=False)
    for _ in range(2):
        assert harness.turn(PROMPT, 3, "a") == {"new": 22}
    assert harness.turn([*harness.logs["a"], 5], 3, "a") == {"new": 26}
    harness.drain()
