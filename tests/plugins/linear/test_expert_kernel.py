"""The kernels of experts against their twins, for both gates, uneven routing and sizes that no tile
divides."""

from itertools import product

import pytest
import torch

from pensieve.plugins.linear.expert_reference import Experts, one_by_one
from pensieve.plugins.linear.fp8 import widening
from pensieve.plugins.linear.fp8_format import FP8, MOST

from ..kernel_cases import CUDA, DEVICE, error, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.linear import expert_kernel
from pensieve.plugins.linear.expert_kernel import ExpertTile, Tiles, most_blocks, tiles_for

EXPERTS, CHOSEN, HIDDEN, WIDTH = 6, 2, 40, 24
KINDS = {
    "silu": (False, 0.0),
    "silu, biases": (True, 0.0),
    "clamped": (False, 1.3),
    "clamped, biases": (True, 1.3),
}
TILES = {
    "one row": Tiles(1, ExpertTile(16, 32), ExpertTile(64, 16)),
    "16 rows": Tiles(16, ExpertTile(16, 16), ExpertTile(32, 16)),
    "64 rows": Tiles(64, ExpertTile(32, 32), ExpertTile(16, 64)),
}
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
HALF = torch.bfloat16 if CUDA else torch.float16


def random_route(tokens, experts=EXPERTS, chosen=CHOSEN, seed=0):
    return (
        torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed))
        .topk(chosen)
        .indices
    )


ROUTES = {
    "1 token": random_route(1),
    "5 tokens": random_route(5),
    "70 tokens": random_route(70),
    "all to one pair": torch.tensor([[4, 1]] * 70),
    "one expert thrice": torch.tensor([[3, 3, 3]] * 6),
    "most to the last": torch.tensor([[5, 0]] * 33 + [[2, 5]]),
}


def case(route, kind="silu", dtype=torch.float32, hidden=HIDDEN, width=WIDTH, experts=EXPERTS):
    """x, chosen, shares and the experts."""
    dice = torch.Generator(DEVICE).manual_seed(1)

    def draw(*shape, scale=1.0):
        return (torch.randn(shape, generator=dice, device=DEVICE) * scale).to(dtype)

    biased, limit = KINDS[kind]
    up, down = (
        draw(experts * 2 * width, hidden, scale=hidden**-0.5),
        draw(experts * hidden, width, scale=width**-0.5),
    )
    biases = (draw(len(up)), draw(len(down))) if biased else (None, None)
    shares = torch.rand(route.shape, generator=dice, device=DEVICE)
    return (
        draw(len(route), hidden),
        route.to(DEVICE),
        shares,
        Experts(up, down, *biases, limit, 1.7),
    )


@needs_kernels
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_the_kernels_compute_what_the_twin_does(route, kind, tiles):
    dtype = torch.float32 if not CUDA or TILES[tiles].rows == 1 else HALF
    tokens = 9 if TILES[tiles].rows == 1 else 70  # as each pair is a block there
    inputs = case(ROUTES[route][:tokens], kind, dtype)
    y = expert_kernel.experts(*inputs, TILES[tiles])
    assert y.dtype == dtype and error(y, one_by_one(*inputs)) <= TOLERANCE[dtype]


def in_groups(weight, group):
    """In FP8: the numbers, and a scale for each output and group of inputs."""
    groups = weight.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(dim=2) / MOST
    return (groups / scales.unsqueeze(2)).flatten(1).to(FP8), scales


@needs_kernels
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("group", [8, None], ids=["groups of 8", "rows"])
@pytest.mark.parametrize("route", ROUTES)
def test_weights_in_fp8_are_widened_as_by_the_twin(route, group, tiles):
    dtype = torch.float32 if not CUDA or TILES[tiles].rows == 1 else HALF
    tokens = 9 if TILES[tiles].rows == 1 else 70
    x, chosen, shares, of = case(ROUTES[route][:tokens], "silu, biases", dtype)
    up, up_scale = in_groups(of.up, group or HIDDEN)
    down, down_scale = in_groups(of.down, group or WIDTH)
    if group is None:
        up_scale, down_scale = up_scale.flatten(), down_scale.flatten()
    of = of._replace(up=up, down=down, up_scale=up_scale, down_scale=down_scale)
    y = expert_kernel.experts(x, chosen, shares, of, TILES[tiles])
    assert error(y, one_by_one(x, chosen, shares, of.widened(dtype))) <= TOLERANCE[dtype]
    wrong = of._replace(up_scale=up_scale.flip(0)).widened(dtype)
    assert error(y, one_by_one(x, chosen, shares, wrong)) > 0.01


