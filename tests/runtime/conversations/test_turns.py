"""TurnManager and OpenTurn over a store in memory; `told` is what the loop is asked to erase."""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from collections.abc import Coroutine

import pytest

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.messages import Forget
from pensieve.scheduler.types import InvariantError, RequestError

LOG = array("i", range(100, 140))
SALT = b"owner:key"


class Told(list[Forget]):
    async def erase(self, message: Forget) -> bool:
        self.append(message)
        return True


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


def test_the_turn_of_a_deleted_conversation_erases_what_is_not_shared_by_its_own_tokens_and_salt(told: Told) -> None:
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
        assert (own.shared, own.salt, own.conversation) == (10, b"given:other", deleted.conversation)
        turn.close()
        await settled()
        assert len(told) == 2
        await turns.close()

    run(work())


def test_a_conversation_that_was_made_anew_keeps_its_claims_when_an_old_turn_ends(told: Told) -> None:
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


def test_background_work_survives_errors_of_the_database(told: Told, caplog: pytest.LogCaptureFixture) -> None:
    """They are in the log once a minute, and in `fault` until the work succeeds."""

    async def work() -> None:
        turns = manager(told)
        assert turns.fault is None
        faults: list[str | None] = []
        away, mistake = RequestError(503, "it does not answer"), sqlite3.IntegrityError("no")
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


def test_background_work_that_ends_by_a_mistake_is_noticed(told: Told, caplog: pytest.LogCaptureFixture) -> None:
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
