"""TurnManager and OpenTurn over a store in memory; `told` is what the loop is asked to erase."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
import threading
from array import array
from collections.abc import Coroutine, Sequence

import pytest

from pensieve.runtime.conversations import lines as lines_module
from pensieve.runtime.conversations import turns as turns_module
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.transcript import Message, dialogue_keys
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.messages import Forget
from pensieve.scheduler.types import Erasure, ErrorKind, InvariantError, RequestError

from .test_store import dialogue, transcript

LOG = array("i", range(100, 140))
SALT = b"owner:key"


class Told(list[Forget]):
    async def erase(self, message: Forget) -> Erasure:
        self.append(message)
        return Erasure.WHOLLY


def run(work: Coroutine[None, None, None]) -> None:
    asyncio.run(work)


async def settled() -> None:
    """Tasks that have been made have sent their messages."""
    await asyncio.sleep(0)


@pytest.fixture
def told() -> Told:
    return Told()


def manager(told: Told) -> TurnManager:
    return TurnManager(HistoryStore(":memory:"), lambda message: None, told.erase, None)


async def say(turns: TurnManager, name: str, prompt: array[int]) -> None:
    turn = await turns.open_completion("key", name, prompt)
    await turn.commit([1, 2], "", None, SALT)
    turn.close([1, 2], SALT)


def test_the_turn_of_a_deleted_conversation_erases_what_is_not_shared_by_its_own_tokens_and_salt(
    told: Told,
) -> None:
    async def work() -> None:
        turns = manager(told)
        await say(turns, "c", LOG)
        await turns.fork(Name("key", "c"), "fork")
        edited = LOG[:10] + array("i", [7]) * 50
        turn = await turns.open_completion("key", "c", edited)
        await turns.delete(Name("key", "c"))
        turn.close([3, 4, 5], b"given:other")
        await settled()
        deleted, own = told
        assert deleted.tokens == LOG + array("i", [1, 2]) and deleted.shared == len(deleted.tokens)
        assert own.tokens == edited + array("i", [3, 4, 5])
        assert (own.shared, own.salt, own.conversation) == (
            10,
            b"given:other",
            deleted.conversation,
        )
        turn.close()
        await settled()
        assert len(told) == 2
        await turns.close()

    run(work())


def test_a_turn_without_tokens_erases_nothing_that_others_share(told: Told) -> None:
    """As that of a process that died: the conversation ends again, as at its deletion."""

    async def work() -> None:
        turns = manager(told)
        await say(turns, "c", LOG)
        await turns.fork(Name("key", "c"), "fork")
        turn = await turns.open_completion("key", "c", LOG)
        await turns.delete(Name("key", "c"))
        assert turn.opening is not None
        turns.close_turn(turn.opening.turn, array("i"), b"")
        await settled()
        deleted, again = told
        assert deleted.shared == len(LOG) + 2 and again == deleted
        await turns.close()

    run(work())


def test_a_conversation_that_was_made_anew_keeps_its_claims_when_an_old_turn_ends(
    told: Told,
) -> None:
    async def work() -> None:
        turns = manager(told)
        await say(turns, "c", LOG)
        old = await turns.open_completion("key", "c", LOG[:20])
        await turns.delete(Name("key", "c"))
        await say(turns, "c", LOG[5:])
        next_one = await turns.open_completion("key", "c", LOG)
        old.close([3], SALT)
        next_one.close([4], SALT)
        await settled()
        _, of_old = told
        assert of_old.conversation is None and of_old.tokens == LOG[:20] + array("i", [3])
        await turns.close()

    run(work())


def test_an_edit_leaves_the_loop_the_beginning_that_stays(told: Told) -> None:
    name = Name("key", "c")
    words = ("a", "b", "c", "d", "e", "f")

    async def work() -> None:
        turns = manager(told)
        logs = [transcript(*words[:count]) for count in (2, 4, 6)]
        for whole in logs:
            turn = await turns.open_completion("key", "c", whole.tokens)
            turn.messages, turn.text, turn.inside = whole.messages, whole.text, whole.inside
            await turn.commit([], "", None, SALT)
            if whole is logs[1]:
                await turns.fork(name, "fork")
        open_turn = await turns.open_completion("key", "c", logs[0].tokens[:4])
        await turns.edit(name, lambda messages: messages[:2])
        open_turn.close([7] * 9, SALT)
        await settled()
        edit, own = told
        assert (edit.tokens, edit.shared, edit.kept) == (logs[2].tokens, 12, 6)
        assert (own.shared, own.kept, own.conversation) == (4, 4, edit.conversation)
        await turns.delete(name)
        assert told[-1].kept == 0
        await turns.close()

    run(work())


# -- calls in the one thread of the histories


class Waiting(HistoryStore):
    """Its statements wait as long as the test says."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.seconds = 0.0
        self.interrupted = threading.Event()

    def waiting(self) -> float:
        return self.seconds

    def interrupt(self) -> None:
        self.seconds = 0.0
        self.interrupted.set()


