"""The form of messages that one chat template takes, found by rendering small dialogues.

Templates differ in the roles, places and contents that they know. Some refuse what they do not
know, and some leave it out of the prompt without a word. So a template is probed once, when it is
loaded: a message whose text is not in the prompt was not understood.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...scheduler.types import RequestError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], str]
"""Renders messages and tools. Raises RequestError if the template refuses them."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message that may hold its thoughts, in clients' messages and in
templates."""

SYSTEM_ROLES = ("system", "developer")
BETWEEN = "\n\n"  # two messages that become one

ONE, TWO, THREE, FOUR, FIVE = "wordone", "wordtwo", "wordthree", "wordfour", "wordfive"
CALL_ID = "call00001"  # nine letters or digits: Mistral's templates refuse other ids
LONG_ID = "call_0123456789abcdef01234567"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


@dataclass(frozen=True)
class TemplateForm:
    """What a template shows. The defaults are those of a template that shows everything.

    part_roles       roles whose content may be a list of parts; other roles get one text
    only_parts       roles whose content must be a list of parts
    developer        the role in front; otherwise it becomes `system`
    leading          the most system and developer messages in front: 0, 1, or 2 for any number;
                     more are joined, and with 0 they become the beginning of the user's message
    later_system     system messages behind the first message of another role; otherwise they
                     become the user's
    adjacent_users   two messages of the user in a row; otherwise they are joined
    calls            tool calls and their results; otherwise they are written as text
    text_arguments   a call's arguments are JSON text instead of an object
    named_results    a result needs the name of its tool
    short_ids        ids of calls have nine letters or digits
    text_with_calls  text beside tool calls; otherwise a message of its own in front of them
    user_after_result
                     the user's message behind a tool's result; otherwise the result's end
    thoughts         the field for an assistant's thoughts; None: the template shows none
    thoughts_with_text
                     thoughts beside text in a message with tool calls; otherwise the text is
                     the thoughts' end
    """

    part_roles: frozenset[str] = frozenset({"system", "user", "assistant", "tool"})
    only_parts: frozenset[str] = frozenset()
    developer: bool = True
    leading: int = 2
    later_system: bool = True
    adjacent_users: bool = True
    calls: bool = True
    text_arguments: bool = False
    named_results: bool = False
    short_ids: bool = False
    text_with_calls: bool = True
    user_after_result: bool = True
    thoughts: str | None = None
    thoughts_with_text: bool = True

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages in the form that the template takes.

        A message: role, content (text or a list of text parts), and where it has them name,
        tool_calls with arguments as objects, tool_call_id, and thoughts under a name of `THOUGHTS`.
        """
        formed = [self._thoughts(message) for message in messages]
        formed = self._calls(formed) if self.calls else _calls_as_text(formed)
        formed = self._users(self._system(formed))
        return [self._content(message) for message in formed]

    def _thoughts(self, message: Message) -> Message:
        given = next((message[name] for name in THOUGHTS if message.get(name)), None)
        if not message.keys() & set(THOUGHTS):
            return message
        message = {name: value for name, value in message.items() if name not in THOUGHTS}
        if given is None or self.thoughts is None:
            return message
        text = text_of(message["content"])
        if text and not self.thoughts_with_text and message.get("tool_calls"):
            return {**message, "content": "", self.thoughts: given + BETWEEN + text}
        return {**message, self.thoughts: given}

    def _calls(self, messages: list[Message]) -> list[Message]:
        formed = []
        names: dict[str, str] = {}
        for message in messages:
            if calls := message.get("tool_calls"):
                names |= {call["id"]: call["function"]["name"] for call in calls}
                if self.text_arguments:
                    calls = [_with_text_arguments(call) for call in calls]
                if self.short_ids:
                    calls = [{**call, "id": short_id(call["id"])} for call in calls]
                message = {**message, "tool_calls": calls}
                if text_of(message["content"]).strip() and not self.text_with_calls:
                    formed.append({"role": message["role"], "content": message["content"]})
                    message = {**message, "content": ""}
            elif message["role"] == "tool":
                call_id = message.get("tool_call_id", "")
                if self.named_results and "name" not in message:
                    message = {**message, "name": names.get(call_id, "")}
                if self.short_ids:
                    message = {**message, "tool_call_id": short_id(call_id)}
            formed.append(message)
        return formed

    def _system(self, messages: list[Message]) -> list[Message]:
        first = next(
            (at for at, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES),
            len(messages),
        )
        leading = [self._role(message) for message in messages[:first]]
        if len(leading) > 1 and self.leading < 2:
            leading = [_joined(leading)]
        if leading and not self.leading:
            leading = [{**message, "role": "user"} for message in leading]
            if first < len(messages) and messages[first]["role"] == "user":
                leading = [_joined([*leading, messages[first]])]
                first += 1
        later = [self._role(message) for message in messages[first:]]
        if not self.later_system:
            later = [
                {**message, "role": "user"} if message["role"] in SYSTEM_ROLES else message
                for message in later
            ]
        return leading + later

    def _role(self, message: Message) -> Message:
        if message["role"] == "developer" and not self.developer:
            return {**message, "role": "system"}
        return message

    def _users(self, messages: list[Message]) -> list[Message]:
        formed: list[Message] = []
        for message in messages:
            before = formed[-1]["role"] if formed else None
            is_user = message["role"] == "user"
            if is_user and (
                (before == "user" and not self.adjacent_users)
                or (before == "tool" and not self.user_after_result)
            ):
                formed[-1] = _joined([formed[-1], message])
            else:
                formed.append(message)
        return formed

    def _content(self, message: Message) -> Message:
        content = message["content"]
        role = message["role"]
        if isinstance(content, list) and role in self.part_roles:
            return message
        text = text_of(content)
        return {**message, "content": [_part(text)] if role in self.only_parts else text}


