"""Puts multi-turn load on a server with OpenAI's completions, and measures latency over throughput.

python -m benchmarks.serving --url http://127.0.0.1:8000 --synthetic sharegpt --rate 1,2,4 --plot
out.png python -m benchmarks.serving --compare ours.json theirs.json --plot both.png

Conversations arrive as a Poisson process, at any speed of the server. Each prompt has the server's
own earlier replies, and comes a think time after the last reply. At the start, conversations are
already in the middle of their lives: they send their histories first. Each client process needs
about one core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from pensieve.scheduler.declaration import flag
from pensieve.scheduler.types import SettingError
from pensieve.scripts.chat import ServerError
from pensieve.scripts.command import (
    check_above_0,
    check_least,
    check_matplotlib,
    exit_status,
    numbers,
)
from pensieve.scripts.simulation.arrivals import Arrival, plan_arrivals
from pensieve.scripts.simulation.traces import (
    CHATS,
    TURN_COUNTS,
    Dialogue,
    synthetic,
    synthetic_dialogue,
)

from .clients import (
    Failed,
    Load,
    StreamedReply,
    Target,
    Window,
    body,
    clock,
    load_encode,
    open_session,
)
from .clocks import clock_rate, replay
from .goodput import FAILED_SHARE
from .report import SOURCES, RateReport, json_line, plot, read_reports, report, report_line, titles
from .servers import MetricsServer
from .traces import read_dialogues
from .workload import Words, fitting, mean_turns

POOL = 4096  # synthetic conversations; a run that needs more begins again, with other tokens
NEAR = 0.05  # --find-rate ends when the largest rate is known so well
PROBE_TOKENS = 4
EXPECTED_MS_PER_TOKEN = 20.0
OF_THE_START = ("ramp_s", "from_empty", "send_histories", "expected_ms_per_token")
"""Options about conversations that are open at the start."""
GPU_SECONDS = "pensieve:gpu_seconds_total"
BUSY_CLIENT = 0.8


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.serving", description=__doc__.partition("\n")[0]
    )
    option = parser.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    option("--model", metavar="NAME", help="(default: the server's first)")
    option(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="(default: $OPENAI_API_KEY)",
    )
    option(
        "--conversations",
        action="store_true",
        help="name conversations in the requests (a Pensieve server)",
    )
    workload = parser.add_mutually_exclusive_group()
    workload.add_argument(
        "--synthetic", choices=CHATS, default="sharegpt", help="means of a data set (%(default)s)"
    )
    option("--turn-counts", choices=TURN_COUNTS, help=f"of --synthetic (default {TURN_COUNTS[0]})")
    workload.add_argument("--trace", type=Path, metavar="FILE", help="see benchmarks/traces.py")
    option(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json: for traces of text, servers that return no token ids",
    )
    option(
        "--rate",
        metavar="RATES",
        help="conversations/s, comma between (default 1; a trace's own if it has one)",
    )
    option(
        "--find-rate",
        type=float,
        metavar="MS",
        help="between two --rate, the largest with at most this ms/token",
    )
    option(
        "--think-s",
        type=float,
        default=15.0,
        metavar="S",
        help="mean, where no trace tells (default %(default)s)",
    )
    option(
        "--warm-up-s",
        type=float,
        default=60.0,
        metavar="S",
        help="not measured (default %(default)s)",
    )
    option(
        "--ramp-s",
        type=float,
        default=0.0,
        metavar="S",
        help=(
            "conversations that are in the middle at the start come in over so long (default "
            "%(default)s)"
        ),
    )
    option(
        "--send-histories",
        action="store_true",
        help="a conversation that comes in while its user thinks sends its history at once and "
        "asks for one "
        "token; this request is not measured",
    )
    option(
        "--from-empty",
        action="store_true",
        help="start without conversations: warm up for a lifetime",
    )
    option("--measure-s", type=float, default=120.0, metavar="S", help="(default %(default)s)")
    option(
        "--expected-ms-per-token",
        type=float,
        metavar="MS",
        help="of replies, to find where conversations are at the start "
        f"(default {EXPECTED_MS_PER_TOKEN:g})",
    )
    option(
        "--max-context",
        type=int,
        metavar="N",
        help="conversations end before it (default: as the server says)",
    )
    option(
        "--vocabulary",
        type=int,
        default=1000,
        metavar="N",
        help="made-up token ids are below (default %(default)s)",
    )
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of arrivals and lengths, not ids (default %(default)s)",
    )
    option(
        "--processes", type=int, default=4, metavar="N", help="of the client (default %(default)s)"
    )
    option(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="between pieces of a reply (default %(default)s)",
    )
    option(
        "--gpu-dollars-per-hour",
        type=float,
        metavar="D",
        help="of all the server's GPUs: tells the cost",
    )
    option("--json", type=Path, metavar="FILE", help="a JSON line a rate")
    option(
        "--plot", type=Path, metavar="FILE", help="normalised latency over throughput (matplotlib)"
    )
    option(
        "--compare", type=Path, nargs="+", metavar="FILE", help="no load: show what --json wrote"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        return exit_status("benchmarks.serving", lambda: run(args))
    except ChildProcessError as error:
        print(f"benchmarks.serving: {error}", file=sys.stderr)
        return 1


def run(args: argparse.Namespace) -> None:
    check(args)
    if args.compare:
        compare(args.compare, args.plot)
    else:
        ServingBench(args).run()


def check(args: argparse.Namespace) -> None:
    """Raises SettingError for numbers that cannot be."""
    positive = (
        "think_s",
        "measure_s",
        "expected_ms_per_token",
        "timeout_s",
        "processes",
        "vocabulary",
    )
    check_above_0(args, (*positive, "find_rate", "max_context", "gpu_dollars_per_hour"))
    check_least(args, warm_up_s=0, ramp_s=0)
    if args.trace is not None and args.turn_counts is not None:
        raise SettingError("--turn-counts", "is of synthetic conversations; a trace has its own")
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise SettingError(f"--{name}", f"there is no directory {path.resolve().parent}")
    if args.plot is not None:
        check_matplotlib("--plot")


def check_own_clock(args: argparse.Namespace) -> None:
    """Raises SettingError for an option that has no effect with such a trace."""
    for name in OF_THE_START:
        if getattr(args, name):
            raise SettingError(
                flag(name),
                "leave it out: the trace has its own clock, and no conversation is open at its "
                "start",
            )


def parse_rates(text: str | None, native: float | None, find: bool) -> list[float]:
    rates = [native or 1.0] if text is None else numbers(text, "--rate", float)
    if not all(0 < rate < float("inf") for rate in rates):
        raise SettingError("--rate", f"must be above 0, not {text}")
    if find and (len(rates) != 2 or rates[0] >= rates[1]):
        raise SettingError(
            "--rate", "two rates LOW,HIGH are needed to search between them (--find-rate)"
        )
    return rates


def compare(paths: Sequence[Path], picture: Path | None) -> None:
    curves = {path.stem: read_reports(path, "--compare") for path in paths}
    for name, reports in curves.items():
        print(f"{name}\n{titles()}")
        for each_report in reports:
            print(report_line(each_report))
    if picture is not None:
        plot(curves, picture)


class ServingBench:
    """The runs of one command against one server."""

    def __init__(self, args: argparse.Namespace):
        """Asks the server for its model and limits. Raises SettingError."""
        self._args = args
        try:
            self._server = MetricsServer(args.url, args.api_key)
        except ServerError as error:
            raise SettingError("--url", str(error)) from error
        model, longest = ask_model(self._server, args.model)
        target = Target(
            self._server.url,
            model,
            args.api_key,
            args.conversations,
            args.timeout_s,
            args.tokenizer,
        )
        encode = read_tokenizer(args.tokenizer)
        asyncio.run(probe(target, args.vocabulary))
        self._target = target
        self._dialogues = load_dialogues(args, encode)
        limit = args.max_context or longest
        if limit is not None:
            self._fit(limit)
        native = clock_rate(self._dialogues)
        if native is not None:
            check_own_clock(args)
        self._has_clock = native is not None
        self._expected_ms_per_token = args.expected_ms_per_token or EXPECTED_MS_PER_TOKEN
        self._rates = parse_rates(args.rate, native, args.find_rate is not None)
        self._reports: list[RateReport] = []
        if args.json is not None:
            args.json.write_text("")

    def _fit(self, limit: int) -> None:
        fit = fitting(self._dialogues, limit)
        turns = [
            sum(len(dialogue.turns) for dialogue in dialogues)
            for dialogues in (self._dialogues, fit)
        ]
        if turns[0] != turns[1]:
            print(
                f"{turns[0] - turns[1]} of {turns[0]} turns do not fit into {limit} tokens: left "
                "out",
                file=sys.stderr,
            )
        self._dialogues = fit

    def run(self) -> None:
        args = self._args
        turns = mean_turns(self._dialogues)
        workload = args.trace or args.synthetic
        print(
            f"{self._target.model} at {self._target.url}, {workload}: {turns:.2f} turns a "
            "conversation; times in ms"
        )
        print(titles(), flush=True)
        if args.find_rate is None:
            for rate in self._rates:
                self._measure(rate)
        else:
            low, high = self._rates
            largest = largest_rate(lambda rate: self._bears(rate, args.find_rate), low, high)
            print("--find-rate:", largest, f"with at most {args.find_rate:g} ms/token")
        if args.plot is not None:
            plot({self._target.model: self._reports}, args.plot)

    def _bears(self, rate: float, most_ms: float) -> bool:
        measured = self._measure(rate)
        mean = measured.ms_per_token_mean
        return mean is not None and mean <= most_ms and measured.failed_share <= FAILED_SHARE

    def _measure(self, rate: float) -> RateReport:
        """One run, printed and written."""
        args = self._args
        window = Window(args.warm_up_s, args.warm_up_s + args.measure_s)
        arrivals = self._arrivals(rate, window.end)
        words = Words(args.vocabulary, secrets.token_hex(4))  # nothing is found of a run before
        with Load(self._target, arrivals, words, window, args.processes) as load:
            _sleep_until(load.start + window.start)
            before = read_metrics(self._server)
            _sleep_until(load.start + window.end)
            after = read_metrics(self._server)
            tally = load.result()
        grown = {name: after[name] - value for name, value in before.items() if name in after}
        measured = report(
            tally,
            rate=rate,
            turns=mean_turns(self._dialogues),
            seconds=args.measure_s,
            sources={
                name: int(grown[key]) for name in SOURCES if (key := source_metric(name)) in grown
            }
            or None,
            gpu_seconds=grown.get(GPU_SECONDS),
            dollars_per_hour=args.gpu_dollars_per_hour,
        )
        self._reports.append(measured)
        print(report_line(measured), flush=True)
        if measured.client_busy > BUSY_CLIENT:
            print(
                f"the client used {measured.client_busy:.0%} of a core: more --processes",
                file=sys.stderr,
            )
        if args.json is not None:
            with args.json.open("a", encoding="utf-8") as lines:
                lines.write(json_line(measured, self._settings()) + "\n")
        return measured

    def _arrivals(self, rate: float, seconds: float) -> list[Arrival]:
        args = self._args
        if self._has_clock:
            return replay(self._dialogues, rate=rate, seconds=seconds, seed=args.seed)
        return plan_arrivals(
            self._dialogues,
            rate=rate,
            seconds=seconds,
            seconds_per_token=self._expected_ms_per_token / 1e3,
            seed=args.seed,
            ramp_s=args.ramp_s,
            from_empty=args.from_empty,
            send_histories=args.send_histories,
        )

    def _settings(self) -> dict[str, Any]:
        names = ("think_s", "warm_up_s", *OF_THE_START, "seed", "processes", "conversations")
        workload = str(
            self._args.trace
            or f"{self._args.synthetic}, {self._args.turn_counts or TURN_COUNTS[0]} turns"
        )
        chosen = {name: getattr(self._args, name) for name in names}
        if not self._has_clock:
            chosen["expected_ms_per_token"] = self._expected_ms_per_token
        return {
            "model": self._target.model,
            "workload": workload,
            "time": int(time.time()),
            **chosen,
        }


def largest_rate(bears: Callable[[float], bool], low: float, high: float) -> str:
    """By bisection, as precisely as NEAR; in words, for it may be beyond one of the ends."""
    if not bears(low):
        return f"below {low:.4g} conversations/s"
    if bears(high):
        return f"{high:.4g} conversations/s or more"
    while high - low > NEAR * low:
        middle = (low + high) / 2
        low, high = (middle, high) if bears(middle) else (low, middle)
    return f"{low:.4g} conversations/s"


def load_dialogues(
    args: argparse.Namespace, encode: Callable[[str], Sequence[int]] | None
) -> list[Dialogue]:
    if args.trace is not None:
        return read_dialogues(args.trace, encode=encode, think_s=args.think_s, seed=args.seed)
    sessions = synthetic(
        CHATS[args.synthetic],
        conversations=POOL,
        sessions_per_s=1.0,
        think_s=args.think_s,
        seed=args.seed,
        turn_counts=args.turn_counts or TURN_COUNTS[0],
    )
    return [synthetic_dialogue(session) for session in sessions]


def read_tokenizer(path: str | None) -> Callable[[str], Sequence[int]] | None:
    if path is not None and not Path(path).is_file():
        raise SettingError("--tokenizer", f"there is no file {path}")
    return load_encode(path)


# -- the server


def ask_model(server: MetricsServer, name: str | None) -> tuple[str, int | None]:
    """The model's name, and its longest context where the server tells. Raises SettingError."""
    try:
        models = {
            model["id"]: model.get("max_model_len")
            for model in server.ask("GET", "/v1/models")["data"]
        }
    except (ServerError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            "--url", f"{server.url}/v1/models does not answer as it should: {error}"
        ) from error
    if not models:
        raise SettingError("--url", f"{server.url} serves no model")
    if name is None:
        name = next(iter(models))
    if name not in models:
        raise SettingError("--model", f"{name!r} is not one of the server's: {', '.join(models)}")
    return name, models[name]


