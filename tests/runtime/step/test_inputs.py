import time

import numpy as np
import pytest

from pensieve.builder.forward_batch import NOT_WRITTEN
from pensieve.runtime.step.inputs import LAST_SAMPLE, StepPacker
from pensieve.runtime.step.sampling_inputs import MOST_LIMITED
from pensieve.scheduler.types import InvariantError, Sampling

from ..fake_engine import join, plan, span

CHUNK = 4


@pytest.fixture
def packer():
    """Four seats of five chunks; seats 0, 1 and 3 hold 2, 3 and 1 chunks."""
    packer = StepPacker(seats=4, blocks=5, chunk_tokens=CHUNK)
    packer.pack(
        plan(
            1,
            joins=[join(0), join(1), join(3)],
            blocks=[(0, 0, (9, 8)), (1, 0, (5, 6, 7)), (3, 0, (2,))],
        )
    )
    return packer


def arrays(inputs) -> list[np.ndarray]:
    names = [
        name
        for name in inputs.__dataclass_fields__
        if name not in ("generated", "sharing", "sampling")
    ]
    return (
        [getattr(inputs, name) for name in names]
        + list(inputs.sampling.draws or ())
        + list(inputs.sampling.limited or ())
        + list(inputs.sampling.filtered or ())
    )


def test_a_batch_of_generation_and_spans(packer):
    inputs = packer.pack(
        plan(
            2,
            generate={3: 2, 0: 6},
            spans=[span(1, 2, 6, samples=False), span(1, 8, 11, write_from=10)],
            token_ids=[10, 11, 12, 13, 20, 21, 22],
        )
    )
    assert inputs.generated == 2
    assert inputs.token_ids.tolist() == [LAST_SAMPLE, LAST_SAMPLE, 10, 11, 12, 13, 20, 21, 22]
    assert inputs.positions.tolist() == [2, 6, 2, 3, 4, 5, 8, 9, 10]
    places = [2 * CHUNK + 2, 8 * CHUNK + 2, 5 * CHUNK + 2, 5 * CHUNK + 3, 6 * CHUNK, 6 * CHUNK + 1]
    assert inputs.slots.tolist() == [*places, NOT_WRITTEN, NOT_WRITTEN, 7 * CHUNK + 2]
    assert inputs.segments.tolist() == [
        [0, 1, 0, 3, 3],
        [1, 1, 0, 7, 0],
        [2, 4, 0, 6, 1],
        [6, 3, 0, 11, 1],
    ]
    assert inputs.sample_rows.tolist() == [0, 1, 8]
    assert inputs.sample_seats.tolist() == [3, 0, 1]
    assert inputs.sampling.draws is None
    assert {a.dtype for a in arrays(inputs)[:6]} == {np.dtype(np.int32)}


def test_a_span_with_drafts_samples_several_positions(packer):
    """Each is drawn with its own number, and with the biases of its position."""
    hot = Sampling(temperature=0.7, seed=3, logit_bias=((5, 1.0),))
    late = join(2, hot)._replace(stop_ids=(9,), may_end=8)
    inputs = packer.pack(
        plan(
            2,
            joins=[late],
            blocks=[(2, 0, (1, 3, 4))],
            generate={0: 4},
            spans=[span(2, 5, 9, samples=4), span(1, 2, 4, samples=0), span(3, 1, 2)],
            token_ids=range(7),
        )
    )
    assert inputs.sample_rows.tolist() == [0, 1, 2, 3, 4, 7]
    assert inputs.sample_seats.tolist() == [0, 2, 2, 2, 2, 3]
    assert inputs.sampling.draws.rows.tolist() == [1, 2, 3, 4]
    assert inputs.sampling.draws.positions.tolist() == [6, 7, 8, 9]
    assert inputs.sampling.biases.rows.tolist() == [1, 1, 2, 2, 3, 4]
    assert inputs.sampling.biases.tokens.tolist() == [5, 9, 5, 9, 5, 5]


def test_block_updates_travel_as_cells_of_the_flat_table(packer):
    inputs = packer.pack(plan(2, blocks=[(0, 2, (4,)), (3, 1, (11, 12))]))
    assert inputs.block_cells.tolist() == [2, 16, 17]
    assert inputs.block_slots.tolist() == [4, 11, 12]
    assert len(inputs.token_ids) == len(inputs.segments) == len(inputs.sample_rows) == 0


def test_draws_name_rows_parameters_and_the_sampled_position(packer):
    hot = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=2**63 - 1)
    inputs = packer.pack(
        plan(
            2,
            joins=[join(2, hot)],
            blocks=[(2, 0, (1, 3))],
            generate={0: 4, 1: 9},
            spans=[span(2, 0, 5)],
            token_ids=range(5),
        )
    )
    assert inputs.sampling.draws is None and inputs.sampling.filtered is None
    assert [a.tolist() for a in inputs.sampling.limited] == [
        [2],
        [0.7],
        [5],
        [0.9],
        [0.05],
        [2**63 - 1],
        [5],
    ]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (Sampling(temperature=1.0), "draws"),
        (Sampling(temperature=1.0, top_k=MOST_LIMITED), "limited"),
        (Sampling(temperature=1.0, top_k=MOST_LIMITED + 1), "filtered"),
        (Sampling(temperature=1.0, top_p=0.9), "filtered"),
        (Sampling(temperature=1.0, min_p=0.1), "filtered"),
    ],
)
def test_a_row_is_drawn_by_its_filters_alone(packer, sampling, field):
    seated = plan(2, joins=[join(2, sampling)], blocks=[(2, 0, (1, 3))])
    packer.pack(seated)
    inputs = packer.pack(plan(3, generate={0: 4, 2: 5})).sampling
    rows = {name: getattr(inputs, name) for name in ("draws", "limited", "filtered")}
    assert [name for name, draws in rows.items() if draws is not None] == [field]
    assert rows[field].rows.tolist() == [1]


