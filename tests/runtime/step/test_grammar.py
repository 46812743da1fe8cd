"""The tokens that grammars allow, refusals of grammars, and the matchers of rows next to the
executor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from pensieve.runtime.step import grammar as module
from pensieve.runtime.step.constraints import GrammarMatchers
from pensieve.runtime.step.grammar import (
    Grammars,
    choice_grammar,
    json_grammar,
    lark_grammar,
    open_grammars,
    regex_grammar,
)
from pensieve.scheduler.types import RequestId, RowId, Sampling

from ..fake_engine import join, plan, row, span
from ..fake_loop import EOS, FIRST_BYTE, byte_tokens, save_tokenizer

VOCAB = 260
ONE = ord("1") + FIRST_BYTE


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(save_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))), VOCAB, (EOS, 0))


def allowed(mask_row: np.ndarray) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(mask_row.view(np.uint8), bitorder="little")[:VOCAB]
    ).tolist()


def follows(grammars: Grammars, grammar: str, text: str) -> bool:
    """Returns whether the text is a complete reply."""
    matcher = grammars.matcher(grammar)
    matcher.consume_tokens(byte_tokens(text))
    return matcher.is_accepting() and not matcher.is_error()


def test_json_is_written_as_python_and_templates_write_it(grammars: Grammars) -> None:
    grammar = json_grammar({"type": "object"})
    value = {"a": [1, 2.5, {"b": None}], "é": "\n"}
    assert follows(grammars, grammar, json.dumps(value, ensure_ascii=False))
    assert not follows(grammars, grammar, json.dumps(value, indent=1)) and not follows(
        grammars, grammar, "[1]"
    )


def test_other_forms(grammars: Grammars) -> None:
    for grammar, good, bad in (
        (regex_grammar("[ab]{2}c*"), ["ab", "bacc"], ["a", "abd"]),
        (
            choice_grammar(["yes", 'n"o', "é\n", "\x7f"]),
            ["yes", 'n"o', "é\n", "\x7f"],
            ["ye", "no"],
        ),
        (lark_grammar('start: "a" start "b" | ""'), ["", "aabb"], ["aab"]),
    ):
        assert all(follows(grammars, grammar, text) for text in good)
        assert not any(follows(grammars, grammar, text) for text in bad)


def test_a_tokenizer_without_bytes_has_no_grammars(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(
        str(tmp_path / "tokenizer.json")
    )
    assert open_grammars(str(tmp_path), 2, (1,)) is None
    assert open_grammars("", 2, (1,)) is None


def test_what_is_compiled_ahead_is_not_compiled_again(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    compile_one = module.compile_grammar
    monkeypatch.setattr(
        module, "compile_grammar", lambda its, text: compiled.append(text) or compile_one(its, text)
    )
    monkeypatch.setattr("pensieve.runtime.step.grammar.MOST_COMPILED", 2)
    texts = [regex_grammar(f"{digit}{{3}}") for digit in "123"]
    for text in texts[:2]:
        begun = grammars.begin(text)
        assert begun.result() is grammars.begin(text).result()
    rows = [grammars.matcher(texts[0]) for _ in range(3)]
    for count, matcher in enumerate(rows):
        assert matcher.consume_tokens([ONE] * count)
    assert compiled == texts[:2]
    assert rows[0].consume_token(ONE) and [row.is_accepting() for row in rows] == [False] * 3
    assert rows[2].consume_token(ONE) and [row.is_accepting() for row in rows] == [
        False,
        False,
        True,
    ]
    grammars.matcher(texts[2])
    assert grammars.begin(texts[0]).done() and compiled == texts
    assert grammars.begin(texts[1]).result() is not None and compiled == [*texts, texts[1]], (
        "the latest ones are kept"
    )


def test_a_request_that_waits_keeps_its_compiled_grammar(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More grammars are compiled while it waits than are kept otherwise."""
    compiled = []
    compile_one = module.compile_grammar
    monkeypatch.setattr(
        module, "compile_grammar", lambda its, text: compiled.append(text) or compile_one(its, text)
    )
    monkeypatch.setattr("pensieve.runtime.step.grammar.MOST_COMPILED", 2)
    constraints = GrammarMatchers(grammars)
    texts = [regex_grammar(f"{digit}{{4}}") for digit in "1234"]
    for number, text in enumerate(texts):
        constraints.keep(RequestId(number), constraints.begin(text).result())
    assert compiled == texts
    joins = [join(number, constrained(text)) for number, text in enumerate(texts)]
    mask = constraints.mask(plan(1, joins=joins, spans=[span(number, 0, 3) for number in range(4)]))
    assert mask is not None and [allowed(bits) for bits in mask.bits] == [
        [ONE + n] for n in range(4)
    ]
    assert compiled == texts
    constraints.mask(plan(2, ended=range(4)))
    assert constraints._matchers == {}
    monkeypatch.setattr("pensieve.runtime.step.constraints.MOST_KEPT", 3)
    for number, text in enumerate(texts):
        constraints.keep(RequestId(number), constraints.begin(text).result())
    assert list(constraints._matchers) == [0, 1, 2]


def constrained(grammar: str) -> Sampling:
    return Sampling(grammar=grammar)


