"""profile: measures what steps and copies of an engine cost on this hardware, and keeps it beside
the engine.

`pensieve serve` takes its costs from there. An engine of several ranks is measured on all of them
side by side, and the slowest one's time counts. With `--plots`, also the two measurements that
motivate Pensieve (its figures 3 and 4): a turn with its history recomputed or cached, and a chunk's
cost by the context before it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..builder.choices import DEVICES
from ..builder.manifest import Manifest
from ..runtime.launch.command_line import CommandParser, ending_at_once, run_interruptible
from ..runtime.launch.settings import DEFAULTS
from ..runtime.system import hold_stack_signal
from .command import add_kv_cache_dtype, check_above_0, check_matplotlib, exit_status, subplots

if TYPE_CHECKING:
    from ..runtime.engine import Engine
    from ..runtime.measure.profile import Profile
    from ..runtime.measure.step_bench import HistoryTime, StepBench


# a batch of figure 3; prompts of ShareGPT's mean length
TURN_REQUESTS, TURN_PROMPT, TURN_GENERATED = 32, 38, 200


def parser() -> CommandParser:
    command = CommandParser(prog="pensieve profile", description=__doc__.partition("\n")[0])
    option = command.add_argument
    option(
        "--engine",
        required=True,
        type=Path,
        metavar="DIR",
        help="an engine directory; profile.json is put there",
    )
    option(
        "--device",
        default="cpu",
        choices=DEVICES,
        help="where the engine runs (default %(default)s)",
    )
    add_kv_cache_dtype(command)
    option("--chunk-tokens", type=int, metavar="N", help="tokens of a chunk (default %(default)s)")
    option(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="most rows that generate (default %(default)s)",
    )
    option(
        "--max-num-batched-tokens", type=int, metavar="N", help="a full batch (default %(default)s)"
    )
    served = ("chunk_tokens", "max_num_seqs", "max_num_batched_tokens")
    command.set_defaults(**{name: DEFAULTS[name] for name in served})
    option(
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest context (default: the model's, or what fits)",
    )
    option(
        "--gpu-kv-bytes",
        metavar="SIZE",
        help="GPU cache (default: half of what is free, at most what batches use)",
    )
    option(
        "--seconds",
        type=float,
        default=0.2,
        metavar="S",
        help="to measure each point (default %(default)s)",
    )
    option(
        "--plots",
        type=Path,
        metavar="DIR",
        help="also time whole turns, and draw both figures there (matplotlib)",
    )
    option("--json", action="store_true", help="print one JSON line instead of the table")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(words)
    hold_stack_signal()

    def run() -> int:
        check(args)
        with ending_at_once("pensieve profile"):
            from ..runtime.launch import profiling  # and torch

        return profiling.run(args, words, partial(work, args))

    return exit_status("pensieve profile", run)


def check(args: argparse.Namespace) -> None:
    """Raises SettingError for numbers that cannot be, figures that cannot be drawn, or a directory
    without an engine."""
    check_above_0(args, ("chunk_tokens", "max_num_seqs", "max_num_batched_tokens", "seconds"))
    if args.plots is not None:
        check_matplotlib("--plots")  # known to be there before anything is measured
    Manifest.read(args.engine)


def work(args: argparse.Namespace, bench: StepBench, engine: Engine, rank: int) -> None:
    """All ranks measure, rank 0 tells."""
    from ..runtime.measure.profile import profile_engine

    hear = say if rank == 0 else say_nothing
    profile = profile_engine(bench, engine, hear)
    turns = list(time_turns(bench, hear)) if args.plots is not None else []
    if rank == 0:
        tell(args, profile, turns)


def time_turns(bench: StepBench, say: Callable[[str], None]) -> Iterator[HistoryTime]:
    """Histories doubled for as long as the model and the pool hold them."""
    config = bench.config
    requests = min(TURN_REQUESTS, config.max_num_seqs)
    history = 8 * config.chunk_tokens
    while True:
        context = history + TURN_PROMPT + TURN_GENERATED
        if (
            context > config.max_model_len
            or requests * config.chunks(context) > config.gpu_kv_chunks
        ):
            return
        say(f"a turn of {requests} conversations with {history} tokens of history each")
        yield bench.turn(history, TURN_PROMPT, TURN_GENERATED, requests)
        history *= 2


def tell(args: argparse.Namespace, profile: Profile, turns: Sequence[HistoryTime]) -> None:
    path = profile.save(args.engine)
    if args.json:
        print(
            json.dumps(
                {"bench": "profile", **asdict(profile), "turns": [turn._asdict() for turn in turns]}
            )
        )
    else:
        print("\n".join([*table(profile), *turn_table(turns), f"saved in {path}"]))
    if args.plots is not None:
        draw(profile, turns, args.plots)


def say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


def say_nothing(what: str) -> None:
    pass


# What is printed.


def table(profile: Profile) -> Iterator[str]:
    cost, measured, size = profile.cost, profile.measured, profile.chunk_tokens
    yield f"{profile.hardware}, torch {profile.torch}"
    yield f"{profile.dtype}, chunks of {size} tokens, {cost.chunk_bytes} bytes"
    chunks = profile.max_num_batched_tokens // size
    yield (
        f"a full batch of {chunks} chunks; microseconds of a chunk, of its attention, of its "
        "swap-in instead"
    )
    for (context, seconds), (_, attention) in zip(
        measured.full_batches, cost.attention, strict=True
    ):
        yield (
            f"  context {context:7}  batch {1e3 * seconds:9.3f} ms  chunk "
            f"{1e6 * cost.recompute(context):9.1f}"
            f"  attention {1e6 * attention:9.1f}  swap-in {1e6 * cost.swap_in():7.1f}"
        )
    yield "a step at the shortest context, ms"
    yield "  tokens " + "".join(f"{tokens:9}" for tokens, _ in measured.steps)
    yield "         " + "".join(f"{1e3 * seconds:9.3f}" for _, seconds in measured.steps)
    contexts = sorted({context for _, context, _ in measured.generation})
    yield "generation, ms a step by rows (down) and context"
    yield "         " + "".join(f"{context:9}" for context in contexts)
    times = {(rows, context): seconds for rows, context, seconds in measured.generation}
    for rows in sorted({rows for rows, _ in times}):
        yield f"  {rows:7}" + "".join(f"{1e3 * times[rows, context]:9.3f}" for context in contexts)
    yield "copies, GB/s by layers a piece: in alone, out alone, each while both run"
    for copy in measured.copies:
        moved = copy.chunks * cost.chunk_bytes / 1e9
        speeds = (moved / seconds for seconds in (copy.swap_in, copy.swap_out, copy.both))
        yield f"  {copy.layers:7}" + "".join(f"{speed:9.2f}" for speed in speeds)
    yield (
        f"--swap-out-below {profile.swap_out_below:.2f} frees slots in time (contexts to "
        f"{profile.max_model_len} "
        f"tokens, a GPU cache of {profile.gpu_kv_chunks} chunks)"
    )


def turn_table(turns: Sequence[HistoryTime]) -> Iterator[str]:
    if turns:
        yield (
            f"turns, {TURN_PROMPT} tokens in and {TURN_GENERATED} out, s: prefill recomputed, "
            "cached; generation"
        )
    for turn in turns:
        times = (turn.prefill_recomputed, turn.prefill_cached, turn.generation)
        yield f"  history {turn.history:7}" + "".join(f"{seconds:9.3f}" for seconds in times)


def draw(profile: Profile, turns: Sequence[HistoryTime], directory: Path) -> None:
    """Writes turn_by_history.png, if any turn was timed, and chunk_by_context.png."""
    directory.mkdir(parents=True, exist_ok=True)
    if turns:
        _turns(profile, turns, directory / "turn_by_history.png")
    _chunks(profile, directory / "chunk_by_context.png")


def _turns(profile: Profile, turns: Sequence[HistoryTime], path: Path) -> None:
    """Two bars a history, recomputed and cached, generation on top of prefill."""
    figure, axis = subplots("--plots", figsize=(7, 4))
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
    axis.set(
        title=profile.hardware,
        xlabel="history of each conversation, tokens",
        ylabel="seconds of a turn",
    )
    axis.legend()
    figure.savefig(path, dpi=120)


def _chunks(profile: Profile, path: Path) -> None:
    """Milliseconds to recompute one chunk, attention apart, and to swap it in instead."""
    cost = profile.cost
    contexts = [context for context, _ in cost.attention]
    figure, axis = subplots("--plots", figsize=(7, 4))
    axis.plot(
        contexts, [1e3 * seconds for _, seconds in cost.attention], marker="o", label="attention"
    )
    axis.axhline(1e3 * cost.chunk_seconds, color="tab:orange", label="all else")
    together = [1e3 * cost.recompute(context) for context in contexts]
    axis.plot(contexts, together, color="black", marker=".", label="together")
    axis.axhline(1e3 * cost.swap_in(), color="tab:green", linestyle="--", label="copying it in")
    axis.set_xscale("log", base=2)
    axis.set(
        title=profile.hardware,
        xlabel="context, tokens",
        ylabel=f"ms a chunk of {cost.chunk_tokens} tokens",
    )
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(run_interruptible("pensieve profile", main))
