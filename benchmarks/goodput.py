"""Goodput: the largest rate of conversations at which a server keeps a promise to its users.

A promise (SLO) bounds the wait for a first token, for first and later turns apart, and the time per
token. A rate is judged on the requests of all windows that were measured at it: with other seeds,
on one machine or several. It holds if every bound holds, at most 1% of the requests failed, and the
samples are enough. A request that still waits at a window's end, or whose reply is open, counts
where it is beyond the bound already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.scheduler.sim.simulator import percentile
from pensieve.scheduler.types import SettingError

Record = Mapping[str, Any]

FAILED_SHARE = 0.01  # a rate at which more requests fail is too high
CLOSE_RATES = 1.25
"""The largest rate is read between two measured ones that lie at most so far apart."""

ENOUGH_SESSIONS = 60
ENOUGH_SAMPLES = 20
"""The 95th percentile of fewer is their largest."""


class Promise(NamedTuple):
    """first_s, later_s  p95 of the wait for a first token: a conversation's first turn, and others
    token_ms             p90 of the time per token of a reply, the wait included"""

    first_s: float
    later_s: float
    token_ms: float

    @classmethod
    def read(cls, text: str) -> Promise:
        """Of first=15,later=5,token=50. SettingError."""
        try:
            values = {
                name: float(value)
                for name, _, value in (part.partition("=") for part in text.split(","))
            }
            promise = cls(values.pop("first"), values.pop("later"), values.pop("token"))
        except (ValueError, KeyError):
            values = {"": 0.0}
        if values:
            raise SettingError("--slo", f"{text!r} is not of the form first=15,later=5,token=50")
        return promise

    def __str__(self) -> str:
        return (
            f"TTFT p95 at most {self.first_s:g} s for first turns and {self.later_s:g} s for "
            f"later ones, p90 of ms/token at most {self.token_ms:g}"
        )


class PerSecond(NamedTuple):
    output_tokens: float
    prompt_tokens: float
    sent: float
    done: float


class Judged(NamedTuple):
    """A server at one rate, over all its windows. Waits in seconds; None: no sample.

    broken            the bounds that do not hold
    too_few           kinds of samples of which there are too few to say that the rate holds
    per_second        means over the windows: output tokens, prompt tokens, requests sent and done
    cached_share      share of the prompts' tokens whose KV the server had, by its replies' `usage`;
                      None: it does not tell
    open              requests in the server at the windows' starts and ends, in all
    session_s         of the whole sessions that ended at every server, without think times
    """

    server: str
    rate: float
    windows: int
    sessions: int
    broken: tuple[str, ...]
    too_few: tuple[str, ...]
    first_p95: float | None
    later_p95: float | None
    token_p90: float | None
    per_second: PerSecond
    cached_share: float | None
    open: tuple[int, int]
    session_s: tuple[float, ...]
    longest_wait: float
    errors: Mapping[str, int]

    @property
    def holds(self) -> bool:
        return not (self.broken or self.too_few)


def judge(records: Sequence[Record], promise: Promise) -> list[Judged]:
    """By rate, then by server in the order of their first record. SettingError if a window is there
    twice."""
    groups: dict[tuple[str, float], dict[int, Record]] = {}
    for record in records:
        result = record["result"]
        windows = groups.setdefault((record["server"], result["rate"]), {})
        if result["seed"] in windows:
            raise SettingError(
                "--report",
                f"{record['server']} has two windows at {result['rate']:g} with seed "
                f"{result['seed']}: give one of the runs another --title",
            )
        windows[result["seed"]] = result
    servers = list(dict.fromkeys(server for server, _ in groups))
    ordered = sorted(groups, key=lambda group: (group[1], servers.index(group[0])))
    return [
        _judged(
            server,
            rate,
            groups[server, rate],
            [windows for (_, other), windows in groups.items() if other == rate],
            promise,
        )
        for server, rate in ordered
    ]


def _judged(
    server: str,
    rate: float,
    windows: Mapping[int, Record],
    of_all_servers: Sequence[Mapping[int, Record]],
    promise: Promise,
) -> Judged:
    results = list(windows.values())
    errors: dict[str, int] = {}
    for result in results:
        for kind, count in result["errors"].items():
            errors[kind] = errors.get(kind, 0) + count
    seconds = sum(result["seconds"] for result in results)

    def mean(name: str) -> float:
        return sum(result[name] * result["seconds"] for result in results) / seconds

    first = _waits(results, "first", promise.first_s)
    later = _waits(results, "later", promise.later_s)
    replies = _beyond(
        [value for result in results for value in result["replies_ms_per_token"]],
        [value for result in results for value in result["open_ms_per_token"]],
        promise.token_ms,
    )
    first_p95 = percentile(first, 0.95) if first else None
    later_p95 = percentile(later, 0.95) if later else None
    token_p90 = percentile(replies, 0.9) if replies else None
    failed = sum(errors.values())
    checks = {
        "first turns": first_p95 is not None and first_p95 > promise.first_s,
        "later turns": later_p95 is not None and later_p95 > promise.later_s,
        "ms/token": token_p90 is not None and token_p90 > promise.token_ms,
        "failures": failed > FAILED_SHARE * (failed + len(replies)),
    }
    samples = {"first turns": len(first), "replies": len(replies)}
    if later:  # a load without turns has none
        samples["later turns"] = len(later)
    return Judged(
        server=server,
        rate=rate,
        windows=len(results),
        sessions=sum(result["sessions"] for result in results),
        broken=tuple(name for name, broken in checks.items() if broken),
        too_few=tuple(name for name, number in samples.items() if number < ENOUGH_SAMPLES),
        first_p95=first_p95,
        later_p95=later_p95,
        token_p90=token_p90,
        per_second=PerSecond(
            mean("output_tokens_per_s"),
            mean("prompt_tokens_per_s"),
            mean("sent_per_s"),
            mean("completed_per_s"),
        ),
        cached_share=_cached_share(results),
        open=(
            sum(result["open_at_start"] for result in results),
            sum(result["open_at_end"] for result in results),
        ),
        session_s=_common_sessions(windows, of_all_servers),
        longest_wait=max([*first, *later, *_waits(results, "joined", 0.0)], default=0.0),
        errors=errors,
    )


def _cached_share(results: Sequence[Record]) -> float | None:
    """Of the replies that ended, over the prompts whose first token came."""
    if any(result["cached_tokens"] is None for result in results):
        return None
    prompts = sum(result["prompt_tokens"] for result in results)
    return sum(result["cached_tokens"] for result in results) / prompts if prompts else None


def _waits(results: Sequence[Record], turn: str, bound_s: float) -> list[float]:
    """In seconds."""
    waits = [wait / 1e3 for result in results for wait in result["waits_ms"][turn]]
    open_waits = [wait / 1e3 for result in results for wait in result["open_waits_ms"][turn]]
    return _beyond(waits, open_waits, bound_s)


def _beyond(values: Sequence[float], at_least: Sequence[float], bound: float) -> list[float]:
    """The values, and those of which only a lower limit is known, where it is beyond the bound: of
    the others nothing is known yet."""
    return [*values, *(value for value in at_least if value > bound)]


def _common_sessions(
    windows: Mapping[int, Record], of_all_servers: Sequence[Mapping[int, Record]]
) -> tuple[float, ...]:
    """Of the conversations with one name, one seed and one rate, which are the same everywhere. A
    slower server completes fewer and shorter ones, so all of each server's cannot be compared."""
    seconds = [
        took
        for seed, result in windows.items()
        for name, took in result["session_s"].items()
        if all(name in other[seed]["session_s"] for other in of_all_servers if seed in other)
    ]
    return tuple(sorted(seconds))


