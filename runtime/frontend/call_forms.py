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
from typing import Any, NamedTuple

from ..step.grammar import lark_json

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

DEFINITIONS: tuple[str, ...] = ("$defs", "definitions")

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool, by its name."""

Function = Mapping[str, Any]
"""A function that a model may call: `name`, and `parameters`, a JSON schema."""


class WrittenCall(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


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
    read            reads the text between `open` and `close`; None: it is no call
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
    """

    names: tuple[str, ...]
    read: Callable[[str, Schemas], list[WrittenCall] | None]
    write: Callable[[Function, CallRules], str]
    open: str = ""
    close: str = ""
    begins: Callable[[str, Schemas], bool | None] = lambda text, tools: False
    goes_on: Callable[[str], bool] = lambda text: False
    wrap: tuple[str, str] = ("", "")
    dropped: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    before: str = ""
    after: str = ""
    between: str = ""
    listed: bool = False
    needs_close: bool = False
    short_ids: bool = False

    @property
    def silent(self) -> tuple[str, ...]:
        """Markers outside of calls that are left out of the text."""
        return tuple(filter(None, (*self.wrap, *self.dropped)))

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.open, self.close, *self.silent, *self.inner)))

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
        value = _finite(json.loads(text))
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return text if "string" in types and not types & _type_of(value) else value


def _finite(value: Any) -> Any:
    """Raises ValueError for NaN and infinity, which Python's JSON parser accepts (1e999)."""
    json.dumps(value, allow_nan=False)
    return value


def _argument_schema(tools: Schemas, tool: str, name: str) -> Mapping[str, Any]:
    properties = tools.get(tool, {}).get("properties")
    about = properties.get(name) if isinstance(properties, dict) else None
    return about if isinstance(about, dict) else {}


# -- JSON objects

_BETWEEN_VALUES = re.compile(r"[\s,;]*")


def _objects(text: str) -> list[Any] | None:
    """The JSON values in a row, those of lists one by one; None if the text is something else."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    at = 0
    try:
        while (at := _end(_BETWEEN_VALUES, text, at)) < len(text):
            value, at = decoder.raw_decode(text, at)
            values += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return None
    return values


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _read_objects(text: str, tools: Schemas) -> list[WrittenCall] | None:
    """Objects with a name and arguments, under the names that models use for these."""
    calls = [_call_of(value) for value in _objects(text) or ()]
    return [call for call in calls if call is not None] if calls and None not in calls else None


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
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _ends_in_string(text: str) -> bool:
    """Whether the JSON text ends inside a string."""
    try:
        json.loads(text)
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


def _read_bare_objects(text: str, tools: Schemas) -> list[WrittenCall] | None:
    calls = _read_objects(text, tools)
    return calls if calls and all(call.name in tools for call in calls) else None


# -- a name, then JSON

_NAME = re.compile(r"[\w.-]+")
_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"  # full-width bars, and the space sign of sentencepiece
_CALLS_BEGIN = _DEEPSEEK.format("calls\u2581begin")
_CALLS_END = _DEEPSEEK.format("calls\u2581end")
_CALL_BEGIN = _DEEPSEEK.format("call\u2581begin")
_CALL_END = _DEEPSEEK.format("call\u2581end")
_SEP = _DEEPSEEK.format("sep")


def _read_mistral(text: str, tools: Schemas) -> list[WrittenCall] | None:
    """`name[CALL_ID]id[ARGS]{...}`, of which the markers may be left out."""
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        head, brace, rest = part.partition("{")
        name = head.partition("[CALL_ID]")[0].partition("[ARGS]")[0].strip()
        arguments = _object(brace + rest) if _NAME.fullmatch(name) else None
        if arguments is None:
            return None
        calls.append(_call(name, arguments))
    return [call for call in calls if call is not None] if None not in calls else None


def _writes_mistral(function: Function, rules: CallRules) -> str:
    name = _literal(function["name"])
    return f"{name} {rules.mark('[ARGS]')} {lark_json(schema_of(function))}"


def _read_fenced(text: str, tools: Schemas) -> list[WrittenCall] | None:
    """`function`, a separator, the name, and the arguments in a code block."""
    _, _, written = text.partition(_SEP)
    name, fence, rest = written.partition("```json")
    arguments = _object(rest.strip().removesuffix("```")) if fence else None
    call = None if arguments is None else _call(name.strip(), arguments)
    return None if call is None else [call]


def _writes_fenced(function: Function, rules: CallRules) -> str:
    head = _literal(f"{function['name']}\n```json\n")
    schema = lark_json(schema_of(function))
    return f'"function" {rules.mark(_SEP)} {head} {schema} {_literal(chr(10) + "```")}'


def _read_separated(text: str, tools: Schemas) -> list[WrittenCall] | None:
    """The name, a separator, the arguments."""
    name, separator, rest = text.partition(_SEP)
    arguments = _object(rest.strip()) if separator else None
    call = None if arguments is None else _call(name.strip(), arguments)
    return None if call is None else [call]


def _writes_separated(function: Function, rules: CallRules) -> str:
    name = _literal(function["name"])
    return f"{name} {rules.mark(_SEP)} {lark_json(schema_of(function))}"


def _writes_harmony(function: Function, rules: CallRules) -> str:
    head = _literal(f"commentary to=functions.{function['name']} ")
    marks = f'{rules.mark("<|constrain|>")} "json" {rules.mark("<|message|>")}'
    return f"{head} {marks} {lark_json(schema_of(function))}"


# -- Python's calls


def _read_python(text: str, tools: Schemas) -> list[WrittenCall] | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [_python_call(node) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # as deep nesting raises
        return None
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _python_call(node: ast.expr) -> WrittenCall | None:
    """Raises ValueError for what is not a literal."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {word.arg: _value(word.value) for word in node.keywords if word.arg is not None}
    if len(arguments) < len(node.keywords):
        return None
    return _call(ast.unparse(node.func), arguments)