def text_of(content: str | list[dict[str, str]]) -> str:
    """The text of a message's content; parts are lines."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def short_id(call_id: str) -> str:
    """The id, or nine digits that stand for it."""
    if len(call_id) == len(CALL_ID) and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[: len(CALL_ID)]


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _joined(messages: Sequence[Message]) -> Message:
    """One message with the first one's fields and the texts of all."""
    return {**messages[0], "content": BETWEEN.join(text_of(m["content"]) for m in messages)}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _calls_as_text(messages: Iterable[Message]) -> list[Message]:
    """Calls in the form in which this server lets a model write them, and results as the user's
    messages. Results in a row are one message."""
    formed: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            texts = [text_of(message["content"]), *(_call_text(call["function"]) for call in calls)]
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            formed.append({**rest, "content": "\n".join(text for text in texts if text)})
        elif message["role"] == "tool":
            content = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
            formed.append({"role": "user", "content": content})
        else:
            formed.append(message)
    return formed


def _call_text(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def template_form(render: Render) -> TemplateForm:
    """Probes the template that `render` renders."""
    return _Probe(render).form


class _Probe:
    """Finds a template's form. Each probe renders messages in the form found so far."""

    def __init__(self, render: Render):
        self._render = render
        self.form = TemplateForm(thoughts=None)
        self._contents()
        self._system()
        self._calls()
        self._later()
        self._thoughts()

    def _contents(self) -> None:
        dialogue = [_message("user", ONE), _message("assistant", TWO), _message("user", THREE)]
        with_system = [_message("system", FOUR), *dialogue]
        in_parts = dialogue
        for role in ("user", "assistant"):
            in_parts = _in_parts(in_parts, role)
        words = (ONE, TWO, THREE)
        if not self._shows(dialogue, *words) and self._shows(in_parts, *words):
            only = {"user", "assistant"}
            if self._shows(_in_parts([with_system[0], *in_parts], "system"), FOUR):
                only.add("system")
            self.form = replace(self.form, only_parts=frozenset(only))
        reads = {role for role in ("user", "assistant") if self._reads_parts(dialogue, role)}
        if self._reads_parts(with_system, "system"):
            reads.add("system")
        self.form = replace(self.form, part_roles=frozenset(reads))

    def _system(self) -> None:
        user = _message("user", THREE)
        developer = self._shows([_message("developer", ONE), user], ONE, THREE)
        two = [[_message("system", ONE), _message("system", TWO), user]]
        if developer:
            two.append([_message("system", ONE), _message("developer", TWO), user])
        if all(self._shows(messages, ONE, TWO, THREE) for messages in two):
            leading = 2
        else:
            leading = int(self._shows([_message("system", ONE), user], ONE, THREE))
        adjacent = self._shows([_message("user", ONE), _message("user", TWO)], ONE, TWO)
        self.form = replace(
            self.form, developer=developer, leading=leading, adjacent_users=adjacent
        )

    def _calls(self) -> None:
        ways = [(text, named) for named in (False, True) for text in (False, True)]
        for text_arguments, named_results in ways:
            self.form = replace(
                self.form, calls=True, text_arguments=text_arguments, named_results=named_results
            )
            if self._shows(_tool_dialogue(""), ONE, TWO, THREE):
                break
        else:
            self.form = replace(self.form, calls=False, text_arguments=False, named_results=False)
            return
        long_ids = self._shows(_tool_dialogue("", LONG_ID), ONE, TWO, THREE)
        self.form = replace(self.form, short_ids=not long_ids)
        self.form = replace(
            self.form,
            text_with_calls=self._shows(_tool_dialogue(FOUR), ONE, TWO, THREE, FOUR),
            user_after_result=self._shows(
                [*_tool_dialogue(""), _message("user", FOUR)], ONE, TWO, THREE, FOUR
            ),
        )
        # split from its calls, a text may be refused where the dialogue goes on: rather left out
        goes_on = [*_tool_dialogue(FOUR), _message("assistant", "x"), _message("user", FIVE)]
        if not self.form.text_with_calls and not self._shows(goes_on, ONE, TWO, THREE, FOUR, FIVE):
            self.form = replace(self.form, text_with_calls=True)
        results = _tool_dialogue("")
        if self._reads_parts(results, "tool"):
            self.form = replace(self.form, part_roles=self.form.part_roles | {"tool"})

    def _later(self) -> None:
        words = (ONE, TWO, THREE, FOUR)
        roles = SYSTEM_ROLES if self.form.developer else ("system",)
        before = [_message("user", ONE), _message("assistant", TWO)]
        user = _message("user", FOUR)
        later = all(
            self._shows([*before, _message(role, THREE), user], *words)
            and self._shows([*before, user, _message(role, THREE)], *words)
            and self._shows([_message(role, "x"), *before, _message(role, THREE), user], *words)
            and self._shows([*_tool_dialogue(""), _message(role, FOUR)], *words)
            for role in roles
        )
        self.form = replace(self.form, later_system=later)

    def _thoughts(self) -> None:
        """Many templates show thoughts only behind the user's last message."""
        for name in THOUGHTS:
            self.form = replace(self.form, thoughts=name)
            beside = _tool_dialogue("and")
            alone = _tool_dialogue("")
            last = [_message("user", ONE), _message("assistant", TWO), _message("user", THREE)]
            for dialogue in (beside, alone, last):
                dialogue[1][name] = FOUR
            if self._shows(beside, FOUR) or self._shows(last, FOUR):
                return
            if self._shows(alone, FOUR):
                self.form = replace(self.form, thoughts_with_text=False)
                return
        self.form = replace(self.form, thoughts=None)

    def _reads_parts(self, messages: list[Message], role: str) -> bool:
        """True if the template shows the texts of a list of parts, and not the list itself."""
        text = self._rendered(_in_parts(self.form.messages(messages), role, FIVE))
        return FIVE in text and not re.search(f"text['\"]: *['\"]{FIVE}", text)

    def _shows(self, messages: Sequence[Message], *words: str) -> bool:
        text = self._text(messages)
        return all(word in text for word in words)

    def _text(self, messages: Sequence[Message]) -> str:
        """The rendered dialogue; "" if the template refuses it."""
        return self._rendered(self.form.messages(messages))

    def _rendered(self, messages: Sequence[Message]) -> str:
        tools = TOOLS if any("tool_calls" in message for message in messages) else None
        try:
            return self._render(messages, tools)
        except RequestError:
            return ""


def _message(role: str, content: str, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def _in_parts(messages: Sequence[Message], role: str, *more: str) -> list[Message]:
    """The messages, with the contents of this role's in parts, and `more` parts behind them."""
    return [
        {**message, "content": [_part(text) for text in (text_of(message["content"]), *more)]}
        if message["role"] == role
        else message
        for message in messages
    ]


def _tool_dialogue(text: str, call_id: str = CALL_ID) -> list[Message]:
    """ONE of the user, a call with TWO beside `text`, and its result THREE."""
    function = {"name": "look", "arguments": {"at": TWO}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        _message("user", ONE),
        _message("assistant", text, tool_calls=[call]),
        _message("tool", THREE, tool_call_id=call_id),
    ]
