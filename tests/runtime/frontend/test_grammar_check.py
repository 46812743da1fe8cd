"""Which grammars are refused, and the cost of a check: at most a second, and no process of the
server's."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from pensieve.runtime.frontend import grammar_check
from pensieve.runtime.frontend.grammar_check import (
    CHECKERS,
    CheckProcess,
    GrammarChecker,
    Verdict,
    open_checker,
)
from pensieve.runtime.step.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from pensieve.runtime.system import children, running
from pensieve.scheduler.types import ErrorKind, RequestError

from ..fake_loop import EOS, eventually, save_tokenizer

FOR_EVER = lark_grammar("start: A\nA: /(.*a.{30})/ & /(.*b.{29})/ & ~/(.*c.{28}.*)/")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> GrammarChecker:
    return GrammarChecker(save_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))), 260, (EOS, 0))


def check(
    checker: GrammarChecker, grammar: str, param: str = "structured_outputs"
) -> tuple[str, ...]:
    """The remarks of the verdict."""
    return checker.begin_check(grammar, param, "owner").result(300)


def processes(checker: GrammarChecker) -> list[int]:
    """The checking processes; `checker` must be idle."""
    return [process._process.pid for process in checker._free]


def kill(checker: GrammarChecker) -> None:
    for process in processes(checker):
        os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "object"}),
        regex_grammar("[ab]{2}c*"),
        choice_grammar(["yes", 'n"o', "\x7f"]),
        lark_grammar('start: "a" start "b" | ""'),
    ],
)
def test_these_grammars_can_be_followed(checker: GrammarChecker, grammar: str) -> None:
    check(checker, grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        regex_grammar("("),
        lark_grammar("start: nothing"),
        "nonsense",
    ],
)
def test_what_does_not_compile_is_refused_by_name(checker: GrammarChecker, grammar: str) -> None:
    with pytest.raises(RequestError, match="response_format cannot be followed") as caught:
        check(checker, grammar, "response_format")
    assert (caught.value.kind, caught.value.subject) == (ErrorKind.INVALID, "response_format")


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "frob"}, "has a JSON schema that cannot be enforced"),
        ({"$ref": "https://example.com/a.json"}, "has a $ref that leads nowhere"),
        ({"$ref": "#/$defs/none"}, "has a $ref that leads nowhere"),
        (
            {"$defs": {"a": {"minLength": 1, "$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "has a circular $ref with other keywords",
        ),
        ({"type": "string", "pattern": "^(?!a)"}, "has a pattern that cannot be enforced"),
        ({"type": "string", "pattern": "("}, "has a pattern that cannot be enforced"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "that nothing satisfies"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "that nothing satisfies: see its required property 'a'",
        ),
    ],
)
def test_a_schema_is_refused_in_words_to_act_on(
    checker: GrammarChecker, schema: dict[str, Any], fault: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check(checker, json_grammar(schema), "response_format")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "remarks"),
    [
        ({"type": "string", "format": "date-time"}, ()),
        ({"type": "integer", "maximum": 2**64}, ()),
        ({"type": "string", "format": "path"}, ("format.path",)),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "object", "if": {}, "then": {}, "not": {}}, ("if", "not", "then")),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ("oneOf",)),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
        ({"prefixItems": [{"uniqueItems": True}] * 3}, ("uniqueItems",)),
        ({"prefixItems": [{"type": "string", "format": "a b"}] * 3}, ("format.a b",)),
    ],
)
def test_what_of_a_schema_is_not_enforced_is_named(
    checker: GrammarChecker, schema: dict[str, Any], remarks: tuple[str, ...]
) -> None:
    assert sorted(check(checker, json_grammar(schema))) == sorted(remarks)


def test_a_long_chain_of_rules_does_not_end_the_process(checker: GrammarChecker) -> None:
    rules = [f'r{at}: "a" r{at + 1}' for at in range(2900)]
    check(checker, lark_grammar("\n".join(["start: r0", *rules, 'r2900: "x"'])))


def test_what_is_long_is_refused(checker: GrammarChecker) -> None:
    with pytest.raises(RequestError, match="structured_outputs is too long"):
        check(checker, choice_grammar([str(number) for number in range(20_000)]))


@pytest.mark.parametrize(
    "grammar",
    [
        FOR_EVER,
        json_grammar(
            {"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 40)]}
        ),
        json_grammar({"type": "integer", "multipleOf": 999983}),
    ],
)
def test_what_would_compile_for_ever_is_given_up(checker: GrammarChecker, grammar: str) -> None:
    with pytest.raises(
        RequestError, match="response_format is too complex: it takes more than 1 s"
    ):
        check(checker, grammar, "response_format")
    check(checker, regex_grammar("a"))


def test_a_process_that_has_been_killed_is_started_again(checker: GrammarChecker) -> None:
    kill(checker)
    for at in range(2 * CHECKERS):
        check(checker, regex_grammar(f"killed{at}"))


def test_an_accident_is_not_the_grammar_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiling process is killed, as by a system without free memory: the check may be tried
    again."""
    monkeypatch.setattr(grammar_check, "MOST_SECONDS", 600.0)
    checker = GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,))
    helpers = processes(checker)
    for _ in range(2):
        checked = checker.begin_check(FOR_EVER, "structured_outputs", "owner")
        eventually(lambda: any(map(children, helpers)))
        os.kill(*(child for helper in helpers for child in children(helper)), signal.SIGKILL)
        with pytest.raises(RequestError, match="could not be checked") as caught:
            checked.result(60)
        assert caught.value.kind == ErrorKind.UNAVAILABLE


