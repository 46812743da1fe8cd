"""The databases of histories: a SQLite file for one server, PostgreSQL for several.

The store writes its SQL once, with parameters as ":name". The differences are here: types,
transactions, errors. All calls block. One thread at a time may use a database.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

from ...scheduler.types import ErrorKind, RequestError, SettingError
from .schema import INDEXES, OPEN_TURNS, REMOVED, SCHEMA, SERVERS, VERSION

if TYPE_CHECKING:
    import psycopg  # of the extra `postgres`

log = logging.getLogger(__name__)

LOCK_SECONDS = 15.0  # seconds for the previous process with the file to end
LOOK_SECONDS = 1.0  # seconds for another process to release a file that is only read
FOREVER = 9e99  # open turns of a server with its own database end with the server
LEASE_SECONDS = 10.0  # open turns of a server that is silent for this long are lost
ROOM_BYTES = 2**20  # bytes that a database must take before turns are computed again
RECOVERY_BYTES = 4 * ROOM_BYTES  # these in SQLite's log, their removal, and both in the file

SCHEMES = ("postgresql", "postgres")


class Database(Protocol):
    """`where`     its name for users, without a password
    `kind`        of database, for users
    `setting`     the option to name if it cannot be used
    `shared`      several servers use it at a time
    `lease`       seconds for which an open turn needs no renewal
    `clock`       SQL for its own time in seconds: the servers' clocks may differ
    `sent_at`     when the statement was sent whose answer is awaited, by `time.monotonic`; None:
                  there is none, or it is computed in this process
    `errors`      class of the driver's errors. One that is not raised as RequestError is a mistake
                  of this program
    `fault`       the reason why nothing can be written, from the first call that showed it to a
                  `recover` that succeeds
    """

    where: str
    kind: str
    setting: str
    shared: bool
    lease: float
    clock: str
    sent_at: float | None
    errors: type[Exception]
    fault: RequestError | None

    def execute(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        """Returns the rows. Raises RequestError: UNAVAILABLE if the database does not answer,
        STORAGE_FULL if it cannot write, INVALID if it cannot hold a value, INTERNAL if it is
        damaged."""

    def transaction(self, durable: bool = True) -> AbstractContextManager[None]:
        """A context manager: all changes or none, and no other transaction of any server at the
        same time. On return it is on the disk; not `durable`: a crash may undo it. Raises
        RequestError as `execute`."""

    def snapshot(self) -> AbstractContextManager[None]:
        """A context manager: all reads within see one moment. It may already be in a
        transaction."""

    @property
    def in_transaction(self) -> bool: ...

    def recover(self) -> None:
        """Writes ROOM_BYTES and removes them, which ends the `fault`. Raises RequestError as
        `execute`."""

    def use_reserve(self, refusal: RequestError) -> bool:
        """Called after a deletion was refused: frees the room that is kept for deletions on a full
        disk. False if that is not the reason, or this database keeps none."""

    def text(self, text: str) -> str | bytes:
        """Converts a text of any characters to its stored form; reading returns the same text."""

    def interrupt(self) -> None:
        """Called from another thread: makes a call that waits for an answer fail."""

    def close(self) -> None: ...


def open_database(where: str | Path) -> Database:
    """`where`: a URL of PostgreSQL, a file's path, or ":memory:". Raises SettingError if it cannot
    be used."""
    if is_url(where):
        return Postgres(str(where))
    return Sqlite(where)


def is_url(where: str | Path) -> bool:
    return isinstance(where, str) and where.partition("://")[0] in SCHEMES and "://" in where


# -- SQLite

UPGRADES = {
    1: "ALTER TABLE conversations ADD COLUMN salt BLOB NOT NULL DEFAULT x''",
    2: "CREATE TABLE tokenizer (digest BLOB NOT NULL) STRICT",
    3: "ALTER TABLE conversations ADD COLUMN title TEXT",
    4: "ALTER TABLE turns ADD COLUMN tokenizer BLOB; UPDATE turns SET tokenizer = (SELECT digest "
    "FROM tokenizer); "
    "DROP TABLE tokenizer; CREATE INDEX turns_unknown ON turns (number) WHERE tokenizer IS NULL; "
    "ALTER TABLE turns ADD COLUMN id BLOB; CREATE UNIQUE INDEX turns_id ON turns (id)",
}
"""From each older version to the next one."""

SQLITE_TYPES = {
    "serial": "INTEGER",
    "int": "INTEGER",
    "real": "REAL",
    "bytes": "BLOB",
    "text": "TEXT",
    "no_bytes": "x''",
    "strict": " STRICT",
    "lasting": "TEMP",
    "index_place": "temp.",
}
SQLITE_NAMES = "CREATE UNIQUE INDEX conversations_named ON conversations (owner, kind, id);"
SQLITE_BRANCHES = """
CREATE INDEX IF NOT EXISTS branches_of ON conversations (owner, parent, number)
WHERE kind = 'branch';
"""
SQLITE_KINDS = {
    sqlite3.SQLITE_TOOBIG: ErrorKind.INVALID,
    sqlite3.SQLITE_CORRUPT: ErrorKind.INTERNAL,
    sqlite3.SQLITE_NOTADB: ErrorKind.INTERNAL,
    sqlite3.SQLITE_BUSY: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_INTERRUPT: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_LOCKED: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_IOERR_READ: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_IOERR_SHORT_READ: ErrorKind.UNAVAILABLE,
    sqlite3.SQLITE_CANTOPEN: ErrorKind.STORAGE_FULL,
    sqlite3.SQLITE_FULL: ErrorKind.STORAGE_FULL,
    sqlite3.SQLITE_IOERR: ErrorKind.STORAGE_FULL,
    sqlite3.SQLITE_READONLY: ErrorKind.STORAGE_FULL,
}
"""By SQLite's error code, or by its last byte, which is the kind of error. Others are mistakes of
this program."""
SQLITE_MESSAGES = {
    ErrorKind.INVALID: "the histories cannot hold this: {}",
    ErrorKind.INTERNAL: (
        "the file of the histories is damaged ({}): stop the server and restore a backup, without "
        "the -wal of the damaged file beside it"
    ),
    ErrorKind.UNAVAILABLE: "the histories cannot be read now ({}); try again",
    ErrorKind.STORAGE_FULL: (
        "the histories cannot be written to ({}): make room on the disk or delete conversations"
    ),
}
REFUSED = (
    "the histories cannot be written to ({}): see whether their disk fails, is read-only or has a "
    "quota"
)
MOVED = (
    "the file of the histories was deleted, moved or replaced under the server, which still reads "
    "what was stored: move the file back, and if that does not help, restart: its -wal has the "
    "last turns. To use another file, stop the server and move the old file's -wal away too: it "
    "damages another file beside it"
)
NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)  # IOERR: a quota, or a limit on a file's size
RESERVE_BYTES = 16 * 2**20
"""Room for deletions on a full disk: for the write-ahead log of a large one, and for the 4 MB of
log before it, which are moved to the file."""
NO_RESERVE = "no room is kept for deletions on a full disk: %s cannot be allocated (%s)"


class Sqlite:
    """One file, one server. A transaction is on the disk (synchronous=FULL) when it returns."""

    kind = "SQLite"
    setting = "--state-dir"
    shared = False
    lease = FOREVER
    sent_at: float | None = None
    clock = "((julianday('now') - 2440587.5) * 86400.0)"
    errors: type[Exception] = sqlite3.Error

    def __init__(self, path: str | Path):
        """`path`: the file, created if it is missing, or ":memory:". Raises SettingError if the
        file is in use, damaged, of a newer program, or not writable."""
        self.where = ":memory:" if path == ":memory:" else os.path.abspath(path)
        self.fault: RequestError | None = None
        self._reserve = None if path == ":memory:" else Path(f"{self.where}-reserve")
        self._warned = False  # that there is no reserve
        self._opened: int | None = None  # descriptor of the file
        try:
            if path != ":memory:":
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                path, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._open()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in NO_ROOM or not self._free_reserve():
                    raise
                self._open()
                with contextlib.suppress(RequestError):  # then it is the fault
                    self.recover()
            self._keep_reserve()
        except (sqlite3.Error, OSError) as error:
            raise SettingError(self.setting, _why_unusable(path, error)) from error

    def _open(self) -> None:
        execute = self._db.execute
        # a second server on the same file must not start
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        execute("PRAGMA temp_store = MEMORY")
        (version,) = execute("PRAGMA user_version").fetchone()
        if version == 0:
            tables = (SCHEMA + SQLITE_NAMES).format(**SQLITE_TYPES)
            self._db.executescript(
                f"BEGIN IMMEDIATE; {tables} PRAGMA user_version = {VERSION}; COMMIT"
            )
        elif version in UPGRADES:
            steps = "; ".join(UPGRADES[number] for number in range(version, VERSION))
            self._db.executescript(
                f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {VERSION}; COMMIT"
            )
        elif version != VERSION:
            raise SettingError(self.setting, _of_another_version(self.where, version))
        (fault,) = execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":
            raise sqlite3.DatabaseError(fault)
        # as it is: whether it can be written to is known now
        execute(f"PRAGMA user_version = {VERSION}")
        self._db.executescript(INDEXES + SQLITE_BRANCHES + OPEN_TURNS.format(**SQLITE_TYPES))
        if self.where != ":memory:":
            # without O_PATH closing it would give up SQLite's locks
            self._opened = os.open(self.where, os.O_PATH)

    def _keep_reserve(self) -> None:
        """Allocates the reserve. A quarter of it will do where the disk has room for no more.
        Without any, turns are served as usual, but a deletion may fail on a full disk: one warning
        says so."""
        if self._reserve is None:
            return
        try:
            # Where the file system cannot allocate, the C library writes to each block instead.
            file = os.open(self._reserve, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                held = os.fstat(file).st_size
                free = shutil.disk_usage(self._reserve.parent).free
                size = min(RESERVE_BYTES, held + free - RECOVERY_BYTES)
                if max(size, held) < RESERVE_BYTES // 4:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if size > held:
                    _allocate(file, held, size)
            finally:
                os.close(file)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(NO_RESERVE, self._reserve, error.strerror)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns errors of the database into RequestError."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            primary = code & 0xFF
            kind = SQLITE_KINDS.get(code) or SQLITE_KINDS.get(primary)
            if kind is None:
                raise
            full = kind != ErrorKind.STORAGE_FULL or primary == sqlite3.SQLITE_FULL
            words = SQLITE_MESSAGES[kind] if full else REFUSED
            refusal = RequestError(kind, words.format(error))
            if (
                kind in (ErrorKind.INTERNAL, ErrorKind.STORAGE_FULL)
                or primary == sqlite3.SQLITE_IOERR
            ):
                self._keep_fault(refusal)
            raise refusal from error

    def _keep_fault(self, refusal: RequestError) -> None:
        """The fault of a damaged file stays: no later fault takes its place."""
        if self.fault is None or self.fault.kind != ErrorKind.INTERNAL:
            self.fault = refusal

    def _is_moved(self) -> bool:
        """True if another start would not find the file. SQLite goes on with one that was deleted,
        and loses it at its end."""
        if self._opened is None:
            return False
        try:
            opened = os.fstat(self._opened)
            if os.path.samestat(os.stat(self.where), opened):
                return False
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return False  # SQLite says what the disk refuses
        if opened.st_nlink:
            # SQLite would read the log into another file at this path, and damage it. The log of a
            # file without a name stays: it may be all that is left of the last turns.
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return True

    def _check_place(self) -> None:
        """Raises RequestError if the file is moved."""
        if self._is_moved():
            refusal = RequestError(ErrorKind.STORAGE_FULL, MOVED)
            self._keep_fault(refusal)
            raise refusal

    def execute(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        with self._told():
            return self._db.execute(sql, values or {}).fetchall()

    @contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """Always durable: a transaction that need not be writes no page of the file, and costs
        nothing."""
        self._check_place()
        with self._told():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def recover(self) -> None:
        """A file that is damaged does not recover."""
        if self.fault is not None and self.fault.kind == ErrorKind.INTERNAL:
            raise RequestError(self.fault.kind, self.fault.message)
        self._check_place()
        self._keep_reserve()
        self.execute("DROP TABLE IF EXISTS room")  # of a process that was killed in the middle
        self.execute(f"CREATE TABLE room AS SELECT randomblob({ROOM_BYTES}) AS bytes")
        self.execute("DROP TABLE room")
        # The next turns find room in the log and in the file.
        self.execute("PRAGMA wal_checkpoint(RESTART)")
        self.fault = None

    def use_reserve(self, refusal: RequestError) -> bool:
        cause = refusal.__cause__
        full = isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode & 0xFF in NO_ROOM
        return full and self._free_reserve()

    def _free_reserve(self) -> bool:
        """False if there is none, or the disk does not free it, such as one that has become
        read-only."""
        if self._reserve is None:
            return False
        try:
            os.truncate(self._reserve, 0)
        except FileNotFoundError:
            pass  # the log may still be moved
        except OSError:
            return False
        # The log is written from its beginning again. If that fails it may still grow.
        with contextlib.suppress(RequestError):
            self.execute("PRAGMA wal_checkpoint(RESTART)")
        return True

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        yield  # there is no other writer

    @property
    def in_transaction(self) -> bool:
        return self._db.in_transaction

    def text(self, text: str) -> str:
        return text

    def interrupt(self) -> None:
        self._db.interrupt()

    def close(self) -> None:
        self._is_moved()  # SQLite would leave the log of a file that is
        self._db.close()
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


def _allocate(file: int, held: int, size: int) -> None:
    """Makes a file of `held` bytes `size` bytes long, with room on the disk, or leaves it as it is.
    Raises OSError."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.ftruncate(file, held)
        raise


