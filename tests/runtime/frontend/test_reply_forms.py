"""The forms of thoughts and tool calls: each text is read alike in any pieces, no marker leaks
where it is cut, forced calls have the form that is read, and templates write what is read."""

from __future__ import annotations

import ast
import json
import random
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pensieve.runtime.frontend.call_forms import CALL_FORMS, HARMONY, HERMES, CallForm
from pensieve.runtime.frontend.reply_forms import (
    HARMONY_THOUGHTS,
    NONE,
    THINK,
    THOUGHT_FORMS,
    ReplyForms,
    reply_forms,
)
from pensieve.runtime.frontend.reply_reader import MOST_CLOSES, Reader, ReplyParts
from pensieve.runtime.step.grammar import Grammars, json_grammar, lark_grammar
from pensieve.runtime.text.tokenizer import ChatTemplate, Tokenizer
from pensieve.scheduler.types import SettingError

from ..fake_loop import EOS, byte_tokenizer, byte_tokens, save_tokenizer

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, NOW)]
OSLO = ("weather", {"city": "Oslo", "days": 3})
ROME = ("weather", {"city": "Rome"})
BAR = "\uff5c"
SPACE = "\u2581"


def deepseek(text: str) -> str:
    """Markers are written <|tool calls begin|> here."""
    return text.replace("<|", f"<{BAR}").replace("|>", f"{BAR}>").replace("~", SPACE)


def form(name: str, which: int = 0) -> CallForm:
    return [form for form in CALL_FORMS if name in form.names][which]


def thoughts(name: str) -> Any:
    return next(form for form in THOUGHT_FORMS if name in form.names)


CALLS: list[tuple[CallForm, str, str, list[tuple[str, Any]]]] = [
    (
        form("hermes"),
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        "</tool_call>",
        "Let me look.",
        [OSLO, ROME],
    ),
    (
        form("qwen3_coder"),
        "I look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "I look.",
        [OSLO, ROME],
    ),
    (
        form("glm45"),
        "I look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "I look.",
        [OSLO],
    ),
    (
        form("mistral", 0),
        '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}[TOOL_CALLS]weather[CALL_ID]abcdefghi'
        '[ARGS]{"city": "Rome"}',
        "",
        [OSLO, ROME],
    ),
    (
        form("mistral", 1),
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
        '{"name": "weather", "arguments": {"city": "Rome"}}]',
        "",
        [OSLO, ROME],
    ),
    (
        form("deepseek_v3"),
        deepseek(
            "I look.<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>weather\n```json\n"
            '{"city": "Oslo", "days": 3}\n```<|tool~call~end|>\n<|tool~call~begin|>function'
            '<|tool~sep|>weather\n```json\n{"city": "Rome"}\n```<|tool~call~end|>'
            "<|tool~calls~end|>"
        ),
        "I look.",
        [OSLO, ROME],
    ),
    (
        form("deepseek_v31"),
        deepseek(
            "<|tool~calls~begin|><|tool~call~begin|>weather<|tool~sep|>"
            '{"city": "Oslo", "days": 3}<|tool~call~end|><|tool~calls~end|>'
        ),
        "",
        [OSLO],
    ),
    (
        form("gemma4"),
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
        "",
        [OSLO, ROME],
    ),
    (
        form("functiongemma"),
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>",
        "",
        [OSLO],
    ),
    (
        form("granite"),
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]',
        "",
        [OSLO],
    ),
    (
        form("jamba"),
        '<tool_calls>[\n    {"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n]'
        "</tool_calls>",
        "",
        [OSLO],
    ),
    (
        form("cohere"),
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Oslo", "days": 3}}\n]<|END_ACTION|>',
        "",
        [OSLO],
    ),
    (
        form("lfm2"),
        "<|tool_call_start|>[weather(city='Oslo', days=3), weather(city=\"Rome\")]"
        "<|tool_call_end|>I look.",
        "I look.",
        [OSLO, ROME],
    ),
    (
        form("llama3_json"),
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; '
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [OSLO, ROME],
    ),
    (
        form("llama3_json"),
        '{"type": "function", "name": "weather", "parameters": {"city": "Oslo", "days": 3}}',
        "",
        [OSLO],
    ),
    (form("pythonic"), "[weather(city='Oslo', days=3), now()]", "", [OSLO, ("now", {})]),
    (
        HARMONY,
        "<|channel|>analysis<|message|>They want weather.<|end|><|start|>assistant<|channel|>"
        "commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>',
        "I look.",
        [OSLO],
    ),
    (
        HARMONY,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo", "days": 3}',
        "",
        [OSLO],
    ),
]
IDS = [f"{form.names[0]}-{at}" for at, (form, *_) in enumerate(CALLS)]


