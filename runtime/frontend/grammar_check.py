"""Checks in a separate process whether a grammar can be followed, because that process can be
killed.

Some grammars of a few hundred characters (intersections of regular expressions) compile for ever,
in a call that no limit of llguidance ends. So each is compiled in a forked child that may use
MOST_SECONDS of a processor. A grammar that compiles there also compiles next to the executor.

`python -m pensieve.runtime.frontend.grammar_check FD SECONDS BYTES TOKENIZER VOCAB_SIZE
[STOP_ID...]` is a process that forks: it has the tokenizer and a single thread. It ends when the
pipe FD is closed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import llguidance

from ...scheduler.types import ErrorKind, RequestError
from ..step.grammar import STACK_BYTES, Grammars, compile_grammar

MOST_GRAMMAR = 128 * 1024  # characters
CHECKERS = 2  # processes
# of one processor, to compile a grammar: it is compiled twice, and others wait meanwhile
MOST_SECONDS = 1.0
MOST_BYTES = 2 * 2**30  # of memory, besides the tokenizer's
MOST_REMEMBERED = 256  # grammars whose result is remembered
NOT_CHECKED = "the grammar could not be checked: the system has ended that; try again"
MOST_REMARKS = 16
UNSATISFIABLE = "is a JSON schema that nothing satisfies"
TOO_COMPLEX = "is too complex"


class Verdict(NamedTuple):
    """What is known of a grammar.

    fault    why it cannot be followed, behind its name; "" if it can
    remarks  what of its JSON schemas is not enforced, as `uniqueItems` or `format.path`
    """

    fault: str
    remarks: tuple[str, ...] = ()


class Check(NamedTuple):
    """A grammar to be checked; `param`: the field of the body to name in an error."""

    grammar: str
    param: str
    outcome: Future[tuple[str, ...]]


class GrammarChecker:
    """Checks grammars for one tokenizer. May be called by any thread. A check takes a few ms; there
    are CHECKERS processes.

    Owners take turns: a free process checks one grammar of the owner that has waited longest. An
    owner uses at most one process, even if the other is free: a check cannot be interrupted, so the
    next owner would have to wait for it.
    """

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Sequence[int]):
        """See `Grammars`."""
        about = list(map(str, (MOST_SECONDS, MOST_BYTES, tokenizer, vocab_size, *stop_ids)))
        self._threads = ThreadPoolExecutor(CHECKERS, "grammars")
        self._free = deque(self._threads.map(CheckProcess, [about] * CHECKERS))
        self._verdict = functools.lru_cache(MOST_REMEMBERED)(self._ask)
        self._lock = threading.Lock()  # for the two below: each owner's checks that have not begun
        # of owners without a process, in the order of their turns
        self._waiting: dict[str, deque[Check]] = {}
        self._served: dict[str, deque[Check]] = {}  # of owners with a process

    def begin_check(self, grammar: str, param: str, owner: str) -> Future[tuple[str, ...]]:
        """Begins a check. The future has the remarks of the verdict. It raises RequestError:
        INVALID with the reason if the grammar cannot be followed, UNAVAILABLE if the check failed.

        It may be cancelled until it has begun.
        """
        check = Check(grammar, param, Future())
        with self._lock:
            checks = self._served.get(owner)
            if checks is None:
                checks = self._waiting.setdefault(owner, deque())
            checks.append(check)
        self._begin_turns()
        return check.outcome

    def _begin_turns(self) -> None:
        while (turn := self._next_turn()) is not None:
            owner, check = turn
            checked = self._threads.submit(self._take_turn, owner, check)
            checked.add_done_callback(functools.partial(_pass_on, check.outcome))

    def _next_turn(self) -> tuple[str, Check] | None:
        """Returns the next check and its owner, or None if no process is free or no owner may use
        one. Drops cancelled checks."""
        with self._lock:
            while self._waiting and len(self._served) < CHECKERS:
                owner = next(iter(self._waiting))
                checks = self._waiting.pop(owner)
                while checks:
                    check = checks.popleft()
                    if check.outcome.set_running_or_notify_cancel():
                        self._served[owner] = checks
                        return owner, check
        return None

    def _take_turn(self, owner: str, check: Check) -> tuple[str, ...]:
        try:
            return self._check(check.grammar, check.param)
        finally:
            with self._lock:
                if checks := self._served.pop(owner):
                    self._waiting[owner] = checks
            self._begin_turns()

    def _check(self, grammar: str, param: str) -> tuple[str, ...]:
        if len(grammar) > MOST_GRAMMAR:
            raise RequestError(
                ErrorKind.INVALID,
                f"{param} is too long: {len(grammar)} characters as a grammar, {MOST_GRAMMAR} are "
                "allowed",
                param,
            )
        verdict = self._verdict(grammar)
        if verdict.fault:
            raise RequestError(ErrorKind.INVALID, f"{param} {verdict.fault}", param)
        return verdict.remarks

    def _ask(self, grammar: str) -> Verdict:
        process = self._free.popleft()  # there are as many processes as threads
        try:
            return process.verdict(grammar)
        finally:
            self._free.append(process)


def _pass_on(outcome: Future[tuple[str, ...]], checked: Future[tuple[str, ...]]) -> None:
    if (error := checked.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(checked.result())


class CheckProcess:
    """A process that checks one grammar at a time. It is started again after it was killed.
    ValueError as `Grammars`."""

    def __init__(self, about: Sequence[str]):
        self._about = about
        self._start()

    def verdict(self, grammar: str) -> Verdict:
        """Returns `judge`'s result. Raises RequestError (UNAVAILABLE) if there is none."""
        with contextlib.suppress(EOFError, OSError):
            return self._exchange(grammar)
        self._process.wait()  # it was killed
        with contextlib.suppress(EOFError, OSError):
            self._start()
            return self._exchange(grammar)
        raise RequestError(ErrorKind.UNAVAILABLE, NOT_CHECKED)

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            end = theirs.fileno()
            words = [
                sys.executable,
                "-P",
                "-m",
                f"{__package__}.grammar_check",
                str(end),
                *self._about,
            ]
            self._process = subprocess.Popen(words, pass_fds=[end], stdin=subprocess.DEVNULL)
        if wrong := self._pipe.recv():
            self._process.wait()
            raise ValueError(wrong)

    def _exchange(self, grammar: str) -> Verdict:
        self._pipe.send(grammar)
        verdict: tuple[str, tuple[str, ...]] | None = self._pipe.recv()
        if verdict is None:
            raise RequestError(
                ErrorKind.UNAVAILABLE, NOT_CHECKED
            )  # an exception, so it is not remembered
        return Verdict(*verdict)