def largest(judged: Sequence[Judged]) -> str:
    """One server's largest rate that holds, in words: below the first one that fails. `judged`: by
    rising rate."""
    holding: list[Judged] = []
    failing = None
    for each in judged:
        if each.broken:
            failing = each
            break
        if each.holds:
            holding.append(each)
    unsure = [each.rate for each in judged if each.too_few and not each.broken]
    words = _largest(holding[-1].rate if holding else None, failing and failing.rate)
    if failing and (beyond := [each.rate for each in judged if each.holds and each not in holding]):
        words += f"; {_listed(beyond)} holds, which can only be chance"
    if unsure:
        words += f"; too few samples at {_listed(unsure)}"
    if any(each.windows == 1 for each in (*holding[-1:], *([failing] if failing else []))):
        words += "; single windows"
    return words


def _largest(low: float | None, beyond: float | None) -> str:
    if low is None:
        return "no rate holds" if beyond is None else f"below {beyond:g}"
    if beyond is None:
        return f"at least {low:g}"
    if beyond > CLOSE_RATES * low:
        return f"between {low:g} and {beyond:g}: rates between them are needed"
    return f"{low:g} (fails at {beyond:g})"


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


TITLES = (
    "conversations/s",
    "server",
    "holds",
    "TTFT p95, s: first, later turns",
    "ms/token p90",
    "tokens/s: output, prompt",
    "prompt found, %",
    "req/s: sent, done",
    "open at start, end",
    "sessions that ended everywhere: mean, p95, s (number)",
    "longest wait, s",
    "failed",
    "windows, sessions",
)


def goodput_table(records: Sequence[Record], promise: Promise) -> list[str]:
    """Lines of Markdown: the promise, each server's largest rate, and a row a server and rate."""
    judged = judge(records, promise)
    lines = [f"Promise: {promise}. Largest rate that keeps it, conversations/s:", ""]
    lines += [
        f"* `{server}`: {largest([each for each in judged if each.server == server])}"
        for server in dict.fromkeys(record["server"] for record in records)
    ]
    lines += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
    lines += [f"| {' | '.join(_cells(each))} |" for each in judged]
    if any(each.sessions < ENOUGH_SESSIONS for each in judged):
        lines += ["", f"Rows with fewer than {ENOUGH_SESSIONS} sessions are weak evidence."]
    if any("fp8" in each.server for each in judged):
        lines += [
            "",
            "Rows with `fp8` round weights or KV to eight bits; the others round neither.",
        ]
    return lines


def _cells(each: Judged) -> list[str]:
    per_second = each.per_second
    verdict = "yes"
    if each.broken:
        verdict = f"no: {', '.join(each.broken)}"
    elif each.too_few:
        verdict = f"too few {', '.join(each.too_few)}"
    return [
        f"{each.rate:g}",
        f"`{each.server}`",
        verdict,
        f"{_shown(each.first_p95, '.2f')}, {_shown(each.later_p95, '.2f')}",
        _shown(each.token_p90, ".1f"),
        f"{per_second.output_tokens:,.0f}, {per_second.prompt_tokens:,.0f}",
        "-" if each.cached_share is None else f"{100 * each.cached_share:.0f}",
        f"{per_second.sent:.2f}, {per_second.done:.2f}",
        f"{each.open[0]}, {each.open[1]}",
        _session_cell(each.session_s),
        f"{each.longest_wait:.1f}",
        ", ".join(f"{kind}: {count}" for kind, count in each.errors.items()),
        f"{each.windows}, {each.sessions}",
    ]


def _session_cell(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    mean = f"{sum(seconds) / len(seconds):.0f}"
    if len(seconds) < ENOUGH_SAMPLES:
        return f"{mean} ({len(seconds)})"
    return f"{mean}, {percentile(seconds, 0.95):.0f} ({len(seconds)})"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