@needs_kernels
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 40, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_a_projection_in_fp8_with_groups_is_that_of_its_twin(tokens, biased):
    dice = torch.Generator(DEVICE).manual_seed(2)
    weight = torch.randn(72, 96, generator=dice, device=DEVICE)
    x = torch.randn(tokens, 96, generator=dice, device=DEVICE).to(HALF)
    bias = torch.randn(72, generator=dice, device=DEVICE).to(HALF) if biased else None
    numbers, scales = in_groups(weight, 32)
    y = expert_kernel.linear(x, numbers, scales, bias)
    twin = widening(x, numbers, scales, bias)
    assert y.shape == twin.shape and y.dtype == HALF
    assert not tokens or error(y, twin) <= TOLERANCE[HALF]


@needs_kernels
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_chosen_by_the_number_of_tokens(kind, tokens):
    inputs = case(random_route(tokens), kind, HALF)
    y = expert_kernel.experts(*inputs)
    twin = one_by_one(*inputs)
    assert (
        y.shape == twin.shape
        and y.dtype == HALF
        and (not tokens or error(y, twin) <= TOLERANCE[HALF])
    )


@needs_kernels
@pytest.mark.parametrize("tiles", TILES)
def test_a_row_has_the_same_bits_whatever_its_neighbours_are(tiles):
    x, chosen, shares, of = case(ROUTES["70 tokens"][:40], "clamped, biases", HALF)
    together = expert_kernel.experts(x, chosen, shares, of, TILES[tiles])
    for token in (0, 17, 39):
        part = slice(token, token + 1)
        alone = expert_kernel.experts(x[part], chosen[part], shares[part], of, TILES[tiles])
        assert torch.equal(alone, together[part])


@needs_kernels
@pytest.mark.parametrize("tiles", TILES)
def test_an_infinite_expert_reaches_its_own_tokens_only(tiles):
    x, chosen, shares, of = case(ROUTES["most to the last"], dtype=HALF)
    of.up[2 * 2 * WIDTH : 3 * 2 * WIDTH] = float("inf")  # the last token's
    y = expert_kernel.experts(x, chosen, shares, of, TILES[tiles])
    assert y[:-1].isfinite().all() and not y[-1].isfinite().all()


@needs_kernels
def test_weights_that_are_stored_by_columns_are_refused():
    x, chosen, shares, of = case(ROUTES["5 tokens"])
    with pytest.raises(ValueError, match="contiguous"):
        expert_kernel.experts(x, chosen, shares, of._replace(up=of.up.t().contiguous().t()))


@needs_kernels
@pytest.mark.parametrize("route", [*ROUTES, "of several chunks"])
def test_blocks_have_each_pair_once_by_expert(route, monkeypatch):
    monkeypatch.setattr(expert_kernel, "CHUNK", 64)
    chosen = ROUTES[route] if route in ROUTES else random_route(200)
    inputs = case(chosen)
    route_launch, *_ = expert_kernel.launches(
        *inputs, torch.empty_like(inputs[0]), TILES["16 rows"]
    )
    route_launch.run()
    _, order, table, pairs, blocks = route_launch.arguments
    assert order.tolist() == chosen.flatten().sort(stable=True).indices.tolist()
    used = [tuple(entry) for entry in table.tolist() if entry[0] >= 0]
    assert table[len(used) :, 0].tolist() == [-1] * (blocks - len(used))
    places = []
    for expert, first, end in used:
        assert 0 < end - first <= 16
        assert (chosen.flatten()[order[first:end].cpu()] == expert).all()
        places += range(first, end)
    assert places == list(range(pairs))


def test_some_routing_has_the_most_blocks_and_none_has_more():
    for pairs, experts in product(range(1, 12), range(1, 4)):
        counts = (
            count for count in product(range(pairs + 1), repeat=experts) if sum(count) == pairs
        )
        most = max(sum(-(-pairs_of // 3) for pairs_of in count) for count in counts)
        assert most == most_blocks(pairs, experts, rows=3)


def test_few_pairs_have_few_blocks():
    assert most_blocks(8, 128, 16) == 8
    assert most_blocks(512, 128, 16) == 128 + 24


def test_more_rows_have_larger_blocks():
    rows = [tiles_for(tokens * 8, 128, tokens).rows for tokens in (1, 2, 64, 256, 512, 2048)]
    assert rows == sorted(rows) and rows[0] == 1 and rows[-1] == 128


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 600, 2048])
@pytest.mark.parametrize(
    "kind, hidden, width, experts, chosen",
    [("silu", 2048, 768, 128, 8), ("clamped, biases", 2880, 2880, 32, 4)],
    ids=["qwen3-30b-a3b", "gpt-oss-20b"],
)
def test_models_experts_are_their_twin_s(kind, hidden, width, experts, chosen, tokens):
    route = random_route(tokens, experts, chosen)
    inputs = case(route, kind, torch.bfloat16, hidden=hidden, width=width, experts=experts)
    assert error(expert_kernel.experts(*inputs), one_by_one(*inputs)) <= TOLERANCE[torch.bfloat16]