def forms_of(call_form: CallForm) -> ReplyForms:
    return ReplyForms(HARMONY_THOUGHTS if call_form is HARMONY else THINK, call_form)


def read(forms: ReplyForms, text: str, size: int, cut: bool = False, tail: str = "") -> ReplyParts:
    reader: Reader = forms.reader(TOOLS, 9, tail)
    parts = ReplyParts()
    for at in range(0, len(text), size):
        parts.add(reader.push(text[at : at + size]))
    parts.add(reader.end(cut))
    return parts


def calls_in(parts: ReplyParts) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parts.calls]


@pytest.mark.parametrize(("call_form", "text", "content", "calls"), CALLS, ids=IDS)
@pytest.mark.parametrize("thought", ["", "<think>\nWhat is asked?\n</think>\n\n"])
def test_a_reply_is_read_alike_in_any_pieces(
    call_form: CallForm, text: str, content: str, calls: list[Any], thought: str
) -> None:
    if call_form is HARMONY and thought:
        pytest.skip("gpt-oss has thoughts of its own form")
    for size in (1, 3, 7, len(thought + text)):
        parts = read(forms_of(call_form), thought + text, size)
        assert (parts.content, calls_in(parts)) == (content, calls), size
        if call_form is not HARMONY:
            assert parts.thought == ("What is asked?" if thought else "")
    ids = [call.id for call in parts.calls]
    assert len(set(ids)) == len(ids)
    assert all((len(own) == 9 and own.isalnum()) == call_form.short_ids for own in ids)


@pytest.mark.parametrize(("call_form", "text", "content", "calls"), CALLS, ids=IDS)
def test_a_reply_that_is_cut_shows_no_marker(
    call_form: CallForm, text: str, content: str, calls: list[Any]
) -> None:
    whole = f"<think>Hm.</think>{text}" if call_form is not HARMONY else text
    for end in range(len(whole)):
        for size in (1, end or 1):
            parts = read(forms_of(call_form), whole[:end], size, cut=True)
            assert content.startswith(parts.content), (end, parts)
            assert calls_in(parts) == calls[: len(parts.calls)]
            assert not set("<>[]{") & set(parts.thought), (end, parts)


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_text_without_calls_stays_as_it_is(call_form: CallForm) -> None:
    texts = [" Hello,\n\n  world \n", "a < b", "[1, 2]", '{"name": "Bob", "age": 3}', "{", "[", ""]
    for text in texts:
        for size in (1, 3, len(text) or 1):
            parts = read(ReplyForms(None, call_form), text, size)
            assert (parts.content, parts.calls) == (text, []), size


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_a_broken_call_is_content_and_no_error(call_form: CallForm) -> None:
    for body in ("nonsense", '{"name": 3}', "[" * 100_000, "[weather(", "call:weather{city:"):
        text = f"{call_form.open}{body}{call_form.close}"
        parts = read(ReplyForms(None, call_form), text, len(text))
        assert not parts.calls
        if call_form is not HARMONY:
            assert parts.content == text


HOSTILE = (
    "[TOOL_CALLS]f[CALL_ID]" + " " * 3000 + "a" + " " * 3000,
    "[TOOL_CALLS]f" + " " * 20_000,
    "<tool_call><function=f>" + "<parameter=a>" * 4000 + "</function></tool_call>",
    "<tool_call>" + "<arg_key>" * 4000 + "</arg_key>" * 4000 + "</tool_call>",
    "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * 2000 + "</tool_call>",
    "<|tool_call>call:f{" + "a," * 20_000 + "}<tool_call|>",
    "[f(a={1, 2}), f(a=b'x'), f(a=1j), f(a=...)]",
    "[" + "-" * 50_000 + "1]",
    "[f(a=" + "-" * 50_000 + "1)]",
    "[f(a='" + "\\" * 50_000 + ")]",
    "[f(a=" + "'a' " * 20_000,
    "[f(a='''" + "''x" * 20_000,
    '[f(a="""' + "\\" * 50_000,
    "[TOOL_CALLS]" + " " * 20_000 + "[" + " " * 20_000,
    "<|tool_call|>" + ", " * 10_000 + "[" + " " * 20_000,
    "<tool_call><function=f><parameter=a>" + "</parameter> " * 4000 + "x</tool_call>",
)


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_hostile_text_is_read_in_linear_time(call_form: CallForm) -> None:
    began = time.thread_time()
    for text in HOSTILE:
        read(ReplyForms(THINK, call_form), text, len(text))
    assert time.thread_time() - began < 2


