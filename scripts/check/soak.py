"""soak: a server with three small tiers, random conversations, and random kills, for any length of time.

    python -m pensieve.scripts.check.soak --minutes 30

Clients hold random conversations with `pensieve serve` (whole histories, server histories, branches, hang-ups,
deletions). Meanwhile it is killed (SIGKILL: all of its processes, or only the first) or ended (SIGTERM) at random
times, and started again on the same directory. Every token is compared with plain transformers' greedy choice for the
same context. Memory, file descriptors, slots, processes and bytes of files must not leak. Ends with one JSON line; exit
status 1 after a fault.

Needs transformers (the extra `test`).
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from ...builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ...runtime.system import descendants, running
from ..chat import Server, ServerError
from ..command import flag

START_SECONDS = 120.0
ANSWER_SECONDS = 120.0


class Wrong(Exception):
    """A result that must never occur: the soak looks for it."""


class Life:
    """One process of `pensieve serve`, from its start to its end."""

    def __init__(self, state: Path, engine: str, options: Sequence[str]):
        command = [sys.executable, "-m", "pensieve.scripts.pensieve", "serve", "--engine", engine, "--port", "0"]
        self.log = state / "server.log"
        self._file = self.log.open("a")
        offset = self.log.stat().st_size
        self.process = subprocess.Popen([*command, "--state-dir", str(state), *options], stderr=self._file)
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with self.log.open() as lines:
                lines.seek(offset)
                found = re.search(r"serving (\S+) on (http://\S+)", lines.read())
            if found:
                self.model, self.server = found[1], Server(found[2], None, ANSWER_SECONDS)
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
            with contextlib.suppress(ProcessLookupError):  # it may have ended with the process just killed
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
        self._file.close()
        until = time.monotonic() + 30
        while left := [process for process in self.processes[1:] if running(process)]:
            if time.monotonic() > until:
                raise Wrong(f"processes {left} outlive their server")
            time.sleep(0.1)
        return status


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
SETTLE_SECONDS = 30.0  # more, on a busy machine, until all slots are free
WARM_UP_SECONDS = 45.0  # of a life, before memory counts
MORE_MEMORY = 48 * 2**20  # bytes that a process may grow by afterwards
MORE_FILES = 16
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
        """Raises Wrong unless every token from `start` on is the greedy choice after the tokens before it."""
        with self._lock:
            logits = self._model(torch.tensor([tokens[:-1]])).logits[0, start - 1 :]
        gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0]
        wrong = (gaps > UNDECIDED).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise Wrong(f"token {at} of a reply behind {start} tokens is off by {float(gaps[at]):.3g} in logits")


@dataclass
class Conversation:
    """`known`: the server's log equals the client's; unsure after a turn whose end did not arrive."""

    name: str
    log: list[int] = field(default_factory=list)
    known: bool = False


class Client:
    """One thread: a turn of one of its conversations after the other, while `running` is set."""

    def __init__(self, soak: Soak, number: int):
        self._soak, self._number = soak, number
        self._random = random.Random(f"{soak.seed}/{number}")
        self._begun = 0
        self._conversations = [self._new() for _ in range(CONVERSATIONS_EACH)]
        self.thread = threading.Thread(target=self._talk, daemon=True)

    def _new(self) -> Conversation:
        self._begun += 1
        return Conversation(f"client {self._number} talk {self._begun}")

    def _talk(self) -> None:
        soak = self._soak
        try:
            while not soak.over.is_set():
                if not soak.running.wait(0.1):
                    continue
                with soak.busy():
                    self._step(self._random.randrange(CONVERSATIONS_EACH))
        except BaseException as error:
            soak.fail(error)

    def _step(self, place: int) -> None:
        try:
            self._turn_or_end(place)
        except ServerError as error:
            self._soak.count(f"status {error.status}" if error.status else "cut off")
            time.sleep(0.2)  # the server is down, or about to end

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
        server_history = log is conversation.log and conversation.known and chance.random() < 0.5
        new = [chance.randrange(4, self._soak.reference.vocabulary) for _ in range(chance.choice((1, 5, 20, 60)))]
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
        if chance.random() < 0.05:
            conversation.known = False
            self._hang_up(body)
            return
        known, conversation.known = conversation.known, False
        try:
            answer = self._soak.life.server.ask("POST", "/v1/completions", body)
        except ServerError as error:
            conversation.known = known and error.status == 503  # the turn is not committed; otherwise that is unknown
            if error.status not in (0, 500, 503):
                raise Wrong(f"status {error.status}: {error}") from error
            raise
        tokens = [*log, *new, *answer["choices"][0]["token_ids"]]
        self._soak.reference.check(tokens, len(log) + len(new))
        if answer["usage"]["prompt_tokens"] != len(log) + len(new):
            raise Wrong(f"{conversation.name}: a prompt of {len(log) + len(new)} tokens, said to be {answer['usage']}")
        branched = len(log) < len(conversation.log)
        conversation.log, conversation.known = tokens, True
        self._soak.took(answer["usage"]["prompt_tokens_details"], body["max_tokens"], branched)

    def _hang_up(self, body: dict[str, Any]) -> None:
        """Hangs up in the middle of a streamed reply."""
        reply = self._soak.life.server.events("/v1/completions", body | {"stream": True, "max_tokens": 64})
        with contextlib.closing(reply):
            next(reply, None)
        self._soak.count("hung up")


class Soak:
    def __init__(self, reference: Reference, seed: int):
        self.reference, self.seed = reference, seed
        self.running, self.over = threading.Event(), threading.Event()
        self.counts: Counter[str] = Counter()
        self.life: Life
        self._lock = threading.Lock()
        self._open = 0
        self._fault: BaseException | None = None
        self._random = random.Random(seed)

    # -- for clients

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def took(self, sources: dict[str, int], generated: int, branched: bool) -> None:
        with self._lock:
            self.counts.update({source: sources[source] for source in ("gpu", "host", "disk", "recomputed", "new")})
            self.counts.update(turns=1, generated=generated, branched=branched)

    def fail(self, error: BaseException) -> None:
        self._fault = self._fault or error
        self.over.set()

    # -- the whole

    def run(self, state: Path, seconds: float, lives: int, engine: str, options: Sequence[str]) -> dict[str, Any]:
        """Runs `lives` lives, which serve for `seconds` together. Raises Wrong, or the error of a client."""
        clients = [Client(self, number) for number in range(CLIENTS)]
        history, growth = [], [0]
        for client in clients:
            client.thread.start()
        try:
            shares = [self._random.uniform(0.3, 1.7) for _ in range(lives)]
            for number, share in enumerate(shares, start=1):
                self.life = Life(state, engine, options)
                growth.append(self._live(seconds * share / sum(shares)))
                self._end(calmly=number == lives or number % 3 == 0)
                history.append(sum(file.stat().st_size for file in state.glob("history.sqlite*")))
                self._check_files(state)
        finally:
            self.over.set()
            for client in clients:
                client.thread.join(150)
            with contextlib.suppress(AttributeError):  # no life has begun
                self.life.process.kill()
                self.life.process.wait()
        self._raise_fault()
        if history[-1] - history[len(history) // 2] > MORE_HISTORY:
            raise Wrong(f"the history grows without end: {history} bytes")
        return {"memory_growth": max(growth), "history_bytes": history[-1], **self.counts}

    def _live(self, seconds: float) -> int:
        """Returns the bytes by which its processes grew after they had warmed up."""
        self.running.set()
        began, before, files = time.monotonic(), 0, self.life.files()
        while (now := time.monotonic()) < began + seconds and not self.over.is_set():
            if not before and now > began + WARM_UP_SECONDS:
                before = self.life.memory()
            self.over.wait(min(1.0, began + seconds - now))
        self._raise_fault()
        if self.life.process.poll() is not None:
            raise Wrong(f"the server has ended by itself; see {self.life.log}")
        growth = self.life.memory() - before if before else 0
        if growth > MORE_MEMORY or self.life.files() > files + 2 * CLIENTS + MORE_FILES:
            raise Wrong(f"grown by {growth} bytes, {files} open files became {self.life.files()}")
        return growth

    def _end(self, calmly: bool) -> None:
        if not calmly:
            self.counts["kills"] += 1
            self.life.kill(everything=self._random.random() < 0.5)
            self.running.clear()
            return
        self.running.clear()
        until = time.monotonic() + 150
        while self._open and time.monotonic() < until:
            time.sleep(0.05)
        self._raise_fault()
        time.sleep(QUIET_SECONDS)
        found, until = self.life.server.metrics(), time.monotonic() + SETTLE_SECONDS
        while (taken := _taken(found)) and time.monotonic() < until:
            time.sleep(0.1)
            found = self.life.server.metrics()
        if taken:
            raise Wrong(f"slots are taken without a user: {taken}")
        self.counts["rejected records"] += int(found['pensieve:kv_disk_faults_total{kind="rejected"}'])
        self.counts["ends"] += 1
        self.life.end()

    def _check_files(self, state: Path) -> None:
        sizes = {file: file.stat().st_size for file in (state / "kv").rglob("*.kv")}
        self.counts["disk_bytes"] = sum(sizes.values())
        if len({file.parent for file in sizes}) < len(sizes):
            raise Wrong(f"the disk tier has grown: {sizes} bytes")  # one file a rank is enough
        if "Traceback" in self.life.log.read_text():
            raise Wrong(f"an exception in {self.life.log}")

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault


def _taken(found: dict[str, float]) -> dict[str, float]:
    """Slots by state, of a tier in which any is in use or missing."""
    for tier, slots in (("gpu", GPU_CHUNKS), ("host", HOST_CHUNKS), ("disk", DISK_CHUNKS)):
        states = {name: value for name, value in found.items() if "kv_slots{state=" in name and tier in name}
        if sum(states.values()) != slots or any(value for name, value in states.items() if "in_use" in name):
            return states
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of serving (default %(default)s)")
    parser.add_argument("--lives", type=int, default=20, help="starts in that time (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--engine", default="demo", help="an engine directory in float32 (default %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, help="what it was built from")
    parser.add_argument("--state-dir", type=Path, help="kept afterwards (default: a temporary one)")
    parser.add_argument("options", nargs="*", help="more of `pensieve serve`, behind --")
    args = parser.parse_args(argv)
    sizes = dict(
        chunk_tokens=CHUNK_TOKENS, gpu_kv_chunks=GPU_CHUNKS, host_kv_chunks=HOST_CHUNKS, disk_kv_chunks=DISK_CHUNKS
    )
    options = [f"{flag(name)}={value}" for name, value in sizes.items()]
    options += [f"--max-model-len={LONGEST}", "--max-num-seqs=8", *args.options]
    torch.set_num_threads(1)
    soak = Soak(Reference(args.checkpoint), args.seed)
    with contextlib.ExitStack() as temporary:
        state = args.state_dir or Path(temporary.enter_context(tempfile.TemporaryDirectory(prefix="soak")))
        state.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        result: dict[str, Any] = {"bench": "soak", "seed": args.seed, "wrong": None}
        try:
            result |= soak.run(state, args.minutes * 60, args.lives, args.engine, options)
        except Wrong as error:
            result |= {"wrong": str(error), **soak.counts}
            print((state / "server.log").read_text()[-4000:], file=sys.stderr)
        print(json.dumps(result | {"minutes": round((time.monotonic() - began) / 60, 2)}))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
