"""What a commit reads: a bounded part of the history, and the same result as a search through all
of it."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pensieve.runtime.conversations import store as module
from pensieve.runtime.conversations.databases import is_url
from pensieve.runtime.conversations.lines import Line
from pensieve.runtime.conversations.schema import Name, Opening
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import Transcript, dialogue_keys
from pensieve.scheduler.turns.conversations import common_prefix
from pensieve.scheduler.types import RequestError

from .test_store import dialogue

A = Name("", "a")


class WholeSearch(HistoryStore):
    """The twin: each commit reads all lines from the rows, and looks through all of them."""

    def _line_to(self, head: int | None) -> Line | None:
        turns = self._line(head)
        return Line(turns) if turns else None

    def _nearest(self, head: int | None, others: Sequence[int], whole: Transcript) -> Line | None:
        beginnings = {key: count for count, key in enumerate(dialogue_keys("", whole.messages))}
        # messages, tokens
        best = None
        longest = (-1, -1)
        for end in (head, *others):
            line = list(self._line(end).values())
            common = sys.maxsize
            if line and not whole.messages:
                common = common_prefix(line[-1].turn.transcript().tokens, whole.tokens)
            for number, _, digest, turn, _ in reversed(line):
                log = turn.kept + len(turn.tokens)
                if digest in beginnings and log <= common:
                    if (beginnings[digest], log) > longest:
                        best = number
                        longest = (beginnings[digest], log)
                    break
                if not whole.messages:
                    common = min(common, turn.kept)
        return self._line_to(best)


def tables(store: HistoryStore) -> list[Any]:
    turns = (
        "SELECT number, parent, digest, messages, kept, tokens, inside, text_kept, text FROM turns "
        "ORDER BY number"
    )
    return store._db.execute(turns) + store._db.execute(
        "SELECT * FROM conversations ORDER BY number"
    )


class Driver:
    """The same random operations on both stores. Dialogues have few different messages, logs few
    different tokens: they meet again and again."""

    def __init__(self, seed: int, stores: Sequence[HistoryStore]):
        self.draw = random.Random(seed)
        self.stores = stores
        self.open: list[tuple[Name, list[Opening]]] = []
        self.dialogues: list[tuple[str, ...]] = [()]
        self.logs: list[tuple[int, ...]] = [()]
        self.turns = 0

    def both(self, call: str, *args: Any, **options: Any) -> list[Any]:
        """The results; None where it is refused."""
        results = []
        for store in self.stores:
            try:
                results.append(getattr(store, call)(*args, **options))
            except RequestError as error:
                results.append(error.kind)
        return results

    def name(self) -> Name:
        return Name("", self.draw.choice("ab"))

    def whole(self) -> Transcript:
        draw = self.draw
        if draw.random() < 0.3:
            log = draw.choice(self.logs)
            log = log[: draw.randrange(len(log) + 1)] if draw.random() < 0.3 else log
            log = (*log, *draw.choices((1, 2), k=draw.randrange(1, 3)))
            self.logs.append(log)
            return Transcript((), array("i", log), "".join(map(str, log)), len(log))
        words = draw.choice(self.dialogues[-8:])
        words = words[: draw.randrange(len(words) + 1)] if draw.random() < 0.3 else words
        words = (*words, *draw.choices("xy", k=draw.randrange(3)))
        self.dialogues.append(words)
        tokens = [token for word in words for token in (ord(word), *draw.choices((1, 2), (9, 1)))]
        text = "".join(words) + draw.choice(("", "", "!"))
        return Transcript(dialogue(*words), array("i", tokens), text, len(tokens))

    def step(self) -> None:
        draw = self.draw
        name = self.name()
        match draw.choice(
            (
                "open",
                "open",
                "commit",
                "commit",
                "commit",
                "late",
                "response",
                "fork",
                "delete",
                "fail",
            )
        ):
            case "open":
                self.turns += 1
                openings = self.both("admit", [name], 1.0, self.turns.to_bytes(4, "big"))
                self.open.append((name, openings))
            case "commit":
                self.both("commit", name, self.whole(), 1.0)
            case "late" if self.open:
                name, openings = self.open.pop(draw.randrange(len(self.open)))
                whole = self.whole()
                for store, opening in zip(self.stores, openings, strict=True):
                    store.commit(name, whole, 1.0, opening=opening)
            case "response":
                before, new = (Name("", draw.choice("rs"), "response") for _ in range(2))
                behind = draw.choice((None, name, before))
                self.both("commit", new, self.whole(), 1.0, behind=behind)
            case "fork":
                self.both("fork", name, draw.choice("abc"), 1.0)
            case "delete" if draw.random() < 0.3:
                self.both(
                    "delete", draw.choice((name, Name("", "c"), Name("", "r", "response"))), 1.0
                )
            case "fail":
                whole = self.whole()
                for store in self.stores:
                    with pytest.raises(ZeroDivisionError), store.transaction():
                        store.commit(name, whole, 1.0)
                        raise ZeroDivisionError


@pytest.mark.parametrize("seed", range(12))
def test_a_turn_goes_on_from_the_same_turn_as_after_a_search_through_everything(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BRANCHES", 2 + seed % 5)
    monkeypatch.setattr(module, "MOST_CACHED", (150, 1000, 10**6)[seed % 3])
    stores = HistoryStore(":memory:"), WholeSearch(":memory:")
    driver = Driver(seed, stores)
    for _ in range(250):
        driver.step()
        one, other = map(tables, stores)
        assert one == other
        assert (
            stores[0]._cached_size
            == sum(line.size for line in stores[0]._lines.values())
            <= module.MOST_CACHED
        )
    for digest, owner, id, kind in stores[0]._db.execute(
        "SELECT digest, owner, conversations.id, kind FROM conversations JOIN turns ON "
        "turns.number = head"
    ):
        stored = stores[0].find(Name(owner, id, kind), 1.0)
        assert stored is not None and stored[1] is not None
        assert digest == dialogue_keys("", stored[1].transcript().messages)[-1]
    for store in stores:
        store.close()


def long_dialogue(turns: int, branch: int | None = None) -> Transcript:
    """`branch`: its last answer is another one."""
    words = [f"{at}" for at in range(2 * turns)]
    if branch is not None:
        words[-1] = f"branch {branch}"
    return Transcript(dialogue(*words), array("i", range(3 * turns)), "".join(words), 3 * turns)


class Counted:
    """Counts the rows and bytes that a store's calls read, and the steps of SQLite's machine."""

    def __init__(self, store: HistoryStore, monkeypatch: pytest.MonkeyPatch):
        self.rows = self.bytes = self.steps = 0
        execute = store._db.execute

        def counted(sql: str, values: Any = None) -> list[Any]:
            rows = execute(sql, values)
            self.rows += len(rows)
            self.bytes += sum(
                len(value) if isinstance(value, (str, bytes)) else 8
                for row in rows
                for value in row
            )
            return rows

        def step() -> int:
            self.steps += 1
            return 0

        monkeypatch.setattr(store._db, "execute", counted)
        if not store.shared:
            store._db._db.set_progress_handler(step, 1)  # type: ignore[attr-defined]


def work_of_a_commit(turns: int, branches: int, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Of a turn behind as many others, beside branches that have parted on the way."""
    store = HistoryStore(":memory:")
    for turn in range(1, turns):
        late = store.admit([A], 1.0, b"late %d" % turn) if turn > turns - 1 - branches else None
        store.commit(A, long_dialogue(turn), 1.0)
        if late is not None:
            store.commit(A, long_dialogue(turn, turn), 1.0, opening=late)
    ((branch_count,),) = store._db.execute(
        "SELECT count(*) FROM conversations WHERE kind = 'branch'"
    )
    assert branch_count == branches
    opening = store.admit([A], 1.0, b"turn")
    counted = Counted(store, monkeypatch)
    store.commit(A, long_dialogue(turns), 1.0, opening=opening)
    store.close()
    return counted


