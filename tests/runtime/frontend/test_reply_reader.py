"""Tool calls are found in a text with any division into pieces, and a grammar for them allows only
valid calls."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from pensieve.runtime.frontend.call_forms import HERMES
from pensieve.runtime.frontend.reply_forms import ReplyForms
from pensieve.runtime.frontend.reply_reader import ReplyReader
from pensieve.runtime.step.grammar import Grammars, lark_grammar

from ..fake_loop import EOS, byte_tokens, save_tokenizer

OPEN, CLOSE = HERMES.open, HERMES.close


def call(name: str, **arguments: object) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CLOSE}"


def parsed(
    text: str, cuts: random.Random | None = None, most: int = 100
) -> tuple[str, list[tuple[str, object]]]:
    reader = ReplyReader(None, HERMES, {}, most)
    parts = reader.push("")
    while text:
        size = cuts.randrange(1, 6) if cuts else len(text)
        parts.add(reader.push(text[:size]))
        text = text[size:]
    parts.add(reader.end(cut=False))
    calls = parts.calls
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return parts.content, [(call.name, json.loads(call.arguments)) for call in calls]


A, B = ("a", {"x": 1}), ("b", {})
QUOTED = f'ends with {CLOSE} \\"{CLOSE}' * 2
TEXTS = [
    ("", "", []),
    ("no call < at all <tool", "no call < at all <tool", []),
    (" white \n space \n", " white \n space \n", []),
    (call("a", x=1), "", [A]),
    (f"\n\n{call('a', x=1)}\n{call('b')}\n", "", [A, B]),
    (f"Let me see.\n{call('a', x=1)}\n", "Let me see.", [A]),
    (f"one {call('b')} two {call('a', x=1)} three", "one two  three", [B, A]),
    (f"{OPEN}not json{CLOSE}", f"{OPEN}not json{CLOSE}", []),
    (f'{OPEN}{{"name": 3}}{CLOSE}', f'{OPEN}{{"name": 3}}{CLOSE}', []),
    (
        f'{OPEN}{{"name": "a", "arguments": "x"}}{CLOSE}',
        f'{OPEN}{{"name": "a", "arguments": "x"}}{CLOSE}',
        [],
    ),
    (f'{OPEN}{{"name": "b"}}{CLOSE}', "", [B]),
    (f"{OPEN}\n{{", f"{OPEN}\n{{", []),
    (call("a", x=1) + OPEN, OPEN, [A]),
    (call("a", x=QUOTED) + call("b"), "", [("a", {"x": QUOTED}), B]),
    (f'{OPEN}{{"name": "a{CLOSE}', f'{OPEN}{{"name": "a{CLOSE}', []),
    (
        call("a", x="1\n2\t3").replace("\\n", "\n").replace("\\t", "\t"),
        "",
        [("a", {"x": "1\n2\t3"})],
    ),
    (
        f'{OPEN}\n{{"name": "a\n{CLOSE} then {call("b")}',
        f'{OPEN}\n{{"name": "a\n{CLOSE} then {call("b")}',
        [],
    ),
    (f'{OPEN}{{"name": "a"{CLOSE}{call("b")}', f'{OPEN}{{"name": "a"{CLOSE}', [B]),
    ("<<tool_call" + call("b"), "<<tool_call", [B]),
]


@pytest.mark.parametrize(("text", "outside", "calls"), TEXTS)
def test_calls_are_taken_out_of_the_text(
    text: str, outside: str, calls: list[tuple[str, object]]
) -> None:
    got, parsed_calls = parsed(text)
    assert parsed_calls == calls
    assert got.split() == outside.split()
    for seed in range(20):
        assert parsed(text, random.Random(seed)) == (got, parsed_calls)


def test_text_is_held_back_only_where_a_call_may_begin() -> None:
    reader = ReplyReader(None, HERMES, {}, 9)
    assert [
        reader.push(piece).content for piece in ("one", " two", " ", "<", "to", "ad", "<b>")
    ] == [
        "one",
        " two",
        "",
        "",
        "",
        " <toad",
        "<b>",
    ]


def test_calls_beyond_the_most_are_left_out() -> None:
    assert parsed(call("a", x=1) + call("b"), most=1) == ("", [A])


def test_calls_that_cannot_be_parsed_or_sent_do_no_harm() -> None:
    deep = f'{OPEN}{{"name": "a", "arguments": {"[" * 100_000}{CLOSE}'
    assert parsed(deep) == (deep, [])
    ((_, arguments),) = parsed(f'{OPEN}{{"name": "a", "arguments": {{"x": "\\ud83d"}}}}{CLOSE}')[1]
    assert arguments == {"x": "?"}


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_makes_no_call(number: str) -> None:
    text = f'{OPEN}{{"name": "a", "arguments": {{"x": {number}}}}}{CLOSE}'
    assert parsed(text) == (text, [])


def test_much_white_space_does_not_stop_the_process() -> None:
    text = " " * 50_000 + "x"
    began = time.thread_time()
    assert parsed(text) == (text, [])
    assert time.thread_time() - began < 1


def test_text_that_is_no_call_stays_unchanged() -> None:
    for text in (f"see \n {OPEN}this{CLOSE} tag", f"{call('a')} see {OPEN}this{CLOSE}\n\ntag"):
        got, _ = parsed(text)
        assert text.endswith(got) and f" {OPEN}this{CLOSE}" in got, got


def test_arguments_of_any_content_are_json() -> None:
    arguments = {"text": 'é "</tool>" \n', "list": [1, None], "deep": {"a": {"b": True}}}
    assert parsed(call("a", **arguments)) == ("", [("a", arguments)])


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(save_tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))), 260, (EOS,))


@pytest.mark.parametrize("several", [False, True])
def test_the_grammar_allows_calls_of_the_tools_only(grammars: Grammars, several: bool) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    functions = [
        {"name": "a", "parameters": {**schema, "additionalProperties": False}},
        {"name": "b"},
        {"name": "c", "parameters": {"type": "object"}},
    ]
    grammar = lark_grammar("start: calls\n" + ReplyForms().calls_rules(functions, several))
    for text, allowed in (
        (call("a", x=1), True),
        (call("b"), True),
        (call("b", anything=[1, 2]), False),  # without parameters no argument is allowed
        (call("a", x=1) + "\n" + call("b"), several),
        (call("a"), False),
        (call("a", x="1"), False),
        (call("d", x=1), False),
        (call("c", anything=[1, 2]), True),
        ("text", False),
        ("", False),
    ):
        matcher = grammars.matcher(grammar)
        matcher.consume_tokens(byte_tokens(text))
        assert (matcher.is_accepting() and not matcher.is_error()) == allowed, text
