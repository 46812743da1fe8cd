"""The search for the lowest logit that filters keep, beside the sort of `filters.lowest_kept`."""

import pytest
import torch

from pensieve.runtime.step.filters import lowest_kept

from ..kernel_cases import CUDA, DEVICE, INTERPRETED, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.sampling import kept_kernel

from ..recording_driver import RecordingDriver

SETTINGS = [
    # temperature, top_k, top_p, min_p
    (1.0, 0, 0.9, 0.0),
    (0.6, 0, 0.3, 0.0),
    (1.5, 0, 0.999, 0.0),
    (2.0, 0, 1.0, 0.01),
    (1.0, 0, 0.8, 0.05),
    (1.0, 0, 0.0, 0.0),
    (1.2, 300, 0.9, 0.0),
    (3.0, 300, 1.0, 0.0),
    (1.0, 300, 0.7, 0.3),
    (1.0, 5000, 0.95, 0.0),
    (0.01, 0, 0.9, 0.0),
    (1.0, 1, 0.9, 0.0),
]


def settings_of(rows):
    chosen = [SETTINGS[row % len(SETTINGS)] for row in rows]
    temperatures, top_ks, top_ps, min_ps = zip(*chosen, strict=True)
    reals = {"dtype": torch.float64, "device": DEVICE}
    return (
        torch.tensor(temperatures, **reals),
        torch.tensor(top_ks, device=DEVICE),
        torch.tensor(top_ps, **reals),
        torch.tensor(min_ps, **reals),
    )


def both(logits, temperatures, *filters):
    """The lowest logits by the kernel, and by the sort."""
    distances = logits.double() - logits.max(dim=-1, keepdim=True).values.double()
    weights = (distances / temperatures.unsqueeze(1)).exp()
    searched = kept_kernel.lowest_kept(logits, weights, *filters)
    return searched, lowest_kept(logits, temperatures, *filters, logits.shape[1])


def kept(logits, lowest):
    return (logits >= lowest).nonzero().tolist()


@needs_kernels
@pytest.mark.parametrize("vocab", [37, 1000, 1537])
@pytest.mark.parametrize("digits", [0, 1, 8], ids=["few values", "equal logits", "different"])
def test_the_search_keeps_what_the_sort_keeps(vocab, digits):
    rows = 2 * len(SETTINGS)
    generator = torch.Generator().manual_seed(vocab + digits)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).round(decimals=digits)
    logits[::5, 3 : vocab // 2] = -torch.inf  # as of a grammar
    logits[1::5] -= 50.0  # all of them negative
    logits = logits.to(DEVICE)
    searched, sorted_ = both(logits, *settings_of(range(rows)))
    assert kept(logits, searched) == kept(logits, sorted_)


@needs_kernels
def test_sums_that_just_reach_p_and_zeros_of_both_signs():
    """Equally likely tokens, whose sums are exact: ties stay together."""
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0], [1.0, 1.0, 0.0, -700.0, -2000.0]])
    for top_k, top_p, min_p in ((4, 0.5, 0.0), (2, 1.0, 0.0), (0, 1.0, 1.0), (3, 0.75, 0.0)):
        filters = (
            torch.tensor([top_k, top_k], device=DEVICE),
            torch.tensor([top_p, top_p], dtype=torch.float64, device=DEVICE),
            torch.tensor([min_p, min_p], dtype=torch.float64, device=DEVICE),
        )
        temperatures = torch.ones(2, dtype=torch.float64, device=DEVICE)
        searched, sorted_ = both(logits.to(DEVICE), temperatures, *filters)
        assert kept(logits.to(DEVICE), searched) == kept(logits.to(DEVICE), sorted_)


@pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")
def test_one_kernel_serves_all_sizes_of_step(monkeypatch):
    recording = RecordingDriver(monkeypatch)
    for rows, vocab in ((1, 49_152), (16, 49_152), (17, 151_936)):
        reals = torch.ones(rows, dtype=torch.float64)
        top_ks = torch.zeros(rows, dtype=torch.int64)
        weights = torch.ones(rows, vocab, dtype=torch.float64)
        kept_kernel.lowest_kept(torch.zeros(rows, vocab), weights, top_ks, reals, reals)
    launched = recording.take()
    assert [launch.grid[0] for launch in launched] == [1, 16, 17]
    assert len({launch.image for launch in launched}) == 1
