"""Goodput: the largest rate of conversations at which a server keeps a promise to its users.

A promise (SLO) bounds the wait for a first token, for first and later turns apart, and the time per
token. A rate is judged on the requests of all windows that were measured at it: with other seeds,
on one machine or several. It holds if every bound holds and at most 1% of the requests failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pensieve.scheduler.sim.simulator import percentile
from pensieve.scheduler.types import SettingError

Record = Mapping[str, Any]

FAILED_SHARE = 0.01
CLOSE_RATES = 1.25
"""The largest rate is read between two measured ones that lie at most so far apart."""

ENOUGH_SESSIONS = 60


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


class Judged(NamedTuple):
    """A server at one rate, over all its windows. Waits and sessions in seconds; None: no sample.

    broken            the bounds that do not hold
    per_second        means over the windows: output tokens, prompt tokens, requests
    session_s         mean, p95 and number of whole sessions, without think times
    """

    server: str
    rate: float
    windows: int
    sessions: int
    broken: tuple[str, ...]
    first_p95: float | None
    later_p95: float | None
    token_p90: float | None
    per_second: tuple[float, float, float]
    session_s: tuple[float, float, int] | None
    longest_wait: float
    errors: Mapping[str, int]


def judge(records: Sequence[Record], promise: Promise) -> list[Judged]:
    """By rate, then by server in the order of their first record."""
    groups: dict[tuple[str, float], list[Record]] = {}
    for record in records:
        groups.setdefault((record["server"], record["result"]["rate"]), []).append(record["result"])
    servers = list(dict.fromkeys(server for server, _ in groups))
    ordered = sorted(groups, key=lambda group: (group[1], servers.index(group[0])))
    return [_judged(server, rate, groups[server, rate], promise) for server, rate in ordered]


def _judged(server: str, rate: float, results: Sequence[Record], promise: Promise) -> Judged:
    def pooled(name: str) -> list[float]:
        return [value for result in results for value in result[name]]

    first, later = pooled("first_waits_ms"), pooled("later_waits_ms")
    replies, sessions = pooled("replies_ms_per_token"), pooled("session_s")
    errors: dict[str, int] = {}
    for result in results:
        for kind, count in result["errors"].items():
            errors[kind] = errors.get(kind, 0) + count
    seconds = sum(result["seconds"] for result in results)

    def mean(name: str) -> float:
        return sum(result[name] * result["seconds"] for result in results) / seconds

    first_p95 = percentile(first, 0.95) / 1e3 if first else None
    later_p95 = percentile(later, 0.95) / 1e3 if later else None
    token_p90 = percentile(replies, 0.9) if replies else None
    failed = sum(errors.values())
    checks = {
        "first turns": first_p95 is not None and first_p95 > promise.first_s,
        "later turns": later_p95 is not None and later_p95 > promise.later_s,
        "ms/token": token_p90 is None or token_p90 > promise.token_ms,
        "failures": failed > FAILED_SHARE * (failed + len(replies)),
    }
    return Judged(
        server=server,
        rate=rate,
        windows=len(results),
        sessions=sum(result["sessions"] for result in results),
        broken=tuple(name for name, broken in checks.items() if broken),
        first_p95=first_p95,
        later_p95=later_p95,
        token_p90=token_p90,
        per_second=(
            mean("output_tokens_per_s"),
            mean("prompt_tokens_per_s"),
            mean("completed_per_s"),
        ),
        session_s=(sum(sessions) / len(sessions), percentile(sessions, 0.95), len(sessions))
        if sessions
        else None,
        longest_wait=max([*first, *later], default=0) / 1e3,
        errors=errors,
    )


def largest(judged: Sequence[Judged]) -> str:
    """One server's largest rate that holds, in words. `judged`: by rising rate."""
    holding = [each.rate for each in judged if not each.broken]
    failing = [each.rate for each in judged if each.broken]
    beyond = min((rate for rate in failing if not holding or rate > holding[-1]), default=None)
    if not holding:
        return f"below {failing[0]:g}"
    low = holding[-1]
    if any(rate < low for rate in failing):
        return f"{low:g}, though a smaller rate fails: chance is larger than the difference"
    if beyond is None:
        return f"at least {low:g}"
    if beyond > CLOSE_RATES * low:
        return f"at least {low:g}, below {beyond:g}: more rates between them are needed"
    return f"{low:g} (fails at {beyond:g})"


TITLES = (
    "conversations/s",
    "server",
    "holds",
    "TTFT p95, s: first, later turns",
    "ms/token p90",
    "tokens/s: output, prompt",
    "req/s",
    "whole sessions: mean, p95, s (number)",
    "longest wait, s",
    "failed",
    "windows, sessions",
)


def goodput_table(records: Sequence[Record], promise: Promise) -> list[str]:
    """Lines of Markdown: the promise, each server's largest rate, and a row a server and rate."""
    judged = judge(records, promise)
    lines = [f"Promise: {promise}.", ""]
    lines += [
        f"* `{server}`: {largest([each for each in judged if each.server == server])}"
        for server in dict.fromkeys(record["server"] for record in records)
    ]
    lines += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
    lines += [f"| {' | '.join(_cells(each))} |" for each in judged]
    if any(each.sessions < ENOUGH_SESSIONS for each in judged):
        lines += ["", f"Rows with fewer than {ENOUGH_SESSIONS} sessions are weak evidence."]
    return lines


def _cells(each: Judged) -> list[str]:
    output, prompt, requests = each.per_second
    sessions = each.session_s
    return [
        f"{each.rate:g}",
        f"`{each.server}`",
        f"no: {', '.join(each.broken)}" if each.broken else "yes",
        f"{_shown(each.first_p95, '.2f')}, {_shown(each.later_p95, '.2f')}",
        _shown(each.token_p90, ".1f"),
        f"{output:,.0f}, {prompt:,.0f}",
        f"{requests:.2f}",
        f"{sessions[0]:.0f}, {sessions[1]:.0f} ({sessions[2]})" if sessions else "-",
        f"{each.longest_wait:.1f}",
        ", ".join(f"{kind}: {count}" for kind, count in each.errors.items()),
        f"{each.windows}, {each.sessions}",
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