async def probe(target: Target, vocabulary: int) -> None:
    """Sends one small request before the run. Raises SettingError if the server cannot be
    measured."""
    reply = StreamedReply()
    prompt = [index % vocabulary for index in range(PROBE_TOKENS)]
    content = body(target, prompt, PROBE_TOKENS, f"probe-{secrets.token_hex(4)}")
    try:
        async with (
            open_session(target) as session,
            session.post(f"{target.url}/v1/completions", data=content) as response,
        ):
            if response.status != 200:
                raise SettingError(
                    "--url", f"a request gets HTTP {response.status}: {await response.text()}"
                )
            async for data in response.content.iter_any():
                reply.read(data)
    except (aiohttp.ClientError, TimeoutError, Failed) as error:
        raise SettingError("--url", f"a request fails: {error or type(error).__name__}") from error
    if not reply.has_ids and target.tokenizer is None:
        raise SettingError(
            "--tokenizer", "the server returns no token ids: replies must be encoded again to go on"
        )
    if reply.length < PROBE_TOKENS:
        raise SettingError(
            "--url", f"{PROBE_TOKENS} tokens were asked for with ignore_eos, {reply.length} came"
        )


def source_metric(source: str) -> str:
    return f'pensieve:prompt_tokens_total{{source="{source}"}}'


def read_metrics(server: MetricsServer) -> dict[str, float]:
    """Returns `MetricsServer.metrics`; empty if the server has no metrics or has ended."""
    try:
        return server.metrics()
    except (ServerError, UnicodeDecodeError):
        return {}


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - clock()))


if __name__ == "__main__":
    sys.exit(main())
