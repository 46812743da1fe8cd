"""Random operations on the store and on a model of it: every answer and every refusal is the
same."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal

import pytest

from pensieve.runtime.conversations import store as module
from pensieve.runtime.conversations.schema import Name, Opening, StoredConversation
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import StoredTurn, Transcript
from pensieve.scheduler.types import ErrorKind, RequestError

from .store_model import ModelConversation, ModelOpening, StoreModel
from .test_store import dialogue

OWNERS = ("", "key")
OPERATIONS = (
    *("commit", "commit", "open", "open", "open", "end", "end", "end"),
    *("edit", "edit", "respond", "other"),
)
STATED = [field.name for field in fields(ModelConversation) if field.name not in ("number", "head")]


def stated(value: Any) -> Any:
    """The parts of an answer that the store and the model have in common."""
    if isinstance(value, (StoredConversation, ModelConversation)):
        return [getattr(value, name) for name in STATED]
    if isinstance(value, StoredTurn):
        return value.transcript()
    if isinstance(value, tuple) and type(value) is tuple:
        return [stated(part) for part in value]
    if isinstance(value, list):
        return [part.id if isinstance(part, StoredConversation) else part for part in value]
    return value


class Driver:
    def __init__(self, seed: int, store: HistoryStore, model: StoreModel):
        self.draw = random.Random(seed)
        self.store = store
        self.model = model
        self.now, self.turns = 1000.0, 0
        self.open: list[tuple[list[Name], Opening, ModelOpening]] = []  # some have ended
        self.errors: set[ErrorKind] = set()
        self.kinds: set[str] = set()

    def both(
        self, in_store: Callable[[], Any], call: str, *args: Any, **options: Any
    ) -> tuple[Any, Any] | None:
        """The answers of the store and the model; None: both refuse."""
        answers = []
        refused = []
        for work in (
            in_store,
            lambda: self.model.do(self.now, getattr(self.model, call), *args, **options),
        ):
            try:
                answers.append(work())
            except RequestError as error:
                refused.append(error.kind)
        assert len(answers) == 2 or refused == refused[:1] * 2, (call, args, answers, refused)
        self.errors.update(refused)
        return (answers[0], answers[1]) if answers else None

    def same(self, call: str, *args: Any, **options: Any) -> None:
        result = self.both(
            lambda: getattr(self.store, call)(*args, **options), call, *args, **options
        )
        assert result is None or stated(result[0]) == stated(result[1]), (call, args, result)

    def name(self) -> Name:
        if self.draw.random() < 0.2:
            return Name(self.draw.choice(OWNERS), self.draw.choice("rst"), "response")
        return Name(self.draw.choice(OWNERS), self.draw.choice("abc"))

    def names(self) -> list[Name]:
        """A branch that is younger than its conversation is there until the conversation is
        removed."""
        names = list(self.model.state.conversations)
        return (
            names
            if self.model.history_ttl is None
            else [name for name in names if name.kind != "branch"]
        )

    def any_name(self) -> Name:
        names = self.names()
        return self.draw.choice(names) if names and self.draw.random() < 0.7 else self.name()

    def whole(self, name: Name) -> tuple[Literal["chat", "completion"], Transcript]:
        """It goes on from the stored history, or from a part of it, or from another one."""
        draw = self.draw
        past = self.model.state.conversations.get(name)
        head = past.head if past is not None and name.kind == "conversation" else None
        if head is not None and not self.model.branches(name) and draw.random() < 0.2:
            turn = self.model.state.turns[head]
            if turn.kind != "edit":  # else it is refused before
                log = turn.whole.tokens + array("i", draw.choices((1, 2), k=draw.randrange(2, 4)))
                return "completion", replace(turn.whole, tokens=log)
        conversation = self.model.state.conversations.get(
            name if draw.random() < 0.8 else self.any_name()
        )
        before = (
            self.model.state.turns[conversation.head].whole
            if conversation is not None and conversation.head is not None
            else None
        )
        if draw.random() < 0.25:
            log = list(before.tokens) if before is not None and not before.messages else []
            log = log[: draw.randrange(len(log) + 1)] if draw.random() < 0.3 else log
            log += draw.choices((1, 2), k=draw.randrange(1, 4))
            whole = Transcript((), array("i", log), "".join(map(str, log)), len(log))
            return "completion", whole
        words = [message["content"] for message in before.messages] if before is not None else []
        words = words[: draw.randrange(len(words) + 1)] if draw.random() < 0.25 else words
        words += draw.choices("xyz", k=draw.choice((1, 2, 2, 2, 3)))
        tokens = [token for word in words for token in (ord(word), *draw.choices((1, 2), (9, 1)))]
        whole = Transcript(dialogue(*words), array("i", tokens), "".join(words), len(tokens))
        return "chat", whole

    def edited(self, name: Name) -> list[str]:
        """The words of a conversation with one more, or without one of them."""
        draw = self.draw
        conversation = self.model.state.conversations.get(name)
        words: list[str] = []
        if conversation is not None and conversation.head is not None:
            past = self.model.state.turns[conversation.head].whole
            words = [message["content"] for message in past.messages]
        if not words or draw.random() < 0.4:
            return [*words, draw.choice("xyz")]
        del words[-1 if draw.random() < 0.5 else draw.randrange(len(words))]
        return words

    def step(self) -> None:
        draw = self.draw
        self.now += draw.choice((0.5, 1.0, 1.0, 5.0))
        name = self.name()
        now = self.now
        match draw.choice(OPERATIONS):
            case "commit":
                self.commit([name], None, None)
            case "open":
                self.turns += 1
                turn = self.turns.to_bytes(4, "big")
                alone = draw.random() < 0.4
                if name.kind == "response":  # those of the server have new names
                    name = name._replace(id=f"r{self.turns}")
                names = [name] if draw.random() < 0.8 else [name, name._replace(id="d")]
                opened = self.both(
                    lambda: self.store.admit(names, now, turn, alone),
                    "admit",
                    names,
                    now,
                    turn,
                    alone,
                )
                if opened is not None:
                    assert opened[0].seen.keys() == opened[1].seen.keys()
                    self.open.append((names, *opened))
            case "end" if self.open:
                names, opening, as_modelled = draw.choice(self.open)
                if draw.random() < 0.2:
                    self.same("release", opening.turn)
                else:
                    self.commit(names, opening, as_modelled)
            case "respond":
                behind = self.any_name()
                if behind.kind != "branch":
                    new = Name(behind.owner, draw.choice("rst"), "response")
                    self.commit(
                        [new], None, None, behind, parent=behind.id, thread=behind.id, body="{}"
                    )
            # a turn may go on from an expired branch, and then its log after an edit is that one's
            case "edit" if self.model.history_ttl is None:
                name = name._replace(kind="conversation")
                edited = dialogue(*self.edited(name))
                self.same("edit", name, now, lambda _: edited)
            case "other":
                self.step_aside()

    def step_aside(self) -> None:
        draw = self.draw
        now = self.now
        name = self.any_name()
        match draw.choice(("create", "fork", "fork", "change", "delete", "page")):
            case "create":
                self.same("create", self.name(), now)
            case "fork":
                self.same("fork", name._replace(kind="conversation"), draw.choice("abcd"), now)
            case "change" if name.kind != "branch":
                values: dict[str, tuple[float | str | None, ...]] = {
                    "history_ttl": (None, 5.0, 50.0),
                    "ttl": (None, 9.0),
                    "pinned_until": (0.0, 2000.0),
                    "body": (None, '{"k": "v"}'),
                }
                which = draw.choice(list(values)[self.model.history_ttl is None :])
                self.same("change", name, now, **{which: draw.choice(values[which])})
            case "delete":
                self.delete(name)
            case "page":
                after = draw.choice((None, "a", "b"))
                self.same("page", name.owner, draw.randrange(1, 4), after, draw.random() < 0.5, now)

    def delete(self, name: Name) -> None:
        gone = self.both(lambda: self.store.delete(name, self.now), "delete", name, self.now)
        if gone is not None and self.model.history_ttl is None:
            assert gone[0] == gone[1]
        elif gone is not None:  # what has expired may still share its log
            assert (gone[0].name, gone[0].tokens, gone[0].salt) == (
                gone[1].name,
                gone[1].tokens,
                gone[1].salt,
            )

    def commit(
        self,
        names: list[Name],
        opening: Opening | None,
        as_modelled: ModelOpening | None,
        behind: Name | None = None,
        **about: str,
    ) -> None:
        """With an opening a second time, too: a commit whose answer was lost is repeated."""
        name = names[0]
        now = self.now
        if opening is not None:
            committed = self.store.committed(opening.turn)
            if self.model.history_ttl is None:
                assert committed == self.model.committed(opening.turn)
            if committed:  # perhaps in a conversation that has expired
                return
        kind, whole = self.whole(name)
        salt = self.draw.randbytes(2)
        result = self.both(
            lambda: self.store.commit(name, whole, now, salt, behind, opening, **about).kind,
            "commit",
            name,
            whole,
            now,
            salt,
            behind,
            as_modelled,
            kind,
            **about,
        )
        if result is not None:
            assert result[0] == result[1]
            self.kinds.add(result[0])

    def look(self) -> None:
        """Reads everything."""
        names = {Name(owner, id) for owner in OWNERS for id in "abcd"} | set(self.names())
        for name in sorted(names):
            self.same("find", name, self.now)
        for owner in OWNERS:
            self.same("page", owner, 99, None, True, self.now)

    def check(self) -> None:
        """The rows of a store whose conversations do not expire."""
        store, model = self.store, self.model
        told = store.take_expired()
        expired = model.state.expired
        assert sorted(told, key=lambda gone: gone.name) == sorted(
            expired, key=lambda gone: gone.name
        )
        expired.clear()
        numbers = "SELECT count(*) FROM turns"
        assert store._db.execute(numbers) == [(len(model.used_turns()),)], "no turn is left over"
        lost = (
            "SELECT parent FROM turns WHERE parent IS NOT NULL AND parent NOT IN (SELECT number "
            "FROM turns)"
        )
        assert store._db.execute(lost) == []
        lost = (
            "SELECT head FROM conversations WHERE head IS NOT NULL AND head NOT IN (SELECT number "
            "FROM turns)"
        )
        assert store._db.execute(lost) == []
        held = store._db.execute("SELECT turn, alone FROM open_turns")
        assert sorted(held) == sorted(
            (turn, int(alone)) for turn, _, alone in model.state.open_turns
        )


def drive(
    seed: int, where: str, steps: int, monkeypatch: pytest.MonkeyPatch, history_ttl: float | None
) -> Driver:
    monkeypatch.setattr(module, "MOST_BRANCHES", 3)
    store = HistoryStore(where, history_ttl, quota=4)
    store.lease = 9e9
    if store.shared:
        store.register()
    driver = Driver(seed, store, StoreModel(history_ttl, 4, 3))
    try:
        for step in range(steps):
            driver.step()
            if step % 4 == 0:
                driver.look()
            if history_ttl is None:
                driver.check()
        driver.look()
        for name in list(driver.model.state.conversations):
            if history_ttl is None and name.kind != "branch":
                driver.delete(name)
        if history_ttl is None:
            driver.check()
            assert store._db.execute("SELECT number FROM turns") == []
            assert store._db.execute("SELECT turn FROM open_turns") == []
    finally:
        store.close()
    return driver


@pytest.mark.parametrize("history_ttl", [None, 60.0], ids=["kept", "expiring"])
def test_a_store_and_its_model_agree(
    history_ttl: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = [drive(seed, ":memory:", 300, monkeypatch, history_ttl) for seed in range(6)]
    assert set().union(*(driver.errors for driver in drivers)) == {
        ErrorKind.NOT_FOUND,
        ErrorKind.CONFLICT,
        ErrorKind.TOO_MANY,
    }
    assert set().union(*(driver.kinds for driver in drivers)) == {
        "conversation",
        "response",
        "branch",
    }


@pytest.mark.parametrize("history_ttl", [None, 60.0], ids=["kept", "expiring"])
def test_a_shared_store_and_its_model_agree(
    history_ttl: float | None, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(1, postgres, 200, monkeypatch, history_ttl)
