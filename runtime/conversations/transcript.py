"""A stored turn: its messages, their text as the model saw it, and the tokens of that text.

Turns form trees. A turn holds the part that it added to the one before it, so branches, forks and
snapshots share everything up to the point where they differ:

    root -- turn -- turn            a conversation names one turn, its head
                 \\- turn -- turn    another one, or the same after a diverging history

**Splicing.** Text does not determine token ids: a model seldom generates the ids that its reply's
text would be tokenized to, and the cache is looked up by ids. So when a client sends its history
again, the longest stored text with which the new prompt begins is replaced by its stored ids, and
only the rest is tokenized. Cache is shared from the front, so ids after the first difference could
not be reused anyway. A prompt with a different text is never changed.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...scheduler.turns.conversations import common_prefix
from ..text.template_form import THOUGHTS, text_of
from ..text.tokenizer import Tokenizer

OTHERS = -1
"""Value of `inside` for token ids of another tokenizer: none of them may be used."""

Message = dict[str, Any]
"""A message in the chat template's form. With `KEPT_IDS` it has the ids of the items that clients
see it as; without, they follow from the dialogue (`conversation_items`)."""

KEPT_IDS = "item_ids"

CHARACTERS_PER_ID = 4  # a token id takes the memory of four characters


@dataclass(frozen=True, slots=True)
class Transcript:
    """A dialogue up to the end of one turn.

    messages    all of them; none for a plain completion
    tokens      the log: every token id, typecode "i"
    text        rendered text, up to the last token whose text the client has seen whole
    inside      how many leading tokens that text stands for; 0 without text, or OTHERS
    """

    messages: tuple[Message, ...]
    tokens: array[int]
    text: str
    inside: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTurn:
    """One turn behind its parent. Its log is the parent's first `kept` tokens and its own; its text
    likewise."""

    parent: StoredTurn | None
    messages: tuple[Message, ...]
    kept: int
    tokens: array[int]
    text_kept: int
    text: str
    inside: int

    @classmethod
    def behind(
        cls, parent: StoredTurn | None, whole: Transcript, before: Transcript | None = None
    ) -> StoredTurn:
        """`whole.messages` begin with the parent's. `before`: the parent's transcript, if it is
        known."""
        if before is None:
            before = (
                parent.transcript() if parent is not None else Transcript((), array("i"), "", 0)
            )
        kept = common_prefix(before.tokens, whole.tokens)
        text_kept = common_prefix(before.text, whole.text)
        return cls(
            parent,
            whole.messages[len(before.messages) :],
            kept,
            whole.tokens[kept:],
            text_kept,
            whole.text[text_kept:],
            whole.inside,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the line as a list: pickle would call itself for each parent."""
        names = [one.name for one in fields(self)][1:]
        line = [tuple(getattr(turn, name) for name in names) for turn in self.lineage()]
        return _read_line, (line,)

    def weight(self, message_characters: int) -> int:
        """Its own memory in token ids, about: a template may leave out much of its messages."""
        return max(len(self.tokens), message_characters // CHARACTERS_PER_ID)

    def lineage(self) -> Iterator[StoredTurn]:
        """This turn, the one before it, and so on to the first."""
        turn: StoredTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def transcript(self) -> Transcript:
        """The whole dialogue up to this turn's end."""
        tokens = array("i")
        texts = TextPieces()
        messages: list[Message] = []
        for turn in reversed(list(self.lineage())):
            del tokens[turn.kept :]
            tokens += turn.tokens
            texts.replace_behind(turn.text_kept, turn.text)
            messages += turn.messages
        return Transcript(tuple(messages), tokens, str(texts), self.inside)


def _read_line(line: Sequence[tuple[Any, ...]]) -> StoredTurn | None:
    turn = None
    for values in reversed(line):
        turn = StoredTurn(turn, *values)
    return turn


def ends_with_completion(turn: StoredTurn) -> bool:
    """True if the log goes on behind the last message: a plain completion adds tokens and no
    message. A repeated chat with an equal reply adds no message either, but at most one token, the
    end of the sequence. Behind an edit, which has no tokens, the first turn is such a chat."""
    if turn.messages:
        return False
    spoken = turn
    while not spoken.messages:
        if spoken.parent is None:
            return True
        first = spoken
        spoken = spoken.parent
    if not spoken.tokens:
        spoken = first
    before = spoken.transcript().tokens
    log = turn.transcript().tokens
    return len(log) > len(before) + 1 and common_prefix(before, log) == len(before)


LONGEST_TITLE = 80  # characters


def title_of(whole: Transcript) -> str | None:
    """The beginning of the user's first message, in one line; of a plain completion, the beginning
    of its text. None: there is no text."""
    title = next(
        (message.get("content") for message in whole.messages if message["role"] == "user"), None
    )
    if isinstance(title, list):
        title = " ".join(part.get("text") or "" for part in title)
    if not whole.messages:
        title = whole.text
    words = " ".join((title or "")[: 4 * LONGEST_TITLE].replace("\0", "").split())
    if not words:
        return None
    return words if len(words) <= LONGEST_TITLE else words[: LONGEST_TITLE - 1].rstrip() + "…"


class TextPieces:
    """A growing text that is sometimes cut before it grows, without a copy each time."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def replace_behind(self, kept: int, piece: str) -> None:
        """The text becomes its first `kept` characters and the piece."""
        while self._length > kept:
            last = self._pieces.pop()
            self._length -= len(last)
            if self._length < kept:
                self._pieces.append(last[: kept - self._length])
                self._length = kept
        self._pieces.append(piece)
        self._length += len(piece)

    def __str__(self) -> str:
        return "".join(self._pieces)


def spliced(tokenizer: Tokenizer, text: str, turn: StoredTurn | None) -> array[int] | None:
    """Token ids of a prompt: stored ids for the longest stored text it begins with, the rest
    tokenised.

    None if it begins with no text of `turn` or those before it, or the tokenizer cannot go on
    behind the latest ones.
    """
    for past in _fitting(turn, text)[:MOST_TRIES]:
        whole = past.transcript()
        stored = whole.tokens[: whole.inside]
        rest = tokenizer.encode_behind(stored, text[len(whole.text) :])
        if rest is not None:
            return stored + rest
    return None


# failed attempts to continue after a turn: each one tokenizes the whole rest of the text
MOST_TRIES = 8


def _fitting(turn: StoredTurn | None, text: str) -> list[StoredTurn]:
    """Returns those of the turn and the ones before it whose text is a beginning of this one and
    has tokens, the latest first. Each turn's own text is compared once."""
    # leading characters that the text shares with that of the turn
    matches = []
    equal = 0
    for past in reversed(list(turn.lineage()) if turn is not None else ()):
        if equal >= past.text_kept:
            equal = past.text_kept + common_prefix(
                past.text, text[past.text_kept : past.text_kept + len(past.text)]
            )
        if equal == past.text_kept + len(past.text) and past.inside > 0:
            matches.append(past)
    return matches[::-1]


def common_beginning(turn: StoredTurn | None, messages: Sequence[Message]) -> StoredTurn | None:
    """Returns the latest turn up to `turn` whose messages, with those before it, are a beginning of
    these."""
    lineage = list(turn.lineage()) if turn is not None else []
    stored = [message for past in reversed(lineage) for message in past.messages]
    equal = common_messages(stored, messages)
    count = len(stored)
    for past in lineage:
        if 0 < count <= equal:
            return past
        count -= len(past.messages)
    return None


def stored_tokens(turn: StoredTurn | None, prompt: array[int]) -> int:
    """Returns how many leading tokens of a prompt equal the log up to `turn`, without the log's
    last token, which has no KV."""
    whole = turn.transcript() if turn is not None else None
    if whole is None or whole.inside == OTHERS:
        return 0
    return min(common_prefix(whole.tokens, prompt), max(0, len(whole.tokens) - 1))


def tokens_inside(
    tokenizer: Tokenizer, reply: Sequence[int], delivered: str, before: Sequence[int] = ()
) -> tuple[int, str]:
    """Returns how many leading tokens of a reply have their text completely in `delivered`, and
    that text.

    `before`: tokens that the reply continues, if its text was decoded as a continuation: then a
    leading space counts.

    Tokens at the end without text (end of sequence) do not count: the chat template writes them
    itself. A stop string cuts inside a token, or a few tokens before the last.
    """
    count = len(reply)
    while count and reply[count - 1] in tokenizer.special:
        count -= 1
    decoded = tokenizer.decode(before)
    for inside in range(count, max(0, count - LONGEST_CUT), -1):
        text = tokenizer.decode([*before, *reply[:inside]])
        if text.startswith(decoded) and delivered.startswith(text[len(decoded) :]):
            return inside, text[len(decoded) :]
    return 0, ""


LONGEST_CUT = 64  # tokens of a stop string; after a longer one the reply is tokenized again


class RecentTurns:
    """The latest turns by their messages, for clients that send their whole history.

    The key is a digest of the owner and of all messages, so an owner cannot find another owner's
    turns. Of two turns with equal messages and different ids the later one counts: its cache is
    more likely to be there. The size is limited by the turns' own weights (`StoredTurn.weight`). A
    turn is used together with the turns before it, so these are never removed first.
    """

    def __init__(self, most_tokens: int = 8_000_000):
        self._most_tokens = most_tokens
        self._tokens = 0
        # with their weights
        self._turns: OrderedDict[bytes, tuple[StoredTurn, int]] = OrderedDict()

    def find(self, keys: Sequence[bytes]) -> StoredTurn | None:
        """The longest known beginning of the dialogue with these keys (`dialogue_keys`)."""
        return next((self._turns[key][0] for key in reversed(keys[1:]) if key in self._turns), None)

    def add(self, keys: Sequence[bytes], turn: StoredTurn) -> None:
        """`keys`: of all of the dialogue, up to the end of `turn`."""
        count = len(keys) - 1
        for past in turn.lineage():
            if past.messages:
                self._put(keys[count], past)
            count -= len(past.messages)
        while self._tokens > self._most_tokens:
            _, (_, weight) = self._turns.popitem(last=False)
            self._tokens -= weight

    def _put(self, key: bytes, turn: StoredTurn) -> None:
        before, weight = self._turns.pop(key, (None, 0))
        self._tokens -= weight
        if turn is not before:
            weight = turn.weight(characters(turn.messages))
        self._tokens += weight
        self._turns[key] = turn, weight


def characters(value: object) -> int:
    """Returns about how many characters a JSON value takes in memory: those of its texts, and some
    for each number and container."""
    match value:
        case str():
            return len(value)
        case dict():
            return 8 + sum(map(characters, value)) + sum(map(characters, value.values()))
        case list() | tuple():
            return 8 + sum(map(characters, value))
    return 8


def dialogue_keys(owner: str, messages: Sequence[Message]) -> list[bytes]:
    """Digests of the dialogue's beginnings: entry n stands for the owner and the first n
    messages."""
    return keys_behind(hashlib.sha256(owner.encode()).digest(), messages)


def keys_behind(key: bytes, messages: Sequence[Message]) -> list[bytes]:
    """The digests of a dialogue that goes on with these messages behind a beginning with this one,
    which is entry 0."""
    keys = [key]
    for message in messages:
        canonical = json.dumps(comparable(message), sort_keys=True, ensure_ascii=True)
        keys.append(hashlib.sha256(keys[-1] + canonical.encode()).digest())
    return keys


def comparable(message: Message) -> Message:
    """The message without what clients may send back in another form: some drop thoughts, and some
    send a text as a list of parts."""
    left_out = (*THOUGHTS, KEPT_IDS)
    kept = {name: value for name, value in message.items() if name not in left_out}
    return {**kept, "content": text_of(message["content"])}


def without_ids(messages: Iterable[Message]) -> list[Message]:
    """The messages as templates and chats have them."""
    return [
        {name: value for name, value in message.items() if name != KEPT_IDS} for message in messages
    ]


def common_messages(stored: Sequence[Message], sent: Sequence[Message]) -> int:
    """How many messages at the beginning are the same, some perhaps in another form."""
    equal = 0
    for old, new in zip(stored, sent, strict=False):
        if old != new and comparable(old) != comparable(new):
            break
        equal += 1
    return equal
