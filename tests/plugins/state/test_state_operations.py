"""The CPU's operations on states against their twin in float64, their bits, and their slots."""

from itertools import pairwise

import pytest
import torch

from pensieve.plugins.attention.cpu import StepPlans
from pensieve.plugins.state import cpu, ops, reference  # noqa: F401  ops are registered
from pensieve.plugins.state.pool import ALIGNMENT, StatePool
from pensieve.plugins.torch_ops import register_pool, release_pool

from .state_cases import SHAPE, SLOTS, SPANS, ZERO, Tokens, batch_of_spans, new_pool


class Outcome:
    """The results of one step, and the pool behind it."""

    def __init__(self, tokens: Tokens, spans, pool: StatePool, twin: bool = False):
        """spans: (start, end, state_in, state_out) each."""
        where = batch_of_spans(spans)
        inputs = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta
        self.columns = pool.columns[1].clone()
        self.matrices = pool.matrices[1].clone()
        if twin:
            self.matrices = self.matrices.double()
            self.conv = reference.causal_conv(tokens.x, tokens.weight, *where, self.columns)
            self.delta = reference.gated_delta(*inputs, *where, self.matrices)
        else:
            plans = StepPlans()
            self.conv = cpu.causal_conv(tokens.x, tokens.weight, *where, self.columns, plans)
            self.delta = cpu.gated_delta(*inputs, *where, self.matrices, plans)

    @property
    def parts(self):
        return self.conv, self.columns, self.delta, self.matrices.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SPANS)
def test_results_and_states_equal_those_of_the_twin(name, dtype):
    spans = SPANS[name]
    tokens = Tokens(max((end for _, end, _, _ in spans), default=3), dtype)
    pool = new_pool(dtype)
    ours, twin = (Outcome(tokens, spans, pool, twin) for twin in (False, True))
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for own, expected in zip(ours.parts, twin.parts, strict=True):
        assert own.dtype == expected.dtype
        torch.testing.assert_close(own, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours.matrices, twin.matrices.float(), atol=2e-5, rtol=2e-5)
    assert torch.equal(ours.columns, twin.columns)
    untouched = sorted(set(range(SLOTS)) - {behind for *_, behind in spans})
    assert torch.equal(ours.matrices[untouched], pool.matrices[1][untouched])


def one_after_the_other(tokens: Tokens, spans) -> tuple[list, StatePool]:
    """Each span in a step of its own, over one pool: the results, and the pool."""
    pool = new_pool()
    results = []
    for span in spans:
        step = Outcome(tokens, [span], pool)
        pool.columns[1].copy_(step.columns)
        pool.matrices[1].copy_(step.matrices)
        results.append((step.conv[span[0] : span[1]], step.delta[span[0] : span[1]]))
    return results, pool


@pytest.mark.parametrize("cuts", [[64], [128], [64, 128, 192], [192]])
def test_cuts_at_multiples_of_a_piece_keep_all_bits(cuts):
    tokens = Tokens(230)
    whole = Outcome(tokens, [(0, 230, 6, 6)], new_pool())
    bounds = [0, *cuts, 230]
    results, pool = one_after_the_other(tokens, [(a, b, 6, 6) for a, b in pairwise(bounds)])
    assert torch.equal(torch.cat([conv for conv, _ in results]), whole.conv)
    assert torch.equal(torch.cat([delta for _, delta in results]), whole.delta)
    assert torch.equal(pool.matrices[1], whole.matrices)
    assert torch.equal(pool.columns[1], whole.columns)


@pytest.mark.parametrize("cut", [1, 32, 63, 65, 100, 229])
def test_cuts_elsewhere_change_the_last_digits_only(cut):
    tokens = Tokens(230)
    whole = Outcome(tokens, [(0, 230, 6, 6)], new_pool())
    _, pool = one_after_the_other(tokens, [(0, cut, 6, 6), (cut, 230, 6, 6)])
    change = (pool.matrices[1] - whole.matrices)[6].norm() / whole.matrices[6].norm()
    assert change < 1e-6
    assert torch.equal(pool.columns[1], whole.columns)