def stored_tokenizer(path: str | Path) -> bytes | None:
    """Digest of the tokenizer of the file's latest tokens; None: unknown. Raises SettingError."""
    try:
        with closing(sqlite3.connect(path, timeout=LOOK_SECONDS)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < 3:
                return None
            latest = "SELECT tokenizer FROM turns ORDER BY number DESC LIMIT 1"
            row = db.execute("SELECT digest FROM tokenizer" if version < 5 else latest).fetchone()
            return None if row is None or row[0] is None else bytes(row[0])
    except sqlite3.Error as error:
        raise SettingError(Sqlite.setting, _why_unusable(path, error)) from error


def _why_unusable(path: str | Path, error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return (
            f"{path} is in use by another server; stop that one first, or give this one a "
            "directory of its own"
        )
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return (
            f"{path} is damaged ({error}): restore a backup, without the -wal of this file beside "
            "it, or move it away to begin with empty histories"
        )
    return f"cannot open {path}: {error}"


def _of_another_version(where: str, layout: object) -> str:
    return (
        f"{where} was written by another version of Pensieve (layout {layout}; this version's is "
        f"{VERSION}): start that version, or use other histories"
    )


# -- PostgreSQL

POSTGRES_TYPES = {
    "serial": "BIGINT GENERATED BY DEFAULT AS IDENTITY",
    "int": "BIGINT",
    "real": "DOUBLE PRECISION",
    "bytes": "BYTEA",
    "text": "BYTEA",  # TEXT does not accept zero bytes, which a model may generate
    "no_bytes": "''",
    "strict": "",
    "lasting": "",
    "index_place": "",
}
# An id may be longer than an entry of a B-tree.
POSTGRES_NAMES = """
CREATE UNIQUE INDEX conversations_named ON conversations (owner, kind, md5(id));
CREATE INDEX conversations_id ON conversations USING hash (id);
CREATE TABLE layout (version BIGINT NOT NULL);
"""
POSTGRES_BRANCHES = (
    "CREATE INDEX IF NOT EXISTS branches_of ON conversations USING hash (parent) WHERE kind = "
    "'branch'"
)
TOMBSTONES_NAMED = "CREATE INDEX IF NOT EXISTS tombstones_named ON tombstones USING hash (id);"
SPACE = "pensieve"  # the schema of the tables: the database may have others
WRITER = 0x70656E73  # the advisory lock of the one open transaction
CONNECT_SECONDS = 3  # for the database to answer a new connection
RETRY_SECONDS = 1.0  # seconds after a failure for which calls are refused at once
SETTINGS = {  # milliseconds
    "search_path": SPACE,
    "statement_timeout": 10_000,
    "lock_timeout": 10_000,
    "idle_in_transaction_session_timeout": 10_000,  # a server that is cut off lets others write
}
POSTGRES_KINDS = {
    "08": ErrorKind.UNAVAILABLE,  # the connection
    "22": ErrorKind.INVALID,  # the data, such as a name with a zero byte
    "25": ErrorKind.UNAVAILABLE,  # a transaction ended after a pause, or a read-only database
    "28": ErrorKind.UNAVAILABLE,  # the login
    "40": ErrorKind.UNAVAILABLE,  # rolled back, as after a deadlock
    "53": ErrorKind.UNAVAILABLE,  # memory, connections
    "53100": ErrorKind.STORAGE_FULL,  # the disk is full
    "54": ErrorKind.INVALID,  # the size of the data
    "55": ErrorKind.UNAVAILABLE,  # a lock
    "57": ErrorKind.UNAVAILABLE,  # cancelled, or shut down
    "58": ErrorKind.UNAVAILABLE,  # the system, such as a disk that fails
    "XX": ErrorKind.INTERNAL,  # damaged tables
}
"""By SQLSTATE, or by its first two characters, which are its class. Others are mistakes of this
program."""
READ_ONLY = "25006"
AWAY = "the database of the histories does not answer; try again"
POSTGRES_MESSAGES = {
    ErrorKind.INVALID: "the histories cannot hold this: {}",
    ErrorKind.INTERNAL: "the database of the histories is damaged ({}): its log says more",
    ErrorKind.UNAVAILABLE: AWAY,
    ErrorKind.STORAGE_FULL: (
        "the histories cannot be written to ({}): make room on the disk of their database"
    ),
}


class Postgres:
    """A database that several servers share. `url`: in libpq's form.

    The next call replaces a lost connection. Reads, and transactions that have not begun, are then
    tried once more.
    """

    kind = "PostgreSQL"
    setting = "--history-url"
    shared = True
    lease = LEASE_SECONDS
    clock = "extract(epoch FROM clock_timestamp())::double precision"
    errors: type[Exception]

    def __init__(self, url: str, make: bool = True):
        """`make`: creates missing tables. Raises SettingError if the database does not answer, or
        has tables of another program."""
        self.where = without_password(url)
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None
        self._retry_at = 0.0
        self._in_transaction = False
        self.sent_at: float | None = None
        self.fault: RequestError | None = None
        try:
            import psycopg
        except ImportError:
            raise SettingError(
                self.setting, "needs more packages: pip install 'pensieve[postgres]'"
            ) from None
        self._psycopg = psycopg
        self.errors = psycopg.Error
        try:
            if make:
                self._open()
            self._connect()
        except psycopg.Error as error:
            raise SettingError(
                self.setting, f"cannot use {self.where}: {_first_line(error)}"
            ) from error

    def _open(self) -> None:
        connection = self._connect()
        with connection.transaction():
            connection.execute(f"SELECT pg_advisory_xact_lock({WRITER})")
            if connection.execute(f"SELECT to_regclass('{SPACE}.layout')").fetchone() == (None,):
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SPACE}")
                connection.execute(
                    (SCHEMA + OPEN_TURNS + SERVERS + POSTGRES_NAMES).format(**POSTGRES_TYPES)
                )
                connection.execute(f"INSERT INTO layout VALUES ({VERSION})")
            if connection.execute(f"SELECT to_regclass('{SPACE}.branches_of')").fetchone() == (
                None,
            ):
                # tables of an older program may be large
                connection.execute("SET LOCAL statement_timeout = 0")
                connection.execute(INDEXES + TOMBSTONES_NAMED + POSTGRES_BRANCHES)
            layout = connection.execute("SELECT version FROM layout").fetchone()
        if layout != (VERSION,):
            version = layout[0] if layout is not None else "none"
            raise SettingError(self.setting, _of_another_version(self.where, version))

    def _connect(self) -> psycopg.Connection[Any]:
        """The connection; a lost one is replaced."""
        if self._connection is not None and not self._connection.closed:
            return self._connection
        if time.monotonic() < self._retry_at:
            raise self._psycopg.OperationalError(AWAY)
        options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        try:
            self._connection = self._psycopg.connect(
                self._url,
                autocommit=True,
                options=options,
                application_name="pensieve",
                connect_timeout=CONNECT_SECONDS,
                tcp_user_timeout=1000 * CONNECT_SECONDS,
                keepalives_idle=CONNECT_SECONDS,
                keepalives_interval=1,
                keepalives_count=CONNECT_SECONDS,
            )
            # A database may be configured to acknowledge transactions before they are on the disk.
            self._connection.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') = 'off'"
            )
        except self._psycopg.OperationalError:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            raise
        return self._connection

    def _first(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        """Runs outside of a transaction: tried again on a new connection if the old one is lost."""
        connection = self._connection
        try:
            return self._rows(sql, values)
        except self.errors:
            if connection is None or not connection.closed:
                raise
        return self._rows(sql, values)

    def _rows(self, sql: str, values: Mapping[str, Any] | None) -> list[Any]:
        self.sent_at = time.monotonic()
        try:
            cursor = self._connect().execute(
                _with_percent(sql) if values is not None else sql, values
            )
            return cursor.fetchall() if cursor.description is not None else []
        finally:
            self.sent_at = None

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns errors of the database into RequestError."""
        try:
            yield
        except self._psycopg.Error as error:
            kind = self._kind(error)
            if kind is None:
                raise
            if error.sqlstate == READ_ONLY and self._connection is not None:
                self._connection.close()  # another one may be the primary now
            refusal = RequestError(kind, POSTGRES_MESSAGES[kind].format(_first_line(error)))
            if kind == ErrorKind.STORAGE_FULL:
                self.fault = refusal
            raise refusal from error

    def _kind(self, error: psycopg.Error) -> ErrorKind | None:
        state = error.sqlstate
        if state is not None:
            return POSTGRES_KINDS.get(state) or POSTGRES_KINDS.get(state[:2])
        if isinstance(error, self._psycopg.DataError):  # found by psycopg itself
            return ErrorKind.INVALID
        lost = isinstance(error, self._psycopg.OperationalError)  # the connection
        return ErrorKind.UNAVAILABLE if lost else None

    def execute(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        with self._told():
            return self._rows(sql, values) if self._in_transaction else self._first(sql, values)

    def transaction(self, durable: bool = True) -> AbstractContextManager[None]:
        begin = "BEGIN" if durable else "BEGIN; SET LOCAL synchronous_commit = off"
        return self._between(f"{begin}; SELECT pg_advisory_xact_lock({WRITER})")

    def snapshot(self) -> AbstractContextManager[None]:
        return self._between("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    @contextmanager
    def _between(self, begin: str) -> Iterator[None]:
        if self._in_transaction:
            yield
            return
        with self._told():
            self._in_transaction = True
            try:
                self._first(begin)
                yield
                self._rows("COMMIT", None)
            except BaseException:
                self._roll_back()
                raise
            finally:
                self._in_transaction = False

    def recover(self) -> None:
        row = {"digest": b"", "messages": "[]", "kept": 0, "inside": 0, "text_kept": 0, "text": b""}
        row["tokens"] = os.urandom(ROOM_BYTES)  # zeros would be compressed
        columns = ", ".join(row)
        values = ", ".join(f":{name}" for name in row)
        with self._told():
            try:
                self._first("BEGIN")
                self._rows(f"INSERT INTO turns ({columns}) VALUES ({values})", row)
            finally:
                self._roll_back()
        self.fault = None

    def use_reserve(self, refusal: RequestError) -> bool:
        return False

    def _roll_back(self) -> None:
        if self._connection is not None and not self._connection.closed:
            try:
                self._rows("ROLLBACK", None)
            except self._psycopg.Error:
                self._connection.close()

    @property
    def in_transaction(self) -> bool:
        return self._in_transaction

    def text(self, text: str) -> bytes:
        return text.encode()

    def interrupt(self) -> None:
        connection = self._connection
        with contextlib.suppress(OSError, self._psycopg.Error):  # it may end by itself just now
            if connection is None:
                return
            with socket.socket(fileno=os.dup(connection.fileno())) as wire:
                wire.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._retry_at = FOREVER


def look_at(url: str) -> tuple[str, list[tuple[str, float]]]:
    """A description of the database for users, and its servers with the seconds since each was last
    heard of. SettingError if it does not answer."""
    database = Postgres(url, make=False)
    try:
        ((version, has_tables),) = database.execute(
            f"SELECT current_setting('server_version'), to_regclass('{SPACE}.layout') IS NOT NULL"
        )
        place = f"{database.where}, PostgreSQL {version.partition(' ')[0]}"
        if not has_tables:
            return f"{place}, without histories yet", []
        counted = f"SELECT count(*) FROM conversations WHERE kind <> '{REMOVED}'"
        ((conversations,),) = database.execute(counted)
        servers = database.execute(f"SELECT id, {database.clock} - alive FROM servers ORDER BY id")
        return f"{place}, {conversations} conversations and responses", servers
    finally:
        database.close()


@lru_cache(maxsize=256)
def _with_percent(sql: str) -> str:
    """The SQL with psycopg's form of parameters."""
    return re.sub(r"(?<!:):([a-z_][a-z_0-9]*)", r"%(\1)s", sql)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def without_password(url: str) -> str:
    """The URL in a form that may be shown. Raises SettingError if it is not a URL."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError as error:
        raise SettingError(Postgres.setting, f"is no URL: {error}") from error
    user = unquote(parts.username or "")
    return f"{parts.scheme}://{user + '@' if user else ''}{host}{parts.path}"


def has_password(url: str) -> bool:
    """True if the URL has a password in either place that libpq reads."""
    parts = urlsplit(url)
    return ":" in parts.netloc.rpartition("@")[0] or "password=" in parts.query