UNCLOSED = (
    '{"name": "',
    '[{"name": "',
    "<function=f><parameter=a>",
    "f<arg_key>a</arg_key><arg_value>",
    deepseek('f<|tool~sep|>{"a": "'),
    deepseek('function<|tool~sep|>f\n```json\n{"a": "'),
    'call:f{a:<|"|>',
    "call:f{a:<escape>",
    "[f(a='",
)


CLOSED = [form for form in CALL_FORMS if form.close and form is not HARMONY]


@pytest.mark.parametrize("call_form", CLOSED, ids=[form.names[0] for form in CLOSED])
def test_many_closing_markers_in_a_value_are_read_in_linear_time(call_form: CallForm) -> None:
    reads = 0

    def counting(text: str, tools: Any) -> Any:
        nonlocal reads
        reads += 1
        return call_form.read(text, tools)

    most = 0
    for begun in UNCLOSED:
        text = f"{call_form.open}{begun}" + call_form.close * 4000
        for size in (1000, len(text)):
            reads = 0
            parts = read(ReplyForms(None, replace(call_form, read=counting)), text, size)
            assert (parts.content, parts.calls) == (text, [])
            assert reads <= MOST_CLOSES + 1
            most = max(most, reads)
    assert most == MOST_CLOSES + 1, "a text of this form is among them"


def test_a_value_has_so_many_closing_markers_at_most() -> None:
    for count in (MOST_CLOSES, MOST_CLOSES + 1):
        value = HERMES.close * count
        call = json.dumps({"name": "now", "arguments": {"a": value}})
        text = f"{HERMES.open}{call}{HERMES.close}"
        parts = read(ReplyForms(None, HERMES), text, len(text))
        if count == MOST_CLOSES:
            assert (parts.content, calls_in(parts)) == ("", [("now", {"a": value})])
        else:
            assert (parts.content, parts.calls) == (text, [])


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_odd_schemas_make_a_grammar(call_form: CallForm) -> None:
    for schema in (
        {"required": None, "properties": {"a": {"type": "string", "enum": None}}},
        {"required": "abc", "properties": {"a": {"type": "string", "enum": [1]}}},
        {"properties": 5},
        {"properties": {"a": 5, "b": {"const": 3}}},
    ):
        assert ReplyForms(None, call_form).calls_rules(
            [{"name": "f", "parameters": schema}], several=True
        )


def test_a_value_may_contain_markers_of_calls() -> None:
    inside = "x\n</function>\n</tool_call>\nEnd."
    text = (
        "<tool_call>\n<function=now>\n<parameter=a>\na.md\n</parameter>\n<parameter=b>\n"
        f"{inside}\n</parameter>\n</function>\n</tool_call>"
    )
    for size in (1, len(text)):
        parts = read(ReplyForms(None, form("qwen3_coder")), text, size)
        assert calls_in(parts) == [("now", {"a": "a.md", "b": inside})] and not parts.content


