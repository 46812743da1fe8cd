"""Shared by all commands: one-line answers to wrong options and to Ctrl-C. Imports little."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from ... import __version__

CLOSE = 0.7  # how much a suggestion resembles the word, from 0 to 1
VERSION = f"pensieve {__version__}"
INTERRUPTED = 130  # the shell's status for a command that Ctrl-C ended


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line each. For an unknown option it suggests the closest one.

    aliases     {another name of an option: our name}
    elsewhere   {an option of another program without an equal here: the suggestion}
    """

    def __init__(
        self,
        *,
        aliases: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        **settings: Any,
    ):
        # an abbreviation would change its meaning with a new option
        super().__init__(allow_abbrev=False, **settings)
        self._aliases = aliases or {}
        self._elsewhere = elsewhere or {}
        self.add_argument(
            "--version", action="version", version=VERSION, help="show the version and exit"
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        for word in self.own_words(words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in name and name not in self._option_names():
                # before a missing option, which may be the misspelt one
                self.error(self._unknown(name))
        parsed, rest = self.parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest[0]))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(self.own_words(words), namespace)

    def own_words(self, words: Sequence[str]) -> list[str]:
        """Replaces other names of options by ours."""
        parts = [word.partition("=") for word in words]
        return [self._aliases.get(name, name) + equals + value for name, equals, value in parts]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def _option_names(self) -> list[str]:
        return ["--", *(name for action in self._actions for name in action.option_strings)]

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{word!r} is one word too many (--help shows what there is)"
        if hint := self._elsewhere.get(word.replace("_", "-")):
            return f"there is no option {word}: {hint}"
        near = did_you_mean(word, [*self._option_names(), *self._aliases])
        return f"there is no option {word}{near or ' (--help shows what there is)'}"


def did_you_mean(word: str, words: Sequence[str]) -> str:
    """The end of a message about an unknown word; "" if no known word is close to it."""
    near = difflib.get_close_matches(word, words, 1, CLOSE)
    return f"; did you mean {near[0]}?" if near else ""


@contextmanager
def ending_at_once(name: str) -> Iterator[None]:
    """While this is open, Ctrl-C ends the process with one line and without cleanup.

    For imports, which may swallow or replace an exception, and for work that needs no cleanup: the
    system frees all that the process holds.
    """

    def end(*_: object) -> None:
        os.write(2, f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    with _interrupts_go_to(end):
        yield


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """While this is open, Ctrl-C raises KeyboardInterrupt: for work with its own cleanup."""
    with _interrupts_go_to(signal.default_int_handler):
        yield


@contextmanager
def _interrupts_go_to(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Leaves interrupts ignored in a process that was started with them ignored, in the background
    of a script."""
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_interruptible(name: str, work: Callable[[], int]) -> int:
    """Returns work(), or prints one line and returns INTERRUPTED after a KeyboardInterrupt."""
    try:
        with interrupts_raise():
            return work()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
