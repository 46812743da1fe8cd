"""Every segment reads the state of exactly the tokens before it: plans of random operations pass
the check, and wrong plans do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pensieve.runtime.step.inputs import StepPacker
from pensieve.runtime.step.reusing_packer import ReusingPacker
from pensieve.scheduler.plan import Span, StateSwapIn
from pensieve.scheduler.types import InvariantError

from ...scheduler.draft_policy import decide_by_chance
from ...scheduler.test_drafted_states import DraftedStateDriver, drafting
from ...scheduler.test_states import StateDriver, drawn
from ..fake_engine import join, plan

SLOTS, CHUNK = 4, 4


class PackingDriver(StateDriver):
    """Packs each plan, with arrays of the last step and without."""

    def __init__(self, seed, **settings):
        super().__init__(seed, **settings)
        blocks = self.config.chunks(self.config.max_model_len)
        sizes = (self.config.max_num_seqs, blocks, self.config.chunk_tokens)
        slots = self.config.states.slots
        self.packers = [kind(*sizes, state_slots=slots) for kind in (StepPacker, ReusingPacker)]

    def launch(self):
        launched = super().launch()
        if launched is not None:
            for packer in self.packers:
                packer.pack(launched)
        return launched


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_random_operations_pass(seed):
    PackingDriver(seed, **drawn(seed)).play(400, Counter())


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_operations_with_drafts_pass(seed, monkeypatch):
    decide_by_chance(monkeypatch, seed)

    class DraftingDriver(PackingDriver, DraftedStateDriver):
        pass

    DraftingDriver(seed, **drafting(seed)).play(400, Counter())


def of(step, *, read, written, swap_ins=(), **fields):
    return replace(
        plan(step, **fields),
        state_in=read,
        state_out=written,
        state_swap_ins=tuple(StateSwapIn(*swap_in) for swap_in in swap_ins),
    )


@pytest.fixture(params=[StepPacker, ReusingPacker])
def packer(request):
    """Seat 0 has computed 4 tokens and then one more in slot 1; seat 1 has computed 4 in slot 2."""
    packer = request.param(2, 5, CHUNK, state_slots=SLOTS)
    blocks = [(0, 0, (0, 1, 2)), (1, 0, (3, 4, 5))]
    spans = [Span(seat, 0, 4, 0, 1) for seat in (0, 1)]
    packer.pack(
        of(
            1,
            joins=[join(0), join(1)],
            blocks=blocks,
            spans=spans,
            token_ids=range(8),
            read=[-1, -1],
            written=[1, 2],
        )
    )
    packer.pack(of(2, generate={0: 4}, read=[1], written=[1]))
    return packer


def test_the_next_token_of_both_rows(packer):
    packer.pack(of(3, generate={0: 5, 1: 4}, read=[1, 2], written=[1, 3]))
    packer.pack(of(4, generate={0: 6, 1: 5}, read=[1, 3], written=[2, 3]))
    packer.pack(of(5, generate={0: 7, 1: 6}, read=[2, 3], written=[2, 3]))


@pytest.mark.parametrize(
    ("position", "read", "written"),
    [
        pytest.param(6, 1, 1, id="a token is left out"),
        pytest.param(4, 1, 1, id="the last token is applied twice"),
        pytest.param(5, -1, 1, id="the zero state behind other tokens"),
        pytest.param(5, 2, 1, id="another row's slot"),
        pytest.param(5, 3, 1, id="a slot that was never written"),
    ],
)
def test_a_wrong_state_is_refused(packer, position, read, written):
    with pytest.raises(InvariantError, match="a state of other tokens"):
        packer.pack(of(3, generate={0: position}, read=[read], written=[written]))


def test_a_slot_of_a_row_that_has_left_is_stale_even_at_the_right_position(packer):
    packer.pack(of(3, joins=[join(1)], blocks=[(1, 0, (3, 4, 5))], read=[], written=[]))
    with pytest.raises(InvariantError, match="a state of other tokens"):
        packer.pack(of(4, generate={1: 4}, read=[2], written=[2]))


def test_a_swapped_in_state_is_used_where_it_ends(packer):
    swap_ins = [(1, 3, 8)]
    blocks = [(1, 0, (3, 4, 5))]
    packer.pack(of(3, joins=[join(1)], blocks=blocks, swap_ins=swap_ins, read=[], written=[]))
    span = [Span(1, 8, 10, 8, 1)]
    packer.pack(of(4, spans=span, token_ids=[1, 2], read=[3], written=[3]))
    with pytest.raises(InvariantError, match="a state of other tokens"):
        packer.pack(of(5, spans=span, token_ids=[1, 2], read=[3], written=[3]))


def check(step, start, written, drafts=2):
    """Seat 0's newest token is at 5; its span begins at `start`."""
    span = Span(0, start, 6 + drafts, 5, 1 + drafts)
    tokens = range(6 + drafts - start)
    return of(step, spans=[span], token_ids=tokens, read=[1], written=[written])


def test_a_row_begins_again_at_the_state_in_front_of_its_drafts(packer):
    packer.pack(check(3, 5, -1))
    packer.pack(of(4, spans=[Span(0, 5, 9, 7, 2)], token_ids=range(4), read=[1], written=[-1]))
    packer.pack(of(5, spans=[Span(0, 5, 9, 8, 1)], token_ids=range(4), read=[1], written=[1]))
    packer.pack(of(6, generate={0: 9}, read=[1], written=[1]))


def test_no_state_is_kept_behind_drafts(packer):
    with pytest.raises(InvariantError, match="keeps a state behind drafts"):
        packer.pack(check(3, 5, 1))


@pytest.mark.parametrize("start", [4, 6, 8])
def test_the_span_behind_a_check_begins_nowhere_else(packer, start):
    """An accepted token is computed twice, or not at all, or a rejected one counts."""
    packer.pack(check(3, 5, -1))
    with pytest.raises(InvariantError, match="a state of other tokens"):
        packer.pack(
            of(
                4,
                spans=[Span(0, start, 9, 8, 1)],
                token_ids=range(9 - start),
                read=[1],
                written=[1],
            )
        )


@pytest.mark.parametrize(("read", "written"), [([1, 2], [3, 3]), ([1, 2], [2, 3])])
def test_two_segments_do_not_use_one_slot(packer, read, written):
    with pytest.raises(InvariantError, match="two segments of step 3 use one state slot"):
        packer.pack(of(3, generate={0: 5, 1: 4}, read=read, written=written))


def test_every_segment_has_a_state(packer):
    with pytest.raises(InvariantError, match="segments without a state"):
        packer.pack(plan(3, generate={0: 5}))
