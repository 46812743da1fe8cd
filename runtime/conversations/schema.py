"""The history store's tables, and a conversation as a row of one.

The SQL is written once. A database fills in the types (`{serial}`: a number that counts up by
itself) and its own form of parameters.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal, NamedTuple

VERSION = 5

SCHEMA = """
CREATE TABLE turns (
    number {serial} PRIMARY KEY,
    parent {int} REFERENCES turns,
    digest {bytes} NOT NULL,        -- of all messages up to its end
    messages TEXT NOT NULL,         -- JSON: those it added
    kept {int} NOT NULL,            -- leading tokens of the parent's log
    tokens {bytes} NOT NULL,        -- and its own behind them: int32, little-endian
    inside {int} NOT NULL,          -- -1: the tokens are of a tokenizer that is not known any more
    text_kept {int} NOT NULL,       -- leading characters of the parent's text
    text {text} NOT NULL,
    tokenizer {bytes},              -- digest of the tokenizer of `tokens` and `inside`;
                                    -- NULL: of an older program
    id {bytes}                      -- unique: of the open turn (`Opening.turn`) whose commit this
                                    -- is; NULL: of an older program, or imported
){strict};
CREATE INDEX turns_parent ON turns (parent);
CREATE INDEX turns_unknown ON turns (number) WHERE tokenizer IS NULL;
CREATE UNIQUE INDEX turns_id ON turns (id);
CREATE TABLE conversations (
    number {serial} PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    created {real} NOT NULL,
    active {real} NOT NULL,
    ttl {real},
    history_ttl {real},
    pinned_until {real} NOT NULL,
    parent TEXT,
    thread TEXT NOT NULL,
    body TEXT,
    tokens {int} NOT NULL,
    salt {bytes} NOT NULL DEFAULT {no_bytes},
    title TEXT,
    head {int} REFERENCES turns
){strict};
CREATE INDEX conversations_head ON conversations (head);
CREATE INDEX conversations_listed ON conversations (owner, kind, number);
"""

INDEXES = """
CREATE INDEX IF NOT EXISTS conversations_due ON conversations (active) WHERE history_ttl IS NULL;
CREATE INDEX IF NOT EXISTS conversations_due_own ON conversations ((active + history_ttl))
WHERE history_ttl IS NOT NULL;
CREATE INDEX IF NOT EXISTS conversations_removed ON conversations (number) WHERE kind = 'removed';
"""
"""Of expiry. Tables of an older program get them at the start; it may go on using the tables."""

OPEN_TURNS = """
CREATE {lasting} TABLE open_turns (  -- a conversation does not expire while a turn of it is open
    turn {bytes} NOT NULL,
    conversation {int} NOT NULL,
    alone {int} NOT NULL,            -- 1: the one turn with the server's history
    until {real} NOT NULL,           -- by the database's clock; then its server has died
    PRIMARY KEY (turn, conversation)
);
CREATE INDEX {index_place}open_turns_conversation ON open_turns (conversation);
"""

SERVERS = """
CREATE TABLE servers (
    id TEXT PRIMARY KEY,
    seen {int} NOT NULL,             -- the latest tombstone of which it has erased all
    alive {real} NOT NULL
);
CREATE TABLE tombstones (            -- as `Gone`; kept until every server has seen it
    number {serial} PRIMARY KEY,
    process TEXT NOT NULL,           -- server that deleted it, whose loop erases its own KV at once
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    thread TEXT,
    tokens {bytes} NOT NULL,
    shared {int} NOT NULL,
    salt {bytes} NOT NULL
);
"""

REMOVED = "removed"
"""The kind of a row that is no conversation: it holds turns of a deleted one until they are deleted
too."""

Kind = Literal["conversation", "response", "branch"]
"""A branch is a turn that was committed although another one had been: its `parent` is the
conversation's id. It is not listed, and is deleted with the conversation, or with the first turn of
the conversation that continues it."""


class Name(NamedTuple):
    """The name of a conversation or a stored response. Different owners never share one."""

    owner: str
    id: str
    kind: Kind = "conversation"


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation, or a stored response: the state of a conversation that never changes.

    number        counts up in order of creation
    ttl           seconds after the last turn for which its KV is claimed; None: the server's
                  default
    history_ttl   seconds after the last turn after which it is deleted; None: the server's default
    pinned_until  time until which its KV is evicted last; 0: not pinned
    parent        the id of the conversation that it was forked from, or of the response that it
                  continues
    thread        the loop's id for its KV: a response shares that of the first one in its line
    body          JSON; of a response: the object as it was sent; of a conversation: its metadata
    tokens        length of its log
    salt          of its last turn (`Request.salt`)
    title         the beginning of its first message (`transcript.title_of`); None: it is empty, has
                  no text, or had its last turn under an older program
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
    """The parts of a deleted conversation or response to clean up: its log, whose first `shared`
    tokens belong to other logs too. `thread`: the loop's id for it; None: of a response whose line
    has others. `kept`: leading tokens that an edit leaves to the conversation itself; 0: none, or
    another server has deleted it."""

    name: Name
    thread: str | None
    tokens: array[int]
    shared: int
    salt: bytes
    kept: int = 0


class Opening(NamedTuple):
    """A turn that the store has let in.

    turn   its unique id: shows that a commit is repeated, and which turn holds the conversation
    alone  it continues the server's history, and no other such turn is open
    seen   the existing conversations and responses, as they were when it opened
    """

    turn: bytes
    alone: bool
    seen: dict[Name, StoredConversation]