def test_text_stays_text_where_the_schema_allows_it() -> None:
    schema = {"properties": {"zip": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = "<tool_call><function=f>\n<parameter=zip>\n{}\n</parameter></function></tool_call>"
    for written, value in (("0123", "0123"), ("1", "1"), ("null", None)):
        reader = ReplyForms(None, form("qwen3_coder")).reader(tools, 9, "")
        (call,) = reader.push(text.format(written)).calls
        assert json.loads(call.arguments) == {"zip": value}


@pytest.mark.parametrize(
    ("call_form", "text"),
    [
        (
            form("qwen3_coder"),
            "<tool_call>\n<function=now>\n<parameter=a>{}</parameter>\n</function>\n</tool_call>",
        ),
        (
            form("glm45"),
            "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        ),
    ],
)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("\n    return x\n", "    return x"),
        ("\n\n    return y\n\n", "\n    return y\n"),
        ("  x ", "  x "),
        ("\n  \n", "  "),
        ("\n\t\n\n", "\t\n"),
        ("\n", ""),
        ("", ""),
        ("\n  True\n", True),
        (" None ", None),
        ("\n  3 \n", 3),
    ],
)
def test_a_text_keeps_its_white_space(
    call_form: CallForm, text: str, written: str, value: Any
) -> None:
    kind = {"type": "string"} if isinstance(value, str) else {}
    parameters = {"properties": {"a": kind}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    reader = ReplyForms(None, call_form).reader(tools, 9, "")
    assert calls_in(reader.push(text.format(written))) == [("now", {"a": value})]


def test_special_tokens_have_no_text_without_tools() -> None:
    forms = ReplyForms(THINK, form("mistral"), kept={5: "[TOOL_CALLS]", 6: "</think>"})
    for size in (1, 40):
        reader = forms.reader([], 0, "")
        parts = reader.push("Hi[TOOL_CALLS] a</think>b") if size > 1 else reader.push("")
        for sign in "Hi[TOOL_CALLS] a</think>b" if size == 1 else "":
            parts.add(reader.push(sign))
        parts.add(reader.end(cut=False))
        assert (parts.content, parts.calls) == ("Hi ab", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\nYes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("granite", "Here is my thought process: Hm. Here is my response: Yes."),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>Yes."),
        ("seed_oss", "<seed:think>Hm.</seed:think>Yes."),
    ],
)
def test_thoughts_are_divided_from_the_content(name: str, text: str) -> None:
    own = thoughts(name)
    forms = ReplyForms(own)
    _, _, inside = text.partition(own.open)
    for size in (1, 3, 7, len(text)):
        for given, tail in ((text, "assistant\n"), (inside, f"assistant\n{own.open}\n")):
            parts = read(forms, given, size, tail=tail)
            assert (parts.thought, parts.content) == ("Hm.", "Yes."), (size, tail)
    for end in range(len(text)):
        parts = read(forms, text[:end], 1, cut=True)
        assert "Hm.".startswith(parts.thought) and "Yes.".startswith(parts.content), (end, parts)


def test_a_prompt_that_ends_behind_a_thought_switches_thoughts_off() -> None:
    forms = ReplyForms(THINK)
    assert forms.thinks("<think>\n\n</think>\n\n") is False
    assert forms.framed("start: /a/", False, "<think>\n\n</think>\n\n", None) == "start: /a/"


JSON_OSLO = '{"city": "Oslo", "days": 3}'
FORCED = {
    "openai": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{JSON_OSLO}"
    "<|call|>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {JSON_OSLO}}}\n</tool_call>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "mistral-0": f"[TOOL_CALLS]weather[ARGS]{JSON_OSLO}",
    "mistral-1": f'[TOOL_CALLS][{{"name": "weather", "arguments": {JSON_OSLO}}}]',
    "deepseek_v3": deepseek(
        "<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>weather\n```json\n"
        f"{JSON_OSLO}\n```<|tool~call~end|><|tool~calls~end|>"
    ),
    "deepseek_v31": deepseek(
        f"<|tool~calls~begin|><|tool~call~begin|>weather<|tool~sep|>{JSON_OSLO}"
        "<|tool~call~end|><|tool~calls~end|>"
    ),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}"
    "<end_function_call>",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {JSON_OSLO}}}]',
    "jamba": f'<tool_calls>[{{"name": "weather", "arguments": {JSON_OSLO}}}]</tool_calls>',
    "cohere": f'<|START_ACTION|>[{{"tool_name": "weather", "parameters": {JSON_OSLO}}}]'
    "<|END_ACTION|>",
    "lfm2": '<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>',
    "llama3_json": f'{{"name": "weather", "parameters": {JSON_OSLO}}}',
    "pythonic": '[weather(city="Oslo", days=3)]',
}
WRITTEN = [
    (own, FORCED.get(own.names[0]) or FORCED[f"{own.names[0]}-{CALL_FORMS[:at].count(own)}"])
    for at, own in enumerate(CALL_FORMS)
    if own.names != ("mistral",)
] + [(form("mistral", at), FORCED[f"mistral-{at}"]) for at in (0, 1)]


