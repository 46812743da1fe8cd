"""Divides the growing text of a reply into thoughts, content and tool calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .call_forms import CallForm, Schemas, WrittenCall

MOST_HEADER = 256  # characters of a message's header in gpt-oss's form
MOST_CLOSES = 64
"""Closing markers inside the values of a call: at each one the whole call is read."""


class ToolCall(NamedTuple):
    """`arguments`: a JSON object as text."""

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def for_template(self) -> dict[str, Any]:
        """The call in the form that chat templates read."""
        function = {"name": self.name, "arguments": json.loads(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ReplyParts:
    """A part of a reply, divided. The thought comes first, then the content, then the calls."""

    thought: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, more: ReplyParts) -> None:
        self.thought += more.thought
        self.content += more.content
        self.calls += more.calls


class Reader(Protocol):
    """Reads the text of one reply."""

    @property
    def thinking(self) -> bool:
        """The text so far ends in a thought."""

    @property
    def in_call(self) -> bool:
        """The text so far ends in a call."""

    def push(self, text: str) -> ReplyParts:
        """Takes more of the text. Returns what is now certain."""

    def end(self, cut: bool) -> ReplyParts:
        """Ends the text. `cut`: in the middle. Then a marker or a call that has only begun is left
        out, otherwise it is content."""


@dataclass(frozen=True)
class ThoughtForm:
    """The markers around a thought.

    names   the names of vLLM's `--reasoning-parser` for it
    """

    names: tuple[str, ...]
    open: str
    close: str


class _Calls:
    """The calls of one reply."""

    def __init__(self, most: int, short_ids: bool, names: Collection[str] | None):
        """`most`: further calls are dropped. `names`: the only tools that may be called; None:
        any."""
        self._most = most
        self._names = names
        self._id_bytes = 4 if short_ids else 12
        self._prefix = "c" if short_ids else "call_"
        self.count = 0

    def may_be(self, calls: list[WrittenCall]) -> bool:
        """True if all of them may be called."""
        return self._names is None or all(call.name in self._names for call in calls)

    def add(self, parts: ReplyParts, calls: list[WrittenCall]) -> None:
        for call in calls:
            if self.count < self._most:
                parts.calls.append(
                    ToolCall(
                        self.count,
                        self._prefix + secrets.token_hex(self._id_bytes),
                        _sendable(call.name),
                        _sendable(json.dumps(call.arguments, ensure_ascii=False)),
                    )
                )
            self.count += 1


class ReplyReader:
    """Reads replies whose thoughts and calls stand between markers, or are the whole reply.

    returned | held: white space, the beginning of a marker, or a call that is not complete

    White space around thoughts and calls is left out. A thought stands in front of the content.
    """

    def __init__(
        self,
        thoughts: ThoughtForm | None,
        calls: CallForm | None,
        tools: Schemas,
        most: int = 0,
        thinking: bool = False,
        silent: Collection[str] = (),
        names: Collection[str] | None = None,
    ):
        """`most`: further calls are dropped. `thinking`: the prompt ends inside a thought.
        `silent`: more markers that have no text. `names`: the only tools that may be called: a call
        of another one is content; None: any."""
        self._silent = (*silent, *(calls.silent if calls is not None else ()))
        self._thoughts = thoughts
        self._form = calls
        opens = (form.open for form in (thoughts, calls) if form is not None)
        # first characters of all markers: text without them contains none
        self._marker_signs = frozenset(marker[0] for marker in (*opens, *self._silent) if marker)
        self._tools = tools
        self._calls = _Calls(most, calls is not None and calls.short_ids, names)
        self.thinking = thinking
        self._thought_before = thinking
        self.in_call = False
        self._held = ""
        self._searched = 0  # of the held characters: they contain no marker that counts
        self._passed_closes = 0  # closing markers inside the values of this call
        self._blank = True  # no content has been returned
        self._begun = False  # characters of this thought have been returned

    def push(self, text: str) -> ReplyParts:
        """See `Reader`."""
        self._held += text
        parts = ReplyParts()
        while self._step(parts):
            pass
        return parts

    def end(self, cut: bool) -> ReplyParts:
        """See `Reader`."""
        parts = ReplyParts()
        while self.in_call:
            self._end_call(parts, cut)
        held = self._held
        self._held = ""
        if self.thinking:
            assert self._thoughts is not None
            kept = len(held) - _begun(held, self._thoughts.close) if cut else len(held)
            parts.thought += held[:kept].rstrip()
        else:
            if cut:
                undecided = self._undecided(held)
                held = "" if undecided else held[: len(held) - self._held_marker(held)]
            passed = self._calls.count or self._thought_before
            parts.content += "" if passed and not held.strip() else held
        return parts

    def _step(self, parts: ReplyParts) -> bool:
        """Reads up to the next marker. Returns False if more text is needed."""
        if self.in_call:
            return self._read_call(parts)
        if self.thinking:
            return self._read_thought(parts)
        return self._read_content(parts)

    def _read_thought(self, parts: ReplyParts) -> bool:
        assert self._thoughts is not None
        close = self._thoughts.close
        cut = self._held.find(close)
        end = cut if cut >= 0 else len(self._held) - _begun(self._held, close)
        thought = self._held[:end].rstrip()
        parts.thought += thought if self._begun else thought.lstrip()
        self._begun = self._begun or bool(thought.strip())
        if cut < 0:
            self._held = self._held[len(thought) :]
            return False
        self._held = self._held[cut + len(close) :]
        self.thinking = False
        return True

    def _read_content(self, parts: ReplyParts) -> bool:
        if self._blank:
            self._held = self._held.lstrip() if self._thought_before else self._held
            if self._opens_call(parts):
                return True
            if self._undecided(self._held):
                return False
        if self._marker_signs.isdisjoint(self._held):
            self._say(parts, len(self._held))
            return False
        place, marker = self._next_marker()
        if not marker:
            self._say(parts, len(self._held) - self._held_marker(self._held))
            return False
        self._say(parts, place)
        if self._thoughts is not None and marker == self._thoughts.open:
            self._held = self._held.lstrip()[len(marker) :]
            self.thinking = self._thought_before = True
        elif self._form is not None and marker == self._form.open:
            self.in_call = True
            self._searched = 0
            self._passed_closes = 0
        else:
            self._held = self._held.replace(marker, "", 1)
        return True

    def _opens_call(self, parts: ReplyParts) -> bool:
        """True if a call begins here without a marker."""
        form = self._form
        if form is None or form.open or self._calls.count or not self._held.strip():
            return False
        self._drop_silent()
        if form.begins(self._held, self._tools):
            self.in_call = True
        return self.in_call

    def _drop_silent(self) -> None:
        for marker in self._silent:
            self._held = self._held.replace(marker, "")

    def _undecided(self, held: str) -> bool:
        """True if a call without a marker may begin here."""
        form = self._form
        if form is None or form.open or not self._blank or not held.strip():
            return False
        return form.begins(held, self._tools) is None

    def _markers(self) -> list[str]:
        """Markers that count in content."""
        markers = []
        if self._thoughts is not None and self._blank and not self._thought_before:
            markers.append(self._thoughts.open)
        if self._form is not None:
            markers += filter(None, (self._form.open,))
        return [*markers, *self._silent]

    def _next_marker(self) -> tuple[int, str]:
        places = [(self._held.find(marker), marker) for marker in self._markers()]
        first_ones = [
            (place, marker)
            for place, marker in places
            if place >= 0 and (not self._opens_thought(marker) or not self._held[:place].strip())
        ]
        return min(first_ones, default=(0, ""))

    def _opens_thought(self, marker: str) -> bool:
        return self._thoughts is not None and marker == self._thoughts.open

    def _held_marker(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a marker."""
        return max((_begun(text, marker) for marker in self._markers()), default=0)

    def _say(self, parts: ReplyParts, end: int) -> None:
        """Returns the held text up to `end`, without the white space before `end`, which is left
        out if a call or thought follows."""
        content = self._held[:end].rstrip()
        if content:
            parts.content += content
            self._held = self._held[len(content) :]
            self._blank = False

    def _read_call(self, parts: ReplyParts) -> bool:
        form = self._form
        assert form is not None
        if not form.close:
            return False
        cut = self._held.find(form.close, self._searched)
        if cut < 0:
            self._searched = max(len(self._held) - len(form.close), self._searched)
            return False
        written = self._held[:cut].lstrip().removeprefix(form.open)
        read = form.read(written, self._tools)
        end = cut + len(form.close)
        may_go_on = not read.whole and self._passed_closes < MOST_CLOSES
        if may_go_on and form.goes_on(written, self._tools):
            self._searched = end
            self._passed_closes += 1
            return True
        if read.whole and self._calls.may_be(read.calls):
            self._calls.add(parts, read.calls)
        else:
            parts.content += self._held[:end]
            self._blank = False
        self._held = self._held[end:]
        self.in_call = False
        return True

    def _end_call(self, parts: ReplyParts, cut: bool) -> None:
        """Reads the held text, which ends without the mark of a call's end."""
        form = self._form
        assert form is not None
        held = self._held
        self.in_call = False
        self._held = ""
        written = held.lstrip().removeprefix(form.open)
        if form.close:
            written = written[: len(written) - _begun(written, form.close)]
        calls, rest = form.read(written, self._tools)
        if cut and form.needs_close:
            return
        marked = form.open and not form.close  # other text may follow
        if not calls or not self._calls.may_be(calls) or not (cut or marked or not rest.strip()):
            parts.content += "" if cut else held
            return
        self._calls.add(parts, calls)
        if form.close or (cut and rest.lstrip().startswith(MORE_CALLS)):
            return  # the rest is a call that is cut
        self._held = rest
        while self._step(parts):
            pass


