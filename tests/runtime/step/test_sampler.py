import math

import numpy as np
import pytest
import torch

from pensieve.runtime.step.sampler import draw, sample, uniform

MASK = 2**64 - 1


def splitmix_twin(seed: int, position: int) -> float:
    """`uniform` in Python integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    step = 0x9E3779B97F4A7C15
    state = (mix((seed + step) & MASK) + (position + 1) * step) & MASK
    return (mix(state) >> 11) / 2**53


def draw_twin(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> int:
    """`draw` for one row, the way the filters are defined."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k:
        smallest = logits[order[min(top_k, len(order)) - 1]]
        order = [token for token in order if logits[token] >= smallest]
    weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / temperature)
    order, weights = zip(
        *((t, w) for t, w in zip(order, weights, strict=True) if w >= min_p * weights[0]),
        strict=True,
    )
    weights = np.array(weights) / sum(weights)
    kept = []
    mass = 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.append((token, weight))
        mass += weight
        if mass >= top_p:
            break
    target = u * mass
    reached = 0.0
    for token, weight in kept:
        reached += weight
        if reached > target:
            return token
    return kept[-1][0]


def arguments(temperatures, top_ks, top_ps, min_ps=None):
    return (
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor(top_ks, dtype=torch.int64),
        torch.tensor(top_ps, dtype=torch.float64),
        torch.tensor(min_ps or [0.0] * len(top_ps), dtype=torch.float64),
    )


def drawn_many(
    logits: list[float], count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0
) -> np.ndarray:
    """Frequencies of the tokens drawn at `count` positions of one seed."""
    rows = torch.tensor([logits]).expand(count, -1)
    uniforms = uniform(torch.full((count,), 7), torch.arange(count))
    tokens = draw(
        rows,
        *arguments([temperature] * count, [top_k] * count, [top_p] * count, [min_p] * count),
        uniforms,
    )
    return np.bincount(tokens.numpy(), minlength=len(logits)) / count


def test_uniform_equals_its_twin():
    seeds = [0, 1, 2, 12345, 2**31, 2**63 - 1]
    positions = [0, 1, 2, 1000, 2**31 - 1]
    grid = [(seed, position) for seed in seeds for position in positions]
    got = uniform(torch.tensor([s for s, _ in grid]), torch.tensor([p for _, p in grid]))
    assert got.tolist() == [splitmix_twin(*point) for point in grid]


@pytest.mark.parametrize("along", ["positions of a seed", "seeds at a position"])
def test_uniform_numbers_are_uniform_and_uncorrelated(along):
    count, bins = 20_000, 50
    other = torch.zeros(count, dtype=torch.int64)
    running = torch.arange(count)
    u = (
        uniform(other, running) if along == "positions of a seed" else uniform(running, other)
    ).numpy()
    assert u.min() >= 0.0 and u.max() < 1.0
    expected = count / bins
    chi_square = ((np.histogram(u, bins, (0.0, 1.0))[0] - expected) ** 2 / expected).sum()
    assert chi_square < 85.4  # 49 degrees of freedom, 0.1%
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(count)


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(3, 300)
    logits[0, [17, 200]] = 1.0
    logits[1, [299, 298]] = 2.0
    none = torch.empty(0, dtype=torch.int64)
    assert sample(
        logits, none, none.double(), none, none.double(), none.double(), none, none
    ).tolist() == [17, 298, 0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (1.3, 8, 0.8, 0.0),
        (1.5, 0, 1.0, 0.2),
        (1.3, 9, 0.9, 0.1),
    ],
)
def test_draw_equals_its_twin(temperature, top_k, top_p, min_p):
    rows = 200
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3)) * 2
    uniforms = uniform(torch.arange(rows), torch.full((rows,), 5))
    got = draw(
        logits,
        *arguments([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows),
        uniforms,
    )
    expected = [
        draw_twin(logits[i].numpy(), temperature, top_k, top_p, min_p, float(uniforms[i]))
        for i in range(rows)
    ]
    assert got.tolist() == expected


def test_frequencies_follow_the_softmax():
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 2.0, -3.0, 1.5]
    count = 20_000
    expected = np.exp(np.array(logits) / 0.8)
    expected /= expected.sum()
    frequencies = drawn_many(logits, count, temperature=0.8)
    # 7 degrees of freedom, 0.1%
    assert (count * (frequencies - expected) ** 2 / expected).sum() < 24.3