def ids_of(text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def accepts(grammars: Grammars, grammar: str, ids: list[int]) -> bool:
    matcher = grammars.matcher(grammar)
    matcher.consume_tokens(ids)
    return bool(matcher.is_accepting()) and not matcher.is_error()


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(("call_form", "text"), WRITTEN, ids=[f"{f.names}" for f, _ in WRITTEN])
def test_a_forced_call_has_the_form_that_is_read(
    call_form: CallForm, text: str, as_tokens: bool, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    markers = list(dict.fromkeys(call_form.markers)) if as_tokens else []
    tokenizer.add_special_tokens(markers)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = {marker: tokenizer.token_to_id(marker) for marker in markers}
    forms = ReplyForms(None, call_form, tokens)
    grammars = Grammars(tmp_path, tokenizer.get_vocab_size(), (EOS,))
    rules = forms.calls_rules([WEATHER, NOW], several=False)
    grammar = lark_grammar(f"start: calls\n{rules}")
    assert accepts(grammars, grammar, ids_of(text, tokenizer)), text
    for wrong in (text.replace("Oslo", "").replace("3", "x"), text.replace("weather", "other")):
        assert not accepts(grammars, grammar, ids_of(wrong, tokenizer)), wrong
    parts = read(forms, text, 1)
    assert (parts.content, calls_in(parts)) == ("", [OSLO])


@pytest.fixture
def thinker(tmp_path: Path) -> tuple[tokenizers.Tokenizer, Grammars, ReplyForms]:
    save_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = {marker: tokenizer.token_to_id(marker) for marker in ("<think>", "</think>")}
    grammars = Grammars(tmp_path, tokenizer.get_vocab_size(), (EOS,))
    return tokenizer, grammars, ReplyForms(THINK, tokens=tokens)


@pytest.mark.parametrize("source", ['start: "yes" | "no"', json_grammar({"type": "boolean"})])
def test_a_grammar_begins_behind_the_thought(
    thinker: tuple[tokenizers.Tokenizer, Grammars, ReplyForms], source: str
) -> None:
    tokenizer, grammars, forms = thinker
    word = "yes" if "yes" in source else "true"
    may = forms.framed(source, False, "assistant\n", None)
    must = forms.framed(source, False, "assistant\n<think>\n", None)
    assert may is not None and must is not None
    for grammar, text, allowed in (
        (may, f"<think>Any text {{</think>\n\n{word}", True),
        (may, word, True),
        (may, f"{word}.", False),
        (may, "<think>Any text.</think>maybe", False),
        (must, f"Any text.</think>{word}", True),
        (must, word, False),
    ):
        assert accepts(grammars, grammar, ids_of(text, tokenizer)) == allowed, text


def test_at_its_budget_the_end_of_the_thought_is_forced(
    thinker: tuple[tokenizers.Tokenizer, Grammars, ReplyForms],
) -> None:
    tokenizer, grammars, forms = thinker
    grammar = forms.framed(None, False, "<think>\n", 5)
    assert grammar is not None
    for text, allowed in (
        ("12345</think>Any reply { <think>", True),
        ("12</think>", True),
        ("123456</think>", False),
    ):
        assert accepts(grammars, grammar, ids_of(text, tokenizer)) == allowed, text
    assert forms.framed(None, False, "assistant\n", None) is None
    assert ReplyForms(THINK).framed(None, False, "<think>", 5) is None  # its end is not a token


def test_names_of_parsers_override_what_is_found(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path))
    assert reply_forms(tokenizer).thoughts is None
    named = reply_forms(tokenizer, "deepseek_r1", "llama3_json")
    assert (named.thoughts, named.calls) == (THINK, form("llama3_json"))
    assert reply_forms(tokenizer, NONE).thoughts is None
    for names in (("wrong", "auto"), ("auto", "wrong")):
        with pytest.raises(SettingError, match=r"must be auto, or one of .*hermes|.*granite"):
            reply_forms(tokenizer, *names)


WHEELS = sorted(Path(".venv/chat-templates").glob("*.whl"))


@pytest.mark.skipif(not WHEELS, reason="make chat-templates downloads the templates")
def test_public_templates_have_a_form(tmp_path: Path) -> None:
    """Each template that writes calls writes them in a form that is read, but for two of a model
    whose form is not in the table."""
    unread = []
    counts: dict[str, int] = {}
    for wheel in WHEELS:
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if not name.endswith(".jinja"):
                    continue
                template = ChatTemplate(files.read(name).decode(), {"bos_token": "<s>"})
                if not template.form.calls:
                    continue
                forms = reply_forms(Tokenizer(byte_tokenizer(), template))
                own = forms.calls.names[0]
                counts[own] = counts.get(own, 0) + 1
                if own == "hermes" and "<tool_call>" not in template.source:
                    unread.append(Path(name).stem)
    assert unread == ["muse_glimmer", "muse_glimmer_training"]
    assert len(counts) >= 10, counts


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(save_tokenizer(tmp_path_factory.mktemp("tokenizer")), 260, (EOS,))


ODD_NAMES = (
    "a",
    "a b",
    "a=b",
    "from",
    "get-w",
    "x>y",
    "<parameter=q>",
    "\u00fc\U0001f600",
    'say "x"',
    "it's",
    "{k:v}",
    "\\d",
    "1",
    "a:b, c",
    "",
)
ODD_FUNCTIONS = ("get-w", "from", "f", "1st", "a_b-C")
TYPES: dict[str, Any] = {"string": str, "integer": int, "boolean": bool, "array": list}
TEMPTING = "<>{}[]()\"'\\/=,:;\n\t ab1\u00fc\U0001f600\uff5c\u2581"
ENDS = ('"', "}", "]", ")", "</parameter>\n", "</arg_value>\n", "\n", "1")


def sampled(matcher: Any, markers: list[str], chance: random.Random) -> str | None:
    """A text that the grammar allows; None if it has not ended in time."""
    text = ""
    for step in range(900):
        if matcher.is_stopped() or (matcher.is_accepting() and chance.random() < 0.5):
            return text
        hurry = step > 60 or chance.random() < 0.3
        tries = [*markers, *ENDS] if hurry else list(TEMPTING)
        chance.shuffle(tries)
        if step > 60:
            ends = chance.sample(ENDS, len(ENDS))
            tries = [*ends, *markers] if step % 2 else [*markers[::-1], *ends]
        printable = [chr(code) for code in range(32, 127)]
        chance.shuffle(printable)
        for piece in (*tries, *TEMPTING, *printable):
            ids = byte_tokens(piece)
            if matcher.validate_tokens(ids) == len(ids):
                matcher.consume_tokens(ids)
                text += piece
                break
        else:
            raise AssertionError(f"nothing goes on behind {text!r}")
    return None


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_what_a_grammar_allows_is_read(call_form: CallForm, grammars: Grammars) -> None:
    """OpenAI's API allows any text as the name of an argument."""
    texts = 0
    for seed in range(12):
        chance = random.Random(f"{call_form.names}/{seed}")
        kinds = {name: chance.choice([*TYPES]) for name in chance.sample(ODD_NAMES, 3)}
        schema = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in kinds.items()},
            "required": chance.sample([*kinds], 2),
            "additionalProperties": False,
        }
        function = {"name": chance.choice(ODD_FUNCTIONS), "parameters": schema}
        forms = ReplyForms(None, call_form)
        rules = forms.calls_rules([function], several=False)
        matcher = grammars.matcher(lark_grammar(f"start: calls\n{rules}"))
        # gpt-oss's markers are tokens that no JSON contains
        within = [] if call_form is HARMONY else list(call_form.markers)
        text = sampled(matcher, within, chance)
        if text is None:
            continue
        texts += 1
        tools = [{"type": "function", "function": function}]
        reader = forms.reader(tools, 9, "")
        parts = reader.push(text)
        parts.add(reader.end(cut=False))
        ((name, arguments),) = calls_in(parts) or [("", {})]
        assert (name, parts.content) == (function["name"], ""), (text, kinds)
        assert set(schema["required"]) <= set(arguments) <= set(kinds), (text, arguments)
        for key, value in arguments.items():
            assert isinstance(value, TYPES[kinds[key]]), (text, arguments)
    assert texts >= 6


