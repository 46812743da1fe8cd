"""The form of a model's replies: how it marks thoughts and tool calls, and grammars in that form.

The form is found once, when the model is loaded: a call that the chat template writes is read with
each form of the table, and the first that reads it back is the model's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...scheduler.types import RequestError, SettingError
from ..text.tokenizer import Tokenizer
from .call_forms import CALL_FORMS, HARMONY, HERMES, CallForm, CallRules, Function, Schemas
from .reply_reader import HarmonyReader, Reader, ReplyReader, ThoughtForm

AUTO = "auto"
NONE = "none"
MOST_BUDGET = 2**31
TAIL_TOKENS = 16  # at the end of a prompt: they contain the beginning of a thought

THINK = ThoughtForm(
    (
        "deepseek_r1",
        "qwen3",
        "deepseek_v3",
        "glm45",
        "nemotron_v3",
        "olmo3",
        "kimi_k2",
        "exaone4",
    ),
    "<think>",
    "</think>",
)
HARMONY_THOUGHTS = ThoughtForm(
    ("openai_gptoss", "openai"), "<|channel|>analysis<|message|>", "<|end|>"
)
THOUGHT_FORMS = (
    HARMONY_THOUGHTS,
    ThoughtForm(("mistral",), "[THINK]", "[/THINK]"),
    ThoughtForm(("gemma4",), "<|channel>thought\n", "<channel|>"),
    ThoughtForm(("cohere",), "<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtForm(("seed_oss",), "<seed:think>", "</seed:think>"),
    ThoughtForm(("granite",), "Here is my thought process:", "Here is my response:"),
    THINK,
)
"""In the order in which they are looked for in a template."""

Tail = str
"""The text at a prompt's end, special tokens included."""

PROBE_NAME = "look"
PROBE_ARGUMENTS = {"at": "wordtwo", "count": 3}
PROBE_SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["at", "count"],
}


