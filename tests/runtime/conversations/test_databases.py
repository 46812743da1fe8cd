"""Which database is used, and what is said when it cannot be."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pensieve.runtime.conversations.databases import Postgres, open_database, without_password
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.settings import HISTORY_URL, ServeSettings
from pensieve.scheduler.types import SettingError
from pensieve.scripts import doctor, import_histories

from .test_store import dialogue, rows, stored, transcript


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
    with pytest.raises(SettingError, match="number 99"):
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


def test_histories_are_imported_from_a_file(tmp_path: Path, postgres: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is taken stays as it is; a second import adds nothing."""
    a, b, c = (Name("", name) for name in "abc")
    snapshot = Name("key", "r", "response")
    source, target = HistoryStore(tmp_path / "history.sqlite"), HistoryStore(postgres)
    source.use_tokenizer(b"ours")
    source.commit(a, transcript("0", "1"), 1.0, b"salt", opening=source.admit([a], 1.0, b"a turn of a server"))
    source.change(a, 1.0, history_ttl=1e12)
    source.fork(a, "b", 2.0)
    source.commit(b, transcript("0", "1", "2", "3"), 3.0)
    source.commit(c, transcript("z", "1"), 3.0)
    source.commit(snapshot, transcript("0", "1"), 4.0, body="{}", thread="x")
    kept = source.get(a, 5.0)
    source.close()
    target.use_tokenizer(b"ours")
    target.commit(c, transcript("other", "1"), 1.0)
    for said in ("copied 3 conversations and responses, 1 were there", "copied 0 conversations and responses, 4 were"):
        assert import_histories.main([str(tmp_path / "history.sqlite"), "--history-url", postgres]) == 0
        assert said in capsys.readouterr().out
        found = target.get(a, 5.0)
        assert (found.salt, found.history_ttl, found.title, found.created) == (b"salt", 1e12, "0", kept.created)
        assert stored(target, b) == transcript("0", "1", "2", "3") and target.get(b, 5.0).parent == "a"
        assert stored(target, c).messages == dialogue("other", "1")
        assert target.get(snapshot, 5.0).body == "{}" and rows(target) == 4
    target.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["none", "--history-url", "postgresql://x/y"], "there is no none"), (["x"], "names no database")],
)
def test_an_import_that_cannot_be(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HISTORY_URL, raising=False)
    with pytest.raises(SystemExit):
        import_histories.main(words)
    assert said in capsys.readouterr().err


def test_an_import_of_a_running_servers_file_says_to_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = HistoryStore(tmp_path / "history.sqlite")
    with pytest.raises(SystemExit):
        import_histories.main([str(tmp_path / "history.sqlite"), "--history-url", "postgresql://x/y"])
    running.close()
    said = capsys.readouterr().err
    assert "FILE: " in said and "is in use by another server; stop that one first" in said and "--state-dir" not in said


def test_the_doctor_asks_the_database(tmp_path: Path, postgres: str) -> None:
    def findings(url: str | None) -> list[doctor.Finding]:
        return list(doctor._histories(tmp_path, url))

    assert "SQLite" in findings(None)[0].found
    assert "without histories yet" in findings(postgres)[0].found
    store, silent = (HistoryStore(postgres, server=name) for name in ("a-1", "b-2"))
    store.register()
    silent.register()
    store.create(Name("", "a"), 1.0)
    store._db.execute("UPDATE servers SET alive = alive - 99 WHERE id = 'b-2'")
    database, *servers = findings(postgres)
    assert database.found.endswith("1 conversations and responses")
    assert [(server.level.value, server.found.split()[0]) for server in servers] == [("ok", "a-1"), ("optional", "b-2")]
    store.close()
    silent.close()
    (gone,) = findings(f"postgresql://me:secret@/x?host={tmp_path}")
    assert gone.level is doctor.Level.PROBLEM and "secret" not in gone.found + gone.advice


def test_each_statement_waits_for_its_own_answer(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction of many slow ones is not one that hangs."""
    database = open_database(postgres)
    assert isinstance(database, Postgres) and database.asked is None
    clock, asked = itertools.count(), []
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    execute = psycopg.Connection.execute

    def noted(connection: Any, sql: Any, values: Any = None) -> Any:
        asked.append(database.asked)
        return execute(connection, sql, values)

    monkeypatch.setattr(psycopg.Connection, "execute", noted)
    with pytest.raises(ZeroDivisionError), database.transaction():
        for _ in range(3):
            database.execute("SELECT 1")
            assert database.asked is None
        raise ZeroDivisionError
    assert len(asked) == 5 and None not in asked, "with the beginning and the end"
    assert asked == sorted(set(asked)) and database.asked is None
    database.close()