def test_a_commit_reads_as_much_of_a_long_history_as_of_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short, long = (work_of_a_commit(turns, 0, monkeypatch) for turns in (4, 200))
    assert (long.rows, long.bytes, long.steps) == (short.rows, short.bytes, short.steps)


def test_of_each_branch_a_commit_reads_its_row_and_its_last_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none, some, many = (work_of_a_commit(40, branches, monkeypatch) for branches in (0, 8, 16))
    assert (some.rows, many.rows) == (none.rows + 2 * 8, none.rows + 2 * 16)
    assert many.bytes < 200 * 17 and many.steps < 2 * some.steps
    long = work_of_a_commit(200, 16, monkeypatch)
    assert (long.rows, long.steps) == (many.rows, many.steps)


def test_branches_of_other_conversations_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(others: int) -> Counted:
        store = HistoryStore(":memory:")
        for number in range(others):
            name = Name("", f"other {number}")
            openings = [store.admit([name], 1.0, f"{number} {turn}".encode()) for turn in range(3)]
            for turn, opening in enumerate(openings):
                store.commit(name, long_dialogue(1, turn), 1.0, opening=opening)
        store.commit(A, long_dialogue(1), 1.0)
        counted = Counted(store, monkeypatch)
        store.commit(A, long_dialogue(2), 1.0)
        store.close()
        return counted

    few, many = work(1), work(60)
    assert (many.rows, many.steps) == (few.rows, few.steps)


def test_tables_of_an_older_program_get_the_index_of_branches(
    histories_at: str, tmp_path: Path
) -> None:
    where = histories_at if is_url(histories_at) else str(tmp_path / "file")
    listed = "SELECT name FROM sqlite_master WHERE name = 'branches_of'"
    if is_url(where):
        listed = "SELECT indexname FROM pg_indexes WHERE indexname = 'branches_of'"
    for _ in range(2):
        store = HistoryStore(where)
        assert store._db.execute(listed) == [("branches_of",)]
        store._db.execute("DROP INDEX branches_of")
        store.close()


def test_a_history_that_was_just_written_or_read_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HistoryStore(":memory:")
    for turn in range(1, 50):
        store.commit(A, long_dialogue(turn), 1.0)
    for _ in range(2):
        counted = Counted(store, monkeypatch)
        stored = store.find(A, 1.0)
        assert counted.rows == 2 and stored is not None and stored[1] is not None
        assert stored[1].transcript() == long_dialogue(49)
        monkeypatch.undo()
        store.use_tokenizer(b"")  # forgets what it knows
        store.find(A, 1.0)
    store.close()


def test_messages_that_the_caller_changes_afterwards_stay_as_they_were_stored() -> None:
    store = HistoryStore(":memory:")
    whole = long_dialogue(1)
    store.commit(A, whole, 1.0)
    whole.messages[0]["content"] = "changed"
    stored = store.find(A, 1.0)
    assert (
        stored is not None and stored[1] is not None and stored[1].transcript() == long_dialogue(1)
    )
    longer = long_dialogue(2)
    longer.messages[0]["content"] = "changed"
    store.commit(A, longer, 1.0)
    assert store._db.execute("SELECT count(*) FROM turns") == [(1,)], (
        "it goes on from nothing that is stored"
    )
    store.close()