def test_a_checker_that_cannot_start_again_is_not_the_grammar_s_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: CheckProcess) -> None:
        raise BlockingIOError("no more processes")

    kill(checker)
    with (
        monkeypatch.context() as patch,
        pytest.raises(RequestError, match="could not be checked") as caught,
    ):
        patch.setattr(CheckProcess, "_start", start)
        check(checker, regex_grammar("start"))
    assert caught.value.kind == ErrorKind.UNAVAILABLE
    check(checker, regex_grammar("start"))


def test_what_lies_in_the_current_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llguidance.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    check(GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,)), regex_grammar("a"))


def test_many_at_once(checker: GrammarChecker) -> None:
    with ThreadPoolExecutor(8) as clients:
        list(
            clients.map(
                lambda number: check(checker, regex_grammar(f"[0-9]{{{number % 9 + 1}}}")),
                range(60),
            )
        )


def test_a_tokenizer_without_bytes_has_no_grammars(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert open_checker(str(tmp_path), 2, (1,)) is None
    assert open_checker("", 2, (1,)) is None


def test_its_process_ends_with_ours(tmp_path: Path) -> None:
    checker = GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,))
    helpers = processes(checker)
    assert len(helpers) == CHECKERS and set(helpers) <= set(children(os.getpid()))
    for process in checker._free:
        process._pipe.close()
    eventually(lambda: not any(map(running, helpers)))


class Work:
    """Replaces the processes: a check runs until it is ended. Grammars begin with their owners'
    names."""

    def __init__(self, checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch):
        self._checker = checker
        self._outcomes: dict[str, Future[None]] = {}
        self._ends: dict[str, threading.Event] = {}
        self._begun: list[str] = []
        self._expected: list[str] = []
        monkeypatch.setattr(CheckProcess, "verdict", lambda _, grammar: self._verdict(grammar))

    def _verdict(self, grammar: str) -> Verdict:
        self._begun.append(grammar)
        assert self._ends[grammar].wait(60)
        return Verdict("")

    def ask(self, *grammars: str) -> None:
        for grammar in grammars:
            self._ends[grammar] = threading.Event()
            self._outcomes[grammar] = self._checker.begin_check(
                grammar, "structured_outputs", grammar[0]
            )

    def cancel(self, *grammars: str) -> None:
        assert all(self._outcomes[grammar].cancel() for grammar in grammars)

    def end(self, grammar: str) -> None:
        self._ends[grammar].set()
        self._outcomes[grammar].result(60)

    def expect(self, grammar: str) -> None:
        """Checks that it is the only grammar whose check has begun since the last call."""
        self._expected.append(grammar)
        eventually(lambda: len(self._begun) >= len(self._expected))
        assert self._begun == self._expected


def test_owners_take_turns(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(checker, monkeypatch)
    work.ask(*(f"a{at}" for at in range(12)))
    work.expect("a0")
    for grammar in ("b0", "b1", "c0"):
        work.ask(grammar)
        work.expect(grammar)
        work.end(grammar)
    work.ask("c1", "c2")
    work.expect("c1")
    work.ask("b2", "d0")
    for ended, begun in (("a0", "b2"), ("c1", "d0"), ("b2", "a1"), ("d0", "c2")):
        work.end(ended)
        work.expect(begun)
    work.end("c2")
    work.cancel(*(f"a{at}" for at in range(2, 11)))
    work.end("a1")
    work.expect("a11")
    work.end("a11")
