"""Conversations on disk: one SQLite file, one writer.

A turn is written in one transaction that is on the disk (synchronous=FULL) when `commit` returns, so after a crash
every turn is there whole or not at all. Turns form trees (`past_turns`): a row holds what its turn added, and forks,
branches and snapshots point into the same tree. A turn that nothing points to any more is deleted with the last
pointer.

Everything here blocks and belongs to one thread at a time. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import sqlite3
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import INSUFFICIENT_QUOTA, RequestError, SettingError
from .schema import SCHEMA, UPGRADES, VERSION, Conversation, Gone, Name
from .transcript import OTHERS, StoredTurn, Transcript, dialogue_keys, title_of

LOCK_SECONDS = 15.0  # for the process that had the file before to end
LOOK_SECONDS = 1.0  # for another process to let go of a file that is only looked at
EXPIRY_INTERVAL_S = 60.0

COLUMNS = ", ".join(field.name for field in fields(Conversation))
LIVE = "(coalesce(active + coalesce(history_ttl, :default_ttl), 9e99) > :now OR in_use(number))"


class HistoryStore:
    """`path`: the file, made if it is missing, or ":memory:". `history_ttl`: of conversations without their own.
    `quota`: of conversations and responses that an owner may have here, None: any number.

    `in_use`: open turns by the conversation's number; it does not expire meanwhile. Whoever opens turns counts them, in
    any one thread: here they are only looked at."""

    def __init__(self, path: str | Path, history_ttl: float | None = None, quota: int | None = None):
        """Raises SettingError if the file is in use, damaged, of a newer program, or cannot be written to."""
        self._history_ttl, self.quota = history_ttl, quota
        self.in_use: Counter[int] = Counter()
        self._expiry_due = 0.0
        self._expired: list[Gone] = []
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False)
            self._open()
        except (sqlite3.Error, OSError) as error:
            raise SettingError("--state-dir", _why_unusable(path, error)) from error

    def _open(self) -> None:
        execute = self._db.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server on the same file must not start
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        self._db.create_function("in_use", 1, self.in_use.__getitem__)
        (version,) = execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT")
        elif version in UPGRADES:
            self._upgrade(version)
        elif version != VERSION:
            raise sqlite3.DatabaseError(f"its layout has number {version}, this program's has {VERSION}")
        (fault,) = execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise sqlite3.DatabaseError(fault)
        execute(f"PRAGMA user_version = {VERSION}")  # as it is: whether it can be written to is known now

    def _upgrade(self, version: int) -> None:
        steps = "; ".join(UPGRADES[number] for number in range(version, VERSION))
        self._db.executescript(f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {VERSION}; COMMIT")

    def close(self) -> None:
        self._db.close()

    def use_tokenizer(self, digest: bytes) -> None:
        """To be called first: all tokens stored from now on are of the tokenizer with this digest. Those of another one
        are marked (`Transcript.inside` is OTHERS), for good: what was said is still there, the ids mean nothing here.
        A file without a digest, of an older program, is taken to be of this tokenizer. Raises SettingError."""
        execute = self._db.execute
        try:
            execute("BEGIN IMMEDIATE")
            if any(known != digest for (known,) in execute("SELECT digest FROM tokenizer")):
                execute("UPDATE turns SET inside = ?", (OTHERS,))
            execute("DELETE FROM tokenizer")
            execute("INSERT INTO tokenizer VALUES (?)", (digest,))
            execute("COMMIT")
        except sqlite3.Error as error:
            raise SettingError("--state-dir", f"the histories cannot be written to: {error}") from error

    # -- turns

    def commit(
        self,
        name: Name,
        whole: Transcript,
        now: float,
        salt: bytes = b"",
        behind: Name | None = None,
        **about: str | None,
    ) -> Conversation:
        """The name stands for this branch from now on; what it stood for before and nobody else needs is deleted.

        `behind`: whose turns a name that is new with this one shares, as far as it goes on from them and they are still
        there; `about`: its `parent`, `thread` and `body`. On return the turn is on the disk, if this is no part of a
        longer transaction. Raises RequestError (507) if it cannot be written; then nothing has changed.
        """
        with self.transaction(now):
            before = self._find(behind, now) if behind is not None else None
            found = self._find(name, now)
            if found is None:
                found = self._insert(name, now, **about)
            head = found.head if before is None else before.head
            turn = self._add_turn(self._nearest(head, whole), whole)
            title = title_of(whole)
            self._db.execute(
                "UPDATE conversations SET head = ?, tokens = ?, active = ?, salt = ?, title = ? WHERE number = ?",
                (turn, len(whole.tokens), now, salt, title, found.number),
            )
            self._prune(found.head)
        return replace(found, head=turn, tokens=len(whole.tokens), active=now, salt=salt, title=title)

    # -- conversations

    def find(self, name: Name, now: float) -> tuple[Conversation, StoredTurn | None] | None:
        """The conversation and its last turn; None if there is none of that name: unknown, or expired."""
        found = self._find(name, now)
        return (found, self._load(found.head)) if found is not None else None

    def get(self, name: Name, now: float) -> Conversation:
        """Raises RequestError (404) if there is none: unknown, expired, or another owner's."""
        found = self._find(name, now)
        if found is None:
            raise RequestError(404, f"there is no {name.kind} {name.id!r}", name.kind)
        return found

    def page(
        self, owner: str, limit: int, after: str | None, ascending: bool, now: float
    ) -> tuple[list[Conversation], bool]:
        """Up to `limit` conversations by creation, behind the one with the id `after`; whether there are more.

        Raises RequestError (404) for an unknown `after`.
        """
        way, sign = ("ASC", ">") if ascending else ("DESC", "<")
        start = 0 if ascending else sys.maxsize
        if after is not None:
            start = self.get(Name(owner, after), now).number
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = 'conversation' "
            f"AND number {sign} :start AND {LIVE} ORDER BY number {way} LIMIT :limit",
            self._times(now) | {"owner": owner, "start": start, "limit": limit + 1},
        ).fetchall()
        return [Conversation(*row) for row in rows[:limit]], len(rows) > limit

    def create(self, name: Name, now: float) -> Conversation:
        """An empty conversation. Raises RequestError: 409 if the name is taken, 429 beyond the owner's quota."""
        with self.transaction(now):
            self._need_free(name, now)
            return self._insert(name, now)

    def fork(self, name: Name, new_id: str, now: float) -> Conversation:
        """A second conversation with the same history. Raises RequestError: 404 unknown name, 409 taken id, 429 beyond
        the owner's quota."""
        new = name._replace(id=new_id)
        with self.transaction(now):
            source = self.get(name, now)
            self._need_free(new, now)
            fork = self._insert(new, now, parent=name.id)
            self._db.execute(
                "UPDATE conversations SET head = ?, tokens = ?, salt = ?, title = ? WHERE number = ?",
                (source.head, source.tokens, source.salt, source.title, fork.number),
            )
        return replace(fork, head=source.head, tokens=source.tokens, salt=source.salt, title=source.title)

    def change(self, name: Name, now: float, **values: float | None) -> Conversation:
        """Sets `ttl`, `history_ttl` or `pinned_until`. Raises RequestError (404)."""
        with self.transaction(now):
            found = replace(self.get(name, now), **values)  # type: ignore[arg-type]
            self._db.execute(
                "UPDATE conversations SET ttl = ?, history_ttl = ?, pinned_until = ? WHERE number = ?",
                (found.ttl, found.history_ttl, found.pinned_until, found.number),
            )
        return found

    def delete(self, name: Name, now: float) -> Gone:
        """Forgets the conversation. Raises RequestError (404)."""
        with self.transaction(now):
            return self._remove(self.get(name, now))

    def admit(self, names: Sequence[Name], now: float) -> list[int]:
        """The numbers of those that exist. RequestError (429) if one would be new and its owner has as many as the
        quota allows."""
        numbers = []
        with self.transaction(now):
            for name in names:
                if (found := self._find(name, now)) is not None:
                    numbers.append(found.number)
                else:
                    self._remove_expired(name)
                    self._need_room(name.owner, now)
        return numbers

    def take_expired(self) -> list[Gone]:
        """Conversations that have outlived their TTL and been deleted since the last call."""
        expired, self._expired = self._expired, []
        return expired

    # -- within

    @contextmanager
    def transaction(self, now: float) -> Iterator[None]:
        """All or nothing; within another one it is a part of that. Raises RequestError (507) if the disk does not take
        it."""
        if self._db.in_transaction:
            yield
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._expire(now)
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._expired.clear()
                    self._db.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            raise RequestError(507, f"the histories could not be written to: {error}") from error

    def _times(self, now: float) -> dict[str, Any]:
        return {"now": now, "default_ttl": self._history_ttl}

    def _find(self, name: Name, now: float) -> Conversation | None:
        row = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id AND {LIVE}",
            self._times(now) | name._asdict(),
        ).fetchone()
        return Conversation(*row) if row is not None else None

    def _need_free(self, name: Name, now: float) -> None:
        if self._find(name, now) is not None:
            raise RequestError(409, f"there is a {name.kind} {name.id!r} already", "id")
        self._need_room(name.owner, now)

    def _need_room(self, owner: str, now: float) -> None:
        if self.quota is None:
            return
        counted = f"SELECT count(*) FROM conversations WHERE owner = :owner AND {LIVE}"
        (count,) = self._db.execute(counted, self._times(now) | {"owner": owner}).fetchone()
        if count >= self.quota:
            message = f"{count} conversations and responses are stored for this key, the most it may have: delete some"
            raise RequestError(429, message, "conversation", INSUFFICIENT_QUOTA)

    def _insert(
        self, name: Name, now: float, parent: str | None = None, thread: str | None = None, body: str | None = None
    ) -> Conversation:
        """An expired one of that name makes room. The quota has been looked at, of a turn when it began."""
        self._remove_expired(name)
        added = self._db.execute(
            "INSERT INTO conversations (owner, id, kind, created, active, pinned_until, parent, thread, body, tokens) "
            "VALUES (:owner, :id, :kind, :now, :now, 0, :parent, :thread, :body, 0) RETURNING " + COLUMNS,
            name._asdict() | {"now": now, "parent": parent, "thread": thread or name.id, "body": body},
        )
        return Conversation(*added.fetchone())

    def _remove_expired(self, name: Name) -> None:
        """The one of that name, if there is one; it is known that it has expired."""
        named = f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id"
        if (row := self._db.execute(named, name._asdict()).fetchone()) is not None:
            self._expired.append(self._remove(Conversation(*row)))

    def _nearest(self, head: int | None, whole: Transcript) -> int | None:
        """The latest turn of the line to `head` whose messages are a beginning of this dialogue; if there are none,
        whose log is a beginning of this one."""
        beginnings, common = set(dialogue_keys("", whole.messages)), sys.maxsize
        if not whole.messages and (before := self._load(head)) is not None:
            common = common_prefix(before.transcript().tokens, whole.tokens)
        while head is not None:
            digest, parent, kept, log = self._db.execute(
                "SELECT digest, parent, kept, kept + length(tokens) / 4 FROM turns WHERE number = ?", (head,)
            ).fetchone()
            if digest in beginnings and log <= common:
                return head
            if not whole.messages:
                common = min(common, kept)
            head = parent
        return None

    def _add_turn(self, parent: int | None, whole: Transcript) -> int:
        turn = StoredTurn.behind(self._load(parent), whole)
        digest = dialogue_keys("", whole.messages)[-1]
        added = self._db.execute(
            "INSERT INTO turns (parent, digest, messages, kept, tokens, inside, text_kept, text) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                parent,
                digest,
                json.dumps(turn.messages, ensure_ascii=False),
                turn.kept,
                _packed(turn.tokens),
                turn.inside,
                turn.text_kept,
                turn.text,
            ),
        )
        assert added.lastrowid is not None
        return added.lastrowid

    def _load(self, head: int | None) -> StoredTurn | None:
        rows = self._db.execute(
            "WITH RECURSIVE line (number, depth) AS (SELECT :head, 0 UNION ALL SELECT parent, depth + 1 "
            "FROM line JOIN turns USING (number) WHERE parent IS NOT NULL) "
            "SELECT messages, kept, tokens, text_kept, text, inside FROM line JOIN turns USING (number) "
            "ORDER BY depth DESC",
            {"head": head},
        )
        turn = None
        for messages, kept, tokens, text_kept, text, inside in rows:
            turn = StoredTurn(turn, tuple(json.loads(messages)), kept, _unpacked(tokens), text_kept, text, inside)
        return turn

    def _remove(self, conversation: Conversation) -> Gone:
        past = self._load(conversation.head)
        self._db.execute("DELETE FROM conversations WHERE number = ?", (conversation.number,))
        own = self._prune(conversation.head)
        name = Name(conversation.owner, conversation.id, conversation.kind)
        if past is None:
            return Gone(name, conversation.thread, array("i"), 0, conversation.salt)
        line, tokens = list(past.lineage()), past.transcript().tokens
        alone = own == len(line)
        shared = 0 if alone else min((turn.kept for turn in line[:own]), default=len(tokens))
        thread = conversation.thread if alone or name.kind == "conversation" else None
        return Gone(name, thread, tokens, shared, conversation.salt)

    def _prune(self, turn: int | None) -> int:
        """Deletes the turn and those before it as far as neither a conversation nor another turn needs them.

        Returns how many.
        """
        deleted = 0
        while turn is not None:
            needed = self._db.execute(
                "SELECT 1 FROM conversations WHERE head = :turn UNION ALL SELECT 1 FROM turns WHERE parent = :turn",
                {"turn": turn},
            )
            if needed.fetchone() is not None:
                return deleted
            (parent,) = self._db.execute("SELECT parent FROM turns WHERE number = ?", (turn,)).fetchone()
            self._db.execute("DELETE FROM turns WHERE number = ?", (turn,))
            turn, deleted = parent, deleted + 1
        return deleted

    def _expire(self, now: float) -> None:
        """Deletes what outlived its TTL; it is invisible already, so now and then is enough."""
        if now < self._expiry_due:
            return
        self._expiry_due = now + EXPIRY_INTERVAL_S
        expired = self._db.execute(f"SELECT {COLUMNS} FROM conversations WHERE NOT ({LIVE})", self._times(now))
        self._expired += [self._remove(Conversation(*row)) for row in expired.fetchall()]


def _packed(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def _unpacked(data: bytes) -> array[int]:
    tokens = array("i", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def stored_tokenizer(path: str | Path) -> bytes | None:
    """The digest that `HistoryStore.use_tokenizer` has left in the file; None if it has none. Raises SettingError."""
    try:
        with closing(sqlite3.connect(path, timeout=LOOK_SECONDS)) as db:
            if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'tokenizer'").fetchone():
                return None
            found = db.execute("SELECT digest FROM tokenizer").fetchone()
            return None if found is None else bytes(found[0])
    except sqlite3.Error as error:
        raise SettingError("--state-dir", _why_unusable(path, error)) from error


def _why_unusable(path: str | Path, error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return f"{path} is in use by another server; give this one a directory of its own"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return f"{path} cannot be used: {error}; move it away to begin with empty histories"
    return f"cannot open {path}: {error}"
