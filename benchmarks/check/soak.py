"""soak: a server with three small tiers, random conversations, and faults, for any length of time.

    python -m benchmarks.check.soak --minutes 30

Clients hold random conversations with `pensieve serve` (whole histories, server histories,
branches, hang-ups, deletions). Every token is compared with plain transformers' greedy choice for
the same context. Meanwhile faults come and go; `--faults` chooses them:

    kills     the server is killed (SIGKILL: all of its processes, or only the first) or ended
              (SIGTERM) at random times, and started again on the same directory
    expiry    thousands of conversations have expired before the start, and new ones live for
              seconds
    readers   clients ask for long streams and do not read them
    database  the histories' PostgreSQL is stopped and started again
    disk      the files of histories, of KV, or both cannot be written to for a while
    workers   with `--api-server-count`: a process that serves clients is killed, or hangs

Half of the time the histories are in a file, the other half in PostgreSQL, which the soak starts
itself. `disk` needs the one, `database` the other.

Two clients always read a stream: no wait between tokens may be above a second, unless a fault
excuses it. No request may fail for another reason. /health is asked every second and must be right.
`soak_watch.py` has the list of faults with what each excuses. Memory, file descriptors, slots,
processes and bytes of files must not leak. Ends with a table of the faults, PASS or FAIL, and one
JSON line; exit status 1 after a wrong result.

Needs transformers (the extra `test`), and PostgreSQL for its half.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import torch

from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.conversations.turns import EXPIRY_SECONDS
from pensieve.runtime.system import descendants, running
from pensieve.scheduler.declaration import flag
from pensieve.scheduler.types import SettingError
from pensieve.scripts.chat import ServerError
from pensieve.scripts.command import exit_status

from ..servers import MetricsServer
from .postgres import NotInstalled, PrivatePostgres
from .soak_faults import (
    LEASE,
    READERS,
    Faults,
    Probe,
    ShortLived,
    SlowReader,
    Stage,
    expired_left,
    look_at_health,
    put_expired,
)
from .soak_watch import MOST_WRONG, Watch, Wrong, table

START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
HISTORY_FILE = "history.sqlite"
WORKER = b"workers.worker"  # in the command of such a process


class Life:
    """One process of `pensieve serve`, from its start to its end."""

    def __init__(
        self, state: Path, engine: str, options: Sequence[str], environment: Mapping[str, str]
    ):
        command = [
            sys.executable,
            "-m",
            "pensieve.scripts.pensieve",
            "serve",
            "--engine",
            engine,
            "--port",
            "0",
        ]
        self.log = state / "server.log"
        self._histories = str(state / HISTORY_FILE)
        self.log.touch()
        offset = self.log.stat().st_size
        self.process = subprocess.Popen(
            [*command, "--state-dir", str(state), *options], stderr=subprocess.PIPE, env=environment
        )
        assert self.process.stderr is not None
        # A pipe: the log must go on when the server may write to no file.
        self._copier = threading.Thread(
            target=_copy, args=(self.process.stderr, self.log), daemon=True
        )
        self._copier.start()
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with self.log.open() as lines:
                lines.seek(offset)
                address = re.search(r"serving (\S+) on (http://\S+)", lines.read())
            if address:
                self.model = address[1]
                self.server = MetricsServer(address[2], None, ANSWER_SECONDS)
                with contextlib.suppress(ServerError):
                    self.server.text("/ready")
                    break
            time.sleep(0.1)
        else:
            raise Wrong(f"the server did not start; see {self.log}")
        self.processes = [self.process.pid, *descendants(self.process.pid)]

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        return sum(_status(process, "VmRSS:") * 1024 for process in self.processes)

    def files(self) -> int:
        return sum(len(list(Path(f"/proc/{process}/fd").iterdir())) for process in self.processes)

    def kill(self, everything: bool) -> None:
        """All of its processes, or only the first: then the others must end by themselves."""
        for process in reversed(self.processes if everything else self.processes[:1]):
            # it may have ended with the process just killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._ended()

    def end(self) -> None:
        """Raises Wrong if SIGTERM does not end it cleanly."""
        self.process.send_signal(signal.SIGTERM)
        if status := self._ended():
            raise Wrong(f"the server ended with status {status}; see {self.log}")

    def _ended(self) -> int:
        """Returns its exit status. Raises Wrong if any of its processes is left."""
        status = self.process.wait(90)
        until = time.monotonic() + 30
        while left := [process for process in self.processes[1:] if running(process)]:
            if time.monotonic() > until:
                raise Wrong(f"processes {left} outlive their server")
            time.sleep(0.1)
        self._copier.join(30)
        return status

    def workers(self) -> list[int]:
        """The processes that serve clients besides the HTTP process; looks for all anew."""
        self.processes = [self.process.pid, *descendants(self.process.pid)]
        return [process for process in self.processes if _is_worker(process)]

    def history_processes(self) -> list[int]:
        """Those that have the file of the histories open."""
        return [process for process in self.processes if self._has_histories(process)]

    def other_processes(self) -> list[int]:
        return [process for process in self.processes if not self._has_histories(process)]

    def _has_histories(self, process: int) -> bool:
        return any(
            _target(file).startswith(self._histories)
            for file in Path(f"/proc/{process}/fd").iterdir()
        )


def _is_worker(process: int) -> bool:
    try:
        return WORKER in Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return False


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except FileNotFoundError:  # it has just been closed
        return ""


def _copy(lines: IO[bytes], log: Path) -> None:
    with lines, log.open("ab", buffering=0) as copy:
        for line in lines:
            copy.write(line)


def _status(process: int, name: str) -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


CHUNK_TOKENS, GPU_CHUNKS, HOST_CHUNKS, DISK_CHUNKS = 16, 72, 24, 160
LONGEST = 640  # tokens; then a conversation is deleted, and another one begins
CLIENTS = 4
CONVERSATIONS_EACH = 6  # more than the three tiers hold
UNDECIDED = 1e-3  # a smaller gap between the reference's logits decides nothing
QUIET_SECONDS = 2.5  # without requests for this long the loop has checked its state
SETTLE_SECONDS = 120.0  # more, on a busy machine, until all slots are free
WARM_UP_SECONDS = 45.0  # of a life, before memory counts
MORE_MEMORY = 48 * 2**20  # bytes that a process may grow by afterwards
MORE_FILES = 16
OTHER_CLIENTS = 6  # beside CLIENTS: each may have a connection and an open answer
MORE_HISTORY = 4 * 2**20  # bytes that the history may grow by in the second half


class Reference:
    """Plain transformers in fp32 on the CPU."""

    def __init__(self, checkpoint: Path):
        from transformers import AutoModelForCausalLM  # only tests need it otherwise

        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.vocabulary: int = self._model.config.vocab_size
        self._lock = threading.Lock()

    @torch.inference_mode()
    def check(self, tokens: Sequence[int], start: int) -> None:
        """Raises Wrong unless every token from `start` on is the greedy choice after the tokens
        before it."""
        with self._lock:
            logits = self._model(torch.tensor([tokens[:-1]])).logits[0, start - 1 :]
        gaps = (
            logits.max(dim=-1).values
            - logits.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
        )
        wrong = (gaps > UNDECIDED).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise Wrong(
                f"token {at} of a reply behind {start} tokens is off by {float(gaps[at]):.3g} in "
                "logits"
            )


@dataclass
class SoakConversation:
    """`intact`: the server's log equals the client's; unsure after a turn whose end did not arrive.
    Until the time `held` (by time.monotonic()) such a turn may hold the conversation of a shared
    database: others become branches."""

    name: str
    log: list[int] = field(default_factory=list)
    intact: bool = False
    held: float = 0.0


class SoakClient:
    """One step is a turn of one of its conversations, or its end."""

    def __init__(self, soak: Soak, number: int):
        self._soak = soak
        self._number = number
        self._random = random.Random(f"{soak.seed}/{number}")
        self._begun = 0
        self._conversations = [self._new() for _ in range(CONVERSATIONS_EACH)]

    def _new(self) -> SoakConversation:
        self._begun += 1
        return SoakConversation(f"client {self._number} talk {self._begun}")

    def step(self) -> None:
        since = time.monotonic()
        try:
            self._turn_or_end(self._random.randrange(CONVERSATIONS_EACH))
        except ServerError as error:
            self._soak.failed(error, since, True, "a turn")

    def _turn_or_end(self, place: int) -> None:
        conversation = self._conversations[place]
        if len(conversation.log) > LONGEST - 120:
            self._conversations[place] = self._new()
            self._soak.life.server.ask("DELETE", f"/v1/conversations/{quote(conversation.name)}")
            self._soak.count("deleted")
            return
        chance = self._random
        log = conversation.log
        if len(log) > 1 and chance.random() < 0.05:
            log = log[: chance.randrange(1, len(log))]
        server_history = log is conversation.log and conversation.intact and chance.random() < 0.5
        new = [
            chance.randrange(4, self._soak.reference.vocabulary)
            for _ in range(chance.choice((1, 5, 20, 60)))
        ]
        body: dict[str, Any] = {
            "model": self._soak.life.model,
            "prompt": new if server_history else [*log, *new],
            "history": "server" if server_history else "client",
            "conversation": conversation.name,
            "max_tokens": chance.randint(1, 32),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_sources": True,
        }
        intact = conversation.intact
        conversation.intact = False
        free = not self._soak.shared or time.monotonic() > conversation.held
        if chance.random() < 0.05:
            self._hang_up(body)
            conversation.held = time.monotonic() + LEASE
            return
        try:
            answer = self._soak.life.server.ask("POST", "/v1/completions", body)
        except ServerError as error:
            # Refused: the turn is not committed. Otherwise, and from a database that stops, that is
            # unknown.
            conversation.held = time.monotonic() + LEASE
            conversation.intact = intact and error.status == 503 and not self._soak.shared
            raise
        tokens = [*log, *new, *answer["choices"][0]["token_ids"]]
        self._soak.reference.check(tokens, len(log) + len(new))
        if answer["usage"]["prompt_tokens"] != len(log) + len(new):
            raise Wrong(
                f"{conversation.name}: a prompt of {len(log) + len(new)} tokens, said to be "
                f"{answer['usage']}"
            )
        branched = len(log) < len(conversation.log)
        conversation.log = tokens
        conversation.intact = free
        self._soak.took(answer["usage"]["prompt_tokens_details"], body["max_tokens"], branched)

    def _hang_up(self, body: dict[str, Any]) -> None:
        """Hangs up in the middle of a streamed reply."""
        reply = self._soak.life.server.events(
            "/v1/completions", body | {"stream": True, "max_tokens": 64}
        )
        with contextlib.closing(reply):
            next(reply, None)
        self._soak.count("hung up")


class Soak(Stage):
    """database  the URL of the histories' database; None: a file
    faults    the faults of the command that concern histories
    """

    def __init__(
        self,
        reference: Reference,
        seed: int,
        faults: Sequence[str] = ("kills",),
        database: PrivatePostgres | None = None,
    ):
        super().__init__(reference, seed)
        self.life: Life
        self._faults = faults
        self._database = database
        self._random = random.Random(seed)

    @property
    def shared(self) -> bool:
        return self._database is not None

    def took(self, sources: dict[str, int], generated: int, branched: bool) -> None:
        with self._lock:
            self.counts.update(
                {source: sources[source] for source in ("gpu", "host", "disk", "recomputed", "new")}
            )
            self.counts.update(turns=1, generated=generated, branched=branched)

    def run(
        self, state: Path, seconds: float, lives: int, engine: str, options: Sequence[str]
    ) -> dict[str, Any]:
        """Runs `lives` lives, which serve for `seconds` together. Raises Wrong, or the error of a
        client."""
        environment = {
            name: value for name, value in os.environ.items() if name != "PENSIEVE_HISTORY_URL"
        }
        histories: str | Path = state / HISTORY_FILE
        if self._database is not None:
            histories = environment["PENSIEVE_HISTORY_URL"] = self._database.url
        history = []
        growth = [0]
        threads = [self.repeat(step) for step in self._steps()]
        down, always = contextlib.ExitStack(), contextlib.ExitStack()
        if "expiry" in self._faults:
            always.enter_context(self.watch.fault("expiry"))
        try:
            shares = [self._random.uniform(0.3, 1.7) for _ in range(lives)]
            for number, share in enumerate(shares, start=1):
                if "expiry" in self._faults:
                    self.count("old conversations removed", -expired_left(histories))
                    self.count("old conversations removed", put_expired(histories))
                self.life = Life(state, engine, options, environment)
                down.close()
                growth.append(self._live(seconds * share / sum(shares)))
                self._end(number == lives or number % 3 == 0 or "kills" not in self._faults, down)
                history.append(_size(state / HISTORY_FILE) + _size(state / f"{HISTORY_FILE}-wal"))
                self._check_files(state)
        finally:
            self.over.set()
            for thread in threads:
                thread.join(150)
            down.close()
            always.close()
            with contextlib.suppress(AttributeError):  # no life has begun
                self.life.process.kill()
                self.life.process.wait()
        self.raise_failure()
        if "expiry" in self._faults:
            self.count("old conversations removed", -expired_left(histories))
            longest = seconds * max(shares) / sum(shares)
            if not self.counts["old conversations removed"] and longest > 2 * EXPIRY_SECONDS:
                raise Wrong("no expired conversation was removed")
        if history[-1] - history[len(history) // 2] > MORE_HISTORY:
            raise Wrong(f"the history grows without end: {history} bytes")
        if self.watch.wrong:
            raise Wrong(self.watch.wrong[0])
        return {"memory_growth": max(growth), "history_bytes": history[-1], **self.counts}

    def _steps(self) -> list[Callable[[], None]]:
        """The steps of all threads."""
        steps = [SoakClient(self, number).step for number in range(CLIENTS)]
        steps += [Probe(self, named).step for named in (False, True)]
        steps.append(partial(look_at_health, self))
        if "expiry" in self._faults:
            steps.append(ShortLived(self).step)
        if "readers" in self._faults:
            steps += [SlowReader(self, number).step for number in range(READERS)]
        if "database" in self._faults:
            steps.append(Faults(self, ["database"], self._database).step)
        if "workers" in self._faults:
            steps.append(Faults(self, ["workers"], None).step)
        if "disk" in self._faults:
            steps.append(Faults(self, ["full histories", "full disk tier", "full disk"], None).step)
        return steps

    def _live(self, seconds: float) -> int:
        """Returns the bytes by which its processes grew after they had warmed up."""
        self.running.set()
        began = time.monotonic()
        before = 0
        files = self.life.files()
        while (now := time.monotonic()) < began + seconds and not self.over.is_set():
            if len(self.watch.wrong) >= MOST_WRONG:
                break
            if not before and now > began + WARM_UP_SECONDS:
                with self.undisturbed:
                    before = self.life.memory()
            self.over.wait(min(1.0, began + seconds - now))
        self.raise_failure()
        if len(self.watch.wrong) >= MOST_WRONG:
            raise Wrong(f"{len(self.watch.wrong)} wrong results")
        if self.life.process.poll() is not None:
            raise Wrong(f"the server has ended by itself; see {self.life.log}")
        with self.undisturbed:
            growth = self.life.memory() - before if before else 0
            now_open = self.life.files()
        if growth > MORE_MEMORY or now_open > files + 2 * (CLIENTS + OTHER_CLIENTS) + MORE_FILES:
            raise Wrong(f"grown by {growth} bytes, {files} open files became {now_open}")
        return growth

    def _end(self, calmly: bool, down: contextlib.ExitStack) -> None:
        """Ends the server. `down` gets the faults that last until the next one is ready."""
        with self.undisturbed:
            if not calmly:
                self._kill(down)
                return
            self.running.clear()
        until = time.monotonic() + 150
        while not self.idle and time.monotonic() < until:
            time.sleep(0.05)
        self.raise_failure()
        time.sleep(QUIET_SECONDS)
        metrics = self.life.server.metrics()
        until = time.monotonic() + SETTLE_SECONDS
        while (taken := _taken(metrics)) and time.monotonic() < until:
            time.sleep(0.1)
            metrics = self.life.server.metrics()
        if taken:
            raise Wrong(f"slots are taken without a user: {taken}")
        self.counts["rejected records"] += int(
            metrics['pensieve:kv_disk_faults_total{kind="rejected"}']
        )
        self.counts["ends"] += 1
        down.enter_context(self.watch.fault("kills"))
        self.life.end()

    def _kill(self, down: contextlib.ExitStack) -> None:
        self.counts["kills"] += 1
        if self.shared:
            down.enter_context(self.watch.fault("leases", lasts=LEASE))
        down.enter_context(self.watch.fault("kills"))
        self.life.kill(everything=self._random.random() < 0.5)
        self.running.clear()

    def _check_files(self, state: Path) -> None:
        sizes = {file: file.stat().st_size for file in (state / "kv").rglob("*.kv")}
        self.counts["disk_bytes"] = sum(sizes.values())
        if len({file.parent for file in sizes}) < len(sizes):
            raise Wrong(f"the disk tier has grown: {sizes} bytes")  # one file a rank is enough
        if "Traceback" in self.life.log.read_text():
            raise Wrong(f"an exception in {self.life.log}")


def _taken(metrics: dict[str, float]) -> dict[str, float]:
    """Slots by state, of a tier in which any is in use or missing."""
    for tier, slots in (("gpu", GPU_CHUNKS), ("host", HOST_CHUNKS), ("disk", DISK_CHUNKS)):
        states = {
            name: value
            for name, value in metrics.items()
            if "kv_slots{state=" in name and tier in name
        }
        if sum(states.values()) != slots or any(
            value for name, value in states.items() if "in_use" in name
        ):
            return states
    return {}


FAULTS = ("kills", "expiry", "readers", "database", "disk", "workers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="of serving (default %(default)s)"
    )
    parser.add_argument("--faults", help=f"some of {','.join(FAULTS)} (default: all)")
    parser.add_argument(
        "--api-server-count",
        type=int,
        default=1,
        metavar="N",
        help="as of `pensieve serve` (default %(default)s)",
    )
    parser.add_argument(
        "--lives", type=int, help="starts in that time (default: one for 1.5 minutes)"
    )
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument(
        "--engine", default="demo", help="an engine directory in float32 (default %(default)s)"
    )
    parser.add_argument(
        "--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="what it was built from"
    )
    parser.add_argument("--state-dir", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("options", nargs="*", help="more of `pensieve serve`, behind --")
    args = parser.parse_args(argv)
    return exit_status("soak", lambda: soak(args))


def soak(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    faults = args.faults.split(",") if args.faults is not None else list(FAULTS)
    if unknown := set(faults) - set(FAULTS):
        raise SettingError(
            "--faults", f"must be some of {', '.join(FAULTS)}, not {', '.join(sorted(unknown))}"
        )
    if args.api_server_count == 1 and "workers" in faults:
        if args.faults is not None:
            raise SettingError("--faults", "workers needs an --api-server-count of 2 or more")
        faults.remove("workers")
    options = [f"--api-server-count={args.api_server_count}", *args.options]
    torch.set_num_threads(1)
    results: dict[str, Any] = {"bench": "soak", "seed": args.seed, "minutes": args.minutes}
    watches: dict[str, Watch] = {}
    wrong: list[str] = []
    with contextlib.ExitStack() as temporary:
        directory = args.state_dir or Path(
            temporary.enter_context(tempfile.TemporaryDirectory(prefix="soak"))
        )
        runs = histories_of(faults, temporary)
        reference = Reference(args.checkpoint)
        for name, (own_faults, database) in runs.items():
            run = Soak(reference, args.seed, own_faults, database)
            state = directory / name
            state.mkdir(parents=True, exist_ok=True)
            watches[name] = run.watch
            lives = args.lives or round(args.minutes / 1.5 if "kills" in faults else 1)
            lives = max(1, lives // len(runs))
            seconds = args.minutes * 60 / len(runs)
            try:
                results[name] = run.run(state, seconds, lives, args.engine, server_options(options))
            except (Wrong, ServerError) as error:
                if str(error) not in run.watch.wrong:
                    run.watch.report(str(error))
                results[name] = dict(run.counts)
                print((state / "server.log").read_text()[-4000:], file=sys.stderr)
            wrong += [f"{name}: {what}" for what in run.watch.wrong]
    print(table(watches))
    for what, times in Counter(wrong).items():
        print(f"wrong, {times} times: {what}")
    print(f"FAIL: {len(wrong)} wrong results" if wrong else "PASS")
    print(json.dumps(results | {"wrong": len(wrong)}))
    return 1 if wrong else 0


def histories_of(
    faults: Sequence[str], temporary: contextlib.ExitStack
) -> dict[str, tuple[list[str], PrivatePostgres | None]]:
    """The kinds of histories that these faults concern, each with its faults and its database,
    which has started.

    SettingError if none can be used."""
    runs: dict[str, tuple[list[str], PrivatePostgres | None]] = {}
    if in_file := [fault for fault in faults if fault != "database"]:
        runs["file"] = in_file, None
    if in_database := [fault for fault in faults if fault != "disk"]:
        try:
            runs["postgres"] = in_database, temporary.enter_context(PrivatePostgres())
        except NotInstalled as error:
            if not runs:
                raise SettingError("--faults", f"database: {error}") from None
            print(f"soak: without PostgreSQL, because {error}", file=sys.stderr)
    return runs


def server_options(more: Sequence[str]) -> list[str]:
    sizes = dict(
        chunk_tokens=CHUNK_TOKENS,
        gpu_kv_chunks=GPU_CHUNKS,
        host_kv_chunks=HOST_CHUNKS,
        disk_kv_chunks=DISK_CHUNKS,
    )
    options = [f"{flag(name)}={value}" for name, value in sizes.items()]
    return [*options, f"--max-model-len={LONGEST}", "--max-num-seqs=8", *more]


if __name__ == "__main__":
    sys.exit(main())