def test_other_rows_of_a_step_change_no_bits():
    spans = SPANS["a mixed step"]
    tokens = Tokens(202)
    together = Outcome(tokens, spans, new_pool())
    for start, end, before, behind in spans:
        alone = Outcome(tokens, [(start, end, before, behind)], new_pool())
        assert torch.equal(alone.conv[start:end], together.conv[start:end])
        assert torch.equal(alone.delta[start:end], together.delta[start:end])
        if behind >= 0:
            assert torch.equal(alone.matrices[behind], together.matrices[behind])
            assert torch.equal(alone.columns[behind], together.columns[behind])


def test_strong_decays_stay_finite():
    tokens = Tokens(100)
    tokens.decay.fill_(-200.0)
    ours, twin = (Outcome(tokens, [(0, 100, 6, 6)], new_pool(), twin) for twin in (False, True))
    torch.testing.assert_close(ours.delta, twin.delta, atol=2e-5, rtol=2e-5)


def test_a_record_holds_every_layer_in_a_place_of_its_own():
    shape = SHAPE._replace(dtype=torch.bfloat16, channels=25)
    assert shape.layer_bytes % ALIGNMENT == 0
    assert shape.nbytes >= 2 * (6 * 8 * 24 * 4 + 3 * 25 * 2)
    records = torch.zeros(3, shape.nbytes + 32, dtype=torch.uint8)  # records of a wider slot
    pool = StatePool(records, shape)
    parts = [*pool.matrices, *pool.columns]
    for number, part in enumerate(parts, start=1):
        assert part.data_ptr() >= records.data_ptr()
        part[1] = number
    for number, part in enumerate(parts, start=1):
        assert part[1].eq(number).all() and not part[0].any() and not part[2].any()
    assert not records[1, shape.nbytes :].any()


@pytest.mark.parametrize(
    "records",
    [torch.zeros(2, SHAPE.nbytes - 1, dtype=torch.uint8), torch.zeros(2, SHAPE.nbytes)],
    ids=["too small", "not bytes"],
)
def test_other_records_are_refused(records):
    with pytest.raises(ValueError, match="a pool of states is"):
        StatePool(records, SHAPE)


def registered_pool(states: StatePool | None, passed: list[int]) -> int:
    return register_pool(torch.zeros(1, 1, 2, 1, 4, 8), passed.append, states=states)


def test_the_operations_use_the_states_of_the_pool_and_pass_the_first_gate():
    tokens = Tokens(5)
    pool = new_pool()
    spans = [(0, 4, ZERO, 3), (4, 5, 2, 2)]
    expected = Outcome(tokens, spans, pool)
    segments = torch.tensor([[0, 4, 0, 4, 0], [4, 1, 0, 1, 1]], dtype=torch.int32)
    where = segments, torch.tensor([ZERO, 2]), torch.tensor([3, 2])
    passed: list[int] = []
    handle = registered_pool(pool, passed)
    try:
        conv = torch.ops.pensieve.causal_conv(tokens.x, tokens.weight, *where, handle, 1)
        delta = torch.ops.pensieve.gated_delta(
            tokens.q, tokens.k, tokens.v, tokens.decay, tokens.beta, *where, handle, 1
        )
        assert not passed
        torch.ops.pensieve.causal_conv(tokens.x, tokens.weight, *where, handle, 0)
        assert passed == [0]
    finally:
        release_pool(handle)
    ours = conv, pool.columns[1], delta, pool.matrices[1]
    assert all(map(torch.equal, ours, expected.parts))


def test_a_pool_without_states_is_refused():
    tokens = Tokens(1)
    where = torch.zeros(1, 5, dtype=torch.int32), torch.tensor([ZERO]), torch.tensor([ZERO])
    handle = registered_pool(None, [])
    try:
        with pytest.raises(ValueError, match="needs a pool with states"):
            torch.ops.pensieve.causal_conv(tokens.x, tokens.weight, *where, handle, 0)
    finally:
        release_pool(handle)
