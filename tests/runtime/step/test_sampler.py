import math

import numpy as np
import pytest
import torch

from pensieve.runtime.step import filters
from pensieve.runtime.step.filters import lowest_kept, lowest_kept_of_few
from pensieve.runtime.step.sampler import (
    Sampler,
    draw,
    draw_filtered,
    uniform,
)
from pensieve.runtime.step.sampling_inputs import Draws, FilteredDraws, SamplingInputs

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
    """`draw_filtered` for one row, the way the filters are defined."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if top_k:
        order = order[:top_k]
    order = [token for token in order if weights[token] >= min_p]
    mass = weights[order].cumsum()
    share = 1 + int((mass < top_p * mass[-1]).sum())
    lowest = logits[order[min(share, len(order)) - 1]]
    return plain_twin(np.where(logits >= lowest, logits, -np.inf), temperature, u)


def arguments(temperatures, top_ks, top_ps, min_ps=None):
    return (
        torch.tensor(temperatures, dtype=torch.float64),
        torch.tensor(top_ks, dtype=torch.int64),
        torch.tensor(top_ps, dtype=torch.float64),
        torch.tensor(min_ps or [0.0] * len(top_ps), dtype=torch.float64),
    )


def drawn_many(
    logits: list[float], count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, most=1000
) -> np.ndarray:
    """Frequencies of the tokens drawn at `count` positions of one seed."""
    rows = torch.tensor([logits]).expand(count, -1)
    uniforms = uniform(torch.full((count,), 7), torch.arange(count))
    tokens = draw_filtered(
        rows,
        *arguments([temperature] * count, [top_k] * count, [top_p] * count, [min_p] * count),
        uniforms,
        most,
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
    tokens, _ = Sampler(300).sample(
        logits, SamplingInputs(None, None, None, (), None, None, None, None)
    )
    assert tokens.tolist() == [17, 298, 0]


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
@pytest.mark.parametrize("most", [10, 40, 1000])
@pytest.mark.parametrize("digits", [1, 8], ids=["equal logits", "different logits"])
def test_filtered_draws_equal_their_twin(temperature, top_k, top_p, min_p, most, digits):
    if not 0 < top_k <= most < 40:
        most = 1000
    rows = 200
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(3)) * 2
    logits = logits.round(decimals=digits)
    uniforms = uniform(torch.arange(rows), torch.full((rows,), 5))
    got = draw_filtered(
        logits,
        *arguments([temperature] * rows, [top_k] * rows, [top_p] * rows, [min_p] * rows),
        uniforms,
        most,
    )
    expected = [
        draw_twin(logits[i].numpy(), temperature, top_k, top_p, min_p, float(uniforms[i]))
        for i in range(rows)
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize("digits", [0, 1, 8], ids=["few values", "equal logits", "different"])
def test_ordering_a_few_keeps_what_ordering_all_keeps(digits):
    """In the first rows the likeliest 256 of 1,000 reach p, in the others they do not."""
    settings = [
        (temperature, top_k, top_p, min_p)
        for temperature in (0.2, 1.0, 5.0)
        for top_k, top_p, min_p in (
            (0, 0.9, 0.0),
            (0, 0.0, 0.0),
            (0, 1.0, 0.3),
            (0, 1.0, 0.05),
            (0, 0.95, 0.01),
            (300, 0.99, 0.0),
        )
    ]
    generator = torch.Generator().manual_seed(digits)
    logits = (3 * torch.randn(len(settings), 1000, generator=generator)).round(decimals=digits)
    logits[::4, 200:] = -torch.inf  # as of a grammar
    temperatures, *filters = arguments(*map(list, zip(*settings, strict=True)))
    distances = logits.double() - logits.max(dim=-1, keepdim=True).values.double()
    weights = (distances / temperatures.unsqueeze(1)).exp()
    lowest = lowest_kept_of_few(logits, weights, temperatures, *filters)
    expected = lowest_kept(logits, temperatures, *filters, 1000)
    assert torch.equal(logits >= lowest, logits >= expected)


def test_rows_whose_few_are_all_that_stays_are_not_ordered(monkeypatch):
    """With min-p alone, however the sums of the few and of all are rounded."""
    monkeypatch.setattr(filters, "lowest_kept", None)
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(200, 5000, generator=generator)
    temperatures, *settings = arguments([1.0] * 200, [0] * 200, [1.0] * 200, [0.05] * 200)
    highest = logits.max(dim=-1, keepdim=True).values
    weights = filters.weights_of(logits, highest, temperatures)
    lowest = lowest_kept_of_few(logits, weights, temperatures, *settings)
    assert torch.equal(logits >= lowest, weights >= 0.05)


def plain_twin(logits: np.ndarray, temperature: float, u: float) -> int:
    """`draw` for one row, token after token."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature).tolist()
    target = u * sum(weights)
    reached = 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if reached > target:
            return token
    raise AssertionError("no token")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_from_all_tokens_equal_their_twin(temperature):
    rows = 200
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(4)) * 2
    logits[::3, 5:20] = -torch.inf  # as of a grammar
    logits[::3, 30:] = -torch.inf
    uniforms = uniform(torch.arange(rows), torch.full((rows,), 5))
    temperatures = torch.full((rows,), temperature, dtype=torch.float64)
    got = draw(logits, temperatures, uniforms).tolist()
    assert got == [
        plain_twin(logits[i].numpy(), temperature, float(uniforms[i])) for i in range(rows)
    ]


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53, 1.0])
def test_a_token_without_weight_is_never_drawn(u):
    """Not even where rounded sums lead to it: 1.0 stands for a sum that is reached too early."""
    logits = torch.full((3, 9), -torch.inf)
    logits[0, 4] = 1.0
    logits[1, [2, 6]] = torch.tensor([0.0, -3.0])
    logits[2, 3:5] = -1e30  # forbidden, but all that a grammar allows
    uniforms = torch.full((3,), u, dtype=torch.float64)
    tokens = draw(logits, torch.ones(3, dtype=torch.float64), uniforms)
    assert torch.isfinite(logits.gather(1, tokens.unsqueeze(1))).all()


