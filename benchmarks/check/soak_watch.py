"""What the soak knows about a server while faults come and go, and what it accepts meanwhile.

A fault has windows of time. What a client saw counts as wrong unless a fault that was active
meanwhile excuses it (`FAULTS`). When a request has met a fault, `/health` must say so within
TELL_SECONDS, and then at every look until the fault's cause is gone. When a request has found it
gone, `/health` must say that within the same time, and then at every look until the next fault.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pensieve.scripts.chat import ServerError

LONGEST_GAP = 1.0  # seconds between two tokens of a stream
LONGEST_WAIT = 10.0  # seconds for a stream's first token: others may have all seats for that long
# for /health to say what a request has met: a server asks its database every 3.3 s
TELL_SECONDS = 10.0
MOST_WRONG = 50  # results; then the soak ends

# in place of a status: the connection, or an event in the stream, ended the answer early
CUT_OFF = 0
HISTORIES, DISK_TIER = "the histories", "the disk tier"  # parts of whose faults /health tells


class Wrong(Exception):
    """A result that must never occur: the soak looks for it."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault: what it is, and what it excuses.

    begins, ends  in words
    named         statuses of requests with a conversation
    plain         statuses of other requests
    slow          requests that may wait: "named", "all" or "" (none)
    parts         whose faults /health must tell
    says          text of the errors that are excused; "": any
    reason        of all that it excuses
    """

    begins: str
    ends: str
    named: frozenset[int] = frozenset()
    plain: frozenset[int] = frozenset()
    slow: str = ""
    parts: frozenset[str] = frozenset()
    says: str = ""
    reason: str = "nothing is excused"


FULL_HISTORIES = Fault(
    begins="the HTTP process may write to no file (RLIMIT_FSIZE)",
    ends="it may again, and a turn is stored",
    named=frozenset({CUT_OFF, 507}),
    slow="named",
    parts=frozenset({HISTORIES}),
    reason="a turn cannot be stored, nor a deletion",
)
FULL_DISK_TIER = Fault(
    begins="the engine's process may write to no file (RLIMIT_FSIZE)",
    ends="it may again, and KV is saved",
    named=frozenset({500}),
    parts=frozenset({DISK_TIER}),
    reason="KV of deleted conversations cannot be erased, which DELETE says",
)
UNERASED = Fault(
    begins="a full disk tier",
    ends="never",
    named=frozenset({500}),
    says="could not be erased",
    reason=(
        "a record that could not be erased stays until the next start; it may be of other "
        "conversations too"
    ),
)
FAULTS = {
    "kills": Fault(
        begins="SIGKILL or SIGTERM",
        ends="the next server is ready",
        named=frozenset({CUT_OFF, 500, 503}),
        plain=frozenset({CUT_OFF, 500, 503}),
        slow="all",
        reason="there is no server",
    ),
    "leases": Fault(
        begins="a kill or a stop of a shared database",
        ends="the lease of an open turn is over",
        named=frozenset({409}),
        reason="a turn that was open then holds its conversation",
    ),
    "expiry": Fault(
        begins="thousands of expired conversations at the start; new ones live for seconds",
        ends="never",
    ),
    "workers": Fault(
        begins="SIGKILL or SIGSTOP of one of the processes that serve clients",
        ends="it is replaced",
        named=frozenset({CUT_OFF}),
        plain=frozenset({CUT_OFF}),
        slow="all",
        reason="its clients are cut off",
    ),
    "readers": Fault(
        begins="clients do not read what they have asked for", ends="they read it, or hang up"
    ),
    "database": Fault(
        begins="pg_ctl stop -m immediate",
        ends="pg_ctl start, and a turn is stored",
        named=frozenset({CUT_OFF, 503}),
        slow="named",
        parts=frozenset({HISTORIES}),
        reason="turns cannot be stored",
    ),
    "full histories": FULL_HISTORIES,
    "full disk tier": FULL_DISK_TIER,
    "records": UNERASED,
}


@dataclass
class FaultWindow:
    """The time of one fault, by time.monotonic(); None: not yet.

    told    /health has said so
    lifted  its cause is gone; the server does not know yet
    ended   /health has said that, or nothing is excused any more
    """

    kind: str
    began: float
    told: float | None = None
    lifted: float | None = None
    ended: float | None = None

    def overlaps(self, since: float, until: float) -> bool:
        return self.began <= until and (self.ended is None or self.ended >= since)

    def holds(self, since: float, until: float) -> bool:
        """True if /health must say so at a look from `since` to `until`."""
        return (
            self.told is not None
            and self.told <= since
            and (self.lifted is None or self.lifted > until)
        )


@dataclass
class Longest:
    """Seconds: between two tokens and for a first token, of the streams that are always open,
    unless a fault excuses it; and until /health tells of a fault, and of its end. `gap` and `wait`
    are without the time for which the server waited for a processor, `whole_gap` is with it."""

    gap: float = 0.0
    whole_gap: float = 0.0
    wait: float = 0.0
    told: float = 0.0
    recovered: float = 0.0


class Watch:
    """Faults in time, and what was wrong. All threads of the soak use it."""

    def __init__(self) -> None:
        self.windows: list[FaultWindow] = []
        self.wrong: list[str] = []
        self.excused: Counter[tuple[str, str]] = Counter()  # (fault, what)
        self.looks: Counter[str] = Counter()  # by what /health said
        self.longest = Longest()
        self._lock = threading.Lock()

    # -- faults

    @contextlib.contextmanager
    def fault(self, kind: str, lasts: float = 0.0) -> Iterator[FaultWindow]:
        """A window of this fault; `lasts`: seconds for which it still excuses after the block."""
        window = FaultWindow(kind, time.monotonic())
        with self._lock:
            self.windows.append(window)
        try:
            yield window
        finally:
            if window.ended is None:
                window.ended = time.monotonic() + lasts

    def active(self, since: float, until: float) -> list[FaultWindow]:
        with self._lock:
            return [window for window in self.windows if window.overlaps(since, until)]

    def disturbed(self, since: float) -> bool:
        """True if a fault that may end turns has been active since then."""
        faults = (FAULTS[window.kind] for window in self.active(since, time.monotonic()))
        return any(fault.named and not fault.says for fault in faults)

    # -- verdicts

    def report(self, what: str) -> None:
        """Records a wrong result; the soak goes on, for others that may come."""
        with self._lock:
            self.wrong.append(what)

    def status(self, error: ServerError, since: float, named: bool, what: str) -> None:
        """Judges the failure of a request that was sent at `since`."""
        for window in self.active(since, time.monotonic()):
            fault = FAULTS[window.kind]
            statuses = fault.named if named else fault.plain
            if error.status in statuses and fault.says in str(error):
                self._excuse(window.kind, f"status {error.status}" if error.status else "cut off")
                return
        self.report(f"{what}: status {error.status}, {error}")

    def wait(self, since: float, seconds: float, most: float, named: bool, what: str) -> bool:
        """Judges a wait of `seconds` that began at `since` and ends now. Returns whether it counts:
        no fault explains it."""
        now = time.monotonic()
        excusing = ("named", "all") if named else ("all",)
        for window in self.active(since, now):
            if FAULTS[window.kind].slow in excusing:
                if seconds > most:
                    self._excuse(window.kind, "waits")
                return False
        if seconds > most:
            self.report(f"{what} took {seconds:.2f} s, with {self._described(since, now)}")
        return True

    def look(self, body: dict[str, Any], since: float, until: float) -> None:
        """Judges an answer of /health to a request sent at `since`."""
        failing = failing_parts(body)
        self.looks[", ".join(sorted(failing)) or "healthy"] += 1
        active = self.active(since, until)
        if HISTORIES in failing and not body["histories"].get("reason"):
            self.report("/health gives no reason for a fault of the histories")
        for part in (HISTORIES, DISK_TIER):
            causes = [window for window in active if part in FAULTS[window.kind].parts]
            if part in failing and not causes:
                self.report(f"/health tells of a fault of {part}, and there is none: {body}")
            if part not in failing and any(window.holds(since, until) for window in causes):
                self.report(f"/health does not tell any more of the fault of {part}: {body}")

    def _excuse(self, kind: str, what: str) -> None:
        with self._lock:
            self.excused[kind, what] += 1

    def _described(self, since: float, until: float) -> str:
        return ", ".join(window.kind for window in self.active(since, until)) or "no fault"


def table(watches: Mapping[str, Watch]) -> str:
    """The faults that occurred with what they excused, and the waits that none excuses, by kind of
    histories."""
    head = [
        "| histories | fault | begins | ends | excuses | times | seconds | excused |",
        "|---" * 8 + "|",
    ]
    now = time.monotonic()
    for name, watch in watches.items():
        for kind, fault in FAULTS.items():
            windows = [window for window in watch.windows if window.kind == kind]
            if not windows:
                continue
            seconds = sum(min(window.ended or now, now) - window.began for window in windows)
            excused = [
                f"{count} {what}"
                for (by, what), count in sorted(watch.excused.items())
                if by == kind
            ]
            words = (fault.begins, fault.ends, allowed(fault))
            row = (name, kind, *words, len(windows), f"{seconds:.0f}", ", ".join(excused) or "none")
            head.append(f"| {' | '.join(map(str, row))} |")
    for name, watch in watches.items():
        looks = ", ".join(f"{count} {state}" for state, count in watch.looks.items())
        longest = watch.longest
        head.append(
            f"\n{name}: at most {longest.gap:.2f} s between two tokens ({longest.whole_gap:.2f} s "
            "with waits for a "
            f"processor), {longest.wait:.2f} s for a first one, "
            f"{longest.told:.2f} s until /health told of a fault, {longest.recovered:.2f} s of its "
            "end; "
            f"looks at /health: {looks or 'none'}"
        )
    return "\n".join(head)


def allowed(fault: Fault) -> str:
    """What the fault excuses, in words."""
    parts = []
    for whose, statuses in (("turns", fault.named), ("other requests", fault.plain)):
        shown = ", ".join(str(status) if status else "cut off" for status in sorted(statuses))
        parts += [f"{whose}: {shown}"] if statuses else []
    if fault.slow:
        parts.append("all waits" if fault.slow == "all" else "waits of turns")
    return "; ".join([*parts, fault.reason])


def failing_parts(body: dict[str, Any]) -> set[str]:
    """The parts of which the body of /health says that they fail."""
    failing = set()
    if not body["histories"]["healthy"]:
        failing.add(HISTORIES)
    if body.get("kv_disk_full"):
        failing.add(DISK_TIER)
    return failing
