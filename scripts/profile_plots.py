"""The two figures of `pensieve profile --plots`, after Pensieve's figures 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from ..runtime.measure.profile import Profile
from ..runtime.measure.step_bench import HistoryTime


def draw(profile: Profile, turns: Sequence[HistoryTime], directory: Path) -> None:
    """Writes turn_by_history.png, if any turn was timed, and chunk_by_context.png."""
    directory.mkdir(parents=True, exist_ok=True)
    if turns:
        _turns(profile, turns, directory / "turn_by_history.png")
    _chunks(profile, directory / "chunk_by_context.png")


def _turns(profile: Profile, turns: Sequence[HistoryTime], path: Path) -> None:
    """Two bars a history, recomputed and cached, generation on top of prefill."""
    figure, axis = plt.subplots(figsize=(7, 4))
    places = range(len(turns))
    generation = [turn.generation for turn in turns]
    for shift, label, prefill in (
        (-0.2, "history recomputed", [turn.prefill_recomputed for turn in turns]),
        (0.2, "history cached", [turn.prefill_cached for turn in turns]),
    ):
        at = [place + shift for place in places]
        axis.bar(at, prefill, 0.38, label=f"prefill, {label}")
        axis.bar(at, generation, 0.38, bottom=prefill, color="lightgrey", edgecolor="grey")
    axis.bar(0, 0, color="lightgrey", edgecolor="grey", label="generation")
    axis.set_xticks(list(places), [f"{turn.history:,}" for turn in turns])
    axis.set(title=profile.hardware, xlabel="history of each conversation, tokens", ylabel="seconds of a turn")
    axis.legend()
    _save(figure, path)


def _chunks(profile: Profile, path: Path) -> None:
    """Milliseconds to recompute one chunk, attention apart, and to load it instead."""
    cost = profile.cost
    contexts = [context for context, _ in cost.attention]
    figure, axis = plt.subplots(figsize=(7, 4))
    axis.plot(contexts, [1e3 * seconds for _, seconds in cost.attention], marker="o", label="attention")
    axis.axhline(1e3 * cost.chunk_seconds, color="tab:orange", label="all else")
    together = [1e3 * cost.recompute(context) for context in contexts]
    axis.plot(contexts, together, color="black", marker=".", label="together")
    axis.axhline(1e3 * cost.load(), color="tab:green", linestyle="--", label="copying it in")
    axis.set_xscale("log", base=2)
    axis.set(title=profile.hardware, xlabel="context, tokens", ylabel=f"ms a chunk of {cost.chunk_tokens} tokens")
    axis.set_ylim(bottom=0)
    axis.legend()
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
