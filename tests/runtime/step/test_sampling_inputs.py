"""Penalties, bias, masks and scores against twins in numpy, and the way of a step's settings to
them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from pensieve.runtime.step.inputs import StepPacker
from pensieve.runtime.step.sampler import Sampler, add_biases, forbid, penalise, score
from pensieve.runtime.step.sampling_inputs import FORBIDDEN, Mask, SeatSampling
from pensieve.scheduler.plan import Span
from pensieve.scheduler.types import Sampling

from ..fake_engine import join, plan, span

VOCAB = 50


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# The operations


def penalise_twin(logits, prompt, reply, repetition, presence, frequency):
    """One row, token by token, the way the penalties are defined."""
    out = logits.astype(np.float64)
    for token in range(len(out)):
        if token in prompt or token in reply:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * list(reply).count(token) + presence * (token in reply)
    return out


def test_penalties_equal_their_twin():
    rng = np.random.default_rng(1)
    rows = 12
    logits = random_logits(rows)
    prompts, replies = rng.integers(0, VOCAB, (rows, 9)), rng.integers(0, VOCAB, (rows, 7))
    replies[:, 3] = replies[:, 2]
    counts = torch.zeros(rows, VOCAB, dtype=torch.int32)
    for at in range(rows):
        counts[at, prompts[at]] = 1
        for token in replies[at]:
            counts[at, token] += 2
    factors = rng.uniform(0.5, 2, rows), rng.uniform(-2, 2, rows), rng.uniform(-2, 2, rows)
    got = penalise(
        logits, counts, *(torch.tensor(factor, dtype=torch.float32) for factor in factors)
    )
    for at in range(rows):
        expected = penalise_twin(
            logits[at].numpy(), prompts[at], replies[at], *(factor[at] for factor in factors)
        )
        assert np.allclose(got[at].numpy(), expected, atol=1e-4)


def test_biases_and_masks_touch_their_places_only():
    logits = random_logits(4)
    expected = logits.clone()
    expected[1, 3] += 5
    expected[3, 3] -= 100
    add_biases(logits, torch.tensor([1, 3]), torch.tensor([3, 3]), torch.tensor([5.0, -100.0]))
    assert torch.equal(logits, expected)
    allowed = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(2)) < 0.3
    allowed[0, [0, 31, 32, 49]] = True
    padded = np.zeros((2, 64), bool)
    padded[:, :VOCAB] = allowed.numpy()
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    forbid(logits, torch.tensor([0, 2]), torch.from_numpy(bits))
    expected[[0, 2]] = expected[[0, 2]].where(allowed, -torch.inf)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("width", [0, 1, 20])
def test_scores_equal_their_twin(width):
    logits = random_logits(30, seed=4)
    tokens = torch.arange(30)
    scores = score(logits, tokens, width)
    entries = scores.entries([width] * 30)
    exact = logits.double().numpy()
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for at, entry in enumerate(entries):
        order = np.argsort(-exact[at], kind="stable")
        assert entry.logprob == pytest.approx(exact[at, at], abs=1e-5)
        assert entry.rank == list(order).index(at) + 1
        assert list(entry.top_ids) == order[:width].tolist()
        assert entry.top_logprobs == pytest.approx(exact[at, order[:width]], abs=1e-5)


# Steps


class FreeSampling(Sampling):
    """With biases of any type, which are not checked before a row joins."""

    def __init__(self, logit_bias):
        super().__init__()
        object.__setattr__(self, "logit_bias", logit_bias)


PENALISED = Sampling(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.2)


def packed(packer, step, joins=(), generate=(), spans=(), scored=(), mask=None):
    """Every join gets the chunks it may need."""
    blocks = [(join.seat, 0, (4 * join.seat, 4 * join.seat + 1)) for join in joins]
    tokens = sum(span.end - span.start for span in spans)
    step_plan = plan(
        step,
        joins=joins,
        blocks=blocks,
        generate=dict(generate),
        spans=spans,
        token_ids=range(tokens),
    )
    return packer.pack(replace(step_plan, scored=array("i", scored)), mask)


def test_counts_follow_the_samples_and_begin_anew_with_a_join():
    """A seat's counts are its own in every step; a resumed row counts its earlier tokens."""
    packer = StepPacker(4, 2, 8)
    sampler = Sampler(VOCAB)
    prompt = [1, 2, 2, 3]
    reply = []
    other = [9]
    seat_one = join(1, PENALISED)._replace(prompt=array("i", prompt))
    seat_three = join(3, PENALISED)._replace(prompt=array("i", other))
    starts = packed(
        packer,
        1,
        [seat_one, join(2), seat_three],
        spans=[span(1, 0, 4), span(2, 0, 2), span(3, 0, 1)],
    )
    replies = {1: reply, 3: []}
    for step in range(2, 12):
        inputs = (
            starts
            if step == 2
            else packed(packer, step, generate=dict.fromkeys((2, 1, 3), step + 2))
        )
        sampler.start(inputs.sampling.starts)
        logits = random_logits(3, seed=step) / 3
        exact = logits.numpy().copy()
        tokens, scores = sampler.sample(logits, inputs.sampling)
        assert scores is None
        for at, seat in enumerate(inputs.sample_seats.tolist()):
            if seat == 2:
                assert tokens[at] == exact[at].argmax()
                continue
            fields = (
                PENALISED.repetition_penalty,
                PENALISED.presence_penalty,
                PENALISED.frequency_penalty,
            )
            expected = penalise_twin(
                exact[at], prompt if seat == 1 else other, replies[seat], *fields
            )
            assert tokens[at] == expected.argmax()
            replies[seat].append(int(tokens[at]))
    # Seat 1's row leaves and is resumed in seat 0: the same counts, from the log.
    resumed = join(0, PENALISED)._replace(prompt=array("i", prompt), reply=array("i", reply))
    inputs = packed(packer, 12, [resumed], generate={1: 14}, spans=[span(0, 0, 14)])
    sampler.start(inputs.sampling.starts)
    logits = random_logits(1, seed=99).repeat(2, 1)
    tokens, _ = sampler.sample(logits, inputs.sampling)
    assert tokens[0] == tokens[1] and torch.equal(logits[0], logits[1])


