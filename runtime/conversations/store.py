"""Conversations in a database: a SQLite file, or a PostgreSQL that several servers share.

A turn is written in one transaction that is on the disk when `commit` returns. So after a crash
every turn is there completely or not at all. One transaction writes at a time. Turns form trees
(`transcript`): a row holds the part that its turn added, and forks, branches and snapshots point
into the same tree. A turn is deleted with the last pointer to it.

All calls block. One thread at a time may use a store. Times are seconds since the epoch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import INSUFFICIENT_QUOTA, ErrorKind, RequestError, SettingError
from .clock import HistoryClock, boot_time
from .databases import Database, open_database
from .lines import (
    Edit,
    Line,
    LineTurn,
    NewTurn,
    PlannedEdit,
    beginning,
    grown,
    new_turn,
    planned_edit,
    up_to,
)
from .schema import REMOVED, Gone, Name, Opening, StoredConversation
from .transcript import (
    OTHERS,
    StoredTurn,
    Transcript,
    dialogue_keys,
    keys_behind,
    title_of,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MOST_BRANCHES = 16  # of a conversation: each commit looks at the ends of all of them
MOST_CACHED = 4_000_000  # `Line.size` of all lines that are kept in memory, about 70 MB
# if the server that deletes what has expired is silent for longer, another one does it
SWEEPER_SECONDS = 60.0
SILENT_SECONDS = 3600.0  # a server that is cut off from the others for longer starts without KV

# Most that one transaction does. What is left is done in later ones.
MOST_EXPIRED = 25  # conversations that `expire` deletes
MOST_EXPIRED_TOKENS = 100_000  # of their logs; one conversation may have more
MOST_TURNS = 1000  # turns that are deleted
MOST_TOMBSTONES = 256  # tombstones that are read
MOST_TOMBSTONE_BYTES = 4_000_000  # of their tokens; one tombstone may have more
MOST_ERASED_TOMBSTONES = 1000  # tombstones that are deleted
MOST_ADOPTED = 1000  # turns that get a tokenizer

TURN_COLUMNS = (
    "number, parent, digest, messages, kept, tokens, inside, text_kept, text, tokenizer, id"
)
COLUMNS = ", ".join(field.name for field in fields(StoredConversation))
DIVERGED = (
    "conversation %r: the request does not continue the stored history, so %d tokens are replaced "
    "by %d; send only new "
    'messages with "history": "server" to continue it, or fork it first to keep both'
)
IN_FLIGHT = (
    "is in flight: turns with the server's history run one at a time; try again when it has ended"
)
LIVE = (
    "(coalesce(active + coalesce(history_ttl, :default_ttl), 9e99) > :now OR EXISTS (SELECT 1 FROM "
    "open_turns "
    "WHERE conversation = conversations.number AND until > {clock}))"
)
DUE = """
SELECT {columns} FROM conversations
WHERE history_ttl {given} AND {since} <= :due AND kind <> 'removed' AND NOT {live}
ORDER BY {since} LIMIT :most
"""
LINE = """
WITH RECURSIVE line (number, depth) AS (SELECT number, 0 FROM turns WHERE number = :head
UNION ALL SELECT (SELECT parent FROM turns WHERE turns.number = line.number), depth + 1 FROM line
WHERE line.number IS NOT NULL)
SELECT number, id, digest, messages, kept, tokens, text_kept, text, inside, tokenizer
FROM line JOIN turns USING (number) ORDER BY depth DESC
"""
# A subquery finds each parent by its index. For a join PostgreSQL may read the whole table, once
# for each turn.
TRACE_COLUMNS = "number, parent, digest, kept, length(tokens) / 4 AS own"
TRACES = "SELECT {columns} FROM turns WHERE number IN ({listed})"
TRACES_OF_LINES = """
WITH RECURSIVE past (number) AS (SELECT number FROM turns WHERE number IN ({listed})
UNION SELECT (SELECT parent FROM turns WHERE turns.number = past.number)
FROM past WHERE past.number IS NOT NULL)
SELECT {columns} FROM past JOIN turns USING (number)
"""
TREE = """
WITH RECURSIVE tree (number) AS (
SELECT head FROM conversations WHERE number IN ({numbers}) AND head IS NOT NULL
UNION SELECT (SELECT parent FROM turns WHERE turns.number = tree.number)
FROM tree WHERE tree.number IS NOT NULL)
SELECT number FROM tree WHERE number IS NOT NULL
"""
TREE_TURNS = """
SELECT number, parent, kept, tokens,
(SELECT count(*) FROM turns AS next WHERE next.parent = turns.number)
+ (SELECT count(*) FROM conversations WHERE head = turns.number)
FROM turns WHERE number IN ({numbers})
"""
BRANCHES = """
SELECT {columns} FROM conversations AS whole JOIN conversations AS branch
ON branch.owner = whole.owner AND branch.parent = whole.id AND branch.kind = 'branch'
WHERE whole.kind = 'conversation' AND whole.number IN ({numbers}) ORDER BY branch.number
"""
UNUSED = """
WITH RECURSIVE unused (number, parent, depth) AS (
SELECT number, parent, 0 FROM turns WHERE number = :head
AND NOT EXISTS (SELECT 1 FROM conversations WHERE head = turns.number)
AND NOT EXISTS (SELECT 1 FROM turns AS next WHERE next.parent = turns.number)
UNION ALL SELECT turns.number, turns.parent, depth + 1
FROM unused JOIN turns ON turns.number = unused.parent
WHERE NOT EXISTS (SELECT 1 FROM conversations WHERE head = turns.number)
AND NOT EXISTS (SELECT 1 FROM turns AS next
WHERE next.parent = turns.number AND next.number <> unused.number))
SELECT number FROM unused ORDER BY depth
"""
CHAIN = """
WITH RECURSIVE chain (number, parent, depth) AS (
SELECT number, parent, 1 FROM turns WHERE number = :head
UNION ALL SELECT turns.number, turns.parent, depth + 1
FROM chain JOIN turns ON turns.number = chain.parent
WHERE depth < :most) SELECT number, parent FROM chain ORDER BY depth
"""


@dataclass(slots=True)
class TreeTurn:
    """A turn without its messages. `uses`: conversations and turns that point to it."""

    parent: int | None
    kept: int
    tokens: array[int]
    uses: int


class Swept(NamedTuple):
    """The work of one call of `expire`. `conversations`: how many it deleted; `more`: whether
    another call may find more to do."""

    conversations: int
    more: bool


class Trace(NamedTuple):
    """What the search for a parent needs of a turn: columns of its row, and the number of its own
    tokens."""

    number: int
    parent: int | None
    digest: bytes
    kept: int
    own: int


class HistoryStore:
    """`where`: a file, made if it is missing, ":memory:", or a URL of PostgreSQL
    (`databases.open_database`). `history_ttl`: of conversations without their own. `quota`: of
    conversations and responses that an owner may have here, None: any number. `server`: what this
    server is called in a shared database; it keeps its name as long as it keeps KV."""

    def __init__(
        self,
        where: str | Path,
        history_ttl: float | None = None,
        quota: int | None = None,
        server: str | None = None,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = boot_time,
    ):
        """`wall`, `boot`: clocks, in seconds; the wall clock of a shared database is its own.
        Raises SettingError if the database cannot be used."""
        self._process = uuid.uuid4().hex
        self._server = server or self._process
        self.seen = 0
        self._history_ttl = history_ttl
        self.quota = quota
        self._expired: list[Gone] = []
        self._tokenizer = b""
        # by their heads, the last used one last
        self._lines: OrderedDict[int, Line] = OrderedDict()
        self._cached_size = 0
        self._db = db = open_database(where)
        self.where, self.kind, self.shared, self.lease = db.where, db.kind, db.shared, db.lease
        self.errors = db.errors
        self._live = LIVE.format(clock=self._db.clock)
        self.behind = False  # others have deleted more than this server has read
        # tombstones beyond `seen` of known deletions, also of own ones
        self._told_early: set[int] = set()
        self._boot = boot
        self._database_ahead = 0.0
        if self.shared:
            try:
                self._read_clock()
            except RequestError as error:
                raise SettingError(db.setting, error.message) from error
            wall = self._database_now
        self.clock = HistoryClock(db.kind if self.shared else "this machine", wall, boot)

    def close(self) -> None:
        self._db.close()

    def interrupt(self) -> None:
        """Called from another thread: makes a call that waits for the database fail
        (UNAVAILABLE)."""
        self._db.interrupt()

    def waiting(self) -> float:
        """Called from another thread: the seconds for which a statement has waited for the
        database's answer, or 0."""
        since = self._db.sent_at
        return time.monotonic() - since if since is not None else 0.0

    def now(self) -> float:
        """The time for all calls, seconds since the epoch; of a shared database by its own
        clock."""
        return self.clock.now()

    def _database_now(self) -> float:
        return self._boot() + self._database_ahead

    def _read_clock(self) -> None:
        ((now,),) = self._db.execute(f"SELECT {self._db.clock}")
        self._database_ahead = now - self._boot()

    @property
    def fault(self) -> RequestError | None:
        """The reason why nothing can be written, until `recover` succeeds."""
        return self._db.fault

    def recover(self) -> None:
        """Called while there is a `fault`: ends it, or raises RequestError."""
        self._db.recover()

    def use_tokenizer(self, digest: bytes) -> None:
        """Called first: tokens stored from now on are of the tokenizer with this digest. For turns
        of another tokenizer (`Transcript.inside` is OTHERS) the text is valid, but the ids are not.
        Turns of an older program, which stored no digest, count as this tokenizer's. Raises
        SettingError."""
        self._tokenizer = digest
        self._lines.clear()
        self._cached_size = 0
        adopt = (
            "UPDATE turns SET tokenizer = :digest WHERE number IN "
            "(SELECT number FROM turns WHERE tokenizer IS NULL LIMIT :most) RETURNING number"
        )
        adopted = True
        try:
            while adopted:
                with self._db.transaction():
                    adopted = bool(
                        self._db.execute(adopt, {"digest": digest, "most": MOST_ADOPTED})
                    )
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    # -- open turns

    def release(self, turn: bytes) -> None:
        """Ends an open turn that `admit` has let in. Idempotent. In SQLite it changes memory only:
        it works also while nothing can be written."""
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
        """Of a shared database: returns whether this server may use KV that it has kept. It has
        been told, or will be, of every deletion since. Raises SettingError."""
        try:
            self._forget_silent_servers()
            seen_now = (
                f"UPDATE servers SET alive = {self._db.clock} WHERE id = :server RETURNING id"
            )
            return bool(self._db.execute(seen_now, {"server": self._server}))
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    def register(self) -> None:
        """To be called before anything is served from a shared database, and after KV that may not
        be used (`is_registered`) is gone. Raises SettingError."""
        try:
            with self._db.transaction():
                if not self.is_registered():
                    self._db.execute(
                        "INSERT INTO servers SELECT CAST(:server AS TEXT), coalesce(max(number), "
                        "0), "
                        f"{self._db.clock} FROM tombstones",
                        {"server": self._server},
                    )
                ((self.seen,),) = self._db.execute(
                    "SELECT seen FROM servers WHERE id = :server", {"server": self._server}
                )
        except RequestError as error:
            raise SettingError(self._db.setting, error.message) from error

    def keep_in_step(self, turns: Sequence[bytes], erased: int, read: bool = True) -> None:
        """Of a shared database: renews the open turns, and learns what others have deleted
        (`take_expired`). To be called before `lease` seconds are over; at once if this server is
        `behind`. `erased`: all up to this tombstone (`seen`) is erased here. `read`: False if too
        much is not erased yet.

        Each statement is a transaction of its own, so that no writer waits for the many servers
        that do this."""
        self._read_clock()
        self.now()
        self.renew(turns)
        if not self.clock.suspended:
            self._forget_silent_servers()
            long_ago = {"silent": SILENT_SECONDS}
            self._db.execute(
                f"DELETE FROM open_turns WHERE until < {self._db.clock} - :silent", long_ago
            )
        self._db.execute(
            f"UPDATE servers SET seen = :erased, alive = {self._db.clock} WHERE id = :server",
            {"erased": erased, "server": self._server},
        )
        if read:
            self._read_tombstones()
        self._db.execute(
            "DELETE FROM tombstones WHERE number IN (SELECT number FROM tombstones "
            "WHERE number <= (SELECT min(seen) FROM servers) ORDER BY number LIMIT :most)",
            {"most": MOST_ERASED_TOMBSTONES},
        )

    def _forget_silent_servers(self) -> None:
        self._db.execute(
            f"DELETE FROM servers WHERE alive < {self._db.clock} - :silent",
            {"silent": SILENT_SECONDS},
        )

    def _read_tombstones(self, names: Sequence[Name] = ()) -> None:
        """Learns of the oldest deletions that are new here, at most MOST_TOMBSTONES, and of all of
        these names."""
        rows = self._db.execute(
            "SELECT new.number, new.size FROM servers LEFT JOIN (SELECT number, length(tokens) AS "
            "size FROM tombstones "
            "WHERE number > :seen ORDER BY number LIMIT :most) AS new ON true WHERE servers.id = "
            ":server "
            "ORDER BY new.number",
            {"seen": self.seen, "server": self._server, "most": MOST_TOMBSTONES + 1},
        )
        if not rows:
            what = (
                "this server was cut off from the database of the histories for too long: restart "
                "it"
            )
            raise RequestError(ErrorKind.UNAVAILABLE, what)
        new = [(number, size) for number, size in rows if number is not None]
        read, bytes_read = 0, 0
        while read < min(len(new), MOST_TOMBSTONES) and (
            not read or bytes_read + new[read][1] <= MOST_TOMBSTONE_BYTES
        ):
            bytes_read += new[read][1]
            read += 1
        if read:
            last = new[read - 1][0]
            self._learn("number <= :last", {"last": last})
            self.seen = last
            self._told_early = {number for number in self._told_early if number > last}
        self.behind = read < len(new)
        for name in names if self.behind else ():
            self._learn("owner = :owner AND kind = :kind AND id = :id", name._asdict())

    def _learn(self, which: str, values: Mapping[str, Any]) -> None:
        """Reads new tombstones, also of own deletions whose success this server does not know: the
        answer to their commit was lost."""
        rows = self._db.execute(
            "SELECT number, owner, id, kind, thread, tokens, shared, salt FROM tombstones "
            f"WHERE number > :seen AND {which} ORDER BY number",
            {"seen": self.seen, **values},
        )
        for number, owner, id, kind, thread, tokens, shared, salt in rows:
            if number not in self._told_early:
                self._expired.append(
                    Gone(Name(owner, id, kind), thread, _unpacked(tokens), shared, salt)
                )
                self._told_early.add(number)

    def _bury(self, deleted: Sequence[Gone]) -> None:
        """Records the deletions for the other servers. This one learns of them when they are
        committed."""
        if not self.shared or not deleted:
            return
        columns = ("process", "owner", "id", "kind", "thread", "tokens", "shared", "salt")
        values: dict[str, Any] = {}
        for at, (name, thread, tokens, shared, salt, _) in enumerate(deleted):
            row = (self._process, *name, thread, _packed(tokens), shared, salt)
            values |= {f"{column}_{at}": value for column, value in zip(columns, row, strict=True)}
        rows = ", ".join(
            f"({', '.join(f':{column}_{at}' for column in columns)})" for at in range(len(deleted))
        )
        numbers = self._db.execute(
            f"INSERT INTO tombstones ({', '.join(columns)}) VALUES {rows} RETURNING number", values
        )
        self._told_early |= {number for (number,) in numbers}

    def _hold(self, conversation: StoredConversation, turn: bytes, alone: bool) -> None:
        values = {
            "turn": turn,
            "number": conversation.number,
            "alone": int(alone),
            "lease": self.lease,
        }
        if alone:
            if self._held_by_another(conversation.number, turn):
                raise _in_flight(conversation)
            self._db.execute(
                "DELETE FROM open_turns WHERE conversation = :number AND alone = 1", values
            )
        self._db.execute(
            "INSERT INTO open_turns (turn, conversation, alone, until) "
            f"VALUES (:turn, :number, :alone, {self._db.clock} + :lease)",
            values,
        )

    def _held_by_another(self, number: int, turn: bytes) -> bool:
        """True if there is another open turn with the server's history."""
        held = self._db.execute(
            "SELECT 1 FROM open_turns WHERE conversation = :number AND alone = 1 AND until > "
            f"{self._db.clock} "
            "AND turn <> :turn",
            {"number": number, "turn": turn},
        )
        return bool(held)

    def in_flight(self, name: Name, now: float) -> bool:
        """True if a turn of the conversation is open, on any server."""
        conversation = self._find(name, now)
        open_turns = conversation is not None and self._db.execute(
            "SELECT 1 FROM open_turns WHERE conversation = :number AND until > "
            f"{self._db.clock} LIMIT 1",
            {"number": conversation.number},
        )
        return bool(open_turns)

    # -- turns

    def committed(self, turn: bytes) -> bool:
        """True if the turn with this id has been committed: a commit whose answer was lost may be
        repeated."""
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
    ) -> StoredConversation:
        """From now on the name stands for this branch. Turns of its former branch that no other
        name needs are deleted. Of more than MOST_BRANCHES branches the oldest are deleted, too, and
        reported like expired conversations.

        `behind`: the name whose turns a new name shares, if they exist and this branch continues
        them; `about`: its `parent`, `thread` and `body`. With an `opening` the name must still
        stand for the same branch as then, and no other turn may continue the server's history.
        Otherwise the turn is stored as a branch of the conversation, which is returned; a turn that
        continues the server's history is refused instead (CONFLICT).

        On return the turn is on the disk, unless this is part of a longer transaction. Raises
        RequestError (STORAGE_FULL) if it cannot be written; then the store is unchanged.
        """
        with self.transaction():
            before = self._find(behind, now) if behind is not None else None
            conversation = self._find(name, now)
            kept = (
                conversation is None
                or opening is None
                or self._unchanged(name, conversation, opening)
            )
            if opening is not None:
                if opening.alone and (
                    conversation is None
                    or not kept
                    or not _same_row(conversation, opening.seen[name])
                ):
                    what = (
                        "another turn has taken its place, or the conversation was deleted: this "
                        "one is not stored"
                    )
                    raise RequestError(
                        ErrorKind.CONFLICT,
                        f"this turn of conversation {name.id!r} comes too late: {what}",
                    )
                self._let_go(opening.turn)
            if conversation is None:
                conversation = self._insert(name, now, **about)
            head = conversation.head if before is None else before.head
            branches = self._branches(conversation)
            past = self._nearest(
                head, [branch.head for branch in branches if branch.head is not None], whole
            )
            parent = past.last.number if past is not None else None
            if not kept and opening is not None:
                branch = Name(name.owner, opening.turn.hex(), "branch")
                conversation = self._insert(
                    branch,
                    now,
                    conversation.history_ttl,
                    parent=name.id,
                    thread=conversation.thread,
                )
            elif name.kind == "conversation" and conversation.head not in (None, parent):
                log.info(DIVERGED, name.id, conversation.tokens, len(whole.tokens))
            turn = self._add_turn(
                past, whole, opening.turn if opening is not None else uuid.uuid4().bytes
            )
            after = replace(
                conversation,
                head=turn.number,
                tokens=len(whole.tokens),
                active=now,
                salt=salt,
                title=title_of(whole),
            )
            self._set_head(after)
            others = [branch for branch in branches if branch.head != parent]
            for continued in (branch for branch in branches if branch.head == parent):
                self._db.execute(
                    "DELETE FROM conversations WHERE number = :it", {"it": continued.number}
                )
            surplus = len(others) + (conversation.kind == "branch") - MOST_BRANCHES
            self._expired += [self._remove(oldest) for oldest in others[: max(0, surplus)]]
            self._prune(conversation.head)
            if conversation.kind != "branch" and (before is None or before.kind == "response"):
                self._forget_line(head)  # it has become longer
                self._know(grown(past, turn, whole))
        return after

    def _unchanged(self, name: Name, conversation: StoredConversation, opening: Opening) -> bool:
        """True if the turn may become the conversation's head."""
        seen = opening.seen.get(name)
        if seen is None or not _same_row(conversation, seen):
            same = conversation.head is None
        else:
            same = _same_state(conversation, seen)
        return same and not self._held_by_another(conversation.number, opening.turn)

    def _branches(self, conversation: StoredConversation) -> list[StoredConversation]:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = 'branch' AND "
            "parent = :id "
            "ORDER BY number",
            {"owner": conversation.owner, "id": conversation.id},
        )
        return (
            [StoredConversation(*row) for row in rows]
            if conversation.kind == "conversation"
            else []
        )

    # -- conversations

    def find(self, name: Name, now: float) -> tuple[StoredConversation, StoredTurn | None] | None:
        """Returns the conversation and its last turn, or None if it is unknown or expired."""
        with self._db.snapshot():
            conversation = self._find(name, now)
            if conversation is None:
                return None
            line = self._line_to(conversation.head)
            return conversation, line.last.turn if line is not None else None

    def get(self, name: Name, now: float) -> StoredConversation:
        """Raises RequestError (NOT_FOUND) if it is unknown, expired, or another owner's."""
        conversation = self._find(name, now)
        if conversation is None:
            raise RequestError(
                ErrorKind.NOT_FOUND, f"there is no {name.kind} {name.id!r}", name.kind
            )
        return conversation

    def page(
        self, owner: str, limit: int, after: str | None, ascending: bool, now: float
    ) -> tuple[list[StoredConversation], bool]:
        """Up to `limit` conversations by creation, behind the one with the id `after`; whether
        there are more.

        Raises RequestError (NOT_FOUND) for an unknown `after`.
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
        return [StoredConversation(*row) for row in rows[:limit]], len(rows) > limit

    def create(
        self,
        name: Name,
        now: float,
        first: NewTurn | None = None,
        metadata: str | None = None,
    ) -> StoredConversation:
        """Creates a conversation, which may begin with a turn (`first_turn`). Raises RequestError:
        CONFLICT if the name is taken, TOO_MANY beyond the owner's quota."""
        with self.transaction():
            self._need_free(name, now)
            created = self._insert(name, now, body=metadata)
            if first is not None:
                head = self._insert_turn(None, first, uuid.uuid4().bytes)
                title = title_of(first.turn.transcript())
                created = replace(created, head=head, title=title)
                self._set_head(created)
        return created

    def edit(self, name: Name, now: float, change: Edit) -> StoredConversation:
        """Replaces the conversation's messages without a reply. Turns in front of the first message
        that differs stay with their tokens. The messages behind them have none: the next prompt is
        tokenized from there on. KV of turns that only this conversation had is erased.

        The parts of an edit: `begin_edit`, `planned_edit` and `finish_edit`. Raises what `change`
        raises, and RequestError: NOT_FOUND; CONFLICT while a turn with the server's history is
        open, or if the history ends with a plain completion."""
        with self.transaction():
            edited = self.finish_edit(now, planned_edit(*self.begin_edit(name, now), change))
        assert edited is not None
        return edited

    def begin_edit(self, name: Name, now: float) -> tuple[StoredConversation, Line | None]:
        """The conversation and its turns, which `planned_edit` reads. RequestError (NOT_FOUND)."""
        with self._db.snapshot():
            conversation = self.get(name, now)
            return conversation, self._line_to(conversation.head)

    def finish_edit(self, now: float, planned: PlannedEdit) -> StoredConversation | None:
        """Stores the edit. None: the conversation is another one by now, and nothing is changed.
        RequestError: NOT_FOUND, CONFLICT while a turn with the server's history is open."""
        seen, past, turn, whole = planned
        name = Name(seen.owner, seen.id)
        with self.transaction():
            conversation = self.get(name, now)
            if not _same_state(conversation, seen):
                return None
            if self._held_by_another(conversation.number, b""):
                raise _in_flight(conversation)
            head = past.last.number if past is not None else None
            if turn is not None:
                head = self._insert_turn(head, turn, uuid.uuid4().bytes)
            edited = replace(
                conversation,
                head=head,
                tokens=len(whole.tokens),
                active=now,
                title=title_of(whole),
            )
            old = conversation.head
            if old is None or (past is not None and old == past.last.number):
                self._forget_line(old)
                self._set_head(edited)
            else:
                released = self._released([conversation], lambda: self._set_head(edited), head)
                # without KV of its own its claims stay, as a pin
                erased = [
                    gone._replace(kept=min(gone.shared, common_prefix(gone.tokens, whole.tokens)))
                    for gone in released
                    if gone.shared < len(gone.tokens)
                ]
                self._bury(erased)
                self._expired += erased
        return edited

    def _set_head(self, conversation: StoredConversation) -> None:
        self._db.execute(
            "UPDATE conversations SET head = :head, tokens = :tokens, active = :active, salt = "
            ":salt, "
            "title = :title WHERE number = :number",
            _row(conversation),
        )

    def fork(self, name: Name, new_id: str, now: float) -> StoredConversation:
        """Creates a second conversation with the same history and metadata. Raises RequestError:
        NOT_FOUND unknown name, CONFLICT taken id, TOO_MANY beyond the owner's quota."""
        new = name._replace(id=new_id)
        with self.transaction():
            source = self.get(name, now)
            self._need_free(new, now)
            fork = self._insert(new, now, parent=name.id, body=source.body)
            self._db.execute(
                "UPDATE conversations SET head = source.head, tokens = source.tokens, salt = "
                "source.salt, "
                "title = source.title FROM conversations AS source "
                "WHERE conversations.number = :fork AND source.number = :source",
                {"fork": fork.number, "source": source.number},
            )
        return replace(
            fork, head=source.head, tokens=source.tokens, salt=source.salt, title=source.title
        )

    def change(self, name: Name, now: float, **values: Any) -> StoredConversation:
        """Sets `ttl`, `history_ttl`, `pinned_until` or `body`. Raises RequestError (NOT_FOUND)."""
        with self.transaction():
            conversation = replace(self.get(name, now), **values)
            self._db.execute(
                "UPDATE conversations SET ttl = :ttl, history_ttl = :history_ttl, pinned_until = "
                ":pinned_until, body = :body "
                "WHERE number = :number OR (owner = :owner AND kind = 'branch' AND parent = :id)",
                _row(conversation),
            )
        return conversation

    def delete_branches(self, name: Name, now: float) -> bool:
        """Deletes some of the conversation's branches, so that its deletion is short. Returns
        whether it may have more. Raises RequestError (NOT_FOUND)."""

        def remove() -> bool:
            with self.transaction():
                branches = self._branches(self.get(name, now))
                some = list[StoredConversation]()
                tokens = 0
                while len(some) < len(branches) and tokens < MOST_EXPIRED_TOKENS:
                    some.append(branches[len(some)])
                    tokens += some[-1].tokens
                self._expired += self._remove_all(some)
            return len(some) < len(branches)

        return self.with_reserve(remove)

    def delete(self, name: Name, now: float) -> Gone:
        """Deletes the conversation. Raises RequestError (NOT_FOUND)."""

        def remove() -> Gone:
            with self.transaction():
                return self._remove(self.get(name, now))

        return self.with_reserve(remove)

    def with_reserve(self, remove: Callable[[], Result]) -> Result:
        """Calls a function that deletes in one transaction. On a full disk it is called again, with
        the room that is kept for deletions."""
        try:
            return remove()
        except RequestError as error:
            if error.kind != ErrorKind.STORAGE_FULL or not self._db.use_reserve(error):
                raise
        return remove()

    def admit(
        self, names: Sequence[Name], now: float, turn: bytes = b"", alone: bool = False
    ) -> Opening:
        """Admits a turn with this id, which will commit to these names. Existing histories do not
        expire until `release(turn)`. `alone`: the histories must exist, and no other turn continues
        them at the same time.

        RequestError: the `fault` if there is one, because the turn could not be committed;
        TOO_MANY if one would be new and its owner has as many as the quota allows; `alone`:
        NOT_FOUND and CONFLICT."""
        if self.fault is not None:
            raise RequestError(self.fault.kind, self.fault.message)
        seen = {}
        with self.transaction(durable=False):
            if self.shared:
                self._read_tombstones(names)
            for name in names:
                if (
                    conversation := self.get(name, now) if alone else self._find(name, now)
                ) is not None:
                    seen[name] = conversation
                    if turn:
                        self._hold(conversation, turn, alone)
                else:
                    self._remove_expired(name)
                    self._need_room(name.owner, now)
        return Opening(turn, alone, seen)

    def take_expired(self) -> list[Gone]:
        """Returns the conversations that were deleted since the last call and whose KV is still
        here: they have expired, were branches, or were deleted by another server."""
        expired = self._expired
        self._expired = []
        return expired

    def copy_from(self, source: Database) -> tuple[int, int]:
        """Adds the conversations of another database, all or none. Returns how many, and how many
        stay behind because their names are taken here. Raises RequestError as
        `Database.transaction`."""
        copied, present = 0, 0
        turns: dict[int | None, int | None] = {None: None}  # numbers there and here
        with self._db.transaction():
            # parents come first
            for (number,) in source.execute("SELECT number FROM turns ORDER BY number"):
                turns[number] = self._copied(source, "turns", TURN_COLUMNS, number, turns)
            listed = f"SELECT number FROM conversations WHERE kind <> '{REMOVED}' ORDER BY number"
            for (number,) in source.execute(listed):
                named = "SELECT owner, kind, id FROM conversations WHERE number = :number"
                ((owner, kind, id),) = source.execute(named, {"number": number})
                taken = (
                    "SELECT 1 FROM conversations WHERE owner = :owner AND kind = :kind AND id = :id"
                )
                if self._db.execute(taken, {"owner": owner, "kind": kind, "id": id}):
                    present += 1
                    continue
                self._copied(source, "conversations", COLUMNS, number, turns)
                copied += 1
            for turn in sorted(filter(None, turns.values()), reverse=True):
                self._prune(turn)
        return copied, present

    def _copied(
        self,
        source: Database,
        table: str,
        columns: str,
        number: int,
        turns: Mapping[int | None, int | None],
    ) -> int:
        (values,) = source.execute(
            f"SELECT {columns} FROM {table} WHERE number = :number", {"number": number}
        )
        row = dict(zip(columns.split(", "), values, strict=True))
        del row["number"]
        if table == "turns":
            # no id: no server repeats these commits, and an earlier import may have brought the
            # same turn
            row |= {"parent": turns[row["parent"]], "text": self._db.text(row["text"]), "id": None}
        else:
            row["head"] = turns[row["head"]]
        return int(
            self._db.execute(f"INSERT INTO {table} {_columns(row)} RETURNING number", row)[0][0]
        )

    # -- within

    @contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[None]:
        """All changes or none; within another transaction it is a part of that one. Raises
        RequestError as `Database.transaction`."""
        if self._db.in_transaction:
            yield
            return
        told = len(self._expired)
        told_early = self._told_early.copy()
        seen = self.seen
        try:
            with self._db.transaction(durable):
                yield
        except BaseException:
            del self._expired[told:]
            self._told_early = told_early
            self.seen = seen
            raise

    def _times(self, now: float) -> dict[str, Any]:
        return {"now": self.clock.without_jump(now), "default_ttl": self._history_ttl}

    def _find(self, name: Name, now: float) -> StoredConversation | None:
        rows = self._db.execute(
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = "
            f":id AND {self._live}",
            self._times(now) | name._asdict(),
        )
        return StoredConversation(*rows[0]) if rows else None

    def _need_free(self, name: Name, now: float) -> None:
        if self._find(name, now) is not None:
            raise RequestError(
                ErrorKind.CONFLICT, f"there is a {name.kind} {name.id!r} already", "id"
            )
        self._need_room(name.owner, now)

    def _need_room(self, owner: str, now: float) -> None:
        if self.quota is None:
            return
        counted = (
            "SELECT count(*) FROM conversations "
            f"WHERE owner = :owner AND kind IN ('conversation', 'response') AND {self._live}"
        )
        ((count,),) = self._db.execute(counted, self._times(now) | {"owner": owner})
        if count >= self.quota:
            message = (
                f"{count} conversations and responses are stored for this key, the most it may "
                "have: delete some"
            )
            raise RequestError(ErrorKind.TOO_MANY, message, "conversation", INSUFFICIENT_QUOTA)

    def _insert(
        self,
        name: Name,
        now: float,
        history_ttl: float | None = None,
        /,
        parent: str | None = None,
        thread: str | None = None,
        body: str | None = None,
    ) -> StoredConversation:
        """Inserts it in place of an expired one of that name. The quota has been checked, for a
        turn at its beginning."""
        self._remove_expired(name)
        added = self._db.execute(
            "INSERT INTO conversations "
            "(owner, id, kind, created, active, history_ttl, pinned_until, parent, thread, body, "
            "tokens) "
            "VALUES (:owner, :id, :kind, :now, :now, :history_ttl, 0, :parent, :thread, :body, 0) "
            f"RETURNING {COLUMNS}",
            name._asdict()
            | {
                "now": now,
                "parent": parent,
                "thread": thread or name.id,
                "body": body,
                "history_ttl": history_ttl,
            },
        )
        return StoredConversation(*added[0])

    def _remove_expired(self, name: Name) -> None:
        """Removes the conversation of that name, if there is one; it has expired."""
        named = (
            f"SELECT {COLUMNS} FROM conversations WHERE owner = :owner AND kind = :kind AND id = "
            ":id"
        )
        for row in self._db.execute(named, name._asdict()):
            self._expired.append(self._remove(StoredConversation(*row)))

    def _nearest(self, head: int | None, others: Sequence[int], whole: Transcript) -> Line | None:
        """Returns the line to the turn that a new one goes on from: of the lines to these heads,
        the latest turn whose messages are a beginning of this dialogue; if there is none, the
        latest one whose log is a beginning of this one. One of the `others` counts if it has more
        of the dialogue than that to `head`.

        The line to `head` is known in memory, as a rule. Of each other one only the turns that are
        not part of it are read, without their contents; all of it only if one of them may have more
        of the dialogue."""
        # messages, tokens
        line = self._line_to(head)
        best = None
        longest = (-1, -1)
        if line is not None and (match := beginning(line, whole)) is not None:
            turn, count = match
            best = up_to(line, turn)
            longest = (count, turn.log)
        traces = self._traces(others, line.turns if line is not None else {})
        if not traces:
            return best
        base, count = (
            (best.last.digest, longest[0]) if best is not None else (dialogue_keys("", ())[0], 0)
        )
        counts = {
            key: count + more for more, key in enumerate(keys_behind(base, whole.messages[count:]))
        }
        for other in others:
            number: int | None = other
            while number in traces and not self._may_have_more(
                traces[number], whole, counts, longest
            ):
                number = traces.pop(number).parent
            if number not in traces:
                continue
            line = Line(self._line(other))
            if (match := beginning(line, whole)) is not None and (
                match[1],
                match[0].log,
            ) > longest:
                best = up_to(line, match[0])
                longest = (match[1], match[0].log)
        return best

    def _traces(self, heads: Sequence[int], cached: Collection[int]) -> dict[int, Trace]:
        """The turns of the lines to these heads that are not known. Branches are short: the first
        two queries read nearly always all, however long the line is from which they have parted."""
        traces: dict[int, Trace] = {}
        ahead = {head for head in heads if head not in cached}
        for query in (TRACES, TRACES, TRACES_OF_LINES):
            if not ahead:
                break
            names = {f"turn_{place}": number for place, number in enumerate(sorted(ahead))}
            listed = ", ".join(f":{name}" for name in names)
            stored = [
                Trace(*row)
                for row in self._db.execute(
                    query.format(columns=TRACE_COLUMNS, listed=listed), names
                )
            ]
            traces |= {trace.number: trace for trace in stored if trace.number not in cached}
            parents = {trace.parent for trace in stored if trace.parent is not None}
            ahead = {parent for parent in parents if parent not in traces and parent not in cached}
        return traces

    def _may_have_more(
        self, trace: Trace, whole: Transcript, counts: Mapping[bytes, int], longest: tuple[int, int]
    ) -> bool:
        """`counts`: the messages of the dialogue's beginnings, by digest, from those of `longest`
        on."""
        log = trace.kept + trace.own
        if trace.digest not in counts or (counts[trace.digest], log) <= longest:
            return False
        if whole.messages:
            return True
        if log > len(whole.tokens):
            return False
        ((tokens,),) = self._db.execute(
            "SELECT tokens FROM turns WHERE number = :turn", {"turn": trace.number}
        )
        return _unpacked(tokens) == whole.tokens[trace.kept : log]

    def _add_turn(self, past: Line | None, whole: Transcript, id: bytes) -> LineTurn:
        """Adds a turn behind the last one of this line."""
        new = new_turn(past, whole)
        parent = past.last.number if past is not None else None
        number = self._insert_turn(parent, new, id)
        # the caller may go on changing its own messages
        turn = replace(new.turn, messages=tuple(json.loads(new.messages)))
        return LineTurn(number, id, new.digest, turn, turn.weight(len(new.messages)))

    def _insert_turn(self, parent: int | None, new: NewTurn, id: bytes) -> int:
        """Returns its number."""
        turn = new.turn
        row = {
            "parent": parent,
            "digest": new.digest,
            "messages": new.messages,
            "kept": turn.kept,
            "tokens": _packed(turn.tokens),
            "inside": turn.inside,
            "text_kept": turn.text_kept,
            "text": self._db.text(turn.text),
            "tokenizer": self._tokenizer,
            "id": id,
        }
        ((number,),) = self._db.execute(f"INSERT INTO turns {_columns(row)} RETURNING number", row)
        return int(number)

    def _line(self, head: int | None) -> dict[int, LineTurn]:
        """The turns from the first one to this one, by number."""
        if head is None:
            return {}
        rows = self._db.execute(LINE, {"head": head})
        turn = None
        line = {}
        for number, id, digest, messages, kept, tokens, text_kept, text, inside, tokenizer in rows:
            prompt_text = text if isinstance(text, str) else text.decode()
            own_inside = inside if tokenizer == self._tokenizer else OTHERS
            turn = StoredTurn(
                turn,
                tuple(json.loads(messages)),
                kept,
                _unpacked(tokens),
                text_kept,
                prompt_text,
                own_inside,
            )
            line[number] = LineTurn(number, id, digest, turn, turn.weight(len(messages)))
        return line

    # -- lines in memory: a line is read once, and grows with its conversation

    def _line_to(self, head: int | None) -> Line | None:
        """The turns from the first one to this one.

        The id tells whether the number still is that turn's: numbers of turns that were deleted, or
        whose transaction failed, are used again. Turns before it cannot change while it exists."""
        line = self._lines.get(head) if head is not None else None
        if line is not None and line.last.id is not None and self._id(head) == line.last.id:
            self._lines.move_to_end(line.last.number)
            return line
        if not (turns := self._line(head)):
            return None
        line = Line(turns)
        self._know(line)
        return line

    def _id(self, turn: int | None) -> bytes | None:
        rows = self._db.execute("SELECT id FROM turns WHERE number = :turn", {"turn": turn})
        return rows[0][0] if rows else None

    def _know(self, line: Line) -> None:
        self._forget_line(line.last.number)
        if line.size > MOST_CACHED:  # it would leave no room for others
            return
        self._lines[line.last.number] = line
        self._cached_size += line.size
        while self._cached_size > MOST_CACHED:
            self._forget_line(next(iter(self._lines)))

    def _forget_line(self, head: int | None) -> None:
        if head is not None and (line := self._lines.pop(head, None)) is not None:
            self._cached_size -= line.size

    def _remove(self, conversation: StoredConversation) -> Gone:
        """Deletes the conversation with its branches, which are reported like expired ones."""
        *branches, gone = self._remove_all([*self._branches(conversation), conversation])
        self._expired += branches
        return gone

    def _remove_all(self, conversations: Sequence[StoredConversation]) -> list[Gone]:
        """Deletes them in this order."""
        numbers = _listed([conversation.number for conversation in conversations])

        def remove() -> None:
            self._db.execute(f"DELETE FROM open_turns WHERE conversation IN ({numbers})")
            self._db.execute(f"DELETE FROM conversations WHERE number IN ({numbers})")

        all_gone = self._released(conversations, remove) if conversations else []
        self._bury(all_gone)
        return all_gone

    def _released(
        self,
        conversations: Sequence[StoredConversation],
        unlink: Callable[[], None],
        new_head: int | None = None,
    ) -> list[Gone]:
        """`unlink` takes their heads from them, and may point to `new_head` instead. Deletes
        the turns that nothing needs then."""
        numbers = _listed([conversation.number for conversation in conversations])
        turns = [turn for (turn,) in self._db.execute(TREE.format(numbers=numbers))]
        tree: dict[int, TreeTurn] = {}
        for at in range(0, len(turns), MOST_TURNS):
            some = TREE_TURNS.format(numbers=_listed(turns[at : at + MOST_TURNS]))
            for number, parent, kept, tokens, uses in self._db.execute(some):
                tree[number] = TreeTurn(parent, kept, _unpacked(tokens), uses)
        if new_head in tree:
            tree[new_head].uses += 1
        unlink()
        unused, all_gone = [], []
        for conversation in conversations:
            self._forget_line(conversation.head)
            # from its last turn to the first
            line = list[int]()
            turn = conversation.head
            while turn is not None:
                line.append(turn)
                turn = tree[turn].parent
            own = _release(line, tree)
            unused.append(line[:own])
            log = array("i")
            for turn in reversed(line):
                del log[tree[turn].kept :]
                log += tree[turn].tokens
            alone = own == len(line)
            shared = 0 if alone else min((tree[turn].kept for turn in line[:own]), default=len(log))
            name = Name(conversation.owner, conversation.id, conversation.kind)
            has_kv = name.kind == "conversation" or (alone and name.kind == "response")
            thread = conversation.thread if has_kv else None
            all_gone.append(Gone(name, thread, log, shared, conversation.salt))
        self._delete_turns(unused)
        return all_gone

    def _prune(self, turn: int | None) -> None:
        """Deletes the turn and the ones before it that neither a conversation nor another turn
        needs."""
        if turn is not None:
            self._delete_turns([[number for (number,) in self._db.execute(UNUSED, {"head": turn})]])

    def _delete_turns(self, chains: Sequence[Sequence[int]]) -> None:
        """Deletes chains of turns, each from its last turn to the first, to which nothing else
        points.

        At most MOST_TURNS. Other chains are only cut off from the turns before them, and kept for
        `expire` by a row of their own, so that no other conversation seems to share the turns
        before."""
        doomed: list[int] = []
        for chain in chains:
            if len(doomed) + len(chain) <= MOST_TURNS:
                doomed += chain
                continue
            self._db.execute(
                "UPDATE turns SET parent = NULL WHERE number = :first", {"first": chain[-1]}
            )
            row = {
                "owner": "",
                "id": uuid.uuid4().hex,
                "kind": REMOVED,
                "thread": "",
                "head": chain[0],
            }
            row |= dict.fromkeys(("created", "active", "pinned_until", "tokens"), 0)
            self._db.execute(f"INSERT INTO conversations {_columns(row)}", row)
        if doomed:
            self._db.execute(f"DELETE FROM turns WHERE number IN ({_listed(doomed)})")

    # -- expiry

    def expire(self, now: float) -> Swept:
        """Deletes some of the expired conversations, or some turns of a deleted one, in a short
        transaction. Expired conversations are invisible before. Of the servers with one database,
        one does this at a time."""
        if self.clock.suspended or (self.shared and not self._is_first_server()):
            return Swept(0, more=False)
        return self.with_reserve(lambda: self._expire(now))

    def _is_first_server(self) -> bool:
        """True for the one server whose name comes first of all servers that are not silent."""
        first = f"SELECT min(id) FROM servers WHERE alive > {self._db.clock} - :silent"
        return self._db.execute(first, {"silent": SWEEPER_SECONDS}) == [(self._server,)]

    def _expire(self, now: float) -> Swept:
        with self.transaction():
            if self._delete_removed():
                return Swept(0, more=True)
            expired = self._some_expired(now)
            if expired:
                self._expired += self._remove_all(expired)
                return Swept(len(expired), more=True)
        return Swept(0, more=False)

    def _some_expired(self, now: float) -> list[StoredConversation]:
        """Expired conversations, each behind its branches. A piece may end between them: the
        branches that it has are deleted before their conversation."""
        due: list[StoredConversation] = []
        if self._history_ttl is not None:
            due = self._due(now, "IS NULL", "active", now - self._history_ttl)
        due = due or self._due(now, "IS NOT NULL", "active + history_ttl", now)
        if not due:
            return []
        columns = ", ".join(f"branch.{column}" for column in COLUMNS.split(", "))
        numbers = _listed([conversation.number for conversation in due])
        branches: dict[tuple[str, str | None], list[StoredConversation]] = {}
        for row in self._db.execute(BRANCHES.format(columns=columns, numbers=numbers)):
            branch = StoredConversation(*row)
            branches.setdefault((branch.owner, branch.parent), []).append(branch)
        expired: dict[int, StoredConversation] = {}
        tokens = 0
        for conversation in due:
            own = (
                branches.get((conversation.owner, conversation.id), ())
                if conversation.kind == "conversation"
                else ()
            )
            for one in (*own, conversation):
                if expired and (tokens >= MOST_EXPIRED_TOKENS or len(expired) >= MOST_EXPIRED):
                    return list(expired.values())
                expired[one.number] = one
                tokens += one.tokens
        return list(expired.values())

    def _due(self, now: float, given: str, since: str, due: float) -> list[StoredConversation]:
        sql = DUE.format(columns=COLUMNS, given=given, since=since, live=self._live)
        rows = self._db.execute(sql, self._times(now) | {"due": due, "most": MOST_EXPIRED})
        return [StoredConversation(*row) for row in rows]

    def _delete_removed(self) -> bool:
        """Deletes turns that `_delete_turns` has left. False if there are none."""
        rows = self._db.execute(
            f"SELECT number, head FROM conversations WHERE kind = '{REMOVED}' LIMIT 1"
        )
        for number, head in rows:
            chain = self._db.execute(CHAIN, {"head": head, "most": MOST_TURNS})
            values = {"number": number, "head": chain[-1][1]}
            if values["head"] is None:
                self._db.execute("DELETE FROM conversations WHERE number = :number", values)
            else:
                self._db.execute(
                    "UPDATE conversations SET head = :head WHERE number = :number", values
                )
            self._db.execute(
                f"DELETE FROM turns WHERE number IN ({_listed([turn for turn, _ in chain])})"
            )
        return bool(rows)


