"""The form of messages that a chat template takes: small templates of each kind, and the public
templates of two packages beside transformers."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pensieve.runtime.conversations.transcript import dialogue_keys
from pensieve.runtime.text.template_form import Message, TemplateForm
from pensieve.runtime.text.tokenizer import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
LOOP = "{% for m in messages %}"
USUAL = "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
REFUSE = "{{ raise_exception('refused') }}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return {"id": "abcdefghi", "type": "function", "function": function}


def result(content: Any) -> Message:
    return message("tool", content, tool_call_id="abcdefghi")


PLAIN = LOOP + "[{{ m.role }}|{{ m.content }}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        # a role that the template shows stays
        (PLAIN, [message("developer", "a")], "[developer|a]"),
        # a role that it leaves out, or refuses
        (
            LOOP + "{% if m.role != 'developer' %}[{{ m.role }}|{{ m.content }}]{% endif %}"
            "{% endfor %}",
            [message("developer", "a"), message("user", "b")],
            "[system|a][user|b]",
        ),
        (
            LOOP + USUAL + REFUSE + "{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}",
            [message("developer", "a"), message("user", "b")],
            "[system|a][user|b]",
        ),
        # one system message, in front only
        (
            LOOP + "{% if m.role == 'system' and not loop.first %}" + REFUSE + "{% endif %}"
            "[{{ m.role }}|{{ m.content }}]{% endfor %}",
            [
                message("system", "a"),
                message("system", parts("b", "c")),
                message("user", "d"),
                message("system", "e"),
            ],
            "[system|a\n\nb\nc][user|d][user|e]",
        ),
        # none, and the user's and the assistant's messages alternate
        (
            LOOP + "{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}" + REFUSE + "{% endif"
            " %}[{{ m.role }}|{{ m.content }}]{% endfor %}",
            [
                message("system", "a"),
                message("user", "b"),
                message("assistant", "c"),
                message("system", "d"),
                message("user", "e"),
                message("assistant", "", tool_calls=[call("f")]),
                result("g"),
                message("user", "h"),
            ],
            "[user|a\n\nb][assistant|c][user|d\n\ne]"
            '[assistant|<tool_call>\n{"name": "weather", "arguments": {"city": "f"}}\n</tool_call>]'
            "[user|<tool_response>\ng\n</tool_response>\n\nh]",
        ),
        # parts only, or the first part only
        (
            LOOP + "[{{ m.role }}|{% for part in m.content %}<{{ part.text }}>{% endfor %}]"
            "{% endfor %}",
            [message("user", "a"), message("user", parts("b", "c"))],
            "[user|<a>][user|<b><c>]",
        ),
        (
            LOOP + "[{{ m.role }}|{{ m.content[0].text }}]{% endfor %}",
            [message("user", "a"), message("user", parts("b", "c"))],
            "[user|a][user|b\nc]",
        ),
        # a template that writes what it is given, even a list
        (PLAIN, [message("user", parts("b", "c"))], "[user|b\nc]"),
        # arguments as text, results with names, no text beside calls
        (
            LOOP + "{% if m.tool_calls %}[{{ 'calls ' + m.tool_calls[0].function.arguments }}]"
            "{% elif m.role == 'tool' %}[{{ m.name + '=' + m.content }}]"
            "{% else %}[{{ m.role }}|{{ m.content }}]{% endif %}{% endfor %}",
            [
                message("user", "a"),
                message("assistant", "b", tool_calls=[call("é")]),
                result("c"),
            ],
            '[user|a][assistant|b][calls {"city": "é"}][weather=c]',
        ),
        # a text in front of its calls would be refused where the dialogue goes on
        (
            "{% set last = namespace(role='') %}" + LOOP + "{% if m.tool_calls %}"
            "[{{ m.tool_calls[0].id }} {{ m.tool_calls[0].function.arguments }}]"
            "{% elif m.role == 'tool' %}[{{ m.tool_call_id }} {{ m.content }}]"
            "{% else %}{% if m.role == last.role %}" + REFUSE + "{% endif %}"
            "{% set last.role = m.role %}[{{ m.role }}|{{ m.content }}]{% endif %}{% endfor %}",
            [
                message("user", "a"),
                message("assistant", "b", tool_calls=[call("c")]),
                result("d"),
                message("assistant", "e"),
                message("user", "f"),
            ],
            "[user|a][abcdefghi {'city': 'c'}][abcdefghi d][assistant|e][user|f]",
        ),
        # ids of nine letters or digits
        (
            LOOP + "{% for id in [m.tool_call_id, (m.tool_calls or [{}])[0].id] if id %}"
            "{% if id | length != 9 %}" + REFUSE + "{% endif %}[{{ id }}]{% endfor %}"
            "{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
            "{{ m.content }}{% endfor %}",
            [
                message("assistant", "", tool_calls=[{**call("a"), "id": "call_0"}]),
                message("tool", "b", tool_call_id="call_0"),
            ],
            "[c557a85a0]{'city': 'a'}[c557a85a0]b",
        ),
        # no user's message behind a result
        (
            "{% set last = namespace(role='') %}" + LOOP + "{% if m.role == 'user' and last.role =="
            " 'tool' %}" + REFUSE + "{% endif %}{% set last.role = m.role %}"
            "[{{ m.role }}|{{ m.content }}{{ m.tool_calls }}]{% endfor %}",
            [
                message("user", "a"),
                message("assistant", "", tool_calls=[]),
                result("c"),
                message("user", "d"),
            ],
            "[user|a][assistant|[]][tool|c\n\nd]",
        ),
        # thoughts under the name that the template reads
        (
            LOOP + "[{{ m.role }}|{{ m.thinking }}|{{ m.content }}]{% endfor %}",
            [message("user", "a"), message("assistant", "b", reasoning_content="c")],
            "[user||a][assistant|c|b]",
        ),
        (PLAIN, [message("assistant", "b", reasoning_content="c")], "[assistant|b]"),
        # and not beside text
        (
            LOOP + "{% if m.thinking and m.content %}" + REFUSE + "{% endif %}"
            "[{{ m.thinking }}|{{ m.content }}{% if m.tool_calls %}"
            "|{{ m.tool_calls[0].function.arguments }}{% endif %}]{% endfor %}",
            [message("assistant", "b", reasoning="c", tool_calls=[call("d")])],
            "[c\n\nb||{'city': 'd'}]",
        ),
    ],
)
def test_messages_get_the_form_that_the_template_takes(
    source: str, messages: list[Message], text: str
) -> None:
    assert ChatTemplate(source, SPECIAL).render(messages) == text


def test_a_dialogue_is_found_again_without_thoughts_and_in_parts() -> None:
    stored = [message("user", "a\nb"), message("assistant", "c", reasoning="d")]
    sent = [message("user", parts("a", "b")), message("assistant", "c")]
    assert dialogue_keys("", stored) == dialogue_keys("", sent)
    assert dialogue_keys("", stored) != dialogue_keys("", [*sent[:1], message("assistant", "e")])


# ---------------------------------------------------------------- public templates

WHEELS = sorted(Path(sys.prefix, "chat-templates").glob("*.whl"))
DIALOGUES: dict[str, list[Message]] = {
    "user": [message("user", "WORD1")],
    "system": [message("system", "WORD1"), message("user", "WORD2")],
    "two systems": [
        message("system", "WORD1"),
        message("system", "WORD2"),
        message("user", "WORD3"),
    ],
    "developer": [message("developer", "WORD1"), message("user", "WORD2")],
    "system and developer": [
        message("system", "WORD1"),
        message("developer", "WORD2"),
        message("user", "WORD3"),
    ],
    "later system": [
        message("user", "WORD1"),
        message("assistant", "WORD2"),
        message("system", "WORD3"),
        message("user", "WORD4"),
    ],
    "last system": [
        message("user", "WORD1"),
        message("assistant", "WORD2"),
        message("user", "WORD3"),
        message("system", "WORD4"),
    ],
    "two users": [message("user", "WORD1"), message("user", "WORD2")],
    "parts of the user": [message("user", parts("WORD1", "WORD2"))],
    "parts of the system": [message("system", parts("WORD1", "WORD2")), message("user", "WORD3")],
    "parts of the assistant": [
        message("user", "WORD1"),
        message("assistant", parts("WORD2", "WORD3")),
        message("user", "WORD4"),
    ],
    "a call": [
        message("user", "WORD1"),
        message("assistant", "", tool_calls=[call("WORD2")]),
        result("WORD3"),
    ],
    "a call beside text": [
        message("user", "WORD1"),
        message("assistant", "WORD2", tool_calls=[call("WORD3")]),
        result("WORD4"),
    ],
    "a call beside null": [
        message("user", "WORD1"),
        message("assistant", None, tool_calls=[call("WORD2")]),
        result("WORD3"),
    ],
    "a user behind a result": [
        message("user", "WORD1"),
        message("assistant", "", tool_calls=[call("WORD2")]),
        result("WORD3"),
        message("user", "WORD4"),
    ],
    "parts of a result": [
        message("user", "WORD1"),
        message("assistant", "", tool_calls=[call("WORD2")]),
        result(parts("WORD3", "WORD4")),
    ],
    "thoughts": [
        message("user", "WORD1"),
        message("assistant", "", tool_calls=[call("WORD2")], reasoning_content="WORD4"),
        result("WORD3"),
    ],
}


def public_templates() -> Iterator[tuple[str, str]]:
    for path in WHEELS:
        wheel = zipfile.ZipFile(path)
        for name in wheel.namelist():
            if name.endswith(".jinja"):
                yield f"{path.name.partition('-')[0]}/{Path(name).stem}", wheel.read(name).decode()


def theirs(source: str, messages: list[Message], tools: Any) -> str:
    """transformers' text; "" if the template refuses the messages."""
    try:
        (text,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=source,
            tools=tools,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except (jinja2.TemplateError, TypeError, AttributeError, LookupError, ValueError):
        return ""
    return str(text)


def shows_all(text: str, messages: list[Message], but: str = "") -> bool:
    """True if each word is there, and neither a list nor None is written out."""
    words = set(re.findall(r"WORD\d", json.dumps(messages))) - {but}
    written_out = re.search(r"text['\"]: *['\"]WORD|None|assistant\nnull", text)
    return all(word in text for word in words) and not written_out


def may_differ(dialogue: str, form: TemplateForm) -> bool:
    """True where the form joins or moves messages that this template shows in this one place."""
    if dialogue in ("later system", "last system"):
        return not form.later_system
    if dialogue in ("two systems", "system and developer"):
        return form.leading < 2
    return False


def left_out(dialogue: str, form: TemplateForm) -> str:
    """The word that the template cannot show, "" for none."""
    if dialogue == "thoughts" and form.thoughts is None:
        return "WORD4"
    # two templates leave the text beside calls out, and refuse it where it is alone
    return "WORD2" if dialogue == "a call beside text" and form.text_with_calls else ""


@pytest.mark.skipif(not WHEELS, reason="make chat-templates downloads the public templates")
def test_public_templates_show_every_message_and_equal_transformers() -> None:
    count = 0
    shown = 0
    before = 0
    equal = 0
    wrong = []
    for name, source in public_templates():
        template = ChatTemplate(source, SPECIAL)
        for dialogue, messages in DIALOGUES.items():
            tools = TOOLS if any("tool_calls" in message for message in messages) else None
            expected = theirs(source, messages, tools)
            sent = [
                {**message, "content": ""} if message["content"] is None else message
                for message in messages
            ]
            text = template.render(sent, tools=tools)
            count += 1
            before += shows_all(expected, messages)
            shown += shows_all(text, messages)
            equal += text == expected
            if not shows_all(text, messages, left_out(dialogue, template.form)) or (
                shows_all(expected, messages)
                and text != expected
                and not may_differ(dialogue, template.form)
            ):
                wrong.append((name, dialogue))
    assert not wrong
    assert count == 108 * len(DIALOGUES)
    print(f"{count} texts: {before} show all with transformers, {shown} here; {equal} are equal")
