"""An engine with another tokenizer continues the text, and never uses the other one's token ids."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.text.tokenizer import ChatTemplate, Tokenizer
from pensieve.scheduler.types import ErrorKind, RequestError

from . import served
from .odd_tokenizer import TEMPLATE, merging_tokenizer, save_merging, spaced_tokenizer
from .text.test_tokenizer import in_bytes, sentencepiece_like

OURS, THEIRS = (
    Tokenizer(make_tokenizer(), ChatTemplate(TEMPLATE, {}))
    for make_tokenizer in (merging_tokenizer, spaced_tokenizer)
)
HELLO, ANSWER, AGAIN = (
    {"role": role, "content": x} for role, x in (("user", "a"), ("assistant", "b"), ("user", "ab"))
)


@pytest.fixture
def serve(tmp_path: Path, histories_at: str) -> Callable[..., None]:
    where = tmp_path / "file" if histories_at == ":memory:" else histories_at

    def serve(tokenizer: Tokenizer | None, work: Callable[[TurnManager], Awaitable[None]]) -> None:
        async def between() -> None:
            loop: Any = None  # gets no messages
            histories = TurnManager(HistoryStore(where), loop, loop, tokenizer)
            try:
                await work(histories)
            finally:
                await histories.close()

        asyncio.run(between())

    return serve


async def talk(histories: TurnManager) -> None:
    turn = await histories.open_chat("", "chat", [HELLO], OURS.render_chat)
    await turn.commit(OURS.encode_rendered("b"), "b", ANSWER, b"")
    turn = await histories.open_completion("", "text", "a")
    await turn.commit(OURS.encode_rendered("b"), "b", None, b"")


def test_a_dialogue_is_tokenised_anew(serve: Callable[..., None]) -> None:
    async def go_on(histories: TurnManager) -> None:
        turn = await histories.open_chat(
            "", "chat", [AGAIN], THEIRS.render_chat, server_history=True
        )
        ours, theirs = (
            tok.encode_rendered(tok.render_chat([HELLO, ANSWER, AGAIN])) for tok in (OURS, THEIRS)
        )
        assert turn.prompt == theirs != ours
        await turn.commit(THEIRS.encode_rendered("b"), "b", ANSWER, b"")

    async def read(histories: TurnManager) -> None:
        turn = await histories.open_completion("", "text", "ab")
        turn.close()
        assert turn.prompt == THEIRS.encode("ab")

    serve(OURS, talk)
    serve(THEIRS, go_on)
    serve(THEIRS, read)


@pytest.mark.parametrize("prompt", ["b", array("i", [1])])
def test_a_log_of_other_ids_is_not_gone_on_with(prompt: Any, serve: Callable[..., None]) -> None:
    async def go_on(histories: TurnManager) -> None:
        with pytest.raises(RequestError, match="another tokenizer") as refused:
            await histories.open_completion("", "text", prompt, server_history=True)
        assert refused.value.kind == ErrorKind.CONFLICT

    serve(OURS, talk)
    serve(THEIRS, go_on)


def test_the_same_tokenizer_finds_its_ids_again(serve: Callable[..., None]) -> None:
    async def go_on(histories: TurnManager) -> None:
        stored = await histories.run(histories._store.find, Name("", "chat"), 0.0)
        assert stored is not None and stored[1] is not None and stored[1].inside > 0

    serve(OURS, talk)
    serve(Tokenizer(merging_tokenizer()), go_on)


def test_a_reply_behind_many_byte_tokens_is_stored_with_its_ids(serve: Callable[..., None]) -> None:
    tokenizer = Tokenizer(sentencepiece_like())

    async def work(histories: TurnManager) -> None:
        turn = await histories.open_completion("", "text", "今日は世界")
        await turn.commit(in_bytes("今é"), "今é", None, b"")
        stored = await histories.run(histories._store.find, Name("", "text"), 0.0)
        assert stored is not None and stored[1] is not None
        assert stored[1].inside == len(turn.prompt) + len(in_bytes("今é"))

    serve(tokenizer, work)


def test_a_token_that_the_model_has_no_embedding_for_is_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Some checkpoints' tokenizers have one token more than the model: in a step it would stop the
    server."""
    fewer = replace(served.odd_ready(), vocab_size=served.DONE)
    monkeypatch.setattr(served, "odd_ready", lambda: fewer)

    async def work() -> None:
        server = served.Served(save_merging(tmp_path), ":memory:", ())
        try:
            for prompt, status in (("a<|done|>", 400), ("a", 200)):
                answer = await server.post("/v1/completions", status, prompt=prompt, max_tokens=1)
            assert answer["choices"]
            refused = await server.post(served.CHAT, 400, messages=[HELLO], max_tokens=1)
            assert f"not {served.DONE}" in refused["error"]["message"]
        finally:
            server.loop.close()
            await server.closed.wait()
            await server.histories.close()
            server.loop.join()

    asyncio.run(work())
