"""Whether a grammar can be followed, found out in a process that can be ended.

Some grammars of a few hundred characters (intersections of regular expressions) compile for ever, in a call that none
of llguidance's limits ends. So each is compiled in a child, forked for it, that may use MOST_SECONDS of a processor;
what has compiled there compiles beside the executor too.

`python -m pensieve.runtime.grammar_check FD SECONDS BYTES TOKENIZER VOCAB_SIZE [STOP_ID...]` is the process that forks:
it has the tokenizer and a single thread. It ends when the pipe FD does.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import llguidance

from ..scheduler.types import RequestError
from .grammar import STACK_BYTES, Grammars, compile_grammar

MOST_GRAMMAR = 128 * 1024  # characters
MOST_SECONDS = 1.0  # of one processor, to compile: it is done twice, and others wait for it meanwhile
MOST_BYTES = 2 * 2**30  # of memory, beside the tokenizer's
MOST_KNOWN = 64  # grammars whose verdict is remembered
NOT_CHECKED = "the grammar could not be checked: the system has ended that; try again"
FINE = "fine"  # what a child says of a grammar that can be followed


class GrammarChecker:
    """Checks grammars for one tokenizer, one at a time. Any thread. Costs a few ms and a process."""

    def __init__(self, tokenizer: str, vocab_size: int, stop_ids: Sequence[int]):
        """As `Grammars`."""
        self._about = list(map(str, (MOST_SECONDS, MOST_BYTES, tokenizer, vocab_size, *stop_ids)))
        self._start()
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._verdict = functools.lru_cache(MOST_KNOWN)(self._ask)

    def begin_check(self, grammar: str, param: str) -> Future[None]:
        """Ends with RequestError: 400 and why the grammar cannot be followed, 503 if that could not be found out."""
        return self._thread.submit(self._check, grammar, param)

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            end = theirs.fileno()
            words = [sys.executable, "-P", "-m", f"{__package__}.grammar_check", str(end), *self._about]
            self._process = subprocess.Popen(words, pass_fds=[end], stdin=subprocess.DEVNULL)
        if wrong := self._pipe.recv():
            self._process.wait()
            raise ValueError(wrong)

    def _check(self, grammar: str, param: str) -> None:
        if len(grammar) > MOST_GRAMMAR:
            raise RequestError(
                400, f"{param} is too long: {len(grammar)} characters as a grammar, {MOST_GRAMMAR} are allowed", param
            )
        if wrong := self._verdict(grammar):
            raise RequestError(400, f"{param} {wrong}", param)

    def _ask(self, grammar: str) -> str:
        with contextlib.suppress(EOFError, OSError):
            return self._exchange(grammar)
        self._process.wait()  # somebody has killed it
        with contextlib.suppress(EOFError, OSError):
            self._start()
            return self._exchange(grammar)
        raise RequestError(503, NOT_CHECKED)

    def _exchange(self, grammar: str) -> str:
        self._pipe.send(grammar)
        verdict: str | None = self._pipe.recv()
        if verdict is None:
            raise RequestError(503, NOT_CHECKED)  # and not remembered
        return verdict


def open_checker(tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> GrammarChecker | None:
    """As `GrammarChecker`; None if the engine has no tokenizer (""), or one whose tokens are not bytes."""
    if not tokenizer:
        return None
    try:
        return GrammarChecker(tokenizer, vocab_size, stop_ids)
    except ValueError:
        return None  # the log says so already, where the same tokenizer was opened beside the executor


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
            pipe.send(judge(tokenizer, pipe.recv(), float(seconds), int(most_bytes)))


def judge(tokenizer: llguidance.LLTokenizer, grammar: str, seconds: float, most_bytes: int) -> str | None:
    """What is wrong with the grammar, behind its name; "" if nothing is, None if that is not known."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + STACK_BYTES + most_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends it
            threading.stack_size(STACK_BYTES)
            os.write(writing, _compile(tokenizer, grammar).encode()[:1000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8", errors="replace") as said:
        wrong = said.read()
    _, status = os.waitpid(child, 0)
    if (status == 0 and not wrong) or status == signal.SIGKILL:
        return None  # no room for a thread, or the system had none for the process
    if status != 0:
        return f"is too complex: it takes more than {seconds:g} s, or too much memory, to compile"
    return "" if wrong == FINE else f"cannot be followed: {wrong}"


def _compile(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    """FINE, or what is wrong, by a thread of its own: llguidance needs a large stack (`Grammars`)."""
    with ThreadPoolExecutor(1) as deep:
        return deep.submit(_compile_here, tokenizer, grammar).result()


def _compile_here(tokenizer: llguidance.LLTokenizer, grammar: str) -> str:
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    if not failed:
        matcher = compile_grammar(tokenizer, grammar)
        failed, messages = matcher.is_error(), [matcher.get_error()]
    return messages[0] if failed else FINE


if __name__ == "__main__":
    main(sys.argv[1:])
