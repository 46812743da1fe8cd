"""A conversation's line of turns in memory: where a dialogue parts from it, what is stored behind
it, and the edits that a client makes of its messages. Pure: nothing here reads the database.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import ErrorKind, RequestError
from .schema import StoredConversation
from .transcript import (
    Message,
    StoredTurn,
    Transcript,
    common_messages,
    dialogue_keys,
    ends_with_completion,
    keys_behind,
)

Edit = Callable[[Sequence[Message]], Sequence[Message]]
"""Gets the messages of a conversation, which it does not change, and returns the new ones."""


class LineTurn(NamedTuple):
    """`weight`: as `StoredTurn.weight`."""

    number: int
    id: bytes | None
    digest: bytes
    turn: StoredTurn
    weight: int

    @property
    def log(self) -> int:
        """Tokens of its whole log."""
        return self.turn.kept + len(self.turn.tokens)


@dataclass(slots=True)
class Line:
    """The turns from the first one to a head, by number. Never empty."""

    turns: dict[int, LineTurn]
    _whole: Transcript | None = None

    @property
    def last(self) -> LineTurn:
        return next(reversed(self.turns.values()))

    @property
    def size(self) -> int:
        """Its memory in token ids, about: the turns' weights, and 100 for each turn."""
        return sum(turn.weight + 100 for turn in self.turns.values())

    @property
    def whole(self) -> Transcript:
        if self._whole is None:
            self._whole = self.last.turn.transcript()
        return self._whole


class NewTurn(NamedTuple):
    """A turn that is stored next. `digest`: of all messages up to its end; `messages`: JSON of its
    own ones."""

    turn: StoredTurn
    digest: bytes
    messages: str


class PlannedEdit(NamedTuple):
    """An edit that is not stored yet.

    seen   the conversation that it changes
    past   the turns that stay, if any
    turn   with the messages behind them, if there are any
    whole  up to the end of both
    """

    seen: StoredConversation
    past: Line | None
    turn: NewTurn | None
    whole: Transcript


def planned_edit(seen: StoredConversation, line: Line | None, change: Edit) -> PlannedEdit:
    """The work of an edit that grows with the dialogue; any thread may do it. `line`: to the head
    of `seen`. Raises as `HistoryStore.edit`."""
    if line is not None and ends_with_completion(line.last.turn):
        reason = f"conversation {seen.id!r} ends with a plain completion"
        raise RequestError(
            ErrorKind.CONFLICT, f"{reason}: its messages cannot be edited", "conversation"
        )
    messages = tuple(change(line.whole.messages if line is not None else ()))
    past = _unchanged_turns(line, messages) if line is not None else None
    before = past.whole if past is not None else Transcript((), array("i"), "", 0)
    whole = replace(before, messages=messages)
    turn = new_turn(past, whole) if len(before.messages) < len(messages) else None
    return PlannedEdit(seen, past, turn, whole)


def new_turn(past: Line | None, whole: Transcript) -> NewTurn:
    """The turn with the end of this dialogue, behind the last one of this line."""
    if past is not None:
        turn = StoredTurn.behind(past.last.turn, whole, past.whole)
        digest = keys_behind(past.last.digest, turn.messages)[-1]
    else:
        turn = StoredTurn.behind(None, whole)
        digest = dialogue_keys("", whole.messages)[-1]
    return NewTurn(turn, digest, json.dumps(turn.messages, ensure_ascii=False))


def first_turn(messages: Sequence[Message]) -> NewTurn:
    """A turn with the first messages of a conversation. It has no tokens."""
    return new_turn(None, Transcript(tuple(messages), array("i"), "", 0))


def beginning(line: Line, whole: Transcript) -> tuple[LineTurn, int] | None:
    """Returns the latest turn of the line whose messages are a beginning of this dialogue, and how
    many they are; of a dialogue without messages, the latest one whose log is a beginning of this
    one. Numbers in messages are equal if their values are: 1 and 1.0."""
    equal = common_messages(line.whole.messages, whole.messages)
    count = len(line.whole.messages)
    common = sys.maxsize if whole.messages else common_prefix(line.whole.tokens, whole.tokens)
    for turn in reversed(line.turns.values()):
        if count <= equal and turn.log <= common:
            return turn, count
        count -= len(turn.turn.messages)
        if not whole.messages:
            common = min(common, turn.turn.kept)
    return None


def grown(past: Line | None, turn: LineTurn, whole: Transcript) -> Line:
    """The line to `turn` behind the last one of this line. `whole`: up to the end of `turn`."""
    before = past.turns if past is not None else {}
    messages = past.whole.messages if past is not None else ()
    return Line(
        before | {turn.number: turn}, replace(whole, messages=messages + turn.turn.messages)
    )


def up_to(line: Line, last: LineTurn) -> Line:
    """The line to `last`, one of its turns."""
    if last is line.last:
        return line
    numbers = list(line.turns)
    return Line(
        {number: line.turns[number] for number in numbers[: numbers.index(last.number) + 1]}
    )


def _unchanged_turns(line: Line, messages: tuple[Message, ...]) -> Line | None:
    """The part of the line whose messages are, in the same form, a beginning of these. A shorter
    part ends with a turn that has messages: the others may be plain completions."""
    equal = common_prefix(line.whole.messages, messages)
    count = len(line.whole.messages)
    for turn in reversed(line.turns.values()):
        if count <= equal and (turn.turn.messages or turn is line.last):
            return up_to(line, turn)
        count -= len(turn.turn.messages)
    return None
