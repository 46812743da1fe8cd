"""The forms in which models write tool calls: one table, `CALL_FORMS`.

Each row tells how a call begins and ends, reads its text, and writes the grammar of a call that is
forced. The form of a model is chosen in `reply_forms`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from ..step.grammar import lark_json

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

DEFINITIONS: tuple[str, ...] = ("$defs", "definitions")

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool, by its name."""

Result = TypeVar("Result")

Function = Mapping[str, Any]
"""A function that a model may call: `name`, and `parameters`, a JSON schema."""


class WrittenCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


class Read(NamedTuple):
    """What a form reads: the calls at the beginning of a text, and the text behind them."""

    calls: list[WrittenCall]
    rest: str

    @property
    def whole(self) -> bool:
        """True if the text is nothing but calls."""
        return bool(self.calls) and not self.rest.strip()


class CallRules:
    """Collects the rules of a Lark grammar of calls."""

    def __init__(self, mark: Callable[[str], str]):
        """`mark`: the term for a marker, which may be one token of the model."""
        self.mark = mark
        self.lines: list[str] = []

    def add(self, term: str, options: str = "") -> str:
        """Adds a rule. Returns its name."""
        name = f"part{len(self.lines)}"
        self.lines.append(f"{name}{options}: {term}")
        return name

    def until(self, end: str, limit: str = "") -> str:
        """A term for any text up to and with `end`. `limit`: an option of the text's rule, for an
        end that is a token."""
        if (mark := self.mark(end)).startswith("<["):
            return f"{self.add('/(?s:.*)/', limit)} {mark}"
        pattern = re.escape(end).replace("/", "\\/").replace("\\\n", "\\n")
        return self.add(f"/(?s:.*){pattern}/", "[lazy]")

    def sequence(self, terms: Sequence[tuple[str, bool]], between: str) -> str:
        """A term for these terms in their order. True: the term is required."""
        first = begun = '""'
        for at in range(len(terms) - 1, -1, -1):
            term, required = terms[at]
            follows = begun
            behind = f"{_literal(between)} {term} {follows}"
            begun = self.add(behind if required else f"({behind}) | {follows}")
            alone = f"{term} {follows}"
            first = self.add(alone if required else f"({alone}) | {first}")
        return first


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes tool calls.

    names           the names of vLLM's `--tool-call-parser` for it
    read            reads the text between `open` and `close`
    write           the term of a grammar for a call of this function
    open, close     the markers around a call. Without `open` a reply that is nothing but calls
                    has them at its beginning, as `begins` tells. Without `close` calls go on to
                    the end of the reply.
    begins          whether a reply that begins with this text is a call; None: it may become one
    goes_on         the text ends inside a value, so that a `close` in it is none
    wrap            markers around all calls
    dropped         markers that have no text of their own
    inner           markers inside a call
    before, after   text between the markers and the call, as models write it
    between         text between two calls
    listed          several calls share their markers, as a list
    needs_close     a call that is cut may look like a whole one with fewer arguments
    short_ids       ids of calls have nine letters or digits
    free            values for which the grammar does not follow their schema: texts, or all but
                    the simple ones
    """

    names: tuple[str, ...]
    read: Callable[[str, Schemas], Read]
    write: Callable[[Function, CallRules], str]
    open: str = ""
    close: str = ""
    begins: Callable[[str, Schemas], bool | None] = lambda text, tools: False
    goes_on: Callable[[str, Schemas], bool] = lambda text, tools: False
    wrap: tuple[str, str] = ("", "")
    dropped: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    between: str = ""
    listed: bool = False
    needs_close: bool = False
    short_ids: bool = False
    free: Literal["none", "texts", "values"] = "none"

    @property
    def silent(self) -> tuple[str, ...]:
        """Markers outside of calls that are left out of the text."""
        return tuple(filter(None, (*self.wrap, *self.dropped)))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.open, self.close, *self.silent, *self.inner)))

    def unenforced(self, functions: Sequence[Function]) -> list[str]:
        """The words of the arguments' schemas that the grammar leaves out."""
        words: set[str] = set()
        for function in functions:
            for _, schema, _ in _properties(function):
                if self.free != "none" and _takes_text(schema):
                    words |= schema.keys() & TEXT_WORDS if _choices(schema) is None else set()
                elif self.free == "values" and not _is_simple(schema):
                    words |= schema.keys() - DESCRIBING_WORDS
        return sorted(words)

    def rules(
        self, functions: Sequence[Function], several: bool, mark: Callable[[str], str]
    ) -> str:
        """Lark rules for `calls`: calls of these functions, exactly one, or with `several` one or
        more."""
        rules = CallRules(mark)
        one = rules.add(" | ".join([rules.add(self.write(each, rules)) for each in functions]))
        more = f"({_literal(', ')} {one})*" if several else ""
        inside = f'"[" {one} {more} "]"' if self.listed else one
        around = [mark(marker) if marker else "" for marker in (self.open, self.close)]
        texts = (around[0], _literal(self.before), inside, _literal(self.after), around[1])
        call = rules.add(" ".join(filter(None, texts)))
        calls = f"{call} ({_literal(self.between)} {call})*" if several else call
        if self.listed:
            calls = call
        ends = [mark(marker) if marker else "" for marker in self.wrap]
        line = " ".join(filter(None, (ends[0], calls, ends[1])))
        return "\n".join([f"calls: {line}", *rules.lines])


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def schema_of(function: Function) -> dict[str, Any]:
    """The schema of the function's arguments."""
    return {"type": "object", **(function.get("parameters") or NO_PARAMETERS)}


