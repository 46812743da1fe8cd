"""Which database is used, and what is said when it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import psycopg
import pytest

from pensieve.runtime.conversations.databases import open_database, without_password
from pensieve.runtime.launch.http_options import http_settings
from pensieve.runtime.launch.settings import HISTORY_URL, ServeSettings
from pensieve.scheduler.types import SettingError


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
