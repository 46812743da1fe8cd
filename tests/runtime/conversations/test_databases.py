"""Which database is used, and what is said when it cannot be."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pensieve.runtime.conversations import databases
from pensieve.runtime.conversations.databases import (
    Postgres,
    Sqlite,
    open_database,
    without_password,
)
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import Transcript
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.settings import HISTORY_URL, ServeSettings
from pensieve.scheduler.types import ErrorKind, RequestError, SettingError
from pensieve.scripts import doctor, import_histories

from .full_disk import full_file
from .test_store import dialogue, refused, rows, stored, transcript


def test_an_option_comes_before_the_environment_and_a_file_in_the_state_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def histories(**options: object) -> str:
        return http_settings(ServeSettings("demo", state_dir=tmp_path, **options)).histories  # type: ignore[arg-type]

    monkeypatch.delenv(HISTORY_URL, raising=False)
    assert histories() == str(tmp_path / "history.sqlite")
    monkeypatch.setenv(HISTORY_URL, "postgres://me:secret@one/x")
    assert histories() == "postgres://me:secret@one/x"
    assert histories(history_url="postgresql://two/x") == "postgresql://two/x"
    monkeypatch.setenv(HISTORY_URL, "one")
    with pytest.raises(SettingError, match=rf"{HISTORY_URL}: must be a URL"):
        histories()


def test_a_database_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--history-url: cannot use postgresql://me@/x") as error:
        open_database(f"postgresql://me:secret@/x?host={tmp_path}")
    assert "secret" not in str(error.value)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SettingError, match=r"pip install 'pensieve\[postgres\]'"):
        open_database("postgresql://one/x")


def test_tables_of_another_program_are_left_alone(postgres: str) -> None:
    open_database(postgres).close()
    with psycopg.connect(postgres) as connection:
        connection.execute("UPDATE pensieve.layout SET version = 99")
    with pytest.raises(SettingError, match=r"another version .*layout 99.*: start that"):
        open_database(postgres)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@one:5432,two/x?password=secret", "postgresql://me@one:5432,two/x"),
        ("postgresql://one/x", "postgresql://one/x"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_histories_are_imported_from_a_file(
    tmp_path: Path, postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is taken stays as it is; a second import adds nothing."""
    a, b, c = (Name("", name) for name in "abc")
    snapshot = Name("key", "r", "response")
    source, target = HistoryStore(tmp_path / "history.sqlite"), HistoryStore(postgres)
    source.use_tokenizer(b"ours")
    source.commit(
        a, transcript("0", "1"), 1.0, b"salt", opening=source.admit([a], 1.0, b"a turn of a server")
    )
    source.change(a, 1.0, history_ttl=1e12)
    source.fork(a, "b", 2.0)
    source.commit(b, transcript("0", "1", "2", "3"), 3.0)
    source.commit(c, transcript("z", "1"), 3.0)
    source.commit(snapshot, transcript("0", "1"), 4.0, body="{}", thread="x")
    kept = source.get(a, 5.0)
    source.close()
    target.use_tokenizer(b"ours")
    target.commit(c, transcript("other", "1"), 1.0)
    for output in (
        "copied 3 conversations and responses, 1 were there",
        "copied 0 conversations and responses, 4 were",
    ):
        assert (
            import_histories.main([str(tmp_path / "history.sqlite"), "--history-url", postgres])
            == 0
        )
        assert output in capsys.readouterr().out
        conversation = target.get(a, 5.0)
        assert (
            conversation.salt,
            conversation.history_ttl,
            conversation.title,
            conversation.created,
        ) == (
            b"salt",
            1e12,
            "0",
            kept.created,
        )
        assert (
            stored(target, b) == transcript("0", "1", "2", "3") and target.get(b, 5.0).parent == "a"
        )
        assert stored(target, c).messages == dialogue("other", "1")
        assert target.get(snapshot, 5.0).body == "{}" and rows(target) == 4
    target.close()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["none", "--history-url", "postgresql://x/y"], "there is no none"),
        (["x"], "names no database"),
    ],
)
def test_an_import_that_cannot_be(
    words: list[str],
    error: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(HISTORY_URL, raising=False)
    with pytest.raises(SystemExit):
        import_histories.main(words)
    assert error in capsys.readouterr().err


def test_an_import_of_a_running_servers_file_says_to_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = HistoryStore(tmp_path / "history.sqlite")
    with pytest.raises(SystemExit):
        import_histories.main(
            [str(tmp_path / "history.sqlite"), "--history-url", "postgresql://x/y"]
        )
    running.close()
    error = capsys.readouterr().err
    assert (
        "FILE: " in error
        and "is in use by another server; stop that one first" in error
        and "--state-dir" not in error
    )


def test_the_doctor_asks_the_database(tmp_path: Path, postgres: str) -> None:
    def findings(url: str | None) -> list[doctor.Finding]:
        return list(doctor._histories(tmp_path, url))

    assert "SQLite" in findings(None)[0].state
    assert "without histories yet" in findings(postgres)[0].state
    store, silent = (HistoryStore(postgres, server=name) for name in ("a-1", "b-2"))
    store.register()
    silent.register()
    store.create(Name("", "a"), 1.0)
    store._db.execute("UPDATE servers SET alive = alive - 99 WHERE id = 'b-2'")
    database, *servers = findings(postgres)
    assert database.state.endswith("1 conversations and responses")
    assert [(server.level.value, server.state.split()[0]) for server in servers] == [
        ("ok", "a-1"),
        ("optional", "b-2"),
    ]
    store.close()
    silent.close()
    (gone,) = findings(f"postgresql://me:secret@/x?host={tmp_path}")
    assert gone.level is doctor.Level.PROBLEM and "secret" not in gone.state + gone.advice


def test_each_statement_waits_for_its_own_answer(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of many slow ones is not one that hangs."""
    database = open_database(postgres)
    assert isinstance(database, Postgres) and database.sent_at is None
    clock = itertools.count()
    times = []
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    execute = psycopg.Connection.execute

    def noted(connection: Any, sql: Any, values: Any = None) -> Any:
        times.append(database.sent_at)
        return execute(connection, sql, values)

    monkeypatch.setattr(psycopg.Connection, "execute", noted)
    with pytest.raises(ZeroDivisionError), database.transaction():
        for _ in range(3):
            database.execute("SELECT 1")
            assert database.sent_at is None
        raise ZeroDivisionError
    assert len(times) == 5 and None not in times, "with the beginning and the end"
    assert times == sorted(set(times)) and database.sent_at is None
    database.close()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("08006", ErrorKind.UNAVAILABLE),
        ("22021", ErrorKind.INVALID),
        ("25006", ErrorKind.UNAVAILABLE),
        ("25P03", ErrorKind.UNAVAILABLE),
        ("28000", ErrorKind.UNAVAILABLE),
        ("40001", ErrorKind.UNAVAILABLE),
        ("40P01", ErrorKind.UNAVAILABLE),
        ("53100", ErrorKind.STORAGE_FULL),
        ("53300", ErrorKind.UNAVAILABLE),
        ("54000", ErrorKind.INVALID),
        ("55P03", ErrorKind.UNAVAILABLE),
        ("57014", ErrorKind.UNAVAILABLE),
        ("57P01", ErrorKind.UNAVAILABLE),
        ("58030", ErrorKind.UNAVAILABLE),
        ("XX001", ErrorKind.INTERNAL),
    ],
)
def test_errors_of_postgres_by_their_class(postgres: str, state: str, kind: int) -> None:
    database = open_database(postgres)
    raising = f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$"
    for _ in range(2):
        refused(kind, database.execute, raising)
        with pytest.raises(RequestError) as error, database.transaction():
            database.execute(raising)
        assert error.value.kind == kind and not database.in_transaction
    assert (database.fault is not None) == (kind == ErrorKind.STORAGE_FULL)
    if kind == ErrorKind.STORAGE_FULL:
        database.recover()
    assert database.fault is None and database.execute("SELECT 1") == [(1,)]
    assert database.execute("SELECT count(*) FROM turns") == [(0,)]
    database.close()


@pytest.mark.parametrize("state", ["23505", "42P01"])
def test_mistakes_of_this_program_are_not_hidden(postgres: str, state: str) -> None:
    database = open_database(postgres)
    with pytest.raises(psycopg.Error):
        database.execute(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")
    file = open_database(":memory:")
    for statement in ("SELECT nothing", "INSERT INTO conversations (owner) VALUES (NULL)"):
        with pytest.raises(sqlite3.Error):
            file.execute(statement)
    assert database.fault is None and file.fault is None
    for one in (database, file):
        one.close()


def test_errors_of_a_file_outside_of_transactions(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    database = Sqlite(path)

    def interrupted() -> None:
        database._db.set_progress_handler(lambda: 1, 1)
        try:
            database.execute("SELECT count(*) FROM sqlite_schema")
        finally:
            database._db.set_progress_handler(None, 1)

    refused(ErrorKind.UNAVAILABLE, interrupted)
    database._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
    refused(ErrorKind.INVALID, database.execute, "SELECT :it", {"it": "x" * 2000})
    assert database.fault is None
    database.close()
    database = Sqlite(path)
    with path.open("r+b") as file:  # all but the first page
        file.seek(4096)
        file.write(b"\x7f" * (path.stat().st_size - 4096))
    database.execute("PRAGMA shrink_memory")
    refused(ErrorKind.INTERNAL, database.execute, "SELECT * FROM conversations")
    assert database.fault is not None and "backup" in database.fault.message
    refused(ErrorKind.INTERNAL, database.recover)
    database.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_IOERR_READ, ErrorKind.UNAVAILABLE),
        (sqlite3.SQLITE_IOERR_WRITE, ErrorKind.STORAGE_FULL),
        (sqlite3.SQLITE_READONLY, ErrorKind.STORAGE_FULL),
    ],
)
def test_a_file_whose_disk_fails(code: int, kind: int) -> None:
    database = Sqlite(":memory:")

    def fail() -> None:
        with database.transaction():
            error = sqlite3.OperationalError("it fails")
            error.sqlite_errorcode = code
            raise error

    refused(kind, fail)
    assert database.fault is not None
    assert "make room" not in database.fault.message
    database.recover()
    assert database.fault is None
    database.close()


def test_deletions_have_room_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    store = HistoryStore(path)
    names = [Name("", name) for name in "abc"]
    for name in names:
        store.commit(name, transcript("0", "1" * 30_000), 1.0)
    more = transcript("0", "1", "2", "3" * 300_000)
    with full_file(path):
        refused(ErrorKind.STORAGE_FULL, store.commit, names[0], more, 2.0)
        assert store.fault is not None
        refused(ErrorKind.STORAGE_FULL, store.admit, names[:1], 2.0, b"turn")
        refused(ErrorKind.STORAGE_FULL, store.recover)
        for name in names[1:]:
            store.delete(name, 2.0)
        refused(ErrorKind.STORAGE_FULL, store.recover)
        assert stored(store, names[0]).messages == dialogue("0", "1" * 30_000)
    store.recover()
    assert store.fault is None
    assert Path(f"{path}-reserve").stat().st_size == databases.RESERVE_BYTES
    store.commit(names[0], more, 2.0)
    assert rows(store) == 1
    assert store._db.execute("SELECT name FROM sqlite_schema WHERE name = 'room'") == []
    store.close()


def test_only_a_write_tells_whether_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Deletions leave free pages in the file, while the disk may have no room for the reserve any
    more."""
    path = tmp_path / "history.sqlite"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    store = HistoryStore(path)
    store.admit([Name("", "a")], 1.0)
    store._db.fault = RequestError(ErrorKind.STORAGE_FULL, "full")
    store.recover()
    assert (
        store.fault is None
        and len(caplog.messages) == 1
        and "no room is kept for deletions" in caplog.text
    )
    enough = databases.RECOVERY_BYTES + databases.RESERVE_BYTES // 4
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=enough))
    store.recover()
    assert Path(f"{path}-reserve").stat().st_size == databases.RESERVE_BYTES // 4
    store.close()