def _release(line: Sequence[int], tree: Mapping[int, TreeTurn]) -> int:
    """A pointer to the line's head goes. Returns to how many turns nothing points then: the first
    of the line."""
    for count, turn in enumerate(line):
        tree[turn].uses -= 1
        if tree[turn].uses > 0:
            return count
    return len(line)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _in_flight(conversation: StoredConversation) -> RequestError:
    return RequestError(
        ErrorKind.CONFLICT,
        f"a turn of conversation {conversation.id!r} {IN_FLIGHT}",
        "conversation",
    )


def _same_row(one: StoredConversation, other: StoredConversation) -> bool:
    """False if one of them was made after the other's deletion: SQLite uses the numbers of deleted
    rows again."""
    return (one.number, one.created) == (other.number, other.created)


def _same_state(one: StoredConversation, other: StoredConversation) -> bool:
    """True if no turn and no edit came between. `active` tells of edits: SQLite uses the number of
    a deleted turn again."""
    return _same_row(one, other) and (one.head, one.active) == (other.head, other.active)


def _columns(row: Mapping[str, object]) -> str:
    return f"({', '.join(row)}) VALUES ({', '.join(f':{name}' for name in row)})"


def _row(conversation: StoredConversation) -> dict[str, Any]:
    return {field.name: getattr(conversation, field.name) for field in fields(StoredConversation)}


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
