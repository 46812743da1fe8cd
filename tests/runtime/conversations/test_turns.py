"""TurnManager and OpenTurn over a store in memory; `told` is what the loop is asked to erase."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine

import pytest

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.messages import Forget

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