def watched(store: HistoryStore, monkeypatch: pytest.MonkeyPatch) -> TurnManager:
    """The manager of a shared database."""
    monkeypatch.setattr(turns_module, "WATCH_SECONDS", 0.001)
    monkeypatch.setattr(store, "shared", True)
    monkeypatch.setattr(store, "register", lambda: None)
    return TurnManager(store, lambda message: None, Told().erase, None)


async def looks(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0.002)


def test_calls_behind_a_slow_one_wait_and_are_answered_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it takes: its statements are answered."""
    monkeypatch.setattr(turns_module, "HUNG_SECONDS", 0.0)

    async def work() -> None:
        store = Waiting()
        go_on = threading.Event()
        done = list[int]()
        turns = watched(store, monkeypatch)
        slow = asyncio.create_task(turns.run(go_on.wait))
        behind = [asyncio.create_task(turns.run(done.append, number)) for number in range(3)]
        await looks()
        assert not slow.done() and not store.interrupted.is_set()
        go_on.set()
        await asyncio.gather(slow, *behind)
        assert done == [0, 1, 2]
        await turns.close()

    run(work())


def test_a_statement_without_an_answer_is_ended_also_when_the_server_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        store = Waiting()
        turns = watched(store, monkeypatch)
        hung = asyncio.create_task(turns.run(store.interrupted.wait))
        store.seconds = turns_module.HUNG_SECONDS - 1
        await looks()
        assert not store.interrupted.is_set()
        store.seconds = turns_module.HUNG_SECONDS + 1
        await asyncio.wait_for(turns.close(), 60)
        assert await hung

    run(work())


def test_a_commit_that_has_waited_for_long_is_tried_again_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call before it may have waited for the same database, which is back in a second."""
    monkeypatch.setattr(turns_module, "COMMIT_PATIENCE_S", 0.0)
    monkeypatch.setattr(turns_module, "COMMIT_RETRY_S", 0.0)

    async def work(failures: int) -> int:
        turns = manager(Told())
        tried = []

        def commit() -> None:
            tried.append(1)
            if len(tried) <= failures:
                raise RequestError(ErrorKind.UNAVAILABLE, "the database does not answer")

        try:
            await turns._until_answered(commit)
        finally:
            await turns.close()
        return len(tried)

    assert asyncio.run(work(1)) == 2
    with pytest.raises(RequestError):
        asyncio.run(work(2))


def test_a_dialogue_that_is_remembered_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        turns = manager(Told())
        hashed = list[int]()
        sha256 = hashlib.sha256
        monkeypatch.setattr("hashlib.sha256", lambda data: hashed.append(1) or sha256(data))
        for count in (2, 4, 6):
            hashed.clear()
            turns.remember("me", transcript(*map(str, range(count))))
            assert len(hashed) == 1 + count
        conversation = turns._recent.find(dialogue_keys("me", dialogue(*map(str, range(7)))))
        assert conversation is not None and conversation.transcript() == transcript(
            *map(str, range(6))
        )
        await turns.close()

    run(work())


class Script:
    """Background work: each call has the next outcome, and then none is left."""

    def __init__(self, *outcomes: Exception | None):
        self._outcomes = list(outcomes)
        self.ended = asyncio.Event()

    async def __call__(self) -> None:
        if not self._outcomes:
            self.ended.set()
            return
        if (outcome := self._outcomes.pop(0)) is not None:
            raise outcome


