"""Steps that reuse arrays of the last one, compared element by element with steps that are packed
and laid out anew."""

import random
from array import array
from collections import Counter
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from pensieve.builder.forward_batch import NOT_WRITTEN
from pensieve.runtime.step import prefixes
from pensieve.runtime.step.bad_words import BadWords
from pensieve.runtime.step.buffers import STAGED_INPUTS, Shapes, StepBuffers, sampling_arrays
from pensieve.runtime.step.inputs import StepInputs, StepPacker
from pensieve.runtime.step.reusing_packer import ReusingPacker
from pensieve.runtime.step.sampling_inputs import Mask
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.plan import Join, Span, StepPlan
from pensieve.scheduler.types import InvariantError, Sampling

from ...scheduler.device_model import DeviceModel
from ...scheduler.driver import Driver
from ..fake_engine import join, plan, row

SEATS, BLOCKS, CHUNK = 7, 12, 4
VOCAB = 97
KEYS = 2 * CHUNK  # that rows share at once


def equal(one, other) -> None:
    """Asserts that two values have equal types and fields, and arrays equal types and elements."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert np.array_equal(one, other)
    elif is_dataclass(one):
        for field in fields(one):
            equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple):
        for own, others in zip(one, other, strict=True):
            equal(own, others)
    else:
        assert one == other


class Twins:
    """Packs and uploads each plan twice: with what the last step left, and anew."""

    def __init__(self, seats: int, blocks: int, tokens: int, seen: Counter[str]):
        self.seen = seen
        self._shapes = Shapes(tokens, seats, CHUNK)
        self._reusing = ReusingPacker(seats, blocks, CHUNK)
        self._anew = StepPacker(seats, blocks, CHUNK)
        self._buffers = StepBuffers(self._shapes, "cpu")
        self._words = BadWords()
        self._last: StepInputs | None = None
        self._copies: list[tuple[StepInputs, StepInputs]] = []

    def pack(self, step: StepPlan, mask: Mask | None = None) -> StepInputs:
        forbidden = self._words.forbidden(step)
        inputs = self._reusing.pack(step, mask, forbidden)
        wanted = self._anew.pack(step, mask, forbidden)
        equal(inputs, wanted)
        self._compare_uploads(inputs, wanted)
        self._check_earlier_steps(inputs, wanted)
        again = self._last is not None and inputs.sample_seats is self._last.sample_seats
        self.seen["again"] += again
        sampling = inputs.sampling
        for name in ("draws", "filtered", "penalties", "biases", "mask", "scores"):
            self.seen[f"again with {name}"] += again and getattr(sampling, name) is not None
        self.seen["again with shared keys"] += again and inputs.sharing is not None
        self.seen["again with new chunks"] += again and len(inputs.block_cells) > 0
        self.seen["again beyond 0"] += again and bool(inputs.positions.max() > 0)
        self._last = inputs
        return inputs

    def advance(self, step: StepPlan, tokens: list[int]) -> None:
        self._words.advance(step.samples, tokens)

    def _compare_uploads(self, inputs: StepInputs, wanted: StepInputs) -> None:
        fresh = StepBuffers(self._shapes, "cpu")
        shape = self._buffers.upload(inputs)
        assert fresh.upload(wanted) == shape
        one = self._buffers.batch(shape)
        other = fresh.batch(shape)
        for name in STAGED_INPUTS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        for name in ("block_cells", "block_slots", "sample_seats"):
            own = getattr(self._buffers, name)
            assert own.dtype == getattr(fresh, name).dtype
            assert own.tolist() == getattr(fresh, name).tolist() == getattr(inputs, name).tolist()
        for values in sampling_arrays(inputs.sampling):
            placed = self._buffers.place(values).numpy()
            assert placed.dtype == values.dtype and np.array_equal(placed, values)

    def _check_earlier_steps(self, inputs: StepInputs, wanted: StepInputs) -> None:
        """The arrays of steps in flight have not changed."""
        self._copies = [*self._copies[-2:], (inputs, wanted)]
        for earlier, as_it_was in self._copies:
            equal(earlier, as_it_was)


class Row:
    def __init__(self, tokens: int, sampling: Sampling, scores: bool):
        self.prompt = tokens  # that are still to be computed
        self.position = 0
        self.begin = 0
        self.chunks = 0
        self.sampling = sampling
        self.scores = scores


class RandomPlans:
    """Rows that join with all wishes, compute prompts in pieces, generate, check drafts, stand
    still, move on to a later begin, and leave without a word."""

    def __init__(self, seed: int):
        self.dice = random.Random(seed)
        self.rows: dict[int, Row] = {}
        self.step = 0
        self.slots = (2, 9)[seed % 2]  # few, so that rows share prefixes: nearly all, or some

    def next(self) -> StepPlan:
        self.step += 1
        dice = self.dice
        calm = self.step % 16 > 5  # else something happens in most steps
        joins: list[Join] = []
        origins: list[tuple[int, int, int]] = []
        blocks: list[tuple[int, int, tuple[int, ...]]] = []
        generate: dict[int, int] = {}
        spans: list[Span] = []
        scored: list[int] = []
        for seat in range(SEATS):
            held = self.rows.get(seat)
            if held is None or (not calm and dice.random() < 0.08):
                self.rows.pop(seat, None)
                if calm or dice.random() < 0.5:
                    continue
                held = self.rows[seat] = self._row()
                joins.append(self._join(seat, held))
            elif held.position - held.begin > CHUNK * (BLOCKS - 3):
                move = CHUNK * dice.randint(1, (held.position - held.begin) // CHUNK)
                held.begin += move
                held.chunks = 0
                origins.append((seat, held.begin, dice.choice((0, held.begin))))
            if not calm and dice.random() < 0.05:
                continue  # suspended, or it awaits its token
            self._compute(seat, held, blocks, generate, spans, scored, calm)
        order = [*generate]
        if not calm and dice.random() < 0.2:
            dice.shuffle(order)
        step_plan = plan(
            self.step,
            joins=joins,
            origins=origins,
            blocks=blocks,
            generate={seat: generate[seat] for seat in order},
            spans=spans,
            token_ids=[
                dice.randrange(VOCAB) for span in spans for _ in range(span.end - span.start)
            ],
        )
        return replace(step_plan, scored=array("i", scored))

    def _row(self) -> Row:
        dice = self.dice
        plain = dice.random() < 0.5
        sampling = Sampling(
            temperature=dice.choice((0.0, 0.8)),
            top_k=dice.choice((0, 5)),
            top_p=dice.choice((1.0, 0.9)),
            min_p=dice.choice((0.0, 0.1)),
            seed=dice.randrange(2**63),
            repetition_penalty=1.0 if plain else dice.choice((1.0, 1.3)),
            presence_penalty=0.0 if plain else dice.choice((0.0, 0.5)),
            frequency_penalty=0.0 if plain else dice.choice((0.0, 0.2)),
            logit_bias=() if plain else dice.choice(((), ((3, 1.0), (8, -2.0)))),
            logprobs=None if plain else dice.choice((None, 0, 3)),
            bad_words=() if plain else dice.choice(((), ((1, 2), (4,)), ((2, 1, 5),))),
        )
        return Row(dice.randint(1, 3 * CHUNK), sampling, not plain and dice.random() < 0.3)

    def _join(self, seat: int, held: Row) -> Join:
        dice = self.dice
        ids = [dice.randrange(VOCAB) for _ in range(6)]
        joined = join(seat, held.sampling)._replace(
            prompt_logprobs=2 if held.scores else None,
            stop_ids=dice.choice(((), (9, 11))),
            may_end=dice.randint(0, 3 * CHUNK),
        )
        return joined._replace(prompt=ids, reply=ids[:3])

    def _compute(self, seat, held, blocks, generate, spans, scored, calm) -> None:
        dice = self.dice
        start = held.position
        drafts = 0
        if held.prompt:
            tokens = min(held.prompt, held.prompt if calm else dice.randint(1, 2 * CHUNK))
        else:
            drafts = 0 if calm or dice.random() < 0.8 else dice.randint(1, 3)
            tokens = 1 + drafts
        end = start + tokens
        needed = -(-(end - held.begin) // CHUNK)
        if needed > held.chunks:
            given = tuple(dice.randrange(self.slots) for _ in range(held.chunks, needed))
            blocks.append((seat, held.chunks, given))
            held.chunks = needed
        held.position = end
        if not held.prompt and not drafts:
            generate[seat] = start
            return
        samples = 1 + drafts
        if held.prompt:
            held.prompt -= tokens
            samples = int(not held.prompt)
        scores = held.scores and not drafts
        spans.append(Span(seat, start, end, start + dice.randint(0, 1), samples, scores))
        if scores:
            scored += [dice.randrange(VOCAB) for _ in range(tokens - samples)]


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "SHARED_KEYS", KEYS)
    monkeypatch.setattr(prefixes, "BAND_KEYS", 2 * KEYS)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans(seed, seen, short_prefixes):
    plans = RandomPlans(seed)
    twins = Twins(SEATS, BLOCKS, 64, seen)
    dice = random.Random(seed)
    words = -(-VOCAB // 32)
    for _ in range(250):
        step = plans.next()
        masked = [at for at in range(len(step.samples)) if dice.random() < 0.1]
        bits = np.array(
            [[dice.randrange(-(2**31), 2**31) for _ in range(words)] for _ in masked], np.int32
        )
        twins.pack(step, Mask(np.array(masked), bits) if masked else None)
        twins.advance(step, [dice.randrange(6) for _ in step.samples])


def test_all_kinds_of_steps_reused_something(seen):
    for kind in (
        "draws",
        "filtered",
        "penalties",
        "biases",
        "mask",
        "scores",
        "shared keys",
        "new chunks",
    ):
        assert seen[f"again with {kind}"] > 20, kind
    assert seen["again"] > 500 and seen["again beyond 0"]


class TwinModel(DeviceModel):
    """Packs each plan of the driver twice."""

    twins: Twins

    def launch(self, plan):
        result = super().launch(plan)
        inputs = self.twins.pack(plan)
        assert len(inputs.token_ids) == plan.tokens
        return result


class TwinDriver(Driver):
    def __init__(self, seen, **settings):
        self.seen = seen
        super().__init__(**settings)

    def _new_device(self):
        model = super()._new_device()
        model.__class__ = TwinModel
        config = self.config
        model.twins = Twins(
            config.max_num_seqs,
            config.max_model_len // CHUNK + 1,
            config.max_num_batched_tokens + 8 * config.max_num_seqs,
            self.seen,
        )
        return model


@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_conversations(seed, short_prefixes):
    """With suspended rows, branches, forks and contexts that overflow."""
    seen: Counter[str] = Counter()
    TwinDriver(
        seen,
        seed=seed,
        gpu_kv_chunks=(20, 40, 72)[seed % 3],
        host_kv_chunks=(16, 60)[seed % 2],
        overflow=OVERFLOW_MODES[seed % 2],
        chunk_tokens=CHUNK,
    ).play(600, seen)
    assert seen["again"] > 20


# What ends the reuse.


@pytest.fixture
def twins() -> Twins:
    """Rows in seats 0 and 1, at position 8, have generated twice."""
    twins = Twins(SEATS, BLOCKS, 64, Counter())
    hot = Sampling(temperature=0.5, seed=7)
    twins.pack(
        plan(
            1,
            joins=[join(0, hot), join(1, hot)],
            blocks=[(0, 0, (1, 2, 3)), (1, 0, (4, 5, 6))],
            generate={0: 6, 1: 6},
        )
    )
    twins.pack(plan(2, generate={0: 7, 1: 7}))
    assert twins.seen["again"] == 1
    return twins


def test_a_row_that_joins_in_the_seat_of_another_has_its_own_settings(twins):
    twins.pack(
        plan(
            3,
            joins=[join(1, Sampling(temperature=0.9, seed=8))],
            blocks=[(1, 0, (4, 5, 6))],
            generate={0: 8, 1: 8},
        )
    )
    inputs = twins.pack(plan(4, generate={0: 9, 1: 9}))
    assert inputs.sampling.draws.temperatures.tolist() == [0.5, 0.9]


def test_a_row_that_begins_later_has_its_own_coordinates(twins):
    twins.pack(plan(3, origins=[(1, 4, 0)], blocks=[(1, 0, (5, 6))], generate={0: 8, 1: 8}))
    inputs = twins.pack(plan(4, generate={0: 9, 1: 9}))
    assert inputs.segments[:, 3].tolist() == [10, 6]


def test_a_row_may_stand_still_for_a_step(twins):
    twins.pack(plan(3, generate={0: 8}))
    inputs = twins.pack(plan(4, generate={0: 9, 1: 8}))
    assert inputs.positions.tolist() == [9, 8]


def test_rows_in_another_order_are_other_rows(twins):
    assert twins.pack(plan(3, generate={1: 8, 0: 9})).positions.tolist() == [8, 9]


def test_the_last_place_of_a_chunk_and_the_first_of_the_next(twins):
    """A position that reaches a new chunk is checked against the table, not before and not
    later."""
    for position in (8, 9, 10, 11):
        inputs = twins.pack(plan(position, generate={0: position, 1: position}))
        assert inputs.slots.tolist() == [3 * CHUNK + position - 8, 6 * CHUNK + position - 8]
    inputs = twins.pack(plan(12, blocks=[(0, 3, (7,)), (1, 3, (8,))], generate={0: 12, 1: 12}))
    assert inputs.slots.tolist() == [7 * CHUNK, 8 * CHUNK]
    with pytest.raises(InvariantError, match="never given"):
        twins._reusing.pack(plan(17, generate={0: 16, 1: 15}))


def test_rows_that_generate_into_equal_slots_begin_to_share_them(short_prefixes):
    twins = Twins(SEATS, BLOCKS, 64, Counter())
    joins = [join(0), join(1)]
    twins.pack(plan(1, joins=joins, blocks=[(0, 0, (1,)), (1, 0, (1,))], generate={0: 2, 1: 2}))
    assert twins.pack(plan(2, generate={0: 3, 1: 3})).sharing is None
    inputs = twins.pack(plan(3, blocks=[(0, 1, (2,)), (1, 1, (2,))], generate={0: 4, 1: 4}))
    assert inputs.sharing.tolist() == [[0, 0], [1, KEYS]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"generate": {0: 12, 1: 8}}, "never given"),
        ({"blocks": [(0, 4, (1,))], "generate": {0: 8, 1: 8}}, "before chunk 3"),
        ({"blocks": [(0, 11, (1, 2))], "generate": {0: 8, 1: 8}}, "beyond its 12"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused_as_anew(twins, change, message):
    for packer in (twins._reusing, twins._anew):
        with pytest.raises(InvariantError, match=message):
            packer.pack(plan(3, **change))


def test_a_sample_without_a_row_is_refused_as_anew(twins):
    broken = replace(plan(3, generate={0: 8, 1: 8}), samples=(row(0),))
    for packer in (twins._reusing, twins._anew):
        with pytest.raises(InvariantError, match="samples without a row"):
            packer.pack(broken)


def test_nothing_is_written_for_rows_that_share_no_memory(twins):
    """Arrays that differ from step to step have memory of their own."""
    steps = [twins.pack(plan(n, generate={0: n, 1: n})) for n in (8, 9)]
    for name in ("positions", "slots", "segments"):
        one, other = (getattr(inputs, name) for inputs in steps)
        assert not np.shares_memory(one, other)
    assert NOT_WRITTEN not in steps[1].slots


def test_any_number_of_changes_of_the_block_table_has_room():
    packer = StepPacker(1, 100, CHUNK)
    buffers = StepBuffers(Shapes(8, 1, CHUNK), "cpu")
    for step, count in enumerate((0, 1, 31, 32, 33, 64, 65, 2), 1):
        joins_and_gets = plan(step, joins=[join(0)], blocks=[(0, 0, tuple(range(count)))])
        buffers.upload(packer.pack(joins_and_gets))
        assert buffers.block_cells.tolist() == buffers.block_slots.tolist() == [*range(count)]
