"""Experts: one product for all of them gives the results of one after the other, however uneven the
routing is."""

import pytest
import torch
import torch.nn.functional as F

import pensieve.plugins.linear.experts  # noqa: F401  registers torch.ops.pensieve.experts
from pensieve.plugins.linear.expert_reference import Experts, grouped, one_by_one

from ..kernel_cases import CUDA, DEVICE

EXPERTS, HIDDEN, WIDTH = 6, 32, 24
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
ROUTES = {  # the experts of each token
    "of one token": [[4, 1]],
    "of no token": torch.empty(0, 2),
    "all to one pair": [[3, 5]] * 9,
    "one expert without tokens": [[0, 2], [2, 0], [5, 1], [1, 3], [3, 5]] * 3,
    "of every number": [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 5]],
    "each once": [[5, 4, 3, 2, 1, 0]] * 4,
}

needs_grouped = pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="torch's grouped product needs these GPUs",
)


def case(route, dtype, hidden=HIDDEN, width=WIDTH, experts=EXPERTS):
    dice = torch.Generator().manual_seed(0)
    chosen = torch.as_tensor(ROUTES.get(route, route)).long()
    x = torch.randn(len(chosen), hidden, generator=dice)
    shares = torch.rand(chosen.shape, generator=dice)
    up = torch.randn(experts * 2 * width, hidden, generator=dice) * hidden**-0.5
    down = torch.randn(experts * hidden, width, generator=dice) * width**-0.5
    return tuple(
        tensor.to(DEVICE) for tensor in (x.to(dtype), chosen, shares, up.to(dtype), down.to(dtype))
    )


def with_biases(inputs):
    """And the clamped gate; about a third of the gates and of the values are beyond its limit."""
    x, chosen, shares, up, down = inputs
    dice = torch.Generator().manual_seed(1)
    biases = [torch.randn(len(weight), generator=dice).to(weight) for weight in (up, down)]
    return x, chosen, shares, up, down, *biases, 1.3, 1.7


def formula(x, chosen, shares, up, down, up_bias=None, down_bias=None, limit=0.0, slope=0.0):
    """Token by token, in float64."""
    up_bias = up.new_zeros(len(up)) if up_bias is None else up_bias
    down_bias = down.new_zeros(len(down)) if down_bias is None else down_bias
    hidden = x.shape[1]
    width = down.shape[1]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, share in zip(chosen[token].tolist(), shares[token].tolist(), strict=True):
            rows = slice(expert * 2 * width, (expert + 1) * 2 * width)
            gate, values = (up[rows].double() @ x[token].double() + up_bias[rows]).chunk(2)
            if limit:
                gate = gate.clamp(max=limit)
                values = values.clamp(-limit, limit) + 1
                activated = gate / (1 + torch.exp(-slope * gate)) * values
            else:
                activated = F.silu(gate) * values
            rows = slice(expert * hidden, (expert + 1) * hidden)
            y[token] += share * (down[rows].double() @ activated + down_bias[rows]).cpu()
    return y


def slow(x, chosen, shares, *of):
    return one_by_one(x, chosen, shares, Experts(*of))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("changed", [tuple, with_biases], ids=["", "biases, clamped"])
def test_all_ways_compute_the_formula(changed, route, dtype):
    inputs = changed(case(route, dtype))
    expected = formula(*inputs)
    for way in (torch.ops.pensieve.experts, slow):
        y = way(*inputs)
        assert y.dtype == dtype and y.shape == expected.shape
        assert (y.cpu() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize(
    "dtype, hidden, width", [(torch.bfloat16, 64, 12), (torch.float32, 20, 6)], ids=str
)
def test_widths_that_the_grouped_product_refuses_are_computed(dtype, hidden, width):
    inputs = with_biases(case("of every number", dtype, hidden, width))
    expected = formula(*inputs)
    y = torch.ops.pensieve.experts(*inputs)
    assert (y.cpu() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_an_infinite_result_of_an_expert_reaches_its_own_tokens_only():
    x, chosen, shares, up, down = case("one expert without tokens", torch.float32)
    up[4 * 2 * WIDTH : 5 * 2 * WIDTH] = float("inf")  # the one without tokens
    for way in (torch.ops.pensieve.experts, slow):
        assert way(x, chosen, shares, up, down).isfinite().all()


def test_what_torch_promises_of_an_operation_holds():
    checks = ("test_schema", "test_faketensor")
    inputs = with_biases(case("of every number", torch.float32))
    torch.library.opcheck(torch.ops.pensieve.experts.default, inputs, test_utils=checks)


def test_weights_may_be_stored_by_columns():
    """The form of packages on a CPU."""
    x, chosen, shares, up, down = case("of every number", torch.float32)
    by_columns = [weight.t().contiguous().t() for weight in (up, down)]
    expected = torch.ops.pensieve.experts(x, chosen, shares, up, down)
    torch.testing.assert_close(torch.ops.pensieve.experts(x, chosen, shares, *by_columns), expected)


@pytest.mark.gpu
@needs_grouped
@pytest.mark.parametrize("tokens", [1, 64, 256, 2048])
def test_the_gpu_s_product_of_qwen3_experts_is_its_twins_and_can_be_captured(tokens):
    scores = torch.rand(2, tokens, 128, generator=torch.Generator().manual_seed(1))
    first, second = scores.topk(8).indices
    inputs = case(first, torch.bfloat16, hidden=2048, width=768, experts=128)
    x, chosen, shares, up, down = inputs
    torch.ops.pensieve.experts(*inputs)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.pensieve.experts(*inputs)
    for route in (first, second, torch.arange(8)):  # the last: all tokens to the first eight
        chosen.copy_(route)
        graph.replay()
        for twin in (grouped, one_by_one):
            expected = twin(x, chosen, shares, Experts(up, down)).float()
            assert (y.float() - expected).norm() <= 0.01 * expected.norm()
