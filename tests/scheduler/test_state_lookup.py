"""What a request computes where recurrent states and KV are partly there. The device model checks
every state that is read; these tests check that no more is computed than necessary."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from pensieve.scheduler.config import StateConfig
from pensieve.scheduler.plan import Span
from pensieve.scheduler.planning.live_states import LiveStates
from pensieve.scheduler.planning.state_lookup import overlaps
from pensieve.scheduler.types import GPU

from .harness import Harness

PROMPT = [*range(1, 31)]  # 30 tokens
OTHER = [*range(60, 90)]


class States(Harness):
    """States of 2 chunks are kept at multiples of 8. `computed` has the ranges of prompts."""

    def __init__(self, **settings):
        states = StateConfig(chunks=2, slots=8, spacing=16, generated=8, multiple=8)
        defaults = {"gpu_kv_chunks": 60, "host_kv_chunks": 60, "max_num_batched_tokens": 64}
        super().__init__(**(defaults | {"max_model_len": 96, "states": states} | settings))
        self.computed = []

    def launch(self):
        plan = super().launch()
        if plan is not None:
            self.computed += [(span.start, span.end) for span in plan.spans]
        return plan

    def spans(self, prompt, max_tokens=4, conversation=None, **fields):
        """A whole turn. Returns the ranges that it computes, neighbours joined."""
        self.computed = []
        self.turn(prompt, max_tokens, conversation, **fields)
        return self.joined()

    def joined(self):
        ranges = []
        for start, end in self.computed:
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((start, end))
        return ranges

    @property
    def ends(self):
        """Where the states on HOST that have keys end."""
        return sorted(state.end for state in self.scheduler._states.kept.by_key.values())

    def lose_kv(self, first, last):
        """The chunks of positions [first, last) are gone."""
        size = self.config.chunk_tokens
        self.lose(
            lambda idle: [c for c in idle if c.state is None and first <= c.end - size < last]
        )

    def lose_states(self, *ends):
        self.lose(lambda idle: [c for c in idle if c.state is not None and c.end in ends][:1])


@pytest.fixture
def served():
    harness = States()
    yield harness
    harness.drain()


def test_the_first_turn_keeps_states_at_the_spacing_and_before_its_end(served):
    assert served.spans(PROMPT) == [(0, 30)]
    assert served.ends == [16, 24]


def test_a_prompt_is_cut_where_a_state_is_kept_and_at_multiples(served):
    served.spans(PROMPT, marks=(13, 27))
    assert served.computed == [(0, 8), (8, 16), (16, 24), (24, 30)]
    assert served.ends == [8, 16, 24]


def test_pieces_of_a_long_prompt_end_at_multiples():
    served = States(max_num_batched_tokens=13, max_num_seqs=2)
    served.spans(PROMPT, marks=(3,))
    assert served.computed == [(0, 8), (8, 16), (16, 24), (24, 30)]
    served.drain()


def test_a_budget_below_a_multiple_still_makes_progress():
    served = States(max_num_batched_tokens=5, max_num_seqs=2)
    served.spans(PROMPT)
    assert [end for _, end in served.computed][:4] == [5, 8, 13, 16]
    served.drain()


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_a_turn_begins_at_the_exact_end_of_the_last(served, extra):
    first = served.spans(PROMPT, 7, "a")
    assert first == [(0, 30)]
    log = [*served.logs["a"]]
    assert len(log) == 37
    spans = served.spans([*log, *OTHER[:extra]], 4, "a")
    assert spans == [(36, 37 + extra)]  # the last drawn token has no KV and is in no state


def test_a_reply_that_a_stop_id_ends_leaves_a_state_that_has_seen_it(served):
    served.spans(PROMPT, 7)
    probe = States()
    probe.spans(PROMPT, 7, "b")
    reply = [*probe.logs["b"]][30:]
    probe.drain()
    request = served.submit(PROMPT, 7, "a", stop_ids=frozenset([reply[4]]))
    served.launch()
    while request in served.open:  # a step is planned before the last one is applied
        served.now += 0.01
        served.launch()
        served.apply()
    while served.results:
        served.apply()
    log = [*served.logs["a"]]
    count = len(log)
    assert count == 30 + reply.index(reply[4]) + 1
    assert served.spans([*log, *OTHER[:3]], 4, "a") == [(count, count + 3)]


def test_a_template_that_drops_old_thoughts_finds_the_last_user_message(served):
    served.spans(PROMPT, 20, "a", marks=(27,))
    later = [*PROMPT[:27], *OTHER[:9]]
    assert served.spans(later, 4, "a") == [(24, 36)]


@pytest.mark.parametrize("length", [23, 24, 25])
def test_a_full_hit_computes_the_last_token_from_an_earlier_state(served, length):
    prompt = PROMPT[:length]
    served.spans(prompt)
    begin = 16 if length <= 24 else 24
    assert served.spans(prompt) == [(begin, length)]
    assert served.spans(prompt) == [(begin, length)]


def test_a_prompt_that_ends_at_a_state_leaves_one_before_its_end(served):
    """The state at its end is of no use for the prompt itself."""
    prompt = PROMPT[:16]
    assert [served.spans(prompt) for _ in range(3)] == [[(0, 16)], [(0, 16)], [(8, 16)]]


def test_nothing_of_a_known_prompt_is_written_again(served):
    served.spans(PROMPT)
    # The state at 24 is the last one. The chunk that ends at 28 is computed for the state alone.
    # The last two tokens fill no chunk, so they left no KV.
    assert served.turn(PROMPT) == {"gpu": 24, "recomputed": 4, "new": 2}
    assert served.turn(PROMPT[:24])["recomputed"] == 8
    assert served.counts["suppressed writes"]


def test_a_leading_hole_is_computed_from_zero_and_then_a_state_is_loaded(served):
    served.spans(PROMPT, 7, "a")
    log = [*served.logs["a"]]
    served.lose_kv(0, 8)
    assert served.spans([*log, 5], 4, "a") == [(0, 8), (36, 38)]


def test_an_inner_hole_is_computed_from_the_state_before_it(served):
    served.spans(PROMPT, 7, "a")
    log = [*served.logs["a"]]
    served.lose_kv(20, 24)
    assert served.ends[:2] == [16, 24]
    assert served.spans([*log, 5], 4, "a") == [(16, 24), (36, 38)]


def test_a_hole_that_reaches_the_state_needs_no_load_behind_it(served):
    served.spans(PROMPT, 1)
    loaded = served.scheduler._states.kept.swapped_in
    served.lose_kv(16, 24)
    assert served.spans(PROMPT, 1) == [(16, 30)]
    assert served.scheduler._states.kept.swapped_in == loaded + 1


def test_if_loading_costs_more_than_computing_nothing_is_loaded():
    served = States(chunks_a_step=0.01)
    served.spans(PROMPT)
    assert served.spans(PROMPT) == [(0, 30)]
    assert served.scheduler._states.kept.swapped_in == 0
    served.drain()


@pytest.mark.parametrize("piece", [0, 1])
def test_a_state_that_lost_a_piece_is_gone_as_a_whole(served, piece):
    served.spans(PROMPT)
    served.lose(lambda idle: [c for c in idle if c.state is not None and c.end == 24][piece:][:1])
    assert served.ends == [16]
    assert sum(c.state is not None for c in served.scheduler._store.resident_chunks()) == 2
    assert served.spans(PROMPT) == [(16, 30)]


def test_a_branch_keeps_a_state_where_it_parts(served):
    served.spans(PROMPT)
    served.lose_states(16)
    branch = [*PROMPT[:19], *OTHER[:10]]
    assert served.spans(branch)[0] == (0, 29)
    assert 16 in served.ends
    assert served.spans([*PROMPT[:19], *OTHER[10:20]]) == [(16, 29)]


def test_two_prompts_that_part_inside_a_chunk(served):
    served.spans(PROMPT[:26])
    assert served.spans([*PROMPT[:25], 77, 78]) == [(24, 27)]


def test_of_a_reply_only_the_newest_state_stays(served):
    served.spans(PROMPT[:10], 40)
    assert served.ends == [8, 48]


def test_parallel_choices_begin_at_the_state_before_the_prompts_end(served):
    served.computed = []
    for choice in range(3):
        served.submit(PROMPT, 6, choice=choice)
    served.run()
    assert sorted(served.computed) == [(0, 16), (16, 24), *[(24, 30)] * 3]


def test_a_fork_has_the_states_at_multiples_but_not_the_turns_own(served):
    served.spans(PROMPT, 7, "a")
    log = [*served.logs["a"]]
    served.fork("a", "b")
    assert served.spans([*log, 5], 4, "b") == [(24, 38)]
    assert served.spans([*log, 6], 4, "a") == [(36, 38)]


def test_a_suspended_request_goes_on_where_it_was():
    served = States(gpu_kv_chunks=26, max_model_len=64, generation_reserve=0.0)
    for number in range(3):
        served.submit([*range(number * 20, number * 20 + 14)], 40)
    served.run_until(lambda: any(served.state(i) == "suspended" for i in served.open))
    (suspended,) = (i for i in served.open if served.state(i) == "suspended")
    served.tick()
    turn = next(turn for turn in served.scheduler._queues.waiting if turn.request.id == suspended)
    count = len(turn.tokens)
    assert turn.state.end == count - 1
    served.computed = []
    served.run_until(lambda: suspended not in served.open or served.state(suspended) == "running")
    starts = {start for start, end in served.computed if end == count}
    assert starts == {count - 1}
    served.run()
    served.drain()


def test_a_request_that_is_suspended_while_its_state_comes_keeps_it(served, monkeypatch):
    request = served.submit(PROMPT, 40)
    served.run_until(lambda: len(served.reply(request)) > 3)
    queues = served.scheduler._queues
    may_begin = LiveStates.may_begin

    def suspend():
        """Until the request has a seat again."""
        row = queues.rows[0]
        queues.suspend(row)
        served.run_until(lambda: bool(queues.rows) and queues.rows[0] is not row)
        return queues.rows[0]

    with monkeypatch.context() as patched:
        patched.setattr(LiveStates, "may_begin", lambda *args: may_begin(*args) and False)
        row = suspend()
        state = row.turn.state
        assert row.state.at == state.end == len(row.turn.tokens) - 1
        assert suspend().turn.state is state
    served.computed = []
    served.run_until(lambda: bool(served.computed))
    assert served.computed == [(state.end, state.end + 1)]
    served.run()


def test_a_request_that_is_suspended_in_a_hole_keeps_its_state_behind_it():
    served = States(max_num_seqs=1, max_num_batched_tokens=5)
    request = served.submit(PROMPT, 40)
    served.run_until(lambda: len(served.reply(request)) > 3)
    queues = served.scheduler._queues
    turn = queues.rows[0].turn
    served.submit(OTHER, 2, priority=-1)
    queues.suspend(queues.rows[0])
    served.run_until(lambda: turn in queues.waiting)
    state = turn.state
    served.lose_states(16, 24)
    served.lose_kv(0, 16)
    served.run_until(lambda: bool(queues.rows) and queues.rows[0].turn is turn)
    served.run_until(lambda: 0 < queues.rows[0].state.at < 16)
    row = queues.rows[0]
    queues.suspend(row)
    served.run_until(lambda: bool(queues.rows) and queues.rows[0] is not row)
    assert turn.state is state
    served.computed = []
    served.run_until(lambda: len(served.reply(request)) > 5)
    starts = [start for start, _ in served.computed]
    assert state.end in starts and not any(16 < start < state.end for start in starts)
    served.run()
    served.drain()


def test_states_of_a_long_prompt_are_noted_as_used_in_pieces(served):
    """The last one first. At the end all are used as if noted at once."""
    served.turn([*range(64)], 4)
    states = sorted(served.scheduler._states.kept.by_key.values(), key=lambda state: state.end)
    assert len(states) > 3
    work = served.scheduler._states._touch([*states], 10.0)
    for count, units in enumerate(work, 1):
        assert units == 1 + served.config.states.chunks
        used = [{piece.last_active for piece in state.pieces} == {10.0} for state in states]
        assert used == [False] * (len(states) - count) + [True] * count
    served.now = 10.0


def test_a_deleted_conversation_leaves_no_state(served):
    served.spans(PROMPT, 12, "a")
    assert served.ends
    served.delete("a")
    served.tick()
    assert served.ends == []
    assert not any(c.state is not None for c in served.scheduler._store.resident_chunks())


def test_without_host_every_prompt_is_computed_from_zero():
    served = States(host_kv_chunks=0)
    served.spans(PROMPT, 7, "a")
    log = [*served.logs["a"]]
    assert served.spans([*log, 5], 4, "a") == [(0, 38)]
    served.drain()


def test_scores_begin_at_a_state(served):
    served.spans(PROMPT)
    assert served.spans(PROMPT, prompt_logprobs=1) == [(0, 30)]
    assert served.counts["scored"] == 29


@pytest.mark.parametrize(
    ("changed", "setting"),
    [
        ({"overflow": "keep"}, "overflow"),
        ({"chunk_tokens": 3}, "chunk_tokens"),
        ({"max_num_seqs": 8}, "states.slots"),
    ],
)
def test_what_states_do_not_support_is_refused_by_name(changed, setting):
    with pytest.raises(ValueError, match=f"^{setting}: "):
        States(**changed)


# -- eviction


def full_host(**settings):
    """HOST, 12 slots, has only KV of an idle conversation, in no other tier."""
    served = States(host_kv_chunks=12, **settings)
    served.turn([*range(200, 249)], 1, "idle")
    store = served.scheduler._store
    served.lose(lambda idle: [c for c in idle if c.state is not None])
    for chunk in list(store.only[GPU])[:12]:
        served.place(chunk, "host")
    assert store.host.free == 0
    return served


def test_a_state_that_is_seldom_needed_displaces_no_kv():
    served = full_host()
    served.turn(PROMPT, 4, "a")
    assert served.ends == []
    served.tick()
    assert len(served.scheduler.conversations.get("a").state.pieces) == 2
    served.turn(OTHER, 4, "b", marks=(25,))
    assert served.ends == [24]
    served.turn([*OTHER[::-1]], 4)
    assert served.ends == [24, 24]
    served.drain()


@pytest.mark.parametrize("pinned", [False, True])
def test_the_state_of_a_pinned_conversation_is_evicted_last(pinned):
    served = States(host_kv_chunks=8)
    served.turn(PROMPT, 4, "a")
    if pinned:
        served.keep("a", pinned_until=1e9)
    for number in range(6):
        served.now += 1.0
        served.turn([*range(100 * number, 100 * number + 20)], 2, f"c{number}")
    log = [*served.logs["a"]]
    assert served.spans([*log, 5], 2, "a") == ([(33, 35)] if pinned else [(0, 35)])
    served.drain()


def test_a_pin_that_ends_ends_for_the_state():
    served = States()
    served.turn(PROMPT, 4, "a")
    served.keep("a", pinned_until=1e9)
    served.tick()
    served.keep("a")
    served.check()
    state = served.scheduler.conversations.get("a").state
    assert [piece.pins for piece in state.pieces] == [0, 0]
    served.drain()


@pytest.mark.parametrize("name", ["a", None])
def test_the_state_of_a_waiting_request_is_evicted_after_others(name):
    served = States(host_kv_chunks=40, max_num_seqs=1)
    served.turn(PROMPT, 4, name)
    log = [*served.logs["a"]] if name else PROMPT
    served.turn([*range(200, 220)], 2, "later")
    served.submit([*range(100, 110)], 8)
    served.tick()
    served.submit([*log, 5], 2, name)
    waits = served.scheduler._queues.waiting[0]
    pieces = [chunk for chunk in waits.awaited if chunk.state is not None]
    assert len(pieces) == 2
    assert {piece.state.end for piece in pieces} == {33 if name else 24}
    served.run()
    served.drain()


def test_overlaps_are_those_of_every_pair():
    """Against the definition, on random ascending spans and ranges."""
    random = Random(5)
    for _ in range(300):
        spans, ranges = (
            [
                (start, end)
                for start, end in pairwise(sorted(random.sample(range(200), random.randint(2, 20))))
                if random.random() < 0.6
            ]
            for _ in range(2)
        )
        expected = [sum(len({*range(*one)} & {*range(*span)}) for span in spans) for one in ranges]
        assert [*overlaps([Span(0, *span, 0, 0) for span in spans], ranges)] == expected