def test_a_join_forgets_the_seat_s_previous_row(packer):
    packer.pack(plan(2, joins=[join(1, Sampling(temperature=1.0))], blocks=[(1, 0, (0,))]))
    inputs = packer.pack(
        plan(3, joins=[join(1)], blocks=[(1, 0, (4,))], spans=[span(1, 0, 4)], token_ids=range(4))
    )
    assert inputs.sampling.draws is None
    with pytest.raises(InvariantError, match="never given"):
        packer.pack(plan(4, generate={1: 4}))


def test_hazard_buffer_rewritten_while_a_step_in_flight_reads_it(packer):
    """No array of a packed step shares memory with the packer or a later step, so none can change
    under its reader."""
    steps = [
        packer.pack(
            plan(
                n,
                blocks=[(0, 2, (n,))],
                generate={0: n, 1: n + 1},
                spans=[span(3, 0, 2)],
                token_ids=[n, n],
            )
        )
        for n in (2, 3)
    ]
    own = [a for a in vars(packer).values() if isinstance(a, np.ndarray)]
    for earlier in arrays(steps[0]):
        assert not any(np.shares_memory(earlier, later) for later in [*arrays(steps[1]), *own])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"blocks": [(0, 3, (1,))]}, "before chunk 2"),
        ({"blocks": [(1, 3, (1, 2, 3))]}, "beyond its 5"),
        ({"generate": {0: 8}}, "never given"),
        ({"generate": {2: 0}}, "never given"),
        ({"spans": [span(0, 0, 3)], "token_ids": [1, 2]}, "differ"),
        ({"spans": [span(0, 3, 3)]}, "empty"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(packer, broken, message):
    with pytest.raises(InvariantError, match=message):
        packer.pack(plan(2, **broken))


def test_a_plain_generation_step_packs_quickly():
    seats, blocks = 256, 128
    packer = StepPacker(seats, blocks, 32)
    packer.pack(
        plan(
            1,
            joins=[join(s) for s in range(seats)],
            blocks=[(s, 0, tuple(range(blocks))) for s in range(seats)],
        )
    )
    steps = [
        plan(n, blocks=[(s, 60, (n,)) for s in range(8)], generate=dict.fromkeys(range(seats), n))
        for n in range(2, 202)
    ]
    times = []
    for step in steps:
        begin = time.perf_counter()
        packer.pack(step)
        times.append(time.perf_counter() - begin)
    assert min(times) < 500e-6, "it takes about 80 us"


@pytest.mark.parametrize(
    ("zero", "told"), [(0, [9, 8, 9, 10]), (8, [1, 0, 1, 2]), (4, [5, 4, 5, 6])]
)
def test_a_row_that_begins_in_the_middle_of_a_context(packer, zero, told):
    """Coordinates count from the row's first position, the model's positions from `zero`."""
    origins = [(1, 8, zero), (3, 8, zero)]
    inputs = packer.pack(
        plan(
            2,
            origins=origins,
            blocks=[(1, 0, (6, 7)), (3, 0, (2,))],
            generate={1: 9},
            spans=[span(3, 8, 11, write_from=9)],
            token_ids=[1, 2, 3],
        )
    )
    assert inputs.positions.tolist() == told
    assert inputs.segments.tolist() == [[0, 1, 0, 2, 1], [1, 3, 0, 3, 3]]
    assert inputs.slots.tolist() == [6 * CHUNK + 1, NOT_WRITTEN, 2 * CHUNK + 1, 2 * CHUNK + 2]
    assert inputs.block_cells.tolist() == [5, 6, 15] and inputs.block_slots.tolist() == [6, 7, 2]
    with pytest.raises(InvariantError, match="never given"):
        packer.pack(plan(3, generate={1: 16}))  # the chunks it had before are not its any more


def test_a_draw_is_counted_by_its_position_in_the_context(packer):
    hot = Sampling(temperature=0.7, seed=3)
    inputs = packer.pack(
        plan(2, joins=[join(2, hot)], origins=[(2, 8, 8)], blocks=[(2, 0, (1,))], generate={2: 9})
    )
    assert inputs.sampling.draws.positions.tolist() == [10]


def test_a_joining_row_begins_at_position_0(packer):
    packer.pack(plan(2, origins=[(1, 8, 8)], blocks=[(1, 0, (6,))]))
    inputs = packer.pack(
        plan(3, joins=[join(1)], blocks=[(1, 0, (4,))], spans=[span(1, 0, 2)], token_ids=[1, 2])
    )
    assert inputs.positions.tolist() == [0, 1] and inputs.segments.tolist() == [[0, 2, 0, 2, 1]]