def test_masks_are_those_of_the_constrained_samples(grammars: Grammars) -> None:
    constraints = GrammarMatchers(grammars)
    digit = constrained(regex_grammar("[0-9]{2}"))
    joins = [join(0), join(1, digit), join(2, digit)]
    mask = constraints.mask(
        plan(1, joins=joins, generate={0: 5}, spans=[span(1, 0, 3), span(2, 0, 3, samples=False)])
    )
    assert mask is not None and mask.rows.tolist() == [1]
    digits = [byte + FIRST_BYTE for byte in range(ord("0"), ord("9") + 1)]
    assert [allowed(bits) for bits in mask.bits] == [digits]
    constraints.advance((row(0), row(1)), (7, ONE))
    assert constraints.mask(plan(2, generate={0: 6})) is None
    constraints.advance((row(0),), (7,))
    constraints.advance((row(1),), (ONE,))
    mask = constraints.mask(plan(3, generate={1: 5}, spans=[span(2, 3, 5)]))
    assert mask is not None and [allowed(bits) for bits in mask.bits] == [[0, EOS], digits]


def test_a_request_that_has_ended_is_forgotten_and_its_late_tokens_are_passed_over(
    grammars: Grammars,
) -> None:
    constraints = GrammarMatchers(grammars)
    digit = constrained(regex_grammar("[0-9]"))
    constraints.mask(
        plan(1, joins=[join(1, digit), join(2, digit)], spans=[span(1, 0, 3), span(2, 0, 3)])
    )
    mask = constraints.mask(
        plan(2, joins=[join(1)._replace(row=row(5))], ended=[1], generate={2: 3})
    )
    assert mask is not None and len(mask.rows) == 1
    assert constraints.advance((row(1), row(2)), (200, ONE)) == ()
    assert constraints.mask(plan(3, ended=[2])) is None and constraints._matchers == {}


class CountingMatcher:
    """Counts the tokens that it and its copies consume."""

    consumed = 0

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> CountingMatcher:
        return CountingMatcher(self._matcher.deep_copy())

    def consume_token(self, token: int) -> bool:
        CountingMatcher.consumed += 1
        return bool(self._matcher.consume_token(token))

    def consume_tokens(self, tokens: list[int]) -> bool:
        CountingMatcher.consumed += len(tokens)
        return bool(self._matcher.consume_tokens(tokens))


def test_a_long_reply_is_not_gone_through_again_when_its_row_resumes(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended, its seat taken by another, and resumed in other seats: a step would wait for all
    of it each time."""
    compile_one = module.compile_grammar
    monkeypatch.setattr(
        module, "compile_grammar", lambda its, text: CountingMatcher(compile_one(its, text))
    )
    constraints = GrammarMatchers(grammars)
    reply = byte_tokens("a" + "b" * 99_999)
    grammar = constrained(regex_grammar("ab*(cd)?"))
    constraints.mask(plan(1, joins=[join(0, grammar)], spans=[span(0, 0, 3)]))
    for token in reply:
        assert constraints.advance((row(0),), (token,)) == ()
    constraints.mask(plan(2, joins=[join(0)._replace(row=row(9))], spans=[span(0, 0, 3)]))
    CountingMatcher.consumed = 0
    for step, seat in ((3, 3), (4, 2)):
        resumed = join(seat, grammar)._replace(row=RowId(RequestId(0), 10 + step), reply=reply)
        mask = constraints.mask(
            replace(plan(step, joins=[resumed], spans=[span(seat, 0, 9)]), samples=(resumed.row,))
        )
        assert mask is not None and [allowed(bits) for bits in mask.bits] == [
            [0, EOS, *byte_tokens("bc")]
        ]
    assert constraints.advance((resumed.row,), (byte_tokens("c")[0],)) == ()
    assert CountingMatcher.consumed == 1


ENTANGLED = lark_grammar("start: X\nX: /[ab]*a[ab]{60}c/ & /[ab]*b[ab]{61}c/ & /[ab]*a[ab]{63}c/")
"""Compiles, but soon needs more states than llguidance builds to find the allowed tokens."""


def test_a_matcher_that_fails_at_a_token_or_at_its_mask_is_told(grammars: Grammars) -> None:
    """Others continue. A matcher that cannot continue allows an end of text, which is not a valid
    end."""
    constraints = GrammarMatchers(grammars)
    digits = constrained(regex_grammar("[0-9]*"))
    joins = [join(0, digits), join(1, digits), join(2, constrained(ENTANGLED)), join(3)]
    constraints.mask(plan(1, joins=joins, spans=[span(seat, 0, 3) for seat in range(4)]))
    everyone = tuple(row(seat) for seat in range(4))
    a = byte_tokens("a")[0]
    assert constraints.advance(everyone, (ONE, 200, a, 200)) == (row(1),)
    for step in range(2, 40):
        mask = constraints.mask(plan(step, generate={0: 2 + step, 2: 2 + step, 3: 2 + step}))
        assert mask is not None
        if allowed(mask.bits[1]) == [0, EOS]:
            break
        assert constraints.advance((row(0), row(2), row(3)), (ONE, a, 7)) == ()
    assert constraints.advance((row(0), row(2), row(3)), (ONE, EOS, 7)) == (row(2),)


LAST_THREAD = """
import threading
from pensieve.runtime.step.grammar import _deep_threads
start, started = threading.Thread.start, []
def start_one(thread):
    if started:
        raise RuntimeError("no more threads")
    started.append(thread)
    start(thread)
threading.Thread.start = start_one
_deep_threads(2)
"""


def test_threads_that_cannot_all_be_had_do_not_wait_for_each_other() -> None:
    """A limit of address space, or of threads: the process ends with that error."""
    ended = subprocess.run(
        [sys.executable, "-c", LAST_THREAD], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1 and "no more threads" in ended.stderr
