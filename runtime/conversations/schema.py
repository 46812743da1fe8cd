"""What the history file holds: its tables, and a conversation as a row of one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

VERSION = 4

SCHEMA = """
CREATE TABLE turns (
    number INTEGER PRIMARY KEY,
    parent INTEGER REFERENCES turns,
    digest BLOB NOT NULL,           -- of all messages up to its end
    messages TEXT NOT NULL,         -- JSON: those it added
    kept INTEGER NOT NULL,          -- leading tokens of the parent's log
    tokens BLOB NOT NULL,           -- and its own behind them: int32, little-endian
    inside INTEGER NOT NULL,        -- -1: the tokens are another tokenizer's
    text_kept INTEGER NOT NULL,     -- leading characters of the parent's text
    text TEXT NOT NULL
) STRICT;
CREATE INDEX turns_parent ON turns (parent);
CREATE TABLE conversations (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    created REAL NOT NULL,
    active REAL NOT NULL,
    ttl REAL,
    history_ttl REAL,
    pinned_until REAL NOT NULL,
    parent TEXT,
    thread TEXT NOT NULL,
    body TEXT,
    tokens INTEGER NOT NULL,
    salt BLOB NOT NULL DEFAULT x'',
    title TEXT,
    head INTEGER REFERENCES turns,
    UNIQUE (owner, kind, id)
) STRICT;
CREATE TABLE tokenizer (digest BLOB NOT NULL) STRICT;  -- the one that the tokens are of, in its only row
CREATE INDEX conversations_head ON conversations (head);
CREATE INDEX conversations_listed ON conversations (owner, kind, number);
"""

UPGRADES = {
    1: "ALTER TABLE conversations ADD COLUMN salt BLOB NOT NULL DEFAULT x''",
    2: "CREATE TABLE tokenizer (digest BLOB NOT NULL) STRICT",
    3: "ALTER TABLE conversations ADD COLUMN title TEXT",
}
"""From each older version to the next one."""

Kind = Literal["conversation", "response"]


class Name(NamedTuple):
    """What a conversation or a stored response is known by. Owners never meet."""

    owner: str
    id: str
    kind: Kind = "conversation"


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, or a stored response: the state of a conversation that never changes.

    number        counts up in order of creation
    ttl           seconds after the last turn for which its KV is claimed; None: the server's default
    history_ttl   seconds after the last turn after which it is deleted; None: the server's default
    pinned_until  its KV is evicted last until then; 0: not pinned
    parent        the id it was forked from, or of the response it continues
    thread        the id under which the loop knows its KV: a response shares that of the first one in its line
    body          of a response: the object as it was sent, JSON
    tokens        length of its log
    salt          of its last turn (`Request.salt`)
    title         how its first message begins (`transcript.title_of`); None: it is empty, has no text, or had its last
                  turn under an older program
    head          number of its last turn, None: it is empty
    """

    number: int
    owner: str
    id: str
    kind: Kind
    created: float
    active: float
    ttl: float | None
    history_ttl: float | None
    pinned_until: float
    parent: str | None
    thread: str
    body: str | None
    tokens: int
    salt: bytes
    title: str | None
    head: int | None


class Gone(NamedTuple):
    """What a deleted conversation or response leaves to clean up: its log, whose first `shared` tokens others have in
    theirs. `thread`: under which the loop knows it; None: of a response, others share its line."""

    name: Name
    thread: str | None
    tokens: array[int]
    shared: int
    salt: bytes