def test_background_work_survives_errors_of_the_database(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    """They are in the log once a minute, and in `fault` until the work succeeds."""

    async def work() -> None:
        turns = manager(told)
        assert turns.fault is None
        faults: list[str | None] = []
        away = RequestError(ErrorKind.UNAVAILABLE, "it does not answer")
        mistake = sqlite3.IntegrityError("no")
        script = Script(*[away] * 5, *[mistake] * 3)

        async def noting() -> None:
            faults.append(turns.fault)
            await script()

        turns._repeat("the work", lambda: 0.0, noting)
        await script.ended.wait()
        assert faults[:6] == [None, *["it does not answer"] * 5]
        assert faults[6:9] == ["the work: the database refuses it"] * 3
        await settled()
        assert turns.fault is None
        await turns.close()

    run(work())
    assert [record.getMessage() for record in caplog.records] == [
        "the work: it does not answer",
        "the work: it works again",
    ]


def test_background_work_that_ends_by_a_mistake_is_noticed(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        turns = manager(told)
        turns._repeat("the work", lambda: 0.0, Script(InvariantError("the books disagree")))
        while turns.fault is None:
            await asyncio.sleep(0)
        assert "restart the server" in turns.fault
        await turns.close()

    run(work())
    (record,) = caplog.records
    assert record.levelname == "CRITICAL" and "the books disagree" in caplog.text


def test_turns_are_stored_while_an_edit_is_computed(told: Told) -> None:
    """If one of them changes its conversation, the edit is computed again."""
    name = Name("key", "c")
    edited = threading.Event()
    calls = list[int]()

    def slow(messages: Sequence[Message]) -> list[Message]:
        calls.append(len(messages))
        assert edited.wait(30), "the histories do nothing else meanwhile"
        return [*messages, *dialogue("slow")]

    def quick(messages: Sequence[Message]) -> list[Message]:
        return [*messages, *dialogue("quick")]

    async def work() -> None:
        turns = manager(told)
        await turns.create(name, dialogue("hello"))
        for changed in (False, True):
            edited.clear()
            edit = asyncio.create_task(turns.edit(name, slow))
            while not calls:
                await asyncio.sleep(0.001)
            await say(turns, "d", LOG)
            if changed:
                await turns.edit(name, quick)
            edited.set()
            await edit
            _, transcript = await turns.load(name)
            words = [message["content"] for message in transcript.messages]
            assert words == (["hello", "slow", "quick", "slow"] if changed else ["hello", "slow"])
            assert calls == ([2, 3] if changed else [1])
            calls.clear()
        await turns.close()

    run(work())


def test_turns_are_stored_while_a_conversation_is_made_of_items(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = dialogue("hello", "you")
    stored = threading.Event()

    def slow(owner: str, messages: Sequence[Message]) -> list[bytes]:
        if messages == items:
            assert stored.wait(30), "the histories do nothing else meanwhile"
        return dialogue_keys(owner, messages)

    async def work() -> None:
        turns = manager(told)
        monkeypatch.setattr(lines_module, "dialogue_keys", slow)
        creation = asyncio.create_task(turns.create(Name("key", "c"), items, "{}"))
        await settled()
        await say(turns, "d", LOG)
        stored.set()
        created = await creation
        assert (created.title, created.body, created.tokens) == ("hello", "{}", 0)
        conversation, transcript = await turns.load(Name("key", "c"))
        assert conversation == created and transcript.messages == items
        await turns.close()

    run(work())


def test_a_turn_with_the_servers_history_refuses_an_edit_that_is_computed(told: Told) -> None:
    name = Name("key", "c")

    async def work() -> None:
        turns = manager(told)
        await turns.create(name, dialogue("hello"))
        begun = threading.Event()
        opened = threading.Event()

        def slow(messages: Sequence[Message]) -> list[Message]:
            begun.set()
            assert opened.wait(30)
            return []

        edit = asyncio.create_task(turns.edit(name, slow))
        await asyncio.to_thread(begun.wait)
        await turns.go_on(name)
        opened.set()
        with pytest.raises(RequestError, match="in flight"):
            await edit
        await turns.close()

    run(work())