MORE_CALLS = (",", ";", "[{", "{")
"""How a call behind another one may begin, without a marker."""


class HarmonyReader:
    """Reads replies in gpt-oss's form: messages with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>A thought.<|end|><|start|>assistant<|channel|>commentary
    to=functions.NAME <|constrain|>json<|message|>{"city": "Oslo"}<|call|>
    """

    def __init__(
        self, most: int = 0, names: Collection[str] | None = None, in_message: bool = False
    ):
        """`in_message`: the prompt ends inside a message of the final channel. See
        `ReplyReader`."""
        self._calls = _Calls(most, False, names)
        self._held = ""
        self._searched = 0  # of the held characters: they contain no marker
        self._in_header = not in_message
        self._first = not in_message
        self._thought_before = False
        self.thinking = False
        self.in_call = False
        self._recipient = ""

    def push(self, text: str) -> ReplyParts:
        """See `Reader`."""
        self._held += text
        parts = ReplyParts()
        while self._read_header(parts) if self._in_header else self._read_message(parts):
            pass
        return parts

    def end(self, cut: bool) -> ReplyParts:
        """See `Reader`."""
        parts = ReplyParts()
        held = self._held
        self._held = ""
        if self._in_header:
            is_header = "<|" in held or held.lstrip().startswith("to=")
            parts.content = "" if is_header or (cut and _may_be_header(held)) else held
            return parts
        body = held[: len(held) - _begun_any(held)] if cut else held
        if self.in_call:
            self._end_call(parts, body or ("" if cut else "{}"), "" if cut else body)
        elif self.thinking:
            parts.thought = body
        else:
            parts.content = body
        return parts

    def _read_header(self, parts: ReplyParts) -> bool:
        header, marker, rest = self._held.partition("<|message|>")
        if not marker:
            plain = self._first and not _may_be_header(header)
            if not plain and len(header) <= MOST_HEADER:
                return False
            parts.content += self._held  # not in this form
            header = ""
            rest = ""
        self._first = self._in_header = False
        self._held = rest
        recipient = _RECIPIENT.search(header)
        self.in_call = recipient is not None
        self._recipient = recipient[1] if recipient is not None else ""
        self.thinking = not self.in_call and "analysis" in header
        if self.thinking and self._thought_before:
            parts.thought += "\n"
        self._thought_before = self._thought_before or self.thinking
        return True

    def _read_message(self, parts: ReplyParts) -> bool:
        end = _MESSAGE_END.search(self._held, self._searched)
        if end is not None:
            body = self._held[: end.start()]
        elif self.in_call:
            self._searched = max(len(self._held) - LONGEST_MARKER, 0)
            return False
        else:
            body = self._held[: len(self._held) - _begun_any(self._held)]
        if self.in_call:
            self._end_call(parts, body or "{}", body)
        elif self.thinking:
            parts.thought += body
        else:
            parts.content += body
        self._held = self._held[len(body) :]
        self._searched = 0
        if end is None:
            return False
        self._in_header = True
        self.thinking = self.in_call = False
        return True

    def _end_call(self, parts: ReplyParts, body: str, content: str) -> None:
        """`content`: if the body is no call."""
        try:
            arguments = json.loads(body, strict=False)
            json.dumps(arguments, allow_nan=False)
        except (ValueError, RecursionError):
            arguments = None
        calls = [WrittenCall(self._recipient, arguments)] if isinstance(arguments, dict) else []
        if calls and self._calls.may_be(calls):
            self._calls.add(parts, calls)
        else:
            parts.content += content


_MARKERS = ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
LONGEST_MARKER = max(map(len, _MARKERS))
_MESSAGE_END = re.compile("|".join(map(re.escape, _MARKERS)))
_HEADERS = ("<|", "to=", "assistant", "analysis", "commentary", "final")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def _may_be_header(text: str) -> bool:
    text = text.lstrip()
    return any(text.startswith(head) or head.startswith(text) for head in _HEADERS)


def _begun_any(text: str) -> int:
    return max(_begun(text, marker) for marker in _MARKERS)


def _begun(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of the marker."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def _sendable(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON may contain but UTF-8 cannot encode, by
    question marks."""
    return text.encode(errors="replace").decode()