@dataclass(frozen=True)
class ReplyForms:
    """The form of one model's replies.

    thoughts    None: the model does not mark thoughts
    calls       the form of tool calls
    tokens      the ids of markers that are tokens of their own
    kept        special tokens among these, with the text that they get
    """

    thoughts: ThoughtForm | None = None
    calls: CallForm = HERMES
    tokens: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)

    def mark(self, marker: str) -> str:
        """The term of a Lark grammar for a marker."""
        token = self.tokens.get(marker)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def reader(
        self,
        tools: Sequence[dict[str, Any]],
        most_calls: int,
        tail: Tail,
        names: Collection[str] | None = None,
        continued: bool = False,
    ) -> Reader:
        """A reader of a reply. `tail`, `continued`: as `thinks` has them. `names`: the only tools
        that may be called; None: any."""
        calls = self.calls if most_calls else None
        if self.calls is HARMONY:
            return HarmonyReader(most_calls, names, in_message=continued)
        thinking = self.thinks(tail, continued) is True
        silent = {*self.kept.values(), *self.calls.silent}
        schemas = schemas_of(tools)
        return ReplyReader(self.thoughts, calls, schemas, most_calls, thinking, silent, names)

    def thinks(self, tail: Tail, continued: bool = False) -> bool | None:
        """Whether the reply to a prompt with this end begins in a thought; None: the model may
        begin one. `continued`: the reply goes on from a message with the text `tail`."""
        if self.thoughts is None:
            return False
        if continued:
            return tail.rfind(self.thoughts.open.rstrip()) > tail.rfind(self.thoughts.close)
        end = tail.rstrip()
        if end.endswith(self.thoughts.open.rstrip()):
            return True
        return False if end.endswith(self.thoughts.close.rstrip()) else None

    def calls_rules(self, functions: Sequence[Function], several: bool) -> str:
        """See `CallForm.rules`."""
        return self.calls.rules(functions, several, self.mark)

    @property
    def can_limit_thoughts(self) -> bool:
        """True if the end of a thought is a token, which can be forced."""
        return self.thoughts is not None and self.thoughts.close in self.tokens

    def framed(
        self,
        grammar: str | None,
        calls: bool,
        tail: Tail,
        budget: int | None,
        continued: bool = False,
    ) -> str | None:
        """The grammar of a whole reply, in which `grammar` begins behind the thought. `tail`,
        `continued`: as `thinks` has them.

        calls   the grammar has tool calls, which have their own markers
        budget  the most tokens of the thought: then its end is forced
        """
        limit = (
            f"[max_tokens={min(budget, MOST_BUDGET)}]"
            if budget is not None and self.can_limit_thoughts
            else ""
        )
        head = "" if calls or continued or grammar is None else self.message_head
        thinks = self.thinks(tail, continued)
        if not head and (thinks is False or (grammar is None and not limit)):
            return grammar
        rules = CallRules(self.mark)
        thought = "" if thinks is False else self._thought(rules, limit)
        reply = "<[*]>*" if grammar is None else f"{head} @reply"
        whole = f"{thought} {reply}"
        if thinks is None and grammar is None:
            whole = self._any_reply(thought)
        elif thinks is None:
            whole = f"/[ \\t\\r\\n]*/ {self._opening} {whole} | {reply}"
        more = [] if grammar is None else _parts_of(grammar)
        start = "\n".join([f"start: {whole}", *rules.lines])
        named = [{**more[0], "name": "reply"}, *more[1:]] if more else []
        return json.dumps({"grammars": [{"lark_grammar": start}, *named]})

    def _thought(self, rules: CallRules, limit: str) -> str:
        """A term for a thought up to its end, behind its beginning."""
        assert self.thoughts is not None
        thought = rules.until(self.thoughts.close, limit)
        if self.thoughts is HARMONY_THOUGHTS:
            thought += f' {self.mark("<|start|>")} "assistant"'
        elif self.thoughts is THINK:
            thought += ' ("\\n\\n" | "\\n")?'
        return thought

    def _any_reply(self, thought: str) -> str:
        """A term for a reply with or without this thought. Other tokens do not begin one: its
        budget would have no effect."""
        assert self.thoughts is not None
        begins = f"{self._opening} {thought}"
        marker = self.thoughts.open.removesuffix("thought\n")
        if self.thoughts is HARMONY_THOUGHTS:
            marker = "<|channel|>"
            begins += f' | {self.mark(marker)} ("final" | "commentary")'
        token = self.tokens.get(marker)
        if token is None:
            return f"({begins})? <[*]>*"
        return f"<[^{token}]>* (({begins}) <[*]>*)?"

    @property
    def _opening(self) -> str:
        """A term for the beginning of a thought."""
        assert self.thoughts is not None
        if self.thoughts is HARMONY_THOUGHTS:
            return f'{self.mark("<|channel|>")} "analysis" {self.mark("<|message|>")}'
        opening, line, _ = self.thoughts.open.partition("thought\n")
        return f'{self.mark(opening)} "thought\\n"' if line else self.mark(opening)

    @property
    def message_head(self) -> str:
        """A term for what stands in front of a reply's content; "" for most models."""
        if self.calls is not HARMONY:
            return ""
        return f'{self.mark("<|channel|>")} "final" {self.mark("<|message|>")}'


def _parts_of(grammar: str) -> list[dict[str, Any]]:
    """The grammars of a text as `runtime/step/grammar.py` makes it."""
    is_list = grammar.startswith('{"grammars"')
    return list(json.loads(grammar)["grammars"]) if is_list else [{"lark_grammar": grammar}]


