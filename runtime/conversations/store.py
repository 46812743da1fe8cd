"""Conversations in a database: a SQLite file, or a PostgreSQL that several servers share.

A turn is written in one transaction that is on the disk when `commit` returns. So after a crash every turn is there
completely or not at all. One transaction writes at a time. Turns form trees (`transcript`): a row holds the part that
its turn added, and forks, branches and snapshots point into the same tree. A turn is deleted with the last pointer to
it.

All calls block. One thread at a time may use a store. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import logging
import sys
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import INSUFFICIENT_QUOTA, RequestError, SettingError
from .databases import Database, open_database
from .schema import Conversation, Gone, Name, Opening
from .transcript import OTHERS, StoredTurn, Transcript, dialogue_keys, title_of

log = logging.getLogger(__name__)

Result = TypeVar("Result")

EXPIRY_INTERVAL_S = 60.0
MOST_BRANCHES = 16  # of a conversation: each commit reads all of them
SILENT_SECONDS = 3600.0  # a server that is cut off from the others for longer starts without KV

TURN_COLUMNS = "number, parent, digest, messages, kept, tokens, inside, text_kept, text, tokenizer, id"
COLUMNS = ", ".join(field.name for field in fields(Conversation))
DIVERGED = (
    "conversation %r: the request does not continue the stored history, so %d tokens are replaced by %d; send only new "
    'messages with "history": "server" to continue it, or fork it first to keep both'
)
IN_FLIGHT = "is in flight: turns with the server's history run one at a time; try again when it has ended"
LIVE = (
    "(coalesce(active + coalesce(history_ttl, :default_ttl), 9e99) > :now OR EXISTS (SELECT 1 FROM open_turns "
    "WHERE conversation = conversations.number AND until > {clock}))"
)
LINE = """
WITH RECURSIVE line (number, depth) AS (SELECT number, 0 FROM turns WHERE number = :head
UNION ALL SELECT parent, depth + 1 FROM line JOIN turns USING (number) WHERE parent IS NOT NULL)
SELECT number, digest, messages, kept, tokens, text_kept, text, inside, tokenizer
FROM line JOIN turns USING (number) ORDER BY depth DESC
"""


class LineTurn(NamedTuple):
    number: int
    digest: bytes
    turn: StoredTurn


class HistoryStore:
    """`where`: a file, made if it is missing, ":memory:", or a URL of PostgreSQL (`databases.open_database`).
    `history_ttl`: of conversations without their own. `quota`: of conversations and responses that an owner may have
    here, None: any number. `server`: what this server is called in a shared database; it keeps its name as long as it
    keeps KV."""

    def __init__(
        self,
        where: str | Path,
        history_ttl: float | None = None,
        quota: int | None = None,
        server: str | None = None,
    ):
        """Raises SettingError if the database cannot be used."""
        self._process = uuid.uuid4().hex
        self._server, self.seen = server or self._process, 0
        self._history_ttl, self.quota = history_ttl, quota
        self._expiry_due = 0.0
        self._expired: list[Gone] = []
        self._tokenizer = b""
        self._db = db = open_database(where)
        self.where, self.kind, self.shared, self.lease = db.where, db.kind, db.shared, db.lease
        self.errors = db.errors
        self._live = LIVE.format(clock=self._db.clock)

    def close(self) -> None:
        self._db.close()

    def interrupt(self) -> None:
        """Called from another thread: makes a call that waits for the database fail (503)."""
        self._db.interrupt()

    @property
    def fault(self) -> RequestError | None:
        """The reason why nothing can be written, until `recover` succeeds."""
        return self._db.fault

    def recover(self) -> None:
        """Called while there is a `fault`: ends it, or raises RequestError."""
        self._db.recover()

    def use_tokenizer(self, digest: bytes) -> None:
        """Called first: tokens stored from now on are of the tokenizer with this digest. For turns of another tokenizer
        (`Transcript.inside` is OTHERS) the text is valid, but the ids are not. Turns of an older program, which stored
        no digest, count as this tokenizer's. Raises SettingError."""
        self._tokenizer = digest
        try:
            with self._db.transaction():
                self._db.execute("UPDATE turns SET tokenizer = :digest WHERE tokenizer IS NULL", {"digest": digest})
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    # -- open turns

    def release(self, turn: bytes) -> None:
        """Ends an open turn that `admit` has let in. Idempotent."""
        with self._db.transaction(durable=False):
            self._let_go(turn)

    def _let_go(self, turn: bytes) -> None:
        self._db.execute("DELETE FROM open_turns WHERE turn = :turn", {"turn": turn})

    def renew(self, turns: Sequence[bytes]) -> None:
        """Called at least every `lease` seconds while the turns are open."""
        names = {f"turn_{number}": turn for number, turn in enumerate(turns)}
        listed = ", ".join(f":{name}" for name in names)
        if names:
            self._db.execute(
                f"UPDATE open_turns SET until = {self._db.clock} + :lease WHERE turn IN ({listed})",
                names | {"lease": self.lease},
            )

    # -- the other servers

    def is_registered(self) -> bool:
        """Of a shared database: returns whether this server may use KV that it has kept. It has been told, or will be,
        of every deletion since. Raises SettingError."""
        try:
            self._forget_silent_servers()
            seen_now = f"UPDATE servers SET alive = {self._db.clock} WHERE id = :server RETURNING id"
            return bool(self._db.execute(seen_now, {"server": self._server}))
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    def register(self) -> None:
        """To be called before anything is served from a shared database, and after KV that may not be used
        (`is_registered`) is gone. Raises SettingError."""
        try:
            with self._db.transaction():
                if not self.is_registered():
                    self._db.execute(
                        "INSERT INTO servers SELECT CAST(:server AS TEXT), coalesce(max(number), 0), "
                        f"{self._db.clock} FROM tombstones",
                        {"server": self._server},
                    )
                ((self.seen,),) = self._db.execute(
                    "SELECT seen FROM servers WHERE id = :server", {"server": self._server}
                )
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    def keep_in_step(self, turns: Sequence[bytes], erased: int) -> None:
        """Of a shared database: renews the open turns, and learns what others have deleted (`take_expired`). To be
        called before `lease` seconds are over. `erased`: all up to this tombstone (`seen`) is erased here.

        Each statement is a transaction of its own, so that no writer waits for the many servers that do this."""
        self.renew(turns)
        self._forget_silent_servers()
        self._db.execute(
            f"UPDATE servers SET seen = :erased, alive = {self._db.clock} WHERE id = :server",
            {"erased": erased, "server": self._server},
        )
        self._read_tombstones()
        long_ago = {"silent": SILENT_SECONDS}
        self._db.execute(f"DELETE FROM open_turns WHERE until < {self._db.clock} - :silent", long_ago)
        self._db.execute("DELETE FROM tombstones WHERE number <= (SELECT min(seen) FROM servers)")

    def _forget_silent_servers(self) -> None:
        self._db.execute(f"DELETE FROM servers WHERE alive < {self._db.clock} - :silent", {"silent": SILENT_SECONDS})

    def _read_tombstones(self) -> None:
        rows = self._db.execute(
            "SELECT tombstones.number, process, owner, tombstones.id, kind, thread, tokens, shared, salt FROM servers "
            "LEFT JOIN tombstones ON tombstones.number > :seen WHERE servers.id = :server ORDER BY tombstones.number",
            {"seen": self.seen, "server": self._server},
        )
        if not rows:
            what = "this server was cut off from the database of the histories for too long: restart it"
            raise RequestError(503, what)
        if rows[0][0] is None:
            return
        for number, process, owner, id, kind, thread, tokens, shared, salt in rows:
            if process != self._process:
                self._expired.append(Gone(Name(owner, id, kind), thread, _unpacked(tokens), shared, salt))
            self.seen = number

    def _bury(self, gone: Gone) -> Gone:
        """Records the deletion for the other servers."""
        if self.shared:
            row = gone.name._asdict() | {
                "process": self._process,
                "thread": gone.thread,
                "tokens": _packed(gone.tokens),
                "shared": gone.shared,
                "salt": gone.salt,
            }
            self._db.execute(f"INSERT INTO tombstones {_columns(row)}", row)
        return gone

    def _hold(self, found: Conversation, turn: bytes, alone: bool) -> None:
        values = {"turn": turn, "number": found.number, "alone": int(alone), "lease": self.lease}
        if alone:
            if self._held_by_another(found.number, turn):
                raise RequestError(409, f"a turn of conversation {found.id!r} {IN_FLIGHT}", "conversation")
            self._db.execute("DELETE FROM open_turns WHERE conversation = :number AND alone = 1", values)
        self._db.execute(
            "INSERT INTO open_turns (turn, conversation, alone, until) "
            f"VALUES (:turn, :number, :alone, {self._db.clock} + :lease)",
            values,
        )

    def _held_by_another(self, number: int, turn: bytes) -> bool:
        """True if there is another open turn with the server's history."""
        held = self._db.execute(
            f"SELECT 1 FROM open_turns WHERE conversation = :number AND alone = 1 AND until > {self._db.clock} "
            "AND turn <> :turn",
            {"number": number, "turn": turn},
        )
        return bool(held)

    # -- turns

    def committed(self, turn: bytes) -> bool:
        """True if the turn with this id has been committed: a commit whose answer was lost may be repeated."""
        return bool(self._db.execute("SELECT 1 FROM turns WHERE id = :turn", {"turn": turn}))

    def commit(
        self,
        name: Name,
        whole: Transcript,
        now: float,
        salt: bytes = b"",
        behind: Name | None = None,
        opening: Opening | None = None,
        **about: str | None,
    ) -> Conversation:
        """From now on the name stands for this branch. Turns of its former branch that no other name needs are deleted.
        Of more than MOST_BRANCHES branches the oldest are deleted, too, and reported like expired conversations.

        `behind`: the name whose turns a new name shares, if they exist and this branch continues them; `about`: its
        `parent`, `thread` and `body`. With an `opening` the name must still stand for the same branch as then, and no
        other turn may continue the server's history. Otherwise the turn is stored as a branch of the conversation,
        which is returned; a turn that continues the server's history is refused instead (409).

        On return the turn is on the disk, unless this is part of a longer transaction. Raises RequestError (507) if it
        cannot be written; then the store is unchanged.
        """
        with self.transaction(now):
            before = self._find(behind, now) if behind is not None else None
            found = self._find(name, now)
            kept = found is None or opening is None or self._unchanged(name, found, opening)
            if opening is not None:
                if opening.alone and (found is None or not kept or not _same_row(found, opening.seen[name])):
                    what = "another turn has taken its place, or the conversation was deleted: this one is not stored"
                    raise RequestError(409, f"this turn of conversation {name.id!r} comes too late: {what}")
                self._let_go(opening.turn)
            if found is None:
                found = self._insert(name, now, **about)
            head = found.head if before is None else before.head
            branches = self._branches(found)
            parent, past = self._nearest([head, *(branch.head for branch in branches)], whole)
            if not kept and opening is not None:
                branch = Name(name.owner, opening.turn.hex(), "branch")
                found = self._insert(branch, now, found.history_ttl, parent=name.id, thread=found.thread)
            elif name.kind == "conversation" and found.head not in (None, parent):
                log.info(DIVERGED, name.id, found.tokens, len(whole.tokens))
            turn = self._add_turn(parent, past, whole, opening.turn if opening is not None else None)
            after = replace(found, head=turn, tokens=len(whole.tokens), active=now, salt=salt, title=title_of(whole))
            self._db.execute(
                "UPDATE conversations SET head = :head, tokens = :tokens, active = :active, salt = :salt, "
                "title = :title WHERE number = :number",
                _row(after),
            )
            others = [branch for branch in branches if branch.head != parent]
            for continued in (branch for branch in branches if branch.head == parent):
                self._db.execute("DELETE FROM conversations WHERE number = :it", {"it": continued.number})
            surplus = len(others) + (found.kind == "branch") - MOST_BRANCHES
            self._expired += [self._remove(oldest) for oldest in others[: max(0, surplus)]]
            self._prune(found.head)
        return after

    def _unchanged(self, name: Name, found: Conversation, opening: Opening) -> bool:
        """True if the turn may become the conversation's head."""
        seen = opening.seen.get(name)
        same = found.head is None or (seen is not None and _same_row(found, seen) and found.head == seen.head)
        return same and not self._held_by_another(found.number, opening.turn)

    def _branches(self, conversation: Conversation) -> list[Conversation]:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = 'branch' AND parent = :id "
            "ORDER BY number",
            {"owner": conversation.owner, "id": conversation.id},
        )
        return [Conversation(*row) for row in rows] if conversation.kind == "conversation" else []

    # -- conversations

    def find(self, name: Name, now: float) -> tuple[Conversation, StoredTurn | None] | None:
        """Returns the conversation and its last turn, or None if it is unknown or expired."""
        with self._db.snapshot():
            found = self._find(name, now)
            return (found, self._load(found.head)) if found is not None else None

    def get(self, name: Name, now: float) -> Conversation:
        """Raises RequestError (404) if it is unknown, expired, or another owner's."""
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
            f"AND number {sign} :start AND {self._live} ORDER BY number {way} LIMIT :limit",
            self._times(now) | {"owner": owner, "start": start, "limit": limit + 1},
        )
        return [Conversation(*row) for row in rows[:limit]], len(rows) > limit

    def create(self, name: Name, now: float) -> Conversation:
        """Creates an empty conversation. Raises RequestError: 409 if the name is taken, 429 beyond the owner's
        quota."""
        with self.transaction(now):
            self._need_free(name, now)
            return self._insert(name, now)

    def fork(self, name: Name, new_id: str, now: float) -> Conversation:
        """Creates a second conversation with the same history. Raises RequestError: 404 unknown name, 409 taken id, 429
        beyond the owner's quota."""
        new = name._replace(id=new_id)
        with self.transaction(now):
            source = self.get(name, now)
            self._need_free(new, now)
            fork = self._insert(new, now, parent=name.id)
            self._db.execute(
                "UPDATE conversations SET head = source.head, tokens = source.tokens, salt = source.salt, "
                "title = source.title FROM conversations AS source "
                "WHERE conversations.number = :fork AND source.number = :source",
                {"fork": fork.number, "source": source.number},
            )
        return replace(fork, head=source.head, tokens=source.tokens, salt=source.salt, title=source.title)

    def change(self, name: Name, now: float, **values: float | None) -> Conversation:
        """Sets `ttl`, `history_ttl` or `pinned_until`. Raises RequestError (404)."""
        with self.transaction(now):
            found = replace(self.get(name, now), **values)  # type: ignore[arg-type]
            self._db.execute(
                "UPDATE conversations SET ttl = :ttl, history_ttl = :history_ttl, pinned_until = :pinned_until "
                "WHERE number = :number OR (owner = :owner AND kind = 'branch' AND parent = :id)",
                _row(found),
            )
        return found

    def delete(self, name: Name, now: float) -> Gone:
        """Deletes the conversation. Raises RequestError (404)."""

        def remove() -> Gone:
            with self.transaction(now):
                return self._remove(self.get(name, now))

        return self.with_reserve(remove)

    def with_reserve(self, remove: Callable[[], Result]) -> Result:
        """Calls a function that deletes in one transaction. On a full disk it is called again, with
        the room that is kept for deletions."""
        try:
            return remove()
        except RequestError as error:
            if error.status != 507 or not self._db.use_reserve():
                raise
        return remove()

    def admit(self, names: Sequence[Name], now: float, turn: bytes = b"", alone: bool = False) -> Opening:
        """Admits a turn with this id, which will commit to these names. Existing histories do not expire until
        `release(turn)`. `alone`: the histories must exist, and no other turn continues them at the same time.

        RequestError: the `fault` if there is one, because the turn could not be committed; 429 if
        one would be new and its owner has as many as the quota allows; `alone`: 404 and 409."""
        if self.fault is not None:
            raise RequestError(self.fault.status, self.fault.message)
        seen = {}
        with self.transaction(now, durable=False):
            if self.shared:
                self._read_tombstones()
            for name in names:
                if (found := self.get(name, now) if alone else self._find(name, now)) is not None:
                    seen[name] = found
                    if turn:
                        self._hold(found, turn, alone)
                else:
                    self._remove_expired(name)
                    self._need_room(name.owner, now)
        return Opening(turn, alone, seen)

    def take_expired(self) -> list[Gone]:
        """Returns the conversations that were deleted since the last call and whose KV is still here: they have
        expired, were branches, or were deleted by another server."""
        expired, self._expired = self._expired, []
        return expired

    def copy_from(self, source: Database) -> tuple[int, int]:
        """Adds the conversations of another database, all or none. Returns how many, and how many stay behind because
        their names are taken here. Raises RequestError as `Database.transaction`."""
        copied, known = 0, 0
        turns: dict[int | None, int | None] = {None: None}  # numbers there and here
        with self._db.transaction():
            for (number,) in source.execute("SELECT number FROM turns ORDER BY number"):  # parents come first
                turns[number] = self._copied(source, "turns", TURN_COLUMNS, number, turns)
            for (number,) in source.execute("SELECT number FROM conversations ORDER BY number"):
                named = "SELECT owner, kind, id FROM conversations WHERE number = :number"
                ((owner, kind, id),) = source.execute(named, {"number": number})
                taken = "SELECT 1 FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id"
                if self._db.execute(taken, {"owner": owner, "kind": kind, "id": id}):
                    known += 1
                    continue
                self._copied(source, "conversations", COLUMNS, number, turns)
                copied += 1
            for turn in sorted(filter(None, turns.values()), reverse=True):
                self._prune(turn)
        return copied, known

    def _copied(
        self, source: Database, table: str, columns: str, number: int, turns: Mapping[int | None, int | None]
    ) -> int:
        (values,) = source.execute(f"SELECT {columns} FROM {table} WHERE number = :number", {"number": number})
        row = dict(zip(columns.split(", "), values, strict=True))
        del row["number"]
        if table == "turns":
            # no id: no server repeats these commits, and an earlier import may have brought the same turn
            row |= {"parent": turns[row["parent"]], "text": self._db.text(row["text"]), "id": None}
        else:
            row["head"] = turns[row["head"]]
        return int(self._db.execute(f"INSERT INTO {table} {_columns(row)} RETURNING number", row)[0][0])

    # -- within

    @contextmanager
    def transaction(self, now: float, durable: bool = True) -> Iterator[None]:
        """All changes or none; within another transaction it is a part of that one. Raises RequestError as
        `Database.transaction`."""
        if self._db.in_transaction:
            yield
            return
        told, seen = len(self._expired), self.seen
        try:
            with self._db.transaction(durable):
                self._expire(now)
                yield
        except BaseException:
            del self._expired[told:]
            self.seen = seen
            raise

    def _times(self, now: float) -> dict[str, Any]:
        return {"now": now, "default_ttl": self._history_ttl}

    def _find(self, name: Name, now: float) -> Conversation | None:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id AND {self._live}",
            self._times(now) | name._asdict(),
        )
        return Conversation(*rows[0]) if rows else None

    def _need_free(self, name: Name, now: float) -> None:
        if self._find(name, now) is not None:
            raise RequestError(409, f"there is a {name.kind} {name.id!r} already", "id")
        self._need_room(name.owner, now)

    def _need_room(self, owner: str, now: float) -> None:
        if self.quota is None:
            return
        counted = f"SELECT count(*) FROM conversations WHERE owner = :owner AND kind <> 'branch' AND {self._live}"
        ((count,),) = self._db.execute(counted, self._times(now) | {"owner": owner})
        if count >= self.quota:
            message = f"{count} conversations and responses are stored for this key, the most it may have: delete some"
            raise RequestError(429, message, "conversation", INSUFFICIENT_QUOTA)

    def _insert(
        self,
        name: Name,
        now: float,
        history_ttl: float | None = None,
        /,
        parent: str | None = None,
        thread: str | None = None,
        body: str | None = None,
    ) -> Conversation:
        """Inserts it in place of an expired one of that name. The quota has been checked, for a turn at its
        beginning."""
        self._remove_expired(name)
        added = self._db.execute(
            "INSERT INTO conversations "
            "(owner, id, kind, created, active, history_ttl, pinned_until, parent, thread, body, tokens) "
            "VALUES (:owner, :id, :kind, :now, :now, :history_ttl, 0, :parent, :thread, :body, 0) "
            f"RETURNING {COLUMNS}",
            name._asdict()
            | {"now": now, "parent": parent, "thread": thread or name.id, "body": body, "history_ttl": history_ttl},
        )
        return Conversation(*added[0])

    def _remove_expired(self, name: Name) -> None:
        """Removes the conversation of that name, if there is one; it has expired."""
        named = f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id"
        for row in self._db.execute(named, name._asdict()):
            self._expired.append(self._remove(Conversation(*row)))

    def _nearest(self, heads: Sequence[int | None], whole: Transcript) -> tuple[int | None, StoredTurn | None]:
        """Returns the latest turn of the lines to these heads whose messages are a beginning of this dialogue; if there
        is none, the latest one whose log is a beginning of this one."""
        beginnings = {key: count for count, key in enumerate(dialogue_keys("", whole.messages))}
        best: tuple[int | None, StoredTurn | None] = (None, None)
        longest = (-1, -1)  # messages, tokens
        for head in heads:
            line, common = self._line(head), sys.maxsize
            if line and not whole.messages:
                common = common_prefix(line[-1].turn.transcript().tokens, whole.tokens)
            for number, digest, turn in reversed(line):
                log = turn.kept + len(turn.tokens)
                if digest in beginnings and log <= common:
                    if (length := (beginnings[digest], log)) > longest:
                        best, longest = (number, turn), length
                    break
                if not whole.messages:
                    common = min(common, turn.kept)
        return best

    def _add_turn(self, parent: int | None, past: StoredTurn | None, whole: Transcript, id: bytes | None) -> int:
        turn = StoredTurn.behind(past, whole)
        row = {
            "parent": parent,
            "digest": dialogue_keys("", whole.messages)[-1],
            "messages": json.dumps(turn.messages, ensure_ascii=False),
            "kept": turn.kept,
            "tokens": _packed(turn.tokens),
            "inside": turn.inside,
            "text_kept": turn.text_kept,
            "text": self._db.text(turn.text),
            "tokenizer": self._tokenizer,
            "id": id,
        }
        added = self._db.execute(f"INSERT INTO turns {_columns(row)} RETURNING number", row)
        return int(added[0][0])

    def _load(self, head: int | None) -> StoredTurn | None:
        line = self._line(head)
        return line[-1].turn if line else None

    def _line(self, head: int | None) -> list[LineTurn]:
        """The turns from the first one to this one."""
        if head is None:
            return []
        rows = self._db.execute(LINE, {"head": head})
        turn, line = None, []
        for number, digest, messages, kept, tokens, text_kept, text, inside, tokenizer in rows:
            said = text if isinstance(text, str) else text.decode()
            known = inside if tokenizer == self._tokenizer else OTHERS
            turn = StoredTurn(turn, tuple(json.loads(messages)), kept, _unpacked(tokens), text_kept, said, known)
            line.append(LineTurn(number, digest, turn))
        return line

    def _remove(self, conversation: Conversation) -> Gone:
        """Deletes the conversation with its branches, which are reported like expired ones."""
        self._expired += [self._remove(branch) for branch in self._branches(conversation)]
        past = self._load(conversation.head)
        for table, column in (("open_turns", "conversation"), ("conversations", "number")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = :number", {"number": conversation.number})
        own = self._prune(conversation.head)
        name = Name(conversation.owner, conversation.id, conversation.kind)
        if past is None:
            return self._bury(Gone(name, conversation.thread, array("i"), 0, conversation.salt))
        line, tokens = list(past.lineage()), past.transcript().tokens
        alone = own == len(line)
        shared = 0 if alone else min((turn.kept for turn in line[:own]), default=len(tokens))
        thread = conversation.thread if name.kind == "conversation" or (alone and name.kind == "response") else None
        return self._bury(Gone(name, thread, tokens, shared, conversation.salt))

    def _prune(self, turn: int | None) -> int:
        """Deletes the turn and the ones before it that neither a conversation nor another turn needs.

        Returns how many.
        """
        deleted = 0
        while turn is not None:
            gone = self._db.execute(
                "DELETE FROM turns WHERE number = :turn "
                "AND NOT EXISTS (SELECT 1 FROM conversations WHERE head = :turn) "
                "AND NOT EXISTS (SELECT 1 FROM turns AS next WHERE next.parent = :turn) RETURNING parent",
                {"turn": turn},
            )
            if not gone:
                return deleted
            turn, deleted = gone[0][0], deleted + 1
        return deleted

    def _expire(self, now: float) -> None:
        """Deletes expired conversations. They are already invisible, so this need not run often."""
        if now < self._expiry_due:
            return
        self._expiry_due = now + EXPIRY_INTERVAL_S
        expired = self._db.execute(f"SELECT {COLUMNS} FROM conversations WHERE NOT {self._live}", self._times(now))
        self._expired += [self._remove(Conversation(*row)) for row in expired]


def _same_row(one: Conversation, other: Conversation) -> bool:
    """False if one of them was made after the other's deletion: SQLite uses the numbers of deleted rows again."""
    return (one.number, one.created) == (other.number, other.created)


def _columns(row: Mapping[str, object]) -> str:
    return f"({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"


def _row(conversation: Conversation) -> dict[str, Any]:
    return {field.name: getattr(conversation, field.name) for field in fields(Conversation)}


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