@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies_follow_the_softmax(filtered):
    logits = [0.0, 1.0, 2.0, -1.0, 0.5, 2.0, -3.0, 1.5]
    count = 20_000
    expected = np.exp(np.array(logits) / 0.8)
    expected /= expected.sum()
    if filtered:
        frequencies = drawn_many(logits, count, temperature=0.8)
    else:
        rows = torch.tensor([logits]).expand(count, -1)
        uniforms = uniform(torch.full((count,), 7), torch.arange(count))
        tokens = draw(rows, torch.full((count,), 0.8, dtype=torch.float64), uniforms)
        frequencies = np.bincount(tokens.numpy(), minlength=len(logits)) / count
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
    shares = [math.log(p) for p in (0.15, 0.5, 0.25, 0.1)]
    for top_p, kept in (
        (0.4, [1]),
        (0.6, [1, 2]),
        (0.8, [0, 1, 2]),
        (0.95, [0, 1, 2, 3]),
        (1e-9, [1]),
    ):
        assert np.flatnonzero(drawn_many(shares, 5000, top_p=top_p)).tolist() == kept


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
    uniforms = uniform(torch.arange(50), torch.arange(50))
    settings = arguments(temperature, top_k, top_p)
    tokens = draw_filtered(logits, *settings, uniforms, 1000)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    if limits[0] < 1e-20:
        assert torch.equal(draw(logits, settings[0], uniforms), tokens)


def test_a_row_does_not_depend_on_its_neighbours_and_resumes_exactly():
    """Rows that are greedy, drawn from all tokens and filtered, in one step."""
    rows = 24
    logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(9))
    temperatures = np.linspace(0.3, 2.0, rows)
    seeds = np.arange(rows) + 2**62
    positions = np.arange(rows) * 100
    top_ks = np.array([0, 10, 3] * 8)
    top_ps = np.array([1.0, 0.9] * 12)

    def sampled(rows: list[int]) -> list[int]:
        def settings(kind: int) -> tuple[np.ndarray, np.ndarray]:
            places = [at for at, row in enumerate(rows) if row % 3 == kind]
            return np.array(places, np.int64), np.array([rows[at] for at in places], np.int64)

        places, plain = settings(1)
        draws = Draws(places, temperatures[plain], seeds[plain], positions[plain])
        places, hot = settings(2)
        limited, filtered = (
            FilteredDraws(
                places[which],
                temperatures[hot[which]],
                top_ks[hot[which]],
                top_ps[hot[which]],
                np.full(which.sum(), 0.01),
                seeds[hot[which]],
                positions[hot[which]],
            )
            for which in (top_ks[hot] > 0, top_ks[hot] == 0)
        )
        inputs = SamplingInputs(
            draws if len(plain) else None,
            limited if len(limited.rows) else None,
            filtered if len(filtered.rows) else None,
            *((), None, None, None, None),
        )
        tokens, _ = Sampler(500).sample(logits[rows], inputs)
        return tokens.tolist()

    together = sampled(list(range(rows)))
    assert together == [sampled([row])[0] for row in range(rows)]
    assert together[::3] == logits.argmax(dim=-1)[::3].tolist()


def test_limits_that_are_just_reached_and_numbers_that_just_end_a_share():
    """Four equally likely tokens, whose sums are exact."""

    def drawn(uniforms, top_p=1.0, min_p=0.0):
        rows = len(uniforms)
        logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.0]]).expand(rows, -1)
        settings = arguments([1.0] * rows, [4] * rows, [top_p] * rows, [min_p] * rows)
        uniforms = torch.tensor(uniforms, dtype=torch.float64)
        return draw_filtered(logits, *settings, uniforms, most=5).tolist()

    assert drawn([0.0, 0.25, 0.5, 0.75]) == [0, 1, 2, 3], (
        "a share begins with the number that ends the one before"
    )
    assert drawn([0.25, 0.75, 0.99], top_p=0.5) == [1, 3, 3], (
        "two of four reach a half, and the others are as likely"
    )
    assert drawn([0.0, 0.3, 0.99], min_p=1.0) == [0, 1, 3], (
        "as likely as the likeliest is likely enough"
    )