@pytest.mark.parametrize(
    ("call_form", "whole", "begun"),
    [
        (form("mistral", 0), '[TOOL_CALLS]now[ARGS]{"a": 1}', '[TOOL_CALLS]now[ARGS]{"a": 2}'),
        (
            form("mistral", 1),
            '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}',
            ', {"name": "now", "arguments": {"a": 2}}]',
        ),
        (
            form("granite"),
            '<|tool_call|>[{"name": "now", "arguments": {"a": 1}}',
            ', {"name": "now", "arguments": {"a": 2}}]',
        ),
        (
            form("jamba"),
            '<tool_calls>[{"name": "now", "arguments": {"a": 1}}',
            ', {"name": "now", "arguments": {"a": 2}}]',
        ),
        (
            form("llama3_json"),
            '{"name": "now", "parameters": {"a": 1}}',
            '; {"name": "now", "parameters": {"a": 2}}',
        ),
        (form("pythonic"), "[now(a=1)", ", now(a=2)]"),
        (form("lfm2"), "<|tool_call_start|>[now(a=1)", ", now(a=2)]"),
    ],
)
def test_a_cut_in_a_second_call_keeps_the_first(
    call_form: CallForm, whole: str, begun: str
) -> None:
    for end in range(len(begun)):
        for size in (1, len(whole) + end):
            parts = read(ReplyForms(None, call_form), whole + begun[:end], size, cut=True)
            calls = calls_in(parts)
            assert calls[0] == ("now", {"a": 1}) and not parts.content, (end, parts)


