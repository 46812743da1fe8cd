"""The history store alone: branches, forks, TTLs, and a process killed while it commits."""

from __future__ import annotations

import logging
import random
import resource
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pensieve.runtime.conversations import databases
from pensieve.runtime.conversations import store as store_module
from pensieve.runtime.conversations.databases import stored_tokenizer
from pensieve.runtime.conversations.lines import first_turn
from pensieve.runtime.conversations.schema import Gone, Name, Opening
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import OTHERS, Message, Transcript
from pensieve.scheduler.types import ErrorKind, RequestError, SettingError

A, B = Name("", "a"), Name("", "b")


Make = Callable[..., HistoryStore]


@pytest.fixture
def make(histories_at: str) -> Iterator[Make]:
    """make(...): a store, with these options."""
    stores: list[HistoryStore] = []

    def make(**options: Any) -> HistoryStore:
        stores.append(HistoryStore(histories_at, **options))
        if stores[-1].shared:
            stores[-1].register()
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(make: Make) -> HistoryStore:
    return make()


def dialogue(*contents: str) -> tuple[Message, ...]:
    return tuple(
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    )


def transcript(*contents: str, seed: int = 0) -> Transcript:
    """Three tokens a message, which depend on it and on all before it."""
    text = ""
    tokens = array("i")
    for content in contents:
        text += f"<{content}>"
        draw = random.Random(f"{seed} {text}")
        tokens += array("i", [draw.randrange(-5, 2**31) for _ in range(3)])
    return Transcript(dialogue(*contents), tokens, text, len(tokens) - 1)


def stored(store: HistoryStore, name: Name, now: float = 0.0) -> Transcript:
    conversation = store.find(name, now)
    assert conversation is not None and conversation[1] is not None
    assert conversation[0].tokens == len(conversation[1].transcript().tokens)
    return conversation[1].transcript()


def rows(store: HistoryStore) -> int:
    return int(store._db.execute("SELECT count(*) FROM turns")[0][0])


def full_disk(shared: bool) -> Exception:
    """What the database's driver raises."""
    if shared:
        return psycopg.errors.DiskFull("no space left on device")
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def refused(kind: int, call: object, *args: object) -> None:
    with pytest.raises(RequestError) as error:
        call(*args)  # type: ignore[operator]
    assert error.value.kind == kind


def test_turns_come_back_as_they_were_and_each_is_stored_once(store: HistoryStore) -> None:
    for count in range(2, 12, 2):
        whole = transcript(*map(str, range(count)))
        store.commit(A, whole, now=float(count))
        assert stored(store, A) == whole
    assert rows(store) == 5
    sizes = store._db.execute("SELECT length(tokens), length(messages) FROM turns ORDER BY number")
    assert {size for size, _ in sizes} == {24}  # 6 new tokens each
    conversation = store.get(A, 0.0)
    assert (conversation.created, conversation.active) == (2.0, 10.0)


def test_messages_that_come_back_in_another_form_are_the_same(store: HistoryStore) -> None:
    """In parts, or with the thoughts that another turn left out."""
    store.commit(A, transcript("0", "1"), now=1.0)
    for count in (4, 6):
        whole = transcript(*map(str, range(count)))
        sent = [
            {**message, "content": [{"type": "text", "text": message["content"]}], "thinking": "t"}
            for message in whole.messages
        ]
        store.commit(A, replace(whole, messages=tuple(sent)), now=float(count))
    assert rows(store) == 3


def test_a_diverging_history_replaces_the_branch_that_the_name_stood_for(
    store: HistoryStore,
) -> None:
    store.commit(A, transcript("0", "1", "2", "3", "4", "5"), 1.0)
    store.commit(A, transcript("0", "1"), 1.0)
    store.commit(A, transcript("0", "1", "2", "3"), 1.0)
    store.commit(A, transcript("0", "1", "other", "3"), 2.0)
    assert stored(store, A) == transcript("0", "1", "other", "3")
    assert rows(store) == 2, "what only the old branch needed is gone"