def test_places_of_counts_are_used_again():
    packer = StepPacker(4, 2, 8)
    places = []
    for seat, sampling in (
        (0, PENALISED),
        (1, PENALISED),
        (0, Sampling()),
        (2, PENALISED),
        (1, PENALISED),
    ):
        inputs = packed(packer, len(places) + 1, [join(seat, sampling)], spans=[span(seat, 0, 2)])
        places.append([start.place for start in inputs.sampling.starts])
    assert places == [[0], [1], [], [0], [1]]


def test_a_plain_step_asks_for_nothing_more():
    packer = StepPacker(4, 2, 8)
    packed(
        packer,
        1,
        [join(0, PENALISED), join(1, Sampling(logprobs=1))],
        spans=[span(0, 0, 2), span(1, 0, 2)],
    )
    packed(
        packer, 2, [join(0), join(1), join(2)], spans=[span(0, 0, 2), span(1, 0, 2), span(2, 0, 2)]
    )
    sampling = packed(packer, 3, generate={0: 2, 1: 2, 2: 2}).sampling
    assert sampling.penalties is sampling.biases is sampling.mask is sampling.scores is None


class ReadOnce(tuple):
    """Items that may be gone through once."""

    def __iter__(self):
        assert not self.__dict__, "these were read when the row joined"
        self.read = True
        return super().__iter__()


def biases_twin(rows):
    """[(row, token, value)] of rows of (biases, stop ids, whether those may end the reply)."""
    entries = []
    for row, (biases, stop_ids, may_end) in enumerate(rows):
        added = dict(biases)
        if not may_end:
            added |= dict.fromkeys(stop_ids, float(np.float32(FORBIDDEN)))
        entries += [(row, token, value) for token, value in added.items()]
    return entries


def test_biases_are_read_once_when_their_row_joins():
    """A step joins ready arrays for any rows; the results equal the slow computation."""
    draw = np.random.default_rng(3)
    tokens = [draw.permutation(VOCAB).tolist() for _ in range(8)]
    biased = [
        ReadOnce((token, at - 4.0) for at, token in enumerate(row[:at]))
        for at, row in enumerate(tokens)
    ]
    stops = [ReadOnce(sorted(row[: 3 * (at % 3)])) for at, row in enumerate(tokens)]
    plain = [
        (list(tuple.__iter__(row)), list(tuple.__iter__(ids)))
        for row, ids in zip(biased, stops, strict=True)
    ]
    seats = SeatSampling(8)
    may_end = [10 + 2 * at for at in range(8)]
    rows = [
        join(at, FreeSampling(biased[at]))._replace(stop_ids=stops[at], may_end=may_end[at])
        for at in range(8)
    ]
    seats.join(rows)
    for step in range(40):
        chosen = draw.permutation(8)[: 1 + step % 8]
        positions = draw.integers(5, 30, len(chosen)).astype(np.int32)
        got = seats.pack((), chosen, positions, (), (), None).biases
        expected = biases_twin(
            [
                (*plain[seat], at >= may_end[seat])
                for seat, at in zip(chosen.tolist(), positions, strict=True)
            ]
        )
        if not expected:
            assert got is None
            continue
        assert sorted(zip(*(column.tolist() for column in got), strict=True)) == sorted(expected)
        assert [column.dtype for column in got] == [np.int64, np.int64, np.float32]
    first, second, third = (
        seats.pack((), np.arange(8), np.full(8, at), (), (), None).biases for at in (5, 6, 12)
    )
    assert first is second and third is not first, "nothing is made anew before a row may end"
    seats.join([join(at) for at in range(8)])
    assert seats.pack((), np.arange(8), np.full(8, 5), (), (), None).biases is None