@pytest.mark.parametrize(
    ("call_form", "text"),
    [
        (
            form("mistral", 0),
            'One. [TOOL_CALLS]now[ARGS]{"a": 1} Two.[TOOL_CALLS]now{"a": 2}Three.',
        ),
        (
            form("mistral", 1),
            'One. [TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}] Two.'
            '[TOOL_CALLS][{"name": "now", "arguments": {"a": 2}}]Three.',
        ),
        (
            form("granite"),
            'One. <|tool_call|>[{"name": "now", "arguments": {"a": 1}}] Two.'
            '<|tool_call|>[{"name": "now", "arguments": {"a": 2}}]Three.',
        ),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_text_behind_a_call_is_content(call_form: CallForm, text: str, cut: bool) -> None:
    for size in (1, 3, len(text)):
        parts = read(ReplyForms(None, call_form), text, size, cut)
        assert calls_in(parts) == [("now", {"a": 1}), ("now", {"a": 2})]
        assert parts.content.split() == ["One.", "Two.Three."]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\u0041\/\ud83d\ude00"', "A/\U0001f600"),
        (r"'it\'s \x41'", "it's A"),
        ("('a', [1.5, -2], {'b': None, 3: true})", ["a", [1.5, -2], {"b": None, "3": True}]),
        ("0x10", 16),
        ("'''x'''", "x"),
        ('"""a\nb"""', "a\nb"),
        ('"""say "hi" or ""\n"""', 'say "hi" or ""\n'),
        (r"'''it's \''' \x41'''", "it's ''' A"),
        ("'''a\r\nb'''", "a\r\nb"),
        ("'a' 'b'", "ab"),
        ("""("a"\n '''b''' "",)""", ["ab"]),
        (r"r'\d+\'' 'x'", r"\d+\'x"),
        ("r'''\\d\r\n'''", "\\d\r\n"),
        ('u"a"', "a"),
        ('""', ""),
        ('""""""', ""),
    ],
)
def test_python_s_and_json_s_literals_are_read(text: str, value: Any) -> None:
    parts = read(ReplyForms(None, form("pythonic")), f"[now(class={text})]", 1)
    assert calls_in(parts) == [("now", {"class": value})]


