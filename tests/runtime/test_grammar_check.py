"""Which grammars are refused, and what it takes: never more than a second, and never a process of the server's."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from pensieve.runtime import grammar_check
from pensieve.runtime.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from pensieve.runtime.grammar_check import GrammarChecker, open_checker
from pensieve.runtime.processes import children, running
from pensieve.scheduler.types import RequestError

from .fake_loop import EOS, eventually, save_tokenizer

FOR_EVER = lark_grammar("start: A\nA: /(.*a.{30})/ & /(.*b.{29})/ & ~/(.*c.{28}.*)/")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> GrammarChecker:
    return GrammarChecker(save_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))), 260, (EOS, 0))


def check(checker: GrammarChecker, grammar: str, param: str = "structured_outputs") -> None:
    checker.begin_check(grammar, param).result(60)


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"type": "object"}),
        regex_grammar("[ab]{2}c*"),
        choice_grammar(["yes", 'n"o', "\x7f"]),
        lark_grammar('start: "a" start "b" | ""'),
    ],
)
def test_what_can_be_followed(checker: GrammarChecker, grammar: str) -> None:
    check(checker, grammar)


@pytest.mark.parametrize(
    "grammar", [json_grammar({"type": "frob"}), regex_grammar("("), lark_grammar("start: nothing"), "nonsense"]
)
def test_what_does_not_compile_is_refused_by_name(checker: GrammarChecker, grammar: str) -> None:
    with pytest.raises(RequestError, match="response_format cannot be followed") as caught:
        check(checker, grammar, "response_format")
    assert (caught.value.status, caught.value.param) == (400, "response_format")


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
        json_grammar({"allOf": [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(1, 40)]}),
        json_grammar({"type": "integer", "multipleOf": 999983}),
    ],
)
def test_what_would_compile_for_ever_is_given_up(checker: GrammarChecker, grammar: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="response_format is too complex: it takes more than 1 s"):
        check(checker, grammar, "response_format")
    assert time.monotonic() - began < 30
    check(checker, regex_grammar("a"))


def test_a_process_that_has_been_killed_is_started_again(checker: GrammarChecker) -> None:
    os.kill(checker._process.pid, signal.SIGKILL)
    check(checker, regex_grammar("killed"))
    check(checker, regex_grammar("again"))


def test_an_accident_is_not_the_grammar_s_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody kills what compiles it, as a system without memory does: it may be tried again."""
    monkeypatch.setattr(grammar_check, "MOST_SECONDS", 600.0)
    checker = GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,))
    for _ in range(2):
        checked = checker.begin_check(FOR_EVER, "structured_outputs")
        eventually(lambda: children(checker._process.pid))
        os.kill(*children(checker._process.pid), signal.SIGKILL)
        with pytest.raises(RequestError, match="could not be checked") as caught:
            checked.result(60)
        assert caught.value.status == 503


def test_nor_is_what_does_not_start_again(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise BlockingIOError("no more processes")

    os.kill(checker._process.pid, signal.SIGKILL)
    with monkeypatch.context() as patch, pytest.raises(RequestError, match="could not be checked") as caught:
        patch.setattr(checker, "_start", start)
        check(checker, regex_grammar("start"))
    assert caught.value.status == 503
    check(checker, regex_grammar("start"))


def test_what_lies_in_the_current_directory_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llguidance.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    check(GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,)), regex_grammar("a"))


def test_many_at_once(checker: GrammarChecker) -> None:
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: check(checker, regex_grammar(f"[0-9]{{{number % 9 + 1}}}")), range(60)))


def test_a_tokenizer_without_bytes_has_no_grammars(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    assert open_checker(str(tmp_path), 2, (1,)) is None
    assert open_checker("", 2, (1,)) is None


def test_its_process_ends_with_ours(tmp_path: Path) -> None:
    checker = GrammarChecker(save_tokenizer(tmp_path), 260, (EOS,))
    helper = checker._process.pid
    assert helper in children(os.getpid())
    checker._pipe.close()
    eventually(lambda: not running(helper))