def test_scores_of_samples_and_of_prompts():
    """Scored rows come after the sampled ones; the rows before a sampled position score nothing
    there."""
    packer = StepPacker(4, 2, 8)
    joins = [join(0, Sampling(logprobs=2)), join(1)._replace(prompt_logprobs=1), join(2)]
    spans = [span(0, 0, 3), Span(1, 0, 4, 0, False, True), span(2, 0, 2)]
    inputs = packed(packer, 1, joins, spans=spans, scored=[11, 12, 13, 14])
    assert inputs.sample_rows.tolist() == [2, 8, 3, 4, 5, 6] and inputs.sample_seats.tolist() == [
        0,
        2,
    ]
    wanted = inputs.sampling.scores
    assert (wanted.rows.tolist(), wanted.targets.tolist()) == ([0], [11, 12, 13, 14])
    assert wanted.tops.tolist() == [2, 1, 1, 1, 1] and wanted.width == 2
    inputs = packed(
        packer, 2, generate={0: 3}, spans=[Span(1, 4, 7, 4, True, True)], scored=[15, 16]
    )
    assert inputs.sample_rows.tolist() == [0, 3, 1, 2]
    logits = random_logits(4)
    exact = logits.log_softmax(dim=-1)
    tokens, scores = Sampler(VOCAB).sample(logits, inputs.sampling)
    assert tokens.tolist() == exact[:2].argmax(dim=-1).tolist()
    expected = [exact[0, tokens[0]], exact[2, 15], exact[3, 16]]
    assert scores.logprobs.tolist() == pytest.approx([float(value) for value in expected], abs=1e-5)


def test_scores_are_of_the_logits_as_they_came():
    """They show neither bias nor penalties nor a mask, though all of these decide the drawn
    token."""
    packer = StepPacker(4, 2, 8)
    sampler = Sampler(VOCAB)
    sampling = replace(PENALISED, logprobs=3, logit_bias=((7, 50.0), (8, 60.0)))
    bits = np.full((1, 2), -1, np.int32)
    bits[0, 0] ^= 1 << 8
    inputs = packed(
        packer, 1, [join(0, sampling)], spans=[span(0, 0, 2)], mask=Mask(np.array([0]), bits)
    )
    sampler.start(inputs.sampling.starts)
    logits = random_logits(1)
    exact = logits.log_softmax(dim=-1)
    tokens, scores = sampler.sample(logits, inputs.sampling)
    assert tokens.tolist() == [7]
    (entry,) = scores.entries(inputs.sampling.scores.tops.tolist())
    assert entry.logprob == pytest.approx(float(exact[0, 7]), abs=1e-5)
    assert list(entry.top_ids) == exact[0].topk(3).indices.tolist()


def test_a_row_does_not_depend_on_its_neighbours():
    """Rows of all kinds together, then each alone, over some steps."""
    settings = [
        Sampling(),
        PENALISED,
        Sampling(temperature=0.9, seed=3, min_p=0.05, logit_bias=((4, 2.0),)),
        replace(PENALISED, temperature=1.1, seed=4, logprobs=2),
    ]

    def run(seats):
        packer = StepPacker(4, 2, 8)
        sampler = Sampler(VOCAB)
        joins = [
            join(seat, settings[seat])._replace(prompt=array("i", [seat, 5])) for seat in seats
        ]
        drawn = {seat: [] for seat in seats}
        for step in range(1, 9):
            if step == 1:
                inputs = packed(packer, 1, joins, spans=[span(seat, 0, 2) for seat in seats])
            else:
                inputs = packed(packer, step, generate=dict.fromkeys(seats, step))
            sampler.start(inputs.sampling.starts)
            tokens, _ = sampler.sample(random_logits(4, seed=step)[list(seats)], inputs.sampling)
            for seat, token in zip(seats, tokens.tolist(), strict=True):
                drawn[seat].append(token)
        return drawn

    together = run((0, 1, 2, 3))
    assert all(run((seat,))[seat] == together[seat] for seat in range(4))


def test_a_forbidden_token_has_one_entry():
    """Also if the row has a bias for it, or for others."""
    seats = SeatSampling(4)
    both = Sampling(logit_bias=((5, 2.0), (6, 1.0)), bad_words=((6,), (8, 9)))
    seats.join([join(0, both), join(1), join(2, Sampling(bad_words=((3,),)))])
    chosen = np.array([0, 1, 2, 3])
    positions = np.zeros(4, np.int32)
    got = seats.pack((), chosen, positions, (), (), None, {0: [5, 9], 1: [7]}).biases
    never = float(np.float32(FORBIDDEN))
    assert sorted(zip(*(column.tolist() for column in got), strict=True)) == [
        *((0, token, never) for token in (5, 6, 9)),
        (1, 7, never),
        (2, 3, never),
    ]
    got = seats.pack((), chosen, positions, (), (), None).biases
    assert got.tokens.tolist() == [5, 6, 3] and got.values.tolist() == [2.0, never, never]