@pytest.mark.parametrize(
    ("call_form", "text"),
    [
        (form("hermes"), '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        (form("mistral", 0), "[TOOL_CALLS]now[ARGS]{}"),
        (form("mistral", 1), '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        (form("granite"), '<|tool_call|>[{"name": "now", "arguments": {}}]'),
        (form("jamba"), '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'),
        (
            form("cohere"),
            '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        ),
        (form("llama3_json"), '{"name": "now", "parameters": {}}'),
        (
            form("deepseek_v3"),
            deepseek(
                "<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>now\n```json\n{}\n```"
                "<|tool~call~end|><|tool~calls~end|>"
            ),
        ),
        (
            form("deepseek_v31"),
            deepseek(
                "<|tool~calls~begin|><|tool~call~begin|>now<|tool~sep|>{}<|tool~call~end|>"
                "<|tool~calls~end|>"
            ),
        ),
        (
            form("qwen3_coder"),
            "<tool_call><function=now><parameter=a>\n{}\n</parameter></function></tool_call>",
        ),
        (HARMONY, "<|channel|>commentary to=functions.now <|message|>{}<|call|>"),
    ],
)
def test_a_text_of_json_may_have_raw_line_feeds(call_form: CallForm, text: str) -> None:
    inside = {HARMONY: "", form("qwen3_coder"): "</parameter>"}.get(call_form, call_form.close)
    value = f"a\n\tb{inside}\nc"
    written = text.replace("{}", f'{{"text": "{value}"}}')
    for size in (1, len(written)):
        parts = read(ReplyForms(None, call_form), written, size)
        ((name, own),) = calls_in(parts)
        assert (name, parts.content) == ("now", "")
        assert own.get("a", own) == {"text": value}


def test_a_text_of_python_may_contain_markers_of_calls() -> None:
    lfm2 = form("lfm2")
    for value in (f"'''a'{lfm2.close}\nb'''", f"'a' '{lfm2.close}b'", f"r'{lfm2.close}'"):
        text = f"{lfm2.open}[now(a={value})]{lfm2.close}"
        for size in (1, len(text)):
            parts = read(ReplyForms(None, lfm2), text, size)
            assert calls_in(parts) == [("now", {"a": ast.literal_eval(value)})]
            assert not parts.content
    unclosed = f"{lfm2.open}[now(a='1)]{lfm2.close}"
    assert read(ReplyForms(None, lfm2), unclosed, 1).content == unclosed


@pytest.mark.parametrize("call_form", CALL_FORMS, ids=[form.names[0] for form in CALL_FORMS])
def test_a_call_that_may_not_be_made_is_content(call_form: CallForm) -> None:
    text = next(text for own, text in WRITTEN if own is call_form)
    for names, count in (({"now"}, 0), ({"now", "weather"}, 1)):
        reader = ReplyForms(None, call_form).reader(TOOLS, 9, "", names)
        parts = reader.push(text)
        parts.add(reader.end(cut=False))
        assert len(parts.calls) == count and bool(parts.content) == (not count)


@pytest.mark.parametrize(
    ("text", "reply", "thought", "content"),
    [
        ("<think>\nThey want", " rain.</think>\n\nYes.", " rain.", "Yes."),
        ("<think>\nHm.\n</think>\n\nIt", " is <b>", "", " is <b>"),
        ("It", " is so.", "", " is so."),
    ],
)
def test_a_continued_message_may_end_in_a_thought(
    text: str, reply: str, thought: str, content: str
) -> None:
    reader = ReplyForms(THINK).reader(TOOLS, 9, text, continued=True)
    parts = reader.push(reply)
    parts.add(reader.end(cut=False))
    assert (parts.thought.strip(), parts.content) == (thought.strip(), content)


def test_a_continued_message_of_gpt_oss_goes_on_with_its_text() -> None:
    forms = ReplyForms(HARMONY_THOUGHTS, HARMONY)
    for reply in ("assistant to=x", " is so."):
        reader = forms.reader(TOOLS, 9, "It", continued=True)
        parts = reader.push(reply)
        parts.add(reader.end(cut=False))
        assert (parts.thought, parts.content) == ("", reply)
    assert forms.framed("start: /a/", False, "It", None, continued=True) == "start: /a/"


def test_a_thought_may_begin_behind_white_space(
    thinker: tuple[tokenizers.Tokenizer, Grammars, ReplyForms],
) -> None:
    tokenizer, grammars, forms = thinker
    grammar = forms.framed('start: "yes"', False, "assistant\n", None)
    limited = forms.framed(None, False, "assistant\n", 5)
    assert grammar is not None and limited is not None
    for source, text, allowed in (
        (grammar, "\n <think>Hm.</think>yes", True),
        (grammar, "\nyes", False),
        (limited, "\n<think>12345</think>Yes.", True),
        (limited, "\n<think>1234567</think>Yes.", False),
        (limited, "<think>1234567</think>Yes.", False),
        (limited, "\nYes.", True),
    ):
        assert accepts(grammars, source, ids_of(text, tokenizer)) == allowed, text


def test_the_budget_of_gpt_oss_holds(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(HARMONY.markers))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = {marker: tokenizer.token_to_id(marker) for marker in HARMONY.markers}
    grammars = Grammars(tmp_path, tokenizer.get_vocab_size(), (EOS,))
    grammar = ReplyForms(HARMONY_THOUGHTS, HARMONY, tokens).framed(None, False, "assistant", 5)
    assert grammar is not None
    final = "<|channel|>final<|message|>Yes."
    for text, allowed in (
        (f"<|channel|>analysis<|message|>12345<|end|><|start|>assistant{final}", True),
        (f"<|channel|>analysis<|message|>123456<|end|><|start|>assistant{final}", False),
        (final, True),
        (" to=functions.f<|channel|>commentary json<|message|>{}", True),
    ):
        assert accepts(grammars, grammar, ids_of(text, tokenizer)) == allowed, text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hermes", []),
        ("qwen3_coder", ["minLength", "pattern"]),
        ("glm45", ["minLength", "pattern"]),
        ("gemma4", ["items", "minLength", "pattern"]),
    ],
)
def test_what_a_grammar_leaves_out_is_named(name: str, words: list[str]) -> None:
    properties = {
        "a": {"type": "string", "pattern": "x", "description": "d"},
        "b": {"type": "string", "minLength": 3},
        "c": {"type": "string", "enum": ["C"], "maxLength": 1},
        "d": {"type": "array", "items": {"type": "integer"}},
        "e": {"type": "integer", "minimum": 3},
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    assert form(name).unenforced([function]) == words