def open_checker(tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> GrammarChecker | None:
    """Makes a `GrammarChecker`. Returns None if the engine has no tokenizer (""), or one whose
    tokens are not bytes."""
    if not tokenizer:
        return None
    try:
        return GrammarChecker(tokenizer, vocab_size, stop_ids)
    except ValueError:
        return None  # already logged, where the same tokenizer was opened next to the executor


def main(words: Sequence[str]) -> None:
    number, seconds, most_bytes, path, vocab_size, *stop_ids = words
    pipe = Connection(int(number))
    os.set_inheritable(pipe.fileno(), False)
    try:
        tokenizer = Grammars.open_tokenizer(path, int(vocab_size), list(map(int, stop_ids)))
    except ValueError as error:
        pipe.send(str(error))
        return
    pipe.send("")
    with contextlib.suppress(EOFError, OSError):
        while True:
            verdict = judge(tokenizer, pipe.recv(), float(seconds), int(most_bytes))
            # a plain tuple: here the class is one of __main__
            pipe.send(None if verdict is None else tuple(verdict))


def judge(
    tokenizer: llguidance.LLTokenizer, grammar: str, seconds: float, most_bytes: int
) -> Verdict | None:
    """Returns the verdict, None if it is not known."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + STACK_BYTES + most_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the child
            threading.stack_size(STACK_BYTES)
            os.write(writing, json.dumps(_compile(tokenizer, grammar)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if (status == 0 and not answer) or status == signal.SIGKILL:
        return None  # no memory for a thread or a process
    if status != 0:
        return Verdict(
            f"{TOO_COMPLEX}: it takes more than {seconds:g} s, or too much memory, to compile"
        )
    fault, remarks = json.loads(answer)
    return Verdict(fault, tuple(remarks))


def _compile(tokenizer: llguidance.LLTokenizer, grammar: str) -> Verdict:
    """Compiles in a new thread, because llguidance needs a large stack (`Grammars`)."""
    with ThreadPoolExecutor(1) as deep:
        return deep.submit(_compile_here, tokenizer, grammar).result()


def _compile_here(tokenizer: llguidance.LLTokenizer, grammar: str) -> Verdict:
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if not failed:
        matcher = compile_grammar(tokenizer, grammar)
        if not matcher.is_error():
            remarks = dict.fromkeys(name for text in messages for name in _not_enforced(text))
            return Verdict("", tuple(remarks)[:MOST_REMARKS])
        messages = [matcher.get_error()]
    # of `json_grammar` and `ToolsForm`: clients' own grammars may contain schemas too
    of_schema = grammar.startswith("start: calls") or re.search(r'"json_schema": *\{', grammar)
    fault = _schema_fault(messages[0]) if of_schema else f"cannot be followed: {messages[0]}"
    return Verdict(fault[:1000])


def _not_enforced(warning: str) -> list[str]:
    """The names of what a warning of llguidance is about."""
    warning = re.sub(r" \(\d+ times\)$", "", warning)
    if warning.startswith("Unknown format: "):
        return ["format." + warning.removeprefix("Unknown format: ")]
    if warning.startswith("Unimplemented keys: "):
        return re.findall(r'"(.*?)"', warning)
    return ["oneOf"] if warning.startswith("oneOf") else ["minProperties"]


def _schema_fault(message: str) -> str:
    """Says llguidance's message about a JSON schema in words that its writer can act on."""
    if "Unsatisfiable schema" in message:
        required = re.search(r"required property '(.*?)' is", message)
        return UNSATISFIABLE + (f": see its required property {required[1]!r}" if required else "")
    if re.match("Resource|Pointer|Anchor|Reference|Definition", message):
        return "has a $ref that leads nowhere: it must point into the schema, as #/$defs/name"
    if message.startswith("circular references"):
        return "has a circular $ref with other keywords beside it: leave the $ref alone there"
    if "regex parse error" in message:
        return "has a pattern that cannot be enforced: take out look-around and back references"
    return "has a JSON schema that cannot be enforced: look for keywords with unusual values"


if __name__ == "__main__":
    main(sys.argv[1:])