def test_top_k_keeps_the_k_largest_and_their_equals():
    assert np.flatnonzero(drawn_many([3.0, 1.0, 2.0, 2.0, 0.0], 5000, top_k=2)).tolist() == [
        0,
        2,
        3,
    ]
    assert np.flatnonzero(drawn_many([3.0, 1.0, 2.0, 2.5, 0.0], 5000, top_k=100)).tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    halves = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    for top_p, kept in (
        (0.4, [1]),
        (0.6, [1, 2]),
        (0.8, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
        (1e-9, [1]),
    ):
        assert np.flatnonzero(drawn_many(halves, 5000, top_p=top_p)).tolist() == kept


def test_top_p_counts_what_top_k_left():
    weights = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two largest the first has 4/7 of the probability, which reaches p = 0.55; 0.4 of all
    # tokens' would not.
    assert np.flatnonzero(drawn_many(weights, 5000, top_k=2, top_p=0.55)).tolist() == [0]


@pytest.mark.parametrize("limits", [(1e-30, 0, 1.0), (5.0, 1, 1.0), (5.0, 0, 1e-12)])
def test_extreme_settings_are_greedy(limits):
    logits = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1))
    logits[0, :500] = -torch.inf
    temperature, top_k, top_p = ([value] * 50 for value in limits)
    tokens = draw(
        logits, *arguments(temperature, top_k, top_p), uniform(torch.arange(50), torch.arange(50))
    )
    assert torch.equal(tokens, logits.argmax(dim=-1))


def test_a_row_does_not_depend_on_its_neighbours_and_resumes_exactly():
    rows = 24
    logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(9))
    drawn = torch.arange(0, rows, 2)  # every other row is greedy
    count = len(drawn)
    temperatures, top_ks, top_ps, min_ps = arguments(
        np.linspace(0.3, 2.0, count),
        [0, 10, 3] * (count // 3),
        [1.0, 0.9] * (count // 2),
        [0.0, 0.0, 0.1] * (count // 3),
    )
    seeds = torch.arange(count) + 2**62
    positions = torch.arange(count) * 100
    together = sample(logits, drawn, temperatures, top_ks, top_ps, min_ps, seeds, positions)
    for i, r in enumerate(drawn.tolist()):
        alone = slice(i, i + 1)
        again = sample(
            logits[r : r + 1],
            torch.tensor([0]),
            temperatures[alone],
            top_ks[alone],
            top_ps[alone],
            min_ps[alone],
            seeds[alone],
            positions[alone],
        )
        assert again.item() == together[r]
    assert torch.equal(together[1::2], logits.argmax(dim=-1)[1::2])


def test_limits_that_are_just_reached_and_numbers_that_just_end_a_share():
    """Four equally likely tokens, whose sums are exact."""

    def drawn(uniforms, top_p=1.0, min_p=0.0):
        rows = len(uniforms)
        logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.0]]).expand(rows, -1)
        settings = arguments([1.0] * rows, [4] * rows, [top_p] * rows, [min_p] * rows)
        return draw(logits, *settings, torch.tensor(uniforms, dtype=torch.float64)).tolist()

    assert drawn([0.0, 0.25, 0.5, 0.75]) == [0, 1, 2, 3], (
        "a share begins with the number that ends the one before"
    )
    assert drawn([0.25, 0.75, 0.99], top_p=0.5) == [0, 1, 1], "two of four reach a half"
    assert drawn([0.0, 0.3, 0.99], min_p=1.0) == [0, 1, 3], (
        "as likely as the likeliest is likely enough"
    )