def _properties(function: Function) -> list[tuple[str, dict[str, Any], bool]]:
    """Name and schema of each argument, and whether it is required."""
    schema = schema_of(function)
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return []
    shared: dict[str, Any] = {name: schema[name] for name in DEFINITIONS if name in schema}
    return [
        (name, {**shared, **about} if isinstance(about, dict) else dict(shared), name in required)
        for name, about in properties.items()
    ]


TEXT_WORDS = {"format", "maxLength", "minLength", "pattern"}
DESCRIBING_WORDS = {"default", "description", "examples", "title", "type", *DEFINITIONS}
"""Words of a schema that forbid nothing more."""


def _is_simple(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") in ("integer", "number", "boolean", "null")


def _takes_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, as far as the schema names them."""
    own = schema.get("type")
    names = own if isinstance(own, list) else [own]
    types = {name for name in names if isinstance(name, str)}
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            types |= _types(option) if isinstance(option, dict) else set()
    return types


def _type_of(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The only texts that a schema of text allows, None for any."""
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    usable = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
    return texts if usable else None


def _argument(text: str, schema: Mapping[str, Any]) -> Any:
    """A value that is written without quotes: text where the schema says so, else JSON."""
    types = _types(schema)
    if types == {"string"}:
        return text
    try:
        value = _finite(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return text if "string" in types and not types & _type_of(value) else value


def _finite(value: Any) -> Any:
    """Raises ValueError for NaN and infinity, which Python's JSON parser accepts (1e999)."""
    json.dumps(value, allow_nan=False)
    return value


def _argument_names(tools: Schemas, tool: str) -> Iterable[str]:
    properties = tools.get(tool, {}).get("properties")
    return properties if isinstance(properties, dict) else ()


def _argument_schema(tools: Schemas, tool: str, name: str) -> Mapping[str, Any]:
    properties = tools.get(tool, {}).get("properties")
    about = properties.get(name) if isinstance(properties, dict) else None
    return about if isinstance(about, dict) else {}


# -- JSON objects

_BEFORE_OBJECT = re.compile(r"[\s,;]*+(\[?)\s*+(?=\{)")
_LIST_END = re.compile(r"\s*\]")
_DECODER = json.JSONDecoder(strict=False)
"""It takes strings with raw line feeds, which models write."""


def _read_objects(text: str, tools: Schemas) -> Read:
    """Objects with a name and arguments, under the names that models use for these; in a row or in
    lists."""
    calls = []
    at = 0
    listed = False
    while before := _BEFORE_OBJECT.match(text, at):
        try:
            value, end = _DECODER.raw_decode(text, before.end())
        except (ValueError, RecursionError):
            break
        call = _call_of(value)
        if call is None:
            break
        calls.append(call)
        at = end
        listed = listed or bool(before[1])
        if listed and (list_end := _LIST_END.match(text, at)):
            at = list_end.end()
            listed = False
    return Read(calls, text[at:])


def _call_of(value: Any) -> WrittenCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _object(arguments or "{}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return _call(name, arguments)


def _call(name: str, arguments: dict[str, Any]) -> WrittenCall | None:
    try:
        return WrittenCall(name, _finite(arguments))
    except (ValueError, RecursionError):
        return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _ends_in_string(text: str, tools: Schemas) -> bool:
    """Whether the JSON text ends inside a string."""
    try:
        json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        pass
    return False


def _writes_object(
    name: str = "name", arguments: str = "arguments"
) -> Callable[[Function, CallRules], str]:
    def write(function: Function, rules: CallRules) -> str:
        head = f'{{"{name}": {json.dumps(function["name"])}, "{arguments}": '
        return f'{_literal(head)} {lark_json(schema_of(function))} "}}"'

    return write


def _ends_in_its_string(text: str, tools: Schemas) -> bool:
    """The same of the JSON behind a name."""
    return _ends_in_string(text[max(text.find("{"), 0) :], tools)


_BARE = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"]*)("?)')
_BARE_HEADS = ('{"name":"', '{"type":"function","name":"')


def _begins_object(text: str, tools: Schemas) -> bool | None:
    if head := _BARE.match(text):
        return _names_tool(head[1], bool(head[2]), tools)
    compact = "".join(text.split())
    return None if any(head.startswith(compact) for head in _BARE_HEADS) else False


def _names_tool(name: str, complete: bool, tools: Schemas) -> bool | None:
    if complete:
        return name in tools
    return None if any(tool.startswith(name) for tool in tools) else False


def _of_tools(read: Read, text: str, tools: Schemas) -> Read:
    """What was read from the text, if each call is of a tool: without markers other text may look
    like calls."""
    return read if all(call.name in tools for call in read.calls) else Read([], text)


def _read_bare_objects(text: str, tools: Schemas) -> Read:
    return _of_tools(_read_objects(text, tools), text, tools)


# -- a name, then JSON

_MISTRAL = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w*+\s*+)?(?:\[ARGS\])?\s*+(?=\{)")
_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"  # full-width bars, and the space sign of sentencepiece
_CALLS_BEGIN = _DEEPSEEK.format("calls\u2581begin")
_CALLS_END = _DEEPSEEK.format("calls\u2581end")
_CALL_BEGIN = _DEEPSEEK.format("call\u2581begin")
_CALL_END = _DEEPSEEK.format("call\u2581end")
_SEP = _DEEPSEEK.format("sep")


def _read_mistral(text: str, tools: Schemas) -> Read:
    """`name[CALL_ID]id[ARGS]{...}`, of which the markers may be left out. The next call begins with
    a marker."""
    head = _MISTRAL.match(text)
    if head is None:
        return Read([], text)
    try:
        arguments, end = _DECODER.raw_decode(text, head.end())
    except (ValueError, RecursionError):
        return Read([], text)
    return _one(_call(head[1], arguments), text[end:])


def _one(call: WrittenCall | None, rest: str = "") -> Read:
    return Read([] if call is None else [call], rest)


def _writes_mistral(function: Function, rules: CallRules) -> str:
    name = _literal(function["name"])
    return f"{name} {rules.mark('[ARGS]')} {lark_json(schema_of(function))}"


def _read_fenced(text: str, tools: Schemas) -> Read:
    """`function`, a separator, the name, and the arguments in a code block."""
    _, _, written = text.partition(_SEP)
    name, fence, rest = written.partition("```json")
    arguments = _object(rest.strip().removesuffix("```")) if fence else None
    return _one(None if arguments is None else _call(name.strip(), arguments))


def _writes_fenced(function: Function, rules: CallRules) -> str:
    head = _literal(f"{function['name']}\n```json\n")
    schema = lark_json(schema_of(function))
    return f'"function" {rules.mark(_SEP)} {head} {schema} {_literal(chr(10) + "```")}'


def _read_separated(text: str, tools: Schemas) -> Read:
    """The name, a separator, the arguments."""
    name, separator, rest = text.partition(_SEP)
    arguments = _object(rest.strip()) if separator else None
    return _one(None if arguments is None else _call(name.strip(), arguments))


def _writes_separated(function: Function, rules: CallRules) -> str:
    name = _literal(function["name"])
    return f"{name} {rules.mark(_SEP)} {lark_json(schema_of(function))}"


def _writes_harmony(function: Function, rules: CallRules) -> str:
    head = _literal(f"commentary to=functions.{function['name']} ")
    marks = f'{rules.mark("<|constrain|>")} "json" {rules.mark("<|message|>")}'
    return f"{head} {marks} {lark_json(schema_of(function))}"


_SPACE = re.compile(r"\s*")


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


class _Values:
    """Reads calls and values from the beginning of a text. Raises ValueError for other text.

    at       the place up to which it has read
    in_text  the text ends inside a literal of text
    """

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.in_text = False

    def take(self, pattern: str | re.Pattern[str]) -> str | None:
        """Passes white space and what the pattern matches. Returns its first group, or all."""
        match = re.compile(pattern).match(self.text, _behind_space(self.text, self.at))
        if match is None:
            return None
        self.at = match.end()
        return match[match.re.groups and 1]

    def need(self, pattern: str) -> str:
        """The same. Raises ValueError if the pattern does not match."""
        taken = self.take(pattern)
        if taken is None:
            raise ValueError(f"no {pattern} at {self.at}")
        return taken

    def name(self, declared: Iterable[str], behind: str, other: str) -> str:
        """A name and what follows: one of `declared`, which may have any text, or one that the
        pattern `other` matches."""
        for name in sorted(declared, key=len, reverse=True):
            start = _behind_space(self.text, self.at)
            for at in (self.at, start):
                if self.text.startswith(name + behind, at):
                    self.at = at + len(name + behind)
                    return name
        return self.need(rf"({other})\s*{re.escape(behind)}")

    def several(self, read: Callable[[], Result], end: str) -> list[Result]:
        """Values with commas between them, up to and with `end`."""
        values: list[Result] = []
        while self.take(end) is None:
            if values:
                self.need(",")
                if self.take(end) is not None:
                    break
            values.append(read())
        return values

    def value(self) -> Any:
        """A literal of Python or JSON."""
        if self.take(r"\[") is not None:
            return self.several(self.value, r"\]")
        if self.take(r"\(") is not None:
            return self.several(self.value, r"\)")
        if self.take(r"\{") is not None:
            return dict(self.several(self.pair, r"\}"))
        if (text := self.strings()) is not None:
            return text
        return _word(self.need(r"[+-]?[\w.]+(?:(?<=[eE])[+-]\d+)?"))

    def strings(self) -> str | None:
        """Literals of text in a row, which are one text. None if there is none."""
        texts: list[str] = []
        while (literal := self.take(_STRING)) is not None:
            texts.append(_string(literal))
        if self.take(_STRING_BEGIN) is not None:
            self.in_text = True
            raise ValueError("a literal of text does not end")
        return "".join(texts) if texts else None

    def pair(self) -> tuple[str, Any]:
        """An entry of a dictionary."""
        key = self.value()
        self.need(":")
        return str(key), self.value()


_STRING_BEGIN = re.compile(r"[rRuU]?[\"']")
# no lookahead in the loop: with one, Python 3.11.2 finds nothing
_STRING = re.compile(
    r"""[rRuU]?(?:
    \"{3}(?:\"{0,2}(?:[^"\\]|\\.))*+\"{3} | '{3}(?:'{0,2}(?:[^'\\]|\\.))*+'{3}
    | "(?!"")(?:[^"\\]|\\.)*+" | '(?!'')(?:[^'\\]|\\.)*+'
    )""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": True, "False": False, "None": None}


def _string(text: str) -> str:
    """A literal of JSON, which has other escapes than Python, or of Python."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        pass
    quoted = text.lstrip("rRuU")
    quotes = 3 if quoted.startswith(('"""', "'''")) else 1
    if text[0] in "rR":
        return quoted[quotes:-quotes]
    quoted = quoted.replace("\r", "\\r")  # Python makes a line feed of it
    return str(_python_literal(quoted if quotes == 3 else quoted.replace("\n", "\\n")))


def _word(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        value = _python_literal(text)
    if not isinstance(value, (int, float)):
        raise ValueError(f"{text} is not a value of JSON")
    return value


def _python_literal(text: str) -> Any:
    """Raises ValueError."""
    try:
        return ast.literal_eval(text)
    except SyntaxError as error:
        raise ValueError(str(error)) from error


# -- Python's calls


def _read_python(text: str, tools: Schemas) -> Read:
    """Calls, perhaps in a list. A name that Python does not allow is read too."""
    return _python_calls(_Values(text), tools)


def _goes_on_python(text: str, tools: Schemas) -> bool:
    values = _Values(text)
    _python_calls(values, tools)
    return values.in_text


def _python_calls(values: _Values, tools: Schemas) -> Read:
    """Ends behind the last whole call."""
    calls: list[WrittenCall] = []
    end = 0
    listed = values.take(r"\[") is not None
    try:
        while (call := _python_call(values, tools)) is not None:
            calls.append(call)
            end = values.at
            if not listed:
                break
            if values.take(r"(?:,\s*)?\]") is not None:
                end = values.at
                break
            values.need(",")
    except (ValueError, RecursionError):
        pass
    return Read(calls, values.text[end:])


def _python_call(values: _Values, tools: Schemas) -> WrittenCall | None:
    name = values.need(r"([\w.-]+)\s*\(")
    declared = _argument_names(tools, name)

    def argument() -> tuple[str, Any]:
        return values.name(declared, "=", r"[\w.-]+"), values.value()

    return _call(name, dict(values.several(argument, r"\)")))


_PYTHON = re.compile(r"\s*\[\s*([\w.-]*)(\(?)")


def _begins_python(text: str, tools: Schemas) -> bool | None:
    head = _PYTHON.match(text)
    if head is None:
        return None if not text.strip() else False
    if not head[2] and head.end() < len(text):
        return False
    return _names_tool(head[1], bool(head[2]), tools)


def _read_bare_python(text: str, tools: Schemas) -> Read:
    return _of_tools(_read_python(text, tools), text, tools)


def _writes_python(function: Function, rules: CallRules) -> str:
    terms = [
        (rules.add(f"{_literal(name + '=')} {lark_json(schema)}"), required)
        for name, schema, required in _properties(function)
    ]
    return f'{_literal(function["name"] + "(")} {rules.sequence(terms, ", ")} ")"'


# -- XML


class Tags(NamedTuple):
    """The texts around the name and the value of an argument."""

    opening: str
    behind_name: str
    before_value: str
    close: str

    def written(self, name: str) -> str:
        """All that stands in front of the value."""
        return f"{self.opening}{name}{self.behind_name}{self.before_value}"


PARAMETER = Tags("<parameter=", ">", "\n", "</parameter>")
ARGUMENT = Tags("<arg_key>", "</arg_key>", "\n<arg_value>", "</arg_value>")


class Tagged(NamedTuple):
    """Arguments between tags. `rest`: the text behind them; None: it ends inside a value."""

    arguments: dict[str, Any]
    rest: str | None


def _read_tagged(text: str, tags: Tags, tool: str, tools: Schemas) -> Tagged:
    values = _Values(text)
    arguments: dict[str, Any] = {}
    declared = _argument_names(tools, tool)
    mark = tags.before_value.strip()
    ends = re.compile(
        rf"(.*?){re.escape(tags.close)}(?=\s*(?:{re.escape(tags.opening)}|</function>|\Z))",
        re.DOTALL,
    )
    while True:
        at = values.at
        try:
            values.need(re.escape(tags.opening))
            name = values.name(declared, tags.behind_name, r"[^\n<>]{1,256}")
            if mark:  # without one, white space belongs to the value
                values.need(re.escape(mark))
        except ValueError:
            return Tagged(arguments, text[at:])
        schema = _argument_schema(tools, tool, name)
        if (end := _json_end(text, values.at, tags.close, schema)) is None:
            match = ends.match(text, values.at)
            if match is None:
                return Tagged(arguments, None)
            end = match.end(1)
        value = text[values.at : end].removeprefix("\n").removesuffix("\n")
        arguments[name] = _argument(value, schema)
        values.at = end + len(tags.close)


def _json_end(text: str, at: int, close: str, schema: Mapping[str, Any]) -> int | None:
    """Where a JSON value ends that stands in front of `close`, which may be in its strings too."""
    if _types(schema) == {"string"}:
        return None
    try:
        _, end = _DECODER.raw_decode(text, _behind_space(text, at))
    except (ValueError, RecursionError):
        return None
    behind = _behind_space(text, end)
    return behind if text.startswith(close, behind) else None


_FUNCTION = re.compile(r"\s*<function=([\w.-]+)>")


def _xml_arguments(text: str, tools: Schemas) -> tuple[str, Tagged] | None:
    head = _FUNCTION.match(text)
    if head is None:
        return None
    return head[1], _read_tagged(text[head.end() :], PARAMETER, head[1], tools)


def _read_xml(text: str, tools: Schemas) -> Read:
    written = _xml_arguments(text, tools)
    if written is None:
        return Read([], text)
    name, (arguments, rest) = written
    if rest is None or rest.strip() != "</function>":
        return Read([], text)
    return _one(_call(name, arguments))


def _goes_on_xml(text: str, tools: Schemas) -> bool:
    written = _xml_arguments(text, tools)
    return written is not None and written[1].rest is None


def _writes_xml(function: Function, rules: CallRules) -> str:
    head = f"<function={function['name']}>\n"
    return f'{_literal(head)} {_texts(function, rules, PARAMETER)} "</function>"'


def _texts(function: Function, rules: CallRules, tags: Tags) -> str:
    """A term for the arguments, each written between the tags. A text does not contain the closing
    tag."""
    line = "\n" if tags is PARAMETER else ""
    terms = []
    for name, schema, required in _properties(function):
        texts = _choices(schema)
        behind = _literal(f"{line}{tags.close}\n")
        if _takes_text(schema) and texts is None:
            value = f"{rules.until(tags.close)} {_literal(chr(10))}"
        elif _takes_text(schema) and texts is not None:
            value = f"({' | '.join(json.dumps(text) for text in texts)}) {behind}"
        else:
            value = f"{lark_json(schema)} {behind}"
        terms.append((rules.add(f"{_literal(tags.written(name))} {value}"), required))
    return rules.sequence(terms, "")


_GLM = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")


def _read_glm(text: str, tools: Schemas) -> Read:
    head = _GLM.match(text)
    if head is None:
        return Read([], text)
    arguments, rest = _read_tagged(text[head.end() :], ARGUMENT, head[1], tools)
    if rest is None or rest.strip() or (head[1] not in tools and not arguments):
        return Read([], text)
    return _one(_call(head[1], arguments))


def _goes_on_glm(text: str, tools: Schemas) -> bool:
    head = _GLM.match(text)
    if head is None:
        return False
    return _read_tagged(text[head.end() :], ARGUMENT, head[1], tools).rest is None


def _writes_glm(function: Function, rules: CallRules) -> str:
    return f"{_literal(function['name'] + chr(10))} {_texts(function, rules, ARGUMENT)}"


# -- Gemma's call:name{key:value}


class _GemmaValues(_Values):
    """The same with texts between `quote`s and keys without any."""

    def __init__(self, text: str, quote: str):
        super().__init__(text)
        self._quote = quote
        self._text = re.compile(rf"{re.escape(quote)}(.*?){re.escape(quote)}", re.DOTALL)

    def value(self) -> Any:
        text = self.take(self._text)
        if text is not None:
            return text
        if self.take(re.escape(self._quote)) is not None:
            self.in_text = True
        return super().value()

    def pair(self) -> tuple[str, Any]:
        return self.argument(())

    def argument(self, declared: Iterable[str]) -> tuple[str, Any]:
        """A key and its value."""
        key = self.take(self._text)
        if key is None:
            key = self.name(declared, ":", r"[^\s\"{}\[\],:]+")
        else:
            self.need(":")
        return key, self.value()


def _reads_gemma(quote: str) -> Callable[[str, Schemas], Read]:
    return lambda text, tools: _gemma_call(_GemmaValues(text, quote), tools)


def _goes_on_gemma(quote: str) -> Callable[[str, Schemas], bool]:
    def goes_on(text: str, tools: Schemas) -> bool:
        values = _GemmaValues(text, quote)
        _gemma_call(values, tools)
        return values.in_text

    return goes_on


def _gemma_call(values: _GemmaValues, tools: Schemas) -> Read:
    try:
        name = values.need(r"call:([\w.-]+)\{")
        declared = _argument_names(tools, name)
        arguments = dict(values.several(lambda: values.argument(declared), r"\}"))
    except (ValueError, RecursionError):
        return Read([], values.text)
    return _one(_call(name, arguments), values.text[values.at :])


def _writes_gemma(quote: str) -> Callable[[Function, CallRules], str]:
    def write(function: Function, rules: CallRules) -> str:
        text = f"{rules.mark(quote)} {rules.until(quote)}"
        value = rules.add("")  # defined below: values contain values
        pair = rules.add(f'/[A-Za-z_][A-Za-z0-9_.-]*/ ":" {value}')
        several = {
            "array": rules.add(f'"[" ({value} ("," {value})*)? "]"'),
            "object": rules.add(f'"{{" ({pair} ("," {pair})*)? "}}"'),
        }
        rules.lines[int(value.removeprefix("part"))] = (
            f'{value}: {text} | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null"'
            f" | {several['array']} | {several['object']}"
        )
        terms = []
        for name, schema, required in _properties(function):
            simple = _is_simple(schema)
            term = lark_json(schema) if simple else several.get(str(schema.get("type")), value)
            if _takes_text(schema):
                texts = _choices(schema) or ()
                marked = [f"{rules.mark(quote)} {json.dumps(t)} {rules.mark(quote)}" for t in texts]
                term = f"({' | '.join(marked) or text})"
            terms.append((rules.add(f"{_literal(name + ':')} {term}"), required))
        head = _literal(f"call:{function['name']}{{")
        return f'{head} {rules.sequence(terms, ",")} "}}"'

    return write


HERMES = CallForm(
    names=("hermes", "qwen"),
    read=_read_objects,
    write=_writes_object(),
    open="<tool_call>",
    close="</tool_call>",
    goes_on=_ends_in_string,
    before="\n",
    after="\n",
    between="\n",
)
HARMONY = CallForm(
    names=("openai",),
    read=_read_objects,  # not used: `HarmonyReader` reads it
    write=_writes_harmony,
    open="<|channel|>",
    close="<|call|>",
    inner=("<|start|>", "<|message|>", "<|end|>", "<|constrain|>", "<|return|>"),
)
CALL_FORMS = (
    HARMONY,
    CallForm(
        names=("qwen3_coder", "qwen3_xml"),
        read=_read_xml,
        write=_writes_xml,
        free="texts",
        open="<tool_call>",
        close="</tool_call>",
        goes_on=_goes_on_xml,
        before="\n",
        after="\n",
        between="\n",
    ),
    HERMES,
    CallForm(
        names=("glm45",),
        read=_read_glm,
        write=_writes_glm,
        free="texts",
        open="<tool_call>",
        close="</tool_call>",
        goes_on=_goes_on_glm,
        needs_close=True,
        between="\n",
    ),
    CallForm(
        names=("mistral",),
        read=_read_mistral,
        write=_writes_mistral,
        open="[TOOL_CALLS]",
        inner=("[ARGS]", "[CALL_ID]"),
        short_ids=True,
    ),
    CallForm(
        names=("mistral",),
        read=_read_objects,
        write=_writes_object(),
        open="[TOOL_CALLS]",
        listed=True,
        short_ids=True,
    ),
    CallForm(
        names=("deepseek_v3",),
        read=_read_fenced,
        write=_writes_fenced,
        open=_CALL_BEGIN,
        close=_CALL_END,
        goes_on=_ends_in_its_string,
        inner=(_SEP,),
        wrap=(_CALLS_BEGIN, _CALLS_END),
        between="\n",
    ),
    CallForm(
        names=("deepseek_v31",),
        read=_read_separated,
        write=_writes_separated,
        open=_CALL_BEGIN,
        close=_CALL_END,
        goes_on=_ends_in_its_string,
        inner=(_SEP,),
        wrap=(_CALLS_BEGIN, _CALLS_END),
    ),
    CallForm(
        names=("gemma4",),
        read=_reads_gemma('<|"|>'),
        write=_writes_gemma('<|"|>'),
        free="values",
        open="<|tool_call>",
        close="<tool_call|>",
        goes_on=_goes_on_gemma('<|"|>'),
        inner=('<|"|>',),
    ),
    CallForm(
        names=("functiongemma",),
        read=_reads_gemma("<escape>"),
        write=_writes_gemma("<escape>"),
        free="values",
        open="<start_function_call>",
        close="<end_function_call>",
        goes_on=_goes_on_gemma("<escape>"),
        inner=("<escape>",),
    ),
    CallForm(
        names=("granite",),
        read=_read_objects,
        write=_writes_object(),
        open="<|tool_call|>",
        listed=True,
    ),
    CallForm(
        names=("jamba",),
        read=_read_objects,
        write=_writes_object(),
        open="<tool_calls>",
        close="</tool_calls>",
        goes_on=_ends_in_string,
        listed=True,
    ),
    CallForm(
        names=("cohere",),
        read=_read_objects,
        write=_writes_object("tool_name", "parameters"),
        open="<|START_ACTION|>",
        close="<|END_ACTION|>",
        goes_on=_ends_in_string,
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        listed=True,
    ),
    CallForm(
        names=("lfm2",),
        read=_read_python,
        write=_writes_python,
        open="<|tool_call_start|>",
        close="<|tool_call_end|>",
        goes_on=_goes_on_python,
        listed=True,
    ),
    CallForm(
        names=("llama3_json", "llama4_json"),
        read=_read_bare_objects,
        write=_writes_object(arguments="parameters"),
        begins=_begins_object,
        dropped=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        between="; ",
    ),
    CallForm(
        names=("pythonic", "llama4_pythonic", "olmo3"),
        read=_read_bare_python,
        write=_writes_python,
        begins=_begins_python,
        dropped=("<|python_start|>", "<|python_end|>"),
        listed=True,
    ),
)
"""In the order in which they are tried on a template's own calls."""
