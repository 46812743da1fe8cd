"""Conversations to be simulated: synthetic ones, and those of a trace.

A trace (JSON lines, plain or .gz) has one of two forms:

* lengths, one request a line: the fields of `trace_lines.TraceLine`
* text, one conversation a line: `conversation`, `messages: [{role, content}]`

Text is turned into token ids message by message, without a chat template's marks between them.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...scheduler.sim.simulator import Session, SessionTurn
from ...scheduler.types import SettingError

if TYPE_CHECKING:
    from .trace_lines import TraceLine


@dataclass(frozen=True, slots=True)
class ChatStatistics:
    """Means over a data set of chats; lengths in tokens. `document`: before the first prompt,
    between these lengths, their logarithms evenly."""

    turns: float
    input_tokens: float
    output_tokens: float
    document: tuple[int, int] | None = None


CHATS = {
    "sharegpt": ChatStatistics(turns=5.56, input_tokens=37.77, output_tokens=204.58),
    "ultrachat": ChatStatistics(turns=3.86, input_tokens=51.78, output_tokens=257.81),
    "documents": ChatStatistics(
        turns=5.56, input_tokens=37.77, output_tokens=204.58, document=(4096, 114_688)
    ),
}

TURN_COUNTS = ("geometric", "uniform")
"""Distributions of the number of turns of synthetic conversations around its mean. Geometric is
memoryless, and with ShareGPT's mean one turn in seven follows ten or more others; uniform is from 1
to twice the mean, and prompts are a third shorter."""


def synthetic(
    chats: ChatStatistics,
    *,
    conversations: int,
    sessions_per_s: float,
    think_s: float,
    seed: int,
    turn_counts: str = "geometric",
) -> list[Session]:
    """Conversations of these means that start as a Poisson process; the same seed makes the same
    ones.

    Numbers of turns are one of TURN_COUNTS, lengths exponential (at least 1 token), think times
    exponential of mean `think_s`.
    """
    draw = random.Random(seed)
    starts = poisson(sessions_per_s, draw)
    uniform = turn_counts == "uniform"
    return [
        Session(f"s{index}", next(starts), tuple(_synthetic_turns(chats, think_s, uniform, draw)))
        for index in range(conversations)
    ]


def _synthetic_turns(
    chats: ChatStatistics, think_s: float, uniform: bool, draw: random.Random
) -> Iterator[SessionTurn]:
    history = 0
    left = round(draw.uniform(0.5, 2 * chats.turns - 0.5)) if uniform else 0
    while True:
        given, reply = (_length(mean, draw) for mean in (chats.input_tokens, chats.output_tokens))
        if chats.document and not history:
            given += round(math.exp(draw.uniform(*map(math.log, chats.document))))
        yield SessionTurn(history, given, reply, draw.expovariate(1 / think_s) if history else 0.0)
        history += given + reply
        left -= 1
        if left == 0 if uniform else draw.random() < 1 / chats.turns:
            return


def _length(mean: float, draw: random.Random) -> int:
    """A whole number of at least 1, exponential, rounded so that its mean stays `mean`."""
    return 1 + int(draw.expovariate(1 / (mean - 0.5)))


def poisson(per_s: float, draw: random.Random) -> Iterator[float]:
    """Times of a Poisson process, seconds, ascending, without end."""
    now = 0.0
    while True:
        now += draw.expovariate(per_s)
        yield now


def read_trace(path: Path, *, sessions_per_s: float, seed: int) -> list[Session]:
    """The sessions of a trace of lengths or text, in the order of its lines. Text counts as a token
    for every four characters, with think times of a minute on average. SettingError names the file
    and line that cannot be read."""
    starts = poisson(sessions_per_s, random.Random(seed))
    if "messages" in next(read_lines(path), ("", ""))[1]:
        objects = [(parse_json(line, where), where) for where, line in read_lines(path)]
        draw = random.Random(seed)
        texts = text_dialogues(
            objects, "conversation", lambda text: range(-(-len(text) // 4)), 60.0, draw
        )
        if not texts:
            raise SettingError("--trace", f"{path} holds no conversations")
        return [Session(text.name, next(starts), text.turns) for text in texts]
    return [
        session._replace(start_s=next(starts) if arrival is None else arrival)
        for session, arrival in read_rows(path)
    ]


def read_rows(path: Path) -> list[tuple[Session, float | None]]:
    """The conversations, and when each one arrives. SettingError as `read_trace`."""
    from .trace_lines import TraceLine, checked

    by_name: dict[str, list[TraceLine]] = {}
    for where, text in read_lines(path):
        line = checked(TraceLine, text, where)
        lines = by_name.setdefault(line.conversation, [])
        _check_turn(line, lines, where)
        lines.append(line)
    if not by_name:
        raise SettingError("--trace", f"{path} holds no requests")
    return [
        (
            Session(
                name, 0.0, tuple(line.session_turn() for line in lines), lines[0].system_tokens or 0
            ),
            lines[0].arrival_s,
        )
        for name, lines in by_name.items()
    ]


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, line) for each line that is not empty."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as lines
        ):
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SettingError("--trace", f"{path} cannot be read: {error}") from error


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingError("--trace", f"{where}: not JSON: {error}") from error


def _check_turn(line: TraceLine, before: Sequence[TraceLine], where: str) -> None:
    """The line continues its conversation."""
    name = line.conversation
    if line.turn != len(before):
        raise SettingError(
            "--trace", f"{where}: turn {line.turn} of {name} where turn {len(before)} was due"
        )
    log = sum(before[-1].session_turn()[:3]) if before else 0
    if (line.history_tokens or 0) > log:
        raise SettingError(
            "--trace", f"{where}: keeps {line.history_tokens} tokens of {name}, which has {log}"
        )
    if before and line.think_s is None:
        raise SettingError("--trace", f"{where}: turn {line.turn} of {name} needs think_s")
    if (line.system_tokens or 0) > (0 if before else line.input_tokens):
        raise SettingError(
            "--trace", f"{where}: system_tokens are part of a first turn's input_tokens"
        )


HEAD_TOKENS = 4  # made up, before text: without them a second pass would reuse the first one's KV

Encode = Callable[[str], Sequence[int]]


class SyntheticTokens(NamedTuple):
    """A number of tokens without meaning.

    key       equal keys have equal tokens, in all conversations of a run; None: unique tokens
    per_pass  tokens differ between passes over the trace
    """

    tokens: int
    key: str | None = None
    per_pass: bool = False


Piece = SyntheticTokens | array  # the array holds the token ids of a text


class Dialogue(NamedTuple):
    """A conversation to be played.

    start_s   by the trace's clock; None: it has none
    inputs    for each turn the new pieces of its prompt, together `input_tokens`
    """

    name: str
    start_s: float | None
    turns: tuple[SessionTurn, ...]
    inputs: tuple[tuple[Piece, ...], ...]


def synthetic_dialogue(session: Session, start_s: float | None = None) -> Dialogue:
    """A conversation with given lengths and synthetic tokens."""
    first = session.turns[0].input_tokens
    opening = (
        (SyntheticTokens(session.system_tokens, f"system {session.system_tokens}"),)
        if session.system_tokens
        else ()
    )
    rest = (
        (SyntheticTokens(first - session.system_tokens),) if first > session.system_tokens else ()
    )
    later = ((SyntheticTokens(turn.input_tokens),) for turn in session.turns[1:])
    return Dialogue(session.name, start_s, session.turns, ((*opening, *rest), *later))


def text_dialogues(
    objects: Sequence[tuple[Any, str]],
    name: str,
    encode: Encode | None,
    think_s: float,
    draw: random.Random,
) -> list[Dialogue]:
    if encode is None:
        raise SettingError("--tokenizer", "this trace is text: name the model's tokenizer.json")
    dialogues = []
    for value, where in objects:
        if (
            not isinstance(value, dict)
            or name not in value
            or not isinstance(value.get("messages"), list)
        ):
            raise SettingError("--trace", f"{where}: needs an object with {name} and messages")
        turns, inputs = _spoken(value["messages"], where, encode, think_s, draw)
        if turns:  # there is a reply to generate
            dialogues.append(Dialogue(str(value[name]), None, tuple(turns), tuple(inputs)))
    return dialogues


def _spoken(
    messages: Sequence[Any], where: str, encode: Encode, think_s: float, draw: random.Random
) -> tuple[list[SessionTurn], list[tuple[Piece, ...]]]:
    """A turn is the text before an assistant's message, with that message's length. The rest is
    left out.

    A user's text follows a think time; the answer of a tool alone comes at once.
    """
    turns: list[SessionTurn] = []
    inputs: list[tuple[Piece, ...]] = []
    history = 0
    prompt = array("i")
    person = False
    for message in messages:
        ids = array("i", encode(message_text(message, where)))
        if message["role"] != "assistant":
            prompt += ids
            person = person or message["role"] != "tool"
        elif prompt and ids:
            pieces: tuple[Piece, ...] = (
                (prompt,)
                if turns
                else (SyntheticTokens(HEAD_TOKENS, "text", per_pass=True), prompt)
            )
            given = len(prompt) + (0 if turns else HEAD_TOKENS)
            thought = draw.expovariate(1 / think_s) if turns and person else 0.0
            turns.append(SessionTurn(history, given, len(ids), thought))
            inputs.append(pieces)
            history = history + given + len(ids)
            prompt = array("i")
            person = False
    return turns, inputs


def message_text(message: Any, where: str) -> str:
    """The text of a message; a tool call's JSON. An empty message becomes a line: its turn was a
    request too."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, str) or (content is None and calls):
            return (content or "") + (json.dumps(calls) if calls else "") or "\n"
    raise SettingError(
        "--trace", f"{where}: a message needs a role, and a content of text or tool calls"
    )