def test_a_log_line_says_that_a_history_is_replaced(
    store: HistoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pensieve.runtime.conversations")
    for contents in (("0", "1"), ("0", "1", "2", "3")):
        store.commit(A, transcript(*contents), 1.0)
    store.commit(Name("", "response", "response"), transcript("new", "1"), 1.0)
    assert caplog.messages == []
    store.commit(A, transcript("new", "1"), 1.0)
    (line,) = caplog.messages
    assert line.startswith("conversation 'a': ") and "12 tokens are replaced by 6" in line
    assert (
        '"history": "server"' in line
        and "fork" in line
        and "new" not in line.replace("new messages", "")
    )


def test_of_completions_the_branch_left_behind_goes_too(store: HistoryStore) -> None:
    """They have no messages: what a turn goes on from is told by its tokens."""

    def completion(*tokens: int) -> Transcript:
        return Transcript((), array("i", tokens), "".join(map(chr, tokens)), len(tokens))

    store.commit(A, completion(1, 2, 3), 1.0)
    store.commit(A, completion(1, 2, 3, 4, 5), 1.0)
    for reply in range(9):
        store.commit(A, completion(1, 2, 3, 4, 5, 6, 60 + reply), 1.0)
    assert stored(store, A) == completion(1, 2, 3, 4, 5, 6, 68) and rows(store) == 3
    store.commit(A, completion(1, 2, 9), 1.0)
    assert stored(store, A) == completion(1, 2, 9) and rows(store) == 1
    store.commit(A, completion(1, 2, 9, 9), 1.0)
    assert stored(store, A) == completion(1, 2, 9, 9) and rows(store) == 2


def test_forks_share_what_they_have_in_common_and_go_their_own_ways(store: HistoryStore) -> None:
    store.commit(A, transcript("0", "1", "2", "3"), 1.0)
    fork = store.fork(A, "b", 2.0)
    assert fork.parent == "a" and stored(store, B) == stored(store, A)
    assert rows(store) == 1
    store.commit(B, transcript("0", "1", "2", "3", "4", "5"), 3.0)
    store.commit(A, transcript("0", "1", "2", "3", "x", "y"), 3.0)
    assert stored(store, B) == transcript("0", "1", "2", "3", "4", "5")
    assert stored(store, A) == transcript("0", "1", "2", "3", "x", "y")
    store.delete(A, 4.0)
    assert stored(store, B) == transcript("0", "1", "2", "3", "4", "5") and rows(store) == 2
    store.delete(B, 4.0)
    assert rows(store) == 0


def test_a_deleted_conversation_says_what_of_its_log_was_its_own(store: HistoryStore) -> None:
    whole, longer = transcript("0", "1", "2", "3"), transcript("0", "1", "2", "3", "4", "5")
    store.commit(A, whole, 1.0, b"salt")
    store.fork(A, "b", 2.0)
    store.fork(A, "c", 2.0)
    store.commit(B, longer, 3.0, b"salt")
    assert store.delete(Name("", "c"), 4.0) == Gone(
        Name("", "c"), "c", whole.tokens, len(whole.tokens), b"salt"
    ), "all others'"
    assert store.delete(B, 4.0) == Gone(B, "b", longer.tokens, len(whole.tokens), b"salt")
    assert store.delete(A, 4.0) == Gone(A, "a", whole.tokens, 0, b"salt")
    store.create(A, 5.0)
    assert store.delete(A, 5.0) == Gone(A, "a", array("i"), 0, b"")
    assert store.take_expired() == []


def test_a_deleted_response_says_whether_its_line_ends_with_it(store: HistoryStore) -> None:
    first, second = (Name("", name, "response") for name in ("r1", "r2"))
    whole, longer = transcript("0", "1", "2", "3"), transcript("0", "1", "2", "3", "4", "5")
    store.commit(first, whole, 1.0, b"salt")
    store.commit(second, longer, 2.0, b"salt", behind=first, parent="r1", thread="r1")
    assert store.delete(first, 3.0) == Gone(first, None, whole.tokens, len(whole.tokens), b"salt")
    assert stored(store, second) == longer
    assert (
        store.delete(second, 3.0) == Gone(second, "r1", longer.tokens, 0, b"salt")
        and rows(store) == 0
    )


def test_what_has_expired_is_said_once_it_is_deleted(make: Make) -> None:
    store = make(history_ttl=100.0)
    whole = transcript("0", "1", "2", "3")
    store.commit(A, whole, 1.0, b"salt")
    store.expire(200.0)
    assert (
        store.take_expired() == [Gone(A, "a", whole.tokens, 0, b"salt")]
        and store.take_expired() == []
    )
    store.close()


@pytest.mark.parametrize("way", ["turn", "create", "fork"])
def test_what_has_expired_is_said_before_its_name_is_another_ones(way: str, make: Make) -> None:
    """In time for the loop: of a turn, when it begins."""
    store = make(history_ttl=10.0)
    whole = transcript("0", "1", "2", "3")
    store.commit(A, whole, 1.0, b"salt")
    store.create(B, 2.0)
    store.change(B, 2.0, history_ttl=1000.0)
    match way:
        case "turn":
            assert [
                conversation.number for conversation in store.admit([B, A], 12.0).seen.values()
            ] == [2]
        case "create":
            store.create(A, 12.0)
        case "fork":
            store.fork(B, "a", 12.0)
    assert store.take_expired() == [Gone(A, "a", whole.tokens, 0, b"salt")]
    store.commit(A, whole, 12.0)
    assert store.take_expired() == []
    store.close()


def as_version_4(db: sqlite3.Connection, tokenizer: bytes | None = None) -> None:
    for index in ("turns_unknown", "turns_id"):
        db.execute(f"DROP INDEX {index}")
    for column in ("tokenizer", "id"):
        db.execute(f"ALTER TABLE turns DROP COLUMN {column}")
    db.execute("CREATE TABLE tokenizer (digest BLOB NOT NULL) STRICT")
    if tokenizer is not None:
        db.execute("INSERT INTO tokenizer VALUES (?)", (tokenizer,))
    db.execute("PRAGMA user_version = 4")


def test_a_file_with_one_tokenizer_for_all_turns(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "file")
    store.commit(A, transcript("0", "1"), 1.0)
    store.close()
    with sqlite3.connect(tmp_path / "file") as db:
        as_version_4(db, b"ours")
    db.close()
    assert stored_tokenizer(tmp_path / "file") == b"ours"
    store = HistoryStore(tmp_path / "file")
    store.use_tokenizer(b"theirs")
    assert stored(store, A).inside == OTHERS
    store.use_tokenizer(b"ours")
    assert stored(store, A) == transcript("0", "1")
    store.close()
    assert stored_tokenizer(tmp_path / "file") == b"ours"


def test_tokens_of_two_tokenizers_live_side_by_side(store: HistoryStore) -> None:
    """Servers of two models share a history: each finds its own ids again, and none of the other
    one's."""
    first, second, third = (transcript(*map(str, range(count))) for count in (2, 4, 6))
    store.use_tokenizer(b"one")
    store.commit(A, first, 1.0)
    store.use_tokenizer(b"two")
    store.commit(A, second, 2.0)
    for tokenizer, inside in ((b"one", [OTHERS, first.inside]), (b"two", [second.inside, OTHERS])):
        store.use_tokenizer(tokenizer)
        conversation = store.find(A, 2.0)
        assert conversation is not None and conversation[1] is not None
        assert [turn.inside for turn in conversation[1].lineage()] == inside
    store.use_tokenizer(b"one")
    store.commit(A, third, 3.0)
    assert stored(store, A) == third


def test_a_beginning_is_found_by_one_query(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many turns there are."""
    queries: list[str] = []
    execute = store._db.execute
    monkeypatch.setattr(
        store._db, "execute", lambda sql, values=None: queries.append(sql) or execute(sql, values)
    )
    counts = set()
    for count in range(2, 40, 2):
        queries.clear()
        store.commit(A, transcript(*map(str, range(count))), 1.0)
        counts.add(len(queries))
    assert len(counts) <= 2, "the first turn makes the conversation"


def test_any_text_comes_back(store: HistoryStore) -> None:
    """A zero byte too, which PostgreSQL's TEXT does not take."""
    messages = ({"role": "user", "content": "a\0b"}, {"role": "assistant", "content": "\0 é 💧"})
    whole = Transcript(messages, array("i", [1, 2]), "a\0b\0 é 💧", 2)
    store.commit(A, whole, 1.0)
    assert stored(store, A) == whole
    long = Name("", "💧" * 1000)
    store.create(long, 2.0)
    refused(ErrorKind.CONFLICT, store.create, long, 2.0)


def test_a_file_of_the_version_before(tmp_path: Path) -> None:
    """It has no salts and no titles; what it holds is served as before."""
    store = HistoryStore(tmp_path / "file")
    store.commit(A, transcript("0", "1"), 1.0, b"salt")
    store.close()
    with sqlite3.connect(tmp_path / "file") as db:
        as_version_4(db)
        db.execute("ALTER TABLE conversations DROP COLUMN salt")
        db.execute("ALTER TABLE conversations DROP COLUMN title")
        db.execute("DROP TABLE tokenizer")
        db.execute("PRAGMA user_version = 1")
    db.close()
    store = HistoryStore(tmp_path / "file")
    store.use_tokenizer(b"whichever")
    assert stored(store, A) == transcript("0", "1")
    assert store.get(A, 1.0).salt == b"" and store.get(A, 1.0).title is None
    store.commit(A, transcript("0", "1", "2", "3"), 2.0, b"new")
    assert store.get(A, 2.0).salt == b"new" and store.get(A, 2.0).title == "0"
    store.close()
    HistoryStore(tmp_path / "file").close()


def test_a_title_is_how_the_first_message_begins_and_a_fork_has_it_too(store: HistoryStore) -> None:
    store.create(A, 0.0)
    assert store.get(A, 0.0).title is None
    assert store.commit(A, transcript("Tell me\n of tea.", "Yes."), 1.0).title == "Tell me of tea."
    assert store.fork(A, "b", 2.0).title == "Tell me of tea."
    store.commit(A, transcript("Another", "Yes."), 3.0)
    assert [conversation.title for conversation in store.page("", 2, None, True, 3.0)[0]] == [
        "Another",
        "Tell me of tea.",
    ]


def test_the_memory_of_lines_counts_long_messages_without_tokens(store: HistoryStore) -> None:
    dropped = Message(role="assistant", content="x", reasoning_content="t" * 4000)
    hidden = replace(FIRST, messages=(*FIRST.messages[:-1], dropped))
    store.commit(A, hidden, 1.0)
    assert 1000 < store._cached_size == sum(line.size for line in store._lines.values()) < 1300
    store.edit(A, 2.0, lambda messages: [*messages, {"role": "user", "content": "x" * 8000}])
    assert stored(store, A).messages[:-1] == hidden.messages
    assert 3000 < store._cached_size == sum(line.size for line in store._lines.values()) < 3500


def test_a_line_that_is_too_large_pushes_no_other_out_of_memory(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MOST_CACHED", 1000)
    store.commit(A, FIRST, 1.0)
    store.create(B, 1.0, first_turn(dialogue("x" * 4000)))
    assert len(stored(store, B).messages) == 1
    assert [line.whole for line in store._lines.values()] == [FIRST]


def test_a_deletion_uncovers_no_completion(store: HistoryStore) -> None:
    store.commit(A, FIRST, 1.0)
    completed = replace(FIRST, tokens=FIRST.tokens + array("i", [1, 2, 3]))
    store.commit(A, completed, 2.0)
    store.commit(A, LONGER, 3.0)
    for now in (4.0, 5.0):
        store.edit(A, now, lambda messages: messages[:-1])
    assert stored(store, A) == FIRST
    store.edit(A, 6.0, lambda messages: [*messages, {"role": "user", "content": "x"}])


def test_a_deletion_that_erases_no_kv_is_not_told(store: HistoryStore) -> None:
    """The loop would end the conversation's claims on its KV, as a pin."""
    store.commit(A, FIRST, 1.0)
    store.edit(A, 2.0, lambda messages: [*messages, {"role": "user", "content": "x"}])
    store.edit(A, 3.0, lambda messages: messages[:-1])  # without tokens
    store.fork(A, "b", 4.0)
    store.edit(A, 5.0, lambda _: [])  # another one has them too
    tombstones = store._db.execute("SELECT number FROM tombstones") if store.shared else []
    assert not store.take_expired() and not tombstones
    store.edit(B, 6.0, lambda _: [])
    (gone,) = store.take_expired()
    assert (gone.tokens, gone.shared) == (FIRST.tokens, 0)
    assert not store.shared or len(store._db.execute("SELECT number FROM tombstones")) == 1


def test_random_operations_agree_with_plain_dictionaries(store: HistoryStore) -> None:
    draw = random.Random(3)
    truth = {}
    for _ in range(600):
        name = Name(draw.choice(("", "k")), draw.choice("abc"))
        match draw.choice(("turn", "turn", "turn", "branch", "fork", "delete")):
            case "fork" if name in truth:
                new = name._replace(id=draw.choice("abc"))
                if new in truth:
                    refused(ErrorKind.CONFLICT, store.fork, name, new.id, 0.0)
                else:
                    store.fork(name, new.id, 0.0)
                    truth[new] = truth[name]
            case "delete" if name in truth:
                store.delete(name, 0.0)
                del truth[name]
            case "turn" | "branch" as kind:
                words = truth.get(name, ())
                words = words[: draw.randrange(len(words) + 1)] if kind == "branch" else words
                truth[name] = (*words, *(draw.choice("xyz") for _ in range(draw.choice((1, 2, 3)))))
                store.commit(name, transcript(*truth[name], seed=draw.randrange(2)), 0.0)
        for stored_name, words in truth.items():
            assert stored(store, stored_name).messages == dialogue(*words)
    for name in list(truth):
        store.delete(name, 0.0)
    assert rows(store) == 0


def test_owners_and_kinds_do_not_meet(store: HistoryStore) -> None:
    store.commit(Name("one", "a"), transcript("0", "1"), 1.0)
    other = Name("two", "a")
    for call in (store.get, store.delete):
        refused(ErrorKind.NOT_FOUND, call, other, 1.0)
    refused(ErrorKind.NOT_FOUND, store.fork, other, "b", 1.0)
    refused(ErrorKind.NOT_FOUND, store.get, Name("one", "a", "response"), 1.0)
    assert store.find(other, 1.0) is None and store.page("two", 9, None, True, 1.0) == ([], False)
    store.create(other, 1.0)
    refused(ErrorKind.CONFLICT, store.create, other, 1.0)


def test_pages(store: HistoryStore) -> None:
    for number in range(5):
        store.create(Name("", str(number)), float(number))
    store.commit(Name("", "snapshot", "response"), transcript("0", "1"), 9.0)

    def ids(*args: object) -> tuple[str, bool]:
        listed, more = store.page("", *args, now=9.0)  # type: ignore[arg-type]
        return "".join(conversation.id for conversation in listed), more

    assert ids(2, None, True) == ("01", True)
    assert ids(2, "1", True) == ("23", True)
    assert ids(2, "3", True) == ("4", False)
    assert ids(3, None, False) == ("432", True)
    assert ids(3, "2", False) == ("10", False)
    refused(ErrorKind.NOT_FOUND, store.page, "", 2, "unknown", True, 9.0)


def test_histories_expire_by_their_own_ttl_or_the_default(make: Make) -> None:
    store = make(history_ttl=100.0)
    store.commit(A, transcript("0", "1"), 0.0)
    store.commit(B, transcript("2", "3"), 0.0)
    store.change(B, 0.0, history_ttl=1000.0)
    assert store.find(A, 99.0) is not None
    assert store.find(A, 100.0) is None and store.find(B, 999.0) is not None
    refused(ErrorKind.NOT_FOUND, store.get, A, 100.0)
    store.commit(A, transcript("new", "1"), 101.0)  # its name is free again
    assert stored(store, A, 101.0) == transcript("new", "1")
    while store.expire(2000.0).more:
        pass
    assert rows(store) == 0


def test_a_failing_transaction_changes_nothing(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(A, transcript("0", "1"), 1.0)

    def full(*_: object) -> None:
        raise full_disk(store.shared)

    monkeypatch.setattr(store, "_prune", full)
    refused(ErrorKind.STORAGE_FULL, store.commit, A, transcript("0", "1", "2", "3"), 2.0)
    monkeypatch.undo()
    assert stored(store, A) == transcript("0", "1") and rows(store) == 1
    store.commit(A, transcript("0", "1", "2", "3"), 2.0)


def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, newer, good = (tmp_path / name for name in ("damaged", "newer", "good"))
    damaged.write_bytes(b"SQLite format 3\0" + b"\x7f" * 5000)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    for path, words in (
        (damaged, "damaged .*: restore a backup, .* or move it away"),
        (newer, "newer was written by another version .*layout 99.*: start that version"),
        (tmp_path, "cannot open"),
    ):
        with pytest.raises(SettingError, match=words) as error:
            HistoryStore(path)
        assert error.value.setting == "--state-dir"
    first = HistoryStore(good)
    monkeypatch.setattr(databases, "LOCK_SECONDS", 0.05)
    with pytest.raises(SettingError, match="in use by another server"):
        HistoryStore(good)
    first.close()
    HistoryStore(good).close()


@pytest.mark.parametrize("replaced", [False, True])
def test_nothing_is_written_to_a_file_that_no_start_would_find(
    replaced: bool, tmp_path: Path
) -> None:
    """SQLite goes on with a file that was deleted, and loses it at its end."""
    path, away = tmp_path / "history.sqlite", tmp_path / "away"
    store = HistoryStore(path)
    store.commit(A, transcript("0", "1"), 1.0)
    path.rename(away)
    if replaced:
        path.write_bytes(b"a backup")
    refused(ErrorKind.STORAGE_FULL, store.admit, [A], 2.0)
    refused(ErrorKind.STORAGE_FULL, store.commit, A, transcript("0", "1", "2", "3"), 2.0)
    refused(ErrorKind.STORAGE_FULL, store.delete, A, 2.0)
    refused(ErrorKind.STORAGE_FULL, store.recover)
    assert store.fault is not None and "deleted, moved or replaced" in store.fault.message
    assert stored(store, A) == transcript("0", "1")
    away.replace(path)
    store.recover()
    store.commit(A, transcript("0", "1", "2", "3"), 2.0)
    store.close()
    store = HistoryStore(path)
    assert stored(store, A) == transcript("0", "1", "2", "3")
    store.close()


def test_that_a_file_cannot_be_written_to_is_known_when_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    HistoryStore(path).close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(SettingError, match="--state-dir: cannot open"):
            HistoryStore(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITER = """
import sys
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from tests.runtime.conversations.test_store import transcript
store = HistoryStore(sys.argv[1])
number = 0
while True:
    number += 1
    name = Name("", str(number % 3))
    words = [f"{number % 3} {turn}" for turn in range(2 * (number // 3 + 1))]
    whole = transcript(*words)
    print(number, flush=True)
    store.commit(name, whole, float(number))
    if number % 7 == 0:
        copy = Name("", "copy")
        if store.find(copy, 0.0):
            store.delete(copy, 0.0)
        store.fork(name, "copy", float(number))
    print(-number, flush=True)
"""


@pytest.mark.parametrize("seed", range(4))
def test_killed_while_committing_every_turn_is_whole_or_absent(
    tmp_path: Path, histories_at: str, seed: int
) -> None:
    path = tmp_path / "history.sqlite" if histories_at == ":memory:" else histories_at
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [int(process.stdout.readline()) for _ in range(40)]
    time.sleep(random.Random(seed).random() * 0.05)
    process.kill()
    lines += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    process.wait()
    durable = -min(lines)
    last = max(lines)
    assert last - durable <= 1 and durable >= 20
    store = HistoryStore(path)
    for kind in range(3):
        numbers = [number for number in range(1, durable + 1) if number % 3 == kind]
        turns = len(stored(store, Name("", str(kind))).messages) // 2
        committed = [numbers[-1] // 3 + 1] + ([last // 3 + 1] if last % 3 == kind else [])
        assert turns in committed, "a turn that was reported is there, at most one more is"
        expected = transcript(*(f"{kind} {turn}" for turn in range(2 * turns)))
        assert stored(store, Name("", str(kind))) == expected
    used = store._db.execute(
        "WITH RECURSIVE used (n) AS (SELECT head FROM conversations UNION SELECT parent FROM turns "
        "JOIN used "
        "ON number = n WHERE parent IS NOT NULL) SELECT count(*) FROM used"
    )
    assert rows(store) == used[0][0], "no turn is left over"
    store.close()


def test_every_transaction_is_flushed_before_it_is_reported(tmp_path: Path) -> None:
    """After a loss of power too: a write-ahead log that is flushed with each commit (2 is FULL)."""
    store = HistoryStore(tmp_path / "file")
    settings = [
        store._db.execute(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous")
    ]
    assert settings == ["wal", 2]
    store.close()


def test_a_database_that_acknowledges_what_it_has_not_written_is_told_to_wait(
    postgres: str,
) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER ROLE postgres SET synchronous_commit = off")
        try:
            store = HistoryStore(postgres)
            assert store._db.execute("SHOW synchronous_commit") == [("on",)]
            store.close()
        finally:
            connection.execute("ALTER ROLE postgres RESET synchronous_commit")


def test_what_a_failed_transaction_did_not_remove_is_not_told(make: Make) -> None:
    """Its KV would be forgotten, though it is still there."""
    store = make(history_ttl=10.0)
    whole = transcript("0", "1")
    store.commit(A, whole, 1.0, b"salt")
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.expire(100.0)
        raise ZeroDivisionError
    assert store.take_expired() == [] and rows(store) == 1
    store.expire(200.0)
    assert store.take_expired() == [Gone(A, "a", whole.tokens, 0, b"salt")]
    store.close()


def test_what_has_expired_is_not_listed(make: Make) -> None:
    """Before it is cleared away too: a listing writes nothing."""
    store = make(history_ttl=10.0)
    store.commit(A, transcript("0", "1"), 0.0)
    store.commit(B, transcript("2", "3"), 5.0)
    listed, more = store.page("", 9, None, True, 12.0)
    assert ([conversation.id for conversation in listed], more) == (["b"], False) and rows(
        store
    ) == 2
    store.close()


def test_of_several_turns_of_its_own_a_deleted_fork_shares_what_is_before_the_first(
    store: HistoryStore,
) -> None:
    words = tuple(map(str, range(8)))
    store.commit(A, transcript(*words[:4]), 1.0)
    store.fork(A, "b", 2.0)
    store.commit(B, transcript(*words[:6]), 3.0)
    store.commit(B, transcript(*words), 4.0)
    assert store.delete(B, 5.0).shared == len(transcript(*words[:4]).tokens)


def test_what_has_expired_does_not_count_for_a_quota(make: Make) -> None:
    """Before it is cleared away too."""
    store = make(history_ttl=10.0, quota=1)
    store.create(A, 0.0)
    refused(ErrorKind.TOO_MANY, store.create, B, 5.0)
    store.create(B, 10.0)
    assert store.find(B, 10.0) is not None
    store.close()


# -- open turns

FIRST, LONGER, OTHER = (transcript(*words) for words in ("01", "0123", "01xy"))


def opened(store: HistoryStore, turn: bytes, alone: bool = False) -> Opening:
    return store.admit([A], 1.0, turn, alone)


def test_one_turn_at_a_time_goes_on_from_the_servers_history(store: HistoryStore) -> None:
    refused(ErrorKind.NOT_FOUND, opened, store, b"1", True)
    store.commit(A, FIRST, 1.0)
    first = opened(store, b"1", True)
    refused(ErrorKind.CONFLICT, opened, store, b"2", True)
    store.release(b"1")
    store.release(b"1")
    second = opened(store, b"2", True)
    store.commit(A, LONGER, 1.0, opening=second)
    assert stored(store, A) == LONGER
    refused(ErrorKind.CONFLICT, store.commit, A, OTHER, 1.0, b"", None, first)
    opened(store, b"3", True)


def test_a_turn_whose_lease_has_run_out_may_be_replaced(store: HistoryStore) -> None:
    store.commit(A, FIRST, 1.0)
    lease = store.lease
    store.lease = 0.0
    first = opened(store, b"1", True)
    second = opened(store, b"2", True)
    store.lease = lease
    store.renew([b"1", b"2"])
    refused(ErrorKind.CONFLICT, opened, store, b"3", True)
    refused(ErrorKind.CONFLICT, store.commit, A, OTHER, 1.0, b"", None, first)
    store.commit(A, LONGER, 1.0, opening=second)
    assert stored(store, A) == LONGER


def test_a_turn_whose_lease_has_run_out_ends_well_if_nobody_came(store: HistoryStore) -> None:
    store.commit(A, FIRST, 1.0)
    store.lease = 0.0
    first = opened(store, b"1", True)
    store.release(b"1")  # as if a crash of the database had lost it
    store.commit(A, LONGER, 1.0, opening=first)
    assert stored(store, A) == LONGER


def branches(store: HistoryStore) -> list[Transcript]:
    rows = store._db.execute("SELECT id FROM conversations WHERE kind = 'branch' ORDER BY number")
    return [stored(store, Name("", id, "branch")) for (id,) in rows]


@pytest.mark.parametrize("new", [True, False])
def test_of_two_turns_with_the_clients_history_the_second_to_end_is_a_branch(
    store: HistoryStore, new: bool
) -> None:
    if not new:
        store.commit(A, FIRST, 1.0)
    one, two, three = (opened(store, name) for name in (b"1", b"2", b"3"))
    store.commit(A, LONGER, 1.0, opening=one)
    store.commit(A, OTHER, 1.0, opening=two)
    store.commit(A, transcript("z", "z"), 1.0, opening=three)
    assert stored(store, A) == LONGER and branches(store) == [OTHER, transcript("z", "z")]
    listed, more = store.page("", 9, None, True, 1.0)
    assert [conversation.id for conversation in listed] == ["a"] and not more
    store.change(A, 1.0, history_ttl=5.0)
    assert store._db.execute("SELECT DISTINCT history_ttl FROM conversations") == [(5.0,)]
    whole = transcript("0", "1", "x", "y", "more", "!")
    store.commit(A, whole, 2.0, opening=opened(store, b"4"))
    assert stored(store, A) == whole and branches(store) == [transcript("z", "z")], (
        "gone on from: no branch any more"
    )
    store.delete(A, 3.0)
    assert rows(store) == 0 and [gone.name.kind for gone in store.take_expired()] == ["branch"]


def test_the_oldest_branches_are_dropped(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that sends unrelated requests at once under one name makes a branch with nearly each
    of them."""
    monkeypatch.setattr("pensieve.runtime.conversations.store.MOST_BRANCHES", 3)
    openings = [opened(store, bytes([at])) for at in range(9)]
    transcripts = [transcript(str(at), "x") for at in range(9)]
    for whole, opening in zip(transcripts, openings, strict=True):
        store.commit(A, whole, 1.0, opening=opening)
    assert (
        stored(store, A) == transcripts[0]
        and branches(store) == transcripts[6:]
        and rows(store) == 4
    )
    assert [gone.tokens for gone in store.take_expired()] == [
        whole.tokens for whole in transcripts[1:6]
    ], "their KV is erased"
    old, new = opened(store, b"old"), opened(store, b"new")
    longer = transcript("6", "x", "y", "z")
    store.commit(A, transcripts[0], 2.0, opening=new)
    store.commit(A, longer, 2.0, opening=old)
    assert branches(store) == [*transcripts[7:], longer], "in place of the branch that it continues"


def test_a_turn_that_edits_have_overtaken_is_a_branch(store: HistoryStore) -> None:
    """Its dialogue has the deleted messages. SQLite gives a deleted turn's number to the next."""
    store.commit(A, FIRST, 1.0)
    store.commit(A, LONGER, 2.0)
    opening = opened(store, b"1")
    for now in (3.0, 4.0):
        store.edit(A, now, lambda messages: messages[:-1])
    store.edit(A, 5.0, lambda messages: [*messages, {"role": "user", "content": "new"}])
    whole = transcript(*"012345")
    assert store.commit(A, whole, 6.0, opening=opening).kind == "branch"
    assert [message["content"] for message in stored(store, A).messages] == ["0", "1", "new"]
    opening = opened(store, b"2")
    store.edit(A, 7.0, lambda _: [])
    assert store.commit(A, whole, 8.0, opening=opening).kind == "branch"
    assert store.get(A, 9.0).head is None and branches(store) == [whole]


def test_a_turn_with_the_servers_history_is_not_overtaken(store: HistoryStore) -> None:
    store.commit(A, FIRST, 1.0)
    alone = opened(store, b"1", True)
    store.commit(A, OTHER, 1.0, opening=opened(store, b"2"))
    assert stored(store, A) == FIRST and branches(store) == [OTHER]
    store.commit(A, LONGER, 1.0, opening=alone)
    assert stored(store, A) == LONGER


def test_a_turn_of_a_deleted_conversation_does_not_bring_the_servers_history_back(
    store: HistoryStore,
) -> None:
    store.commit(A, FIRST, 1.0)
    alone, other = opened(store, b"1", True), opened(store, b"2")
    store.delete(A, 1.0)
    refused(ErrorKind.CONFLICT, store.commit, A, LONGER, 1.0, b"", None, alone)
    assert rows(store) == 0
    store.commit(A, LONGER, 1.0, opening=other)  # its client has it all
    assert stored(store, A) == LONGER


@pytest.mark.parametrize("alone", [True, False])
def test_a_turn_of_a_deleted_conversation_does_not_replace_a_new_one_of_its_name(
    store: HistoryStore, alone: bool
) -> None:
    """SQLite may give the deleted one's numbers to the new one and its turn."""
    store.commit(A, FIRST, 1.0)
    old = opened(store, b"1", alone)
    store.delete(A, 2.0)
    store.commit(A, OTHER, 3.0, opening=opened(store, b"2"))
    if alone:
        refused(ErrorKind.CONFLICT, store.commit, A, LONGER, 4.0, b"", None, old)
    else:
        assert store.commit(A, LONGER, 4.0, opening=old).kind == "branch"
    assert stored(store, A) == OTHER


def test_a_turn_of_a_deleted_conversation_is_not_stored_in_a_new_empty_one(
    store: HistoryStore,
) -> None:
    store.create(A, 1.0)
    alone, other = opened(store, b"1", True), opened(store, b"2")
    store.delete(A, 2.0)
    store.create(A, 3.0)
    refused(ErrorKind.CONFLICT, store.commit, A, FIRST, 4.0, b"", None, alone)
    store.commit(A, FIRST, 4.0, opening=other)  # its client has it all
    assert stored(store, A) == FIRST


def test_a_deleted_conversation_is_not_held_any_more(store: HistoryStore) -> None:
    """SQLite may give its number to the next one."""
    store.create(A, 1.0)
    opened(store, b"1", True)
    store.delete(A, 1.0)
    store.create(B, 1.0)
    store.admit([B], 1.0, b"2", alone=True)
    assert store._db.execute("SELECT turn FROM open_turns") == [(b"2",)]


def test_a_commit_is_known_by_its_turn(store: HistoryStore) -> None:
    first = opened(store, b"1")
    assert not store.committed(b"1")
    store.commit(A, FIRST, 1.0, opening=first)
    assert store.committed(b"1") and not store.committed(b"2")


def test_an_open_turn_keeps_its_conversation_from_expiring(make: Make) -> None:
    store = make(history_ttl=10.0)
    store.commit(A, FIRST, 0.0)
    opened(store, b"1")
    assert store.expire(100.0).conversations == 0
    assert store.find(A, 100.0) is not None
    store.release(b"1")
    assert store.find(A, 100.0) is None