def _value(node: ast.expr) -> Any:
    """A literal of Python or JSON."""
    if isinstance(node, ast.Name):
        return json.loads(node.id)
    if isinstance(node, ast.Dict):
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_value, node.values), strict=True))
    if isinstance(node, (ast.List, ast.Tuple)):
        return list(map(_value, node.elts))
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is not a value of JSON")
    return value


_PYTHON = re.compile(r"\s*\[\s*([\w.-]*)(\(?)")


def _begins_python(text: str, tools: Schemas) -> bool | None:
    head = _PYTHON.match(text)
    if head is None:
        return None if not text.strip() else False
    if not head[2] and head.end() < len(text):
        return False
    return _names_tool(head[1], bool(head[2]), tools)


def _read_bare_python(text: str, tools: Schemas) -> list[WrittenCall] | None:
    calls = _read_python(text, tools)
    return calls if calls and all(call.name in tools for call in calls) else None


def _writes_python(function: Function, rules: CallRules) -> str:
    terms = [
        (rules.add(f"{_literal(name + '=')} {lark_json(schema)}"), required)
        for name, schema, required in _properties(function)
    ]
    return f'{_literal(function["name"] + "(")} {rules.sequence(terms, ", ")} ")"'


# -- XML

_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")


def _read_xml(text: str, tools: Schemas) -> list[WrittenCall] | None:
    text = text.strip()
    if not text.startswith("<function=") or not text.endswith("</function>"):
        return None
    name, _, inside = text.removeprefix("<function=").partition(">")
    before, *written = _PARAMETER.split(inside.removesuffix("</function>"))
    if before.strip() or "\n" in name:
        return None
    pairs = zip(written[::2], written[1::2], strict=True)
    return _with_texts(name, pairs, "</parameter>", tools)


def _with_texts(
    name: str, pairs: Iterable[tuple[str, str]], close: str, tools: Schemas
) -> list[WrittenCall] | None:
    """A call with these arguments, each with the text behind its name up to the last `close`."""
    arguments = {}
    for key, text in pairs:
        value, closed, rest = text.rpartition(close)
        if not closed or rest.strip():
            return None
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _argument(value, _argument_schema(tools, name, key))
    return [WrittenCall(name, arguments)]


