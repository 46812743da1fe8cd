"""The figures of `simulate_paper --plots`, after CachedAttention's evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from ..scheduler.sim.simulator import Report
from .simulate_paper import TB, Case, dollars, gpu_hours, hit_shares, policy_label

TIERS = (("GPU", "tab:green"), ("host", "tab:blue"), ("disk", "tab:orange"))


def draw(figures: Mapping[str, Sequence[Case]], reports: Mapping[Case, Report], directory: Path) -> None:
    """Writes paper_NN.png for each figure: hit rates by tier above; GPU hours and, where that is told, cost below."""
    directory.mkdir(parents=True, exist_ok=True)
    for title, cases in figures.items():
        number, _, what = title.partition(":")
        figure, (hits, costs) = plt.subplots(2, 1, figsize=(max(6.0, 0.35 * len(cases)), 6.5), sharex=True)
        places = list(range(len(cases)))
        bottom = [0.0] * len(cases)
        for tier, (name, color) in enumerate(TIERS):
            shares = [100 * hit_shares(reports[case])[tier] for case in cases]
            hits.bar(places, shares, 0.7, bottom=bottom, label=name, color=color)
            bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
        hits.set(title=what.strip(), ylabel="of known prompt tokens, %", ylim=(0, 118))
        hits.legend(ncols=3, loc="upper left", fontsize=8)
        if "cost" in title:
            gpus, storage = zip(*(dollars(case, reports[case]) for case in cases), strict=True)
            costs.bar(places, gpus, 0.7, label="GPUs")
            costs.bar(places, storage, 0.7, bottom=gpus, label="storage")
            costs.set_ylabel("dollars per 1,000 turns")
            costs.legend()
        else:
            costs.bar(places, [gpu_hours(reports[case]) for case in cases], 0.7, color="grey")
            costs.set_ylabel("busy hours per 1,000 turns")
        costs.set_xticks(places, [label(case) for case in cases], rotation=60, ha="right", fontsize=7)
        figure.tight_layout()
        figure.savefig(directory / f"paper_{number.replace(', ', '_')}.png", dpi=80)
        plt.close(figure)


def label(case: Case) -> str:
    what = f"{case.model}, {policy_label(case)}"
    if not case.reuse:
        return what
    tiers = f"{case.disk / TB:g} TB disk" if case.disk else "no disk" if case.host else "GPU only"
    return f"{what}, {tiers}, {case.rate:g}/s"