def schemas_of(tools: Sequence[dict[str, Any]]) -> Schemas:
    """The schemas of the tools of a chat."""
    functions = (tool.get("function", {}) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


def reply_forms(
    tokenizer: Tokenizer | None, reasoning_parser: str = AUTO, tool_call_parser: str = AUTO
) -> ReplyForms:
    """The form of this model's replies. `reasoning_parser` and `tool_call_parser` are names of the
    tables, `auto`, or `none` (of the former). Raises SettingError for other names."""
    check_parsers(reasoning_parser, tool_call_parser)
    if tokenizer is None:
        return ReplyForms()
    calls = _calls_form(tokenizer, tool_call_parser)
    thoughts = _thought_form(tokenizer, reasoning_parser)
    if HARMONY_THOUGHTS is thoughts or calls is HARMONY:
        thoughts = HARMONY_THOUGHTS
        calls = HARMONY
    around = (thoughts.open, thoughts.close, "<|channel>") if thoughts is not None else ()
    markers = (*around, *calls.markers)
    tokens = {marker: tokenizer.added[marker] for marker in markers if marker in tokenizer.added}
    kept = {token: marker for marker, token in tokens.items() if token in tokenizer.special}
    return ReplyForms(thoughts, calls, tokens, kept)


def check_parsers(reasoning_parser: str, tool_call_parser: str) -> None:
    """Raises SettingError for a name that no form has."""
    for setting, name, forms in (
        ("--reasoning-parser", reasoning_parser, THOUGHT_FORMS),
        ("--tool-call-parser", tool_call_parser, CALL_FORMS),
    ):
        names = sorted({own for form in forms for own in form.names})
        if setting == "--reasoning-parser":
            names.append(NONE)
        if name not in (AUTO, *names):
            raise SettingError(setting, f"must be auto, or one of {', '.join(names)}, not {name!r}")


def _thought_form(tokenizer: Tokenizer, name: str) -> ThoughtForm | None:
    """By the markers in the template or, for a template without them, in the vocabulary."""
    if name == NONE:
        return None
    if name != AUTO:
        return next(form for form in THOUGHT_FORMS if name in form.names)
    source = tokenizer.template_source
    for form in THOUGHT_FORMS:
        if all(part in source for part in _parts(form)):
            return form
    for form in THOUGHT_FORMS[1:]:
        if form.close in source or {form.open, form.close} <= tokenizer.added.keys():
            return form
    return None


def _parts(form: ThoughtForm) -> tuple[str, ...]:
    if form is HARMONY_THOUGHTS:
        return "<|channel|>", "analysis", "<|message|>"
    return form.open.rstrip(), form.close


def _calls_form(tokenizer: Tokenizer, name: str) -> CallForm:
    forms = [form for form in CALL_FORMS if name in (AUTO, *form.names)]
    written = _written_call(tokenizer)
    for form in forms:
        if written and _reads_back(form, written):
            return form
    if name == AUTO:
        return HERMES
    in_vocabulary = [form for form in forms if all(part in tokenizer.added for part in form.inner)]
    return (in_vocabulary or forms)[0]


def _written_call(tokenizer: Tokenizer) -> str:
    """A call, as the chat template writes it; "" if it writes none."""
    if not tokenizer.shows_calls:
        return ""
    function = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
    call = {"id": "call00001", "type": "function", "function": function}
    about = {"name": PROBE_NAME, "description": "Looks.", "parameters": PROBE_SCHEMA}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "wordone"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "wordthree", "tool_call_id": call["id"]},
    ]
    try:
        text = tokenizer.render_chat(messages, tools=[{"type": "function", "function": about}])
    except RequestError:
        return ""
    _, _, behind = text.rpartition("wordone")
    return behind.partition("wordthree")[0]


def _reads_back(form: CallForm, written: str) -> bool:
    """Whether the form reads the call in the template's text. Without markers of its own a call may
    begin and end at any bracket."""
    name = max(written.find(PROBE_NAME), 0)
    starts = [at for at in range(name) if written[at] in "[{"] if not form.open else [0]
    ends = [len(written)]
    if not form.close:
        ends = [at + 1 for at in range(name, len(written)) if written[at] in "]}"]
    return any(_reads(form, written[start:end]) for start in starts for end in ends)


def _reads(form: CallForm, written: str) -> bool:
    tools = {PROBE_NAME: PROBE_SCHEMA}
    reader: Reader = HarmonyReader(1) if form is HARMONY else ReplyReader(None, form, tools, 1)
    parts = reader.push(written)
    parts.add(reader.end(cut=False))
    calls = [(call.name, json.loads(call.arguments)) for call in parts.calls]
    return calls == [(PROBE_NAME, PROBE_ARGUMENTS)]
