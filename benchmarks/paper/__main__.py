"""paper: a paper's evaluation, figure by figure: runs, the paper's values beside ours, and a
verdict.

    python -m benchmarks.paper cachedattention --figures 13,21 --results
    docs/measured/paper-DATE.jsonl python -m benchmarks.paper pensieve --device cuda --engine DIR
    --figures 3,12 --results paper-DATE.jsonl python -m benchmarks.paper pensieve --report --results
    paper-*.jsonl --page docs/measured/pensieve.md

Without `--device` figures are simulated. Every run is appended to the last file of `--results` as
soon as it ends; runs that the files have are not run again. The report covers all figures of the
paper.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pensieve.scheduler.declaration import flag
from pensieve.scheduler.sim.simulator import Report
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import check_least, check_matplotlib, exit_status, title_line
from pensieve.scripts.command import numbers as parse_numbers

from . import cachedattention, device, pensieve
from .report import (
    Figure,
    ValuesByFigure,
    append,
    draw,
    gathered,
    read_figures,
    read_records,
    table,
    today,
    write_page,
)

PAPERS = ("pensieve", "cachedattention")
PENSIEVE_KEY = {"settings": pensieve.SETTINGS}
CACHED_ONLY = ("models", "sessions", "warm_up", "sample")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paper", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("paper", choices=PAPERS)
    option("--figures", metavar="NUMBERS", help="comma between (default: all that can be run)")
    option("--device", choices=("cuda",), help="run what a GPU measures instead")
    option("--engine", type=Path, metavar="DIR", help="for --device, of an OPT-13B or Llama shape")
    option(
        "--vllm",
        type=Path,
        metavar="PATH",
        help="for --device: a Python with vLLM, or a folder of packages (default: this one)",
    )
    option("--results", type=Path, nargs="+", metavar="FILE",
           help="JSON lines, appended to the last one (default: paper-DATE.jsonl)")  # fmt: skip
    option(
        "--trace",
        type=Path,
        metavar="FILE",
        help="turn counts and lengths of these sessions instead of means",
    )
    option(
        "--rates",
        metavar="RATES",
        help="pensieve, simulated: conversations/s, comma between (default: the figures')",
    )
    option(
        "--seeds",
        default="0",
        metavar="SEEDS",
        help="pensieve, simulated: comma between (default %(default)s)",
    )
    option(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="runs at a time (default %(default)s)",
    )
    option("--report", action="store_true", help="run nothing: tell what the files have")
    option(
        "--page",
        type=Path,
        metavar="FILE",
        help="put the table into this Markdown file, between its marks",
    )
    option(
        "--plot", type=Path, metavar="FILE", help="draw the values beside the paper's (matplotlib)"
    )
    ours = parser.add_argument_group("cachedattention, simulated")
    option = ours.add_argument
    models = ",".join(cachedattention.MODELS)
    option("--models", default=models, metavar="NAMES", help="(default %(default)s)")
    option(
        "--sessions",
        type=int,
        default=cachedattention.SESSIONS,
        metavar="N",
        help="(default %(default)s)",
    )
    option("--warm-up", type=int, default=cachedattention.WARM_UP, metavar="N",
           help="turns not counted (default %(default)s)")  # fmt: skip
    option(
        "--sample",
        type=int,
        default=1,
        metavar="N",
        help="one session in N on its share of everything (default 1)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("paper", lambda: tell(args))


def tell(args: argparse.Namespace) -> None:
    """Runs what is missing, and prints the report. Raises SettingError."""
    files = args.results or [Path(f"paper-{today()}.jsonl")]
    chosen = numbers(args)
    check(args)
    if args.plot:
        check_matplotlib("--plot")
    if args.device:
        with tempfile.TemporaryDirectory() as directory:
            for record in device.measure(
                args.paper, chosen, args.engine, args.vllm, Path(directory)
            ):
                append(files[-1], record)
    elif not args.report:
        (pensieve_cases if args.paper == "pensieve" else cached_cases)(args, chosen, files)
    report(args, files)


def numbers(args: argparse.Namespace) -> list[str]:
    """The figures to run. Raises SettingError."""
    if args.device:
        all_numbers = sorted(
            {number for one in device.MEASUREMENTS[args.paper] for number in one.figures}
        )
    else:
        all_numbers = list(
            pensieve.FIGURES if args.paper == "pensieve" else cachedattention.FIGURES
        )
    chosen = args.figures.split(",") if args.figures else all_numbers
    if unknown := [number for number in chosen if number not in all_numbers]:
        raise SettingError("--figures", f"{unknown[0]!r} is none of {', '.join(all_numbers)}")
    if args.device and args.engine is None and device.needs_engine(args.paper, chosen):
        raise SettingError("--engine", "is needed for these figures: build_engine makes one")
    return chosen


def check(args: argparse.Namespace) -> None:
    """Raises SettingError for an option without a meaning here, and for wrong ones of
    CachedAttention."""
    default = parser().get_default
    for name, reason in (
        ("report", "not with --device, which runs commands" if args.device else ""),
        *((name, "" if args.device else "only with --device") for name in ("engine", "vllm")),
        ("trace", "not with --device, whose commands have their own loads" if args.device else ""),
        *(
            (
                name,
                "only for pensieve, simulated"
                if args.device or args.paper == "cachedattention"
                else "",
            )
            for name in ("rates", "seeds")
        ),
        *(
            (name, "" if args.paper == "cachedattention" else "only for cachedattention")
            for name in CACHED_ONLY
        ),
    ):
        if reason and getattr(args, name) != default(name):
            raise SettingError(flag(name), reason)
    if args.paper == "pensieve":
        return
    for model in args.models.split(","):
        if model not in cachedattention.MODELS:
            raise SettingError(
                "--models", f"must be of {', '.join(cachedattention.MODELS)}, not {model!r}"
            )
    check_least(args, sessions=1)
    most = min(cachedattention.SEATS, args.sessions)
    if args.sample not in range(1, most + 1):
        raise SettingError("--sample", f"must be between 1 and {most}, not {args.sample}")
    if not (args.report or args.device):
        trace = str(args.trace or "")
        sessions = cachedattention.chats(
            args.sessions, 1.0, cachedattention.MODELS["llama-13b"], trace
        )
        turns = sum(len(session.turns) for session in sessions)
        if not 0 <= args.warm_up < turns:
            raise SettingError("--warm-up", f"must leave some of {turns} turns, not {args.warm_up}")


# -- simulated runs


def missing_runs(
    args: argparse.Namespace,
    files: Sequence[Path],
    cases: Sequence[Any],
    run: Callable[[Any], dict],
    key: dict,
) -> None:
    """Runs the cases that no record has, and appends them."""
    stored = [record["case"] for record in read_records(files, args.paper) if same_run(record, key)]
    done = {type(cases[0])(**case) for case in stored} if cases else set()
    missing = [case for case in dict.fromkeys(cases) if case not in done]
    with multiprocessing.get_context("spawn").Pool(max(1, min(args.jobs, len(missing)))) as pool:
        for case, result in zip(missing, pool.imap(run, missing), strict=True):
            heading = {"paper": args.paper, "how": "simulated", "date": today(), **key}
            append(files[-1], {**heading, "case": asdict(case), "found": result})


def same_run(record: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return "case" in record and all(record.get(name) == value for name, value in key.items())


def pensieve_cases(args: argparse.Namespace, chosen: Sequence[str], files: Sequence[Path]) -> None:
    cases = [case for number in chosen for case in pensieve.FIGURES[number]]
    if args.trace:
        cases = [replace(case, trace=str(args.trace)) for case in cases]
    if args.rates:
        rates = parse_numbers(args.rates, "--rates", float)
        if min(rates) <= 0:
            raise SettingError("--rates", f"must be above 0, not {args.rates}")
        cases = [replace(case, rate=rate) for rate in rates for case in cases]
    seeds = parse_numbers(args.seeds, "--seeds", int)
    missing_runs(
        args,
        files,
        [replace(case, seed=seed) for seed in seeds for case in cases],
        pensieve.run,
        PENSIEVE_KEY,
    )


def cached_key(args: argparse.Namespace) -> dict[str, int]:
    return {"sessions": args.sessions, "warm_up": args.warm_up, "sample": args.sample}


def cached_cases(args: argparse.Namespace, chosen: Sequence[str], files: Sequence[Path]) -> None:
    cases = [
        case
        for number in chosen
        for model in args.models.split(",")
        for case in cachedattention.FIGURES[number](model)
    ]
    if args.trace:
        cases = [replace(case, trace=str(args.trace)) for case in cases]
    run = partial(cachedattention.simulate_case, args.sessions, args.warm_up, args.sample)
    missing_runs(args, files, cases, run, cached_key(args))


# -- the report


def report(args: argparse.Namespace, files: Sequence[Path]) -> None:
    if args.paper == "cachedattention":
        print(title_line(cachedattention.COLUMNS))
        for case, one in cached_reports(args, read_records(files, args.paper)).items():
            print(cachedattention.case_line(case, one))
    figures, values = figures_and_values(args, files)
    print(text := table(figures, values))
    if args.page:
        write_page(args.page, text)
    if args.plot:
        draw(figures, values, args.plot)


def figures_and_values(
    args: argparse.Namespace, files: Sequence[Path]
) -> tuple[list[Figure], ValuesByFigure]:
    """The paper's figures, and what the files have of each. Raises SettingError."""
    records = read_records(files, args.paper)
    if args.paper == "pensieve":
        trace = str(args.trace or "")
        runs = {
            pensieve.PensieveCase(**record["case"]): record["found"]
            for record in records
            if same_run(record, PENSIEVE_KEY)
        }
        runs = {replaced(case): values for case, values in runs.items() if case.trace == trace}
        simulated: Mapping[str, Mapping[str, Any]] = pensieve.values_by_seed(runs)
    else:
        simulated = cachedattention.values(cached_reports(args, records))
    computed = cachedattention.COMPUTED if args.paper == "cachedattention" else ()
    return read_figures(args.paper), gathered(simulated, records, computed)


def cached_reports(
    args: argparse.Namespace, records: Sequence[Mapping[str, Any]]
) -> dict[cachedattention.CachedAttentionCase, Report]:
    """Of the simulated runs with these options."""
    key = cached_key(args)
    reports = {
        cachedattention.CachedAttentionCase(**record["case"]): cachedattention.read_report(
            record["found"]
        )
        for record in records
        if same_run(record, key)
    }
    trace = str(args.trace or "")
    return {replaced(case): one for case, one in reports.items() if case.trace == trace}


def replaced(case: Any) -> Any:
    """The same case without its trace, to be found by the figures."""
    return replace(case, trace="")


if __name__ == "__main__":
    sys.exit(main())