def _goes_on_xml(text: str) -> bool:
    return text.count("<parameter=") > text.count("</parameter>")


def _writes_xml(function: Function, rules: CallRules) -> str:
    def parameter(name: str) -> tuple[str, str]:
        return f"<parameter={name}>\n", "\n</parameter>\n"

    head = f"<function={function['name']}>\n"
    return f'{_literal(head)} {_texts(function, rules, parameter)} "</function>"'


def _texts(function: Function, rules: CallRules, around: Callable[[str], tuple[str, str]]) -> str:
    """A term for the arguments, each written between the texts that `around` gives."""
    terms = []
    for name, schema, required in _properties(function):
        before, after = around(name)
        texts = _choices(schema)
        if _takes_text(schema) and texts is None:
            value = rules.until(after)
        elif _takes_text(schema) and texts is not None:
            value = f"({' | '.join(json.dumps(text) for text in texts)}) {_literal(after)}"
        else:
            value = f"{lark_json(schema)} {_literal(after)}"
        terms.append((rules.add(f"{_literal(before)} {value}"), required))
    return rules.sequence(terms, "")


def _read_glm(text: str, tools: Schemas) -> list[WrittenCall] | None:
    head, *written = text.split("<arg_key>")
    name = head.strip()
    if name not in tools and not written:
        return None
    pairs = []
    for argument in written:
        key, closed, rest = argument.partition("</arg_key>")
        between, opened, value = rest.partition("<arg_value>")
        if not closed or not opened or between.strip():
            return None
        pairs.append((key, value))
    return _with_texts(name, pairs, "</arg_value>", tools)


def _goes_on_glm(text: str) -> bool:
    return text.count("<arg_value>") > text.count("</arg_value>")


def _writes_glm(function: Function, rules: CallRules) -> str:
    def argument(name: str) -> tuple[str, str]:
        return f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"

    return f"{_literal(function['name'] + chr(10))} {_texts(function, rules, argument)}"


# -- Gemma's call:name{key:value}

_GEMMA = re.compile(r"\s*call:([\w.-]+)(\{.*\})\s*\Z", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:")


def _reads_gemma(quote: str) -> Callable[[str, Schemas], list[WrittenCall] | None]:
    def read(text: str, tools: Schemas) -> list[WrittenCall] | None:
        written = _GEMMA.match(text)
        if written is None:
            return None
        parts = written[2].split(quote)
        for at, part in enumerate(parts):
            parts[at] = json.dumps(part) if at % 2 else _KEY.sub(r'\1"\2":', part)
        arguments = _object("".join(parts))
        call = None if arguments is None else _call(written[1], arguments)
        return None if call is None else [call]

    return read


def _writes_gemma(quote: str) -> Callable[[Function, CallRules], str]:
    def write(function: Function, rules: CallRules) -> str:
        text = f"{rules.mark(quote)} {rules.until(quote)}"
        value = rules.add("")  # defined below: values contain values
        pair = rules.add(f'/[A-Za-z_][A-Za-z0-9_.-]*/ ":" {value}')
        rules.lines[int(value.removeprefix("part"))] = (
            f'{value}: {text} | /-?[0-9]+(\\.[0-9]+)?/ | "true" | "false" | "null"'
            f' | "[" ({value} ("," {value})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
        )
        terms = []
        for name, schema, required in _properties(function):
            simple = schema.get("type") in ("integer", "number", "boolean", "null")
            term = lark_json(schema) if simple else value
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
        inner=(_SEP,),
        wrap=(_CALLS_BEGIN, _CALLS_END),
    ),
    CallForm(
        names=("gemma4",),
        read=_reads_gemma('<|"|>'),
        write=_writes_gemma('<|"|>'),
        open="<|tool_call>",
        close="<tool_call|>",
        inner=('<|"|>',),
    ),
    CallForm(
        names=("functiongemma",),
        read=_reads_gemma("<escape>"),
        write=_writes_gemma("<escape>"),
        open="<start_function_call>",
        close="<end_function_call>",
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