@pytest.mark.parametrize("reason", [errno.EBADF, errno.EOPNOTSUPP, errno.ENOSPC])
def test_a_disk_that_cannot_allocate_keeps_no_reserve(
    reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The C library writes to the blocks of the file instead, which it cannot if the file is only
    appended to."""
    path = tmp_path / "history.sqlite"
    allocate = os.posix_fallocate

    def refuse(file: int, at: int, size: int) -> None:
        assert fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_APPEND | os.O_ACCMODE) == os.O_RDWR
        allocate(file, at, 4096)
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = HistoryStore(path)
    store.admit([Name("", "a")], 1.0)
    assert store.fault is None and caplog.text.count("no room is kept for deletions") == 1
    assert Path(f"{path}-reserve").stat().st_size == 0
    store.close()


def test_a_start_on_a_full_disk_uses_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "history.sqlite"
    HistoryStore(path).close()
    opening, writing = Sqlite._open, Sqlite.execute
    state = {"full": True}

    def open_(database: Sqlite) -> None:
        if Path(f"{path}-reserve").stat().st_size:
            raise no_room()
        opening(database)

    def execute(database: Sqlite, sql: str, values: Any = None) -> list[Any]:
        with database._told():
            if state["full"] and sql.startswith("CREATE TABLE room"):
                raise no_room()
        return writing(database, sql, values)

    def no_room() -> sqlite3.OperationalError:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        return error

    monkeypatch.setattr(Sqlite, "_open", open_)
    monkeypatch.setattr(Sqlite, "execute", execute)
    store = HistoryStore(path)
    refused(ErrorKind.STORAGE_FULL, store.admit, [Name("", "a")], 1.0)
    state["full"] = False
    store.recover()
    store.admit([Name("", "a")], 1.0)
    store.close()


@pytest.mark.parametrize(
    ("code", "used"), [(sqlite3.SQLITE_READONLY, False), (sqlite3.SQLITE_FULL, True)]
)
def test_a_deletion_that_nothing_helps_is_refused(
    code: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve is for a full disk. One that has become read-only does not give it back."""
    store = HistoryStore(tmp_path / "history.sqlite")
    truncated: list[Path] = []

    def truncate(path: Path, size: int) -> None:
        truncated.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def fail() -> None:
        with store.transaction():
            error = sqlite3.OperationalError("it fails")
            error.sqlite_errorcode = code
            raise error

    monkeypatch.setattr(os, "truncate", truncate)
    refused(ErrorKind.STORAGE_FULL, store.with_reserve, fail)
    assert bool(truncated) == used
    store.close()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_restart_on_a_backup_finds_no_log_of_the_file_that_was_moved_away(
    noticed: bool, tmp_path: Path
) -> None:
    """SQLite would read the log into the backup, and damage it."""
    path, away = tmp_path / "history.sqlite", tmp_path / "away"
    store, backup, more = store_with_backup(path)
    path.rename(away)
    backup.rename(path)
    if noticed:
        refused(ErrorKind.STORAGE_FULL, store.admit, [Name("", "a")], 2.0)
        assert store.fault is not None and "-wal" in store.fault.message
    store.close()
    assert Path(f"{path}-wal").stat().st_size == 0
    for file, kept in ((path, transcript("0", "1")), (away, more)):
        store = HistoryStore(file)
        assert stored(store, Name("", "a")) == kept
        store.close()


def test_the_log_of_a_file_without_a_name_stays(tmp_path: Path) -> None:
    """It may be all that is left of the last turns."""
    path = tmp_path / "history.sqlite"
    store, backup, _ = store_with_backup(path)
    backup.replace(path)
    refused(ErrorKind.STORAGE_FULL, store.admit, [Name("", "a")], 2.0)
    store.close()
    assert Path(f"{path}-wal").stat().st_size > 0


def store_with_backup(path: Path) -> tuple[HistoryStore, Path, Transcript]:
    """A store whose log has a turn more than the backup of its file, the backup, and what the store
    has."""
    store = HistoryStore(path)
    store.commit(Name("", "a"), transcript("0", "1"), 1.0)
    store.close()
    backup = path.with_name("backup")
    shutil.copy(path, backup)
    store = HistoryStore(path)
    more = transcript("0", "1", "2", "3" * 30_000)
    store.commit(Name("", "a"), more, 2.0)
    return store, backup, more


def test_a_snapshot_of_file_and_log_is_a_backup(tmp_path: Path) -> None:
    """No other program can read the file of a running server."""
    path, snapshot = tmp_path / "history.sqlite", tmp_path / "snapshot.sqlite"
    store, _, more = store_with_backup(path)
    for end in ("", "-wal"):
        shutil.copy(f"{path}{end}", f"{snapshot}{end}")
    locked = pytest.raises(sqlite3.OperationalError, match="locked")
    with closing(sqlite3.connect(path, timeout=0)) as reader, locked:
        reader.execute("SELECT count(*) FROM sqlite_master")
    store.close()
    restored = HistoryStore(snapshot)
    assert stored(restored, Name("", "a")) == more
    restored.close()


def test_a_process_may_change_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    store = HistoryStore("history.sqlite")
    monkeypatch.chdir(elsewhere)
    store.commit(Name("", "a"), transcript("0", "1"), 1.0)
    assert store._db._free_reserve()  # type: ignore[attr-defined]
    store.close()
    assert (tmp_path / "history.sqlite-reserve").stat().st_size == 0


def test_a_damaged_file_does_not_recover_after_it_was_moved(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    store = HistoryStore(path)
    damaged = RequestError(ErrorKind.INTERNAL, "damaged")
    store._db.fault = damaged
    path.rename(tmp_path / "away")
    refused(ErrorKind.STORAGE_FULL, store.delete, Name("", "a"), 2.0)
    assert store.fault is damaged
    (tmp_path / "away").rename(path)
    refused(ErrorKind.INTERNAL, store.recover)
    store.close()


def test_a_turn_that_ends_while_the_file_is_moved_holds_its_conversation_no_longer(
    tmp_path: Path,
) -> None:
    path, away = tmp_path / "history.sqlite", tmp_path / "away"
    store = HistoryStore(path)
    name = Name("", "a")
    store.commit(name, transcript("0", "1"), 1.0)
    opening = store.admit([name], 2.0, b"1", alone=True)
    path.rename(away)
    more = transcript("0", "1", "2", "3")
    refused(ErrorKind.STORAGE_FULL, store.commit, name, more, 3.0, b"", None, opening)
    store.release(b"1")
    away.rename(path)
    store.recover()
    assert not store.in_flight(name, 4.0)
    store.commit(name, more, 4.0, opening=store.admit([name], 4.0, b"2", alone=True))
    store.close()


def test_a_file_whose_directory_is_no_directory_any_more_is_moved(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    store = HistoryStore(directory / "history.sqlite")
    directory.rename(tmp_path / "away")
    directory.touch()
    refused(ErrorKind.STORAGE_FULL, store.admit, [Name("", "a")], 2.0)
    store.close()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_disk_that_does_not_tell_of_the_file_is_no_moved_one(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    store = HistoryStore(tmp_path / "history.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", refuse)
        store.commit(Name("", "a"), transcript("0", "1"), 1.0)
        store.close()
    store = HistoryStore(tmp_path / "history.sqlite")
    assert stored(store, Name("", "a")) == transcript("0", "1")
    store.close()


def test_a_file_that_shrinks_is_no_moved_one(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    HistoryStore(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA auto_vacuum = FULL")
        db.execute("VACUUM")
    store = HistoryStore(path)
    store.commit(Name("", "a"), transcript("0", "1" * 30_000), 1.0)
    store.recover()  # it moves the log into the file
    size = path.stat().st_size
    store.delete(Name("", "a"), 2.0)
    store.recover()
    assert path.stat().st_size < size
    store.commit(Name("", "b"), transcript("0", "1"), 3.0)
    store.close()
