"""Conversations over HTTP: endpoints, server history, splicing, keys, salts."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.conversations.turns import TurnManager
from pensieve.runtime.http.settings import key_digest
from pensieve.runtime.messages import Erased, Fatal, Forget, Fork, Keep, Submit
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.turns.conversations import common_prefix
from pensieve.scheduler.types import Erasure, ErrorKind, RequestError

from ..fake_loop import eventually
from ..odd_tokenizer import byte_by_byte, spaced_tokenizer
from ..served import CHAT, DONE, run, serve, spell

__all__ = ["serve"]  # a fixture

pytestmark = pytest.mark.usefixtures("histories_at")  # with both databases

COMPLETIONS, CONVERSATIONS = "/v1/completions", "/v1/conversations"


@pytest.mark.parametrize("name", [None, "tea"])
def test_a_client_that_sends_its_whole_history_gets_every_generated_id_back(
    serve: Any, name: str | None
) -> None:
    async def work() -> None:
        async with serve() as server:
            dialogue: list[str] = []
            for number in range(5):
                dialogue.append(f"hello {number}. aaaa\n")
                dialogue.append(await server.chat(*dialogue, conversation=name))
            logs = server.logs()
            for before, request in zip(logs, server.requests[1:], strict=False):
                assert request.prompt[: len(before)].tolist() == before
                assert request.conversation == name

    run(work())


def test_the_server_keeps_the_history(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            body = dict(conversation="tea", history="server")
            assert (
                "tea"
                in (
                    await server.post(
                        CHAT, 404, messages=[{"role": "user", "content": "x"}], **body
                    )
                )["error"]["message"]
            )
            dialogue = ["hello"]
            dialogue.append(await server.chat(*dialogue, conversation="tea"))
            for number in range(3):
                dialogue.append(f"more {number}")
                dialogue.append(await server.chat(dialogue[-1], **body))
            whole = await server.ask("GET", f"{CONVERSATIONS}/tea")
            assert [message["content"] for message in whole["messages"]] == dialogue
            assert whole["tokens"] == len(server.logs()[-1])
            again = await server.chat(*dialogue, "x")
            assert (
                again
                and server.requests[-1].prompt[: whole["tokens"]].tolist() == server.logs()[-2]
            )

    run(work())


def test_tool_calls_are_part_of_the_history(serve: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    question = {"role": "user", "content": "hello"}

    async def work() -> None:
        async with serve(answers=lambda _: [*byte_by_byte(call), DONE]) as server:
            answer = await server.post(CHAT, messages=[question], tools=tools, conversation="a")
            message = answer["choices"][0]["message"]
            log = [*server.requests[0].prompt, *byte_by_byte(call), DONE]
            result = {
                "role": "tool",
                "tool_call_id": message["tool_calls"][0]["id"],
                "content": "rain",
            }
            await server.post(CHAT, messages=[question, message, result], tools=tools)
            await server.post(
                CHAT, messages=[result], tools=tools, conversation="a", history="server"
            )
            for request in server.requests[1:]:
                assert request.prompt[: len(log)].tolist() == log

    run(work())


def test_completions_go_on_behind_the_log(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            body = dict(prompt="hello", conversation="c", max_tokens=5, return_token_ids=True)
            first = await server.post(COMPLETIONS, **body)
            log = [*first["choices"][0]["prompt_token_ids"], *first["choices"][0]["token_ids"]]
            body = dict(conversation="c", history="server", max_tokens=3)
            await server.post(COMPLETIONS, prompt=[7, 8], **body)
            assert server.requests[-1].prompt.tolist() == [*log, 7, 8]
            log = [*log, 7, 8, *spell(server.requests[-1])[:3]]
            await server.post(COMPLETIONS, prompt=" world", **body)
            assert server.requests[-1].prompt[:-1].tolist() == log
            text = "hello" + first["choices"][0]["text"]
            await server.post(COMPLETIONS, prompt=text + "!", conversation="d")
            assert server.requests[-1].prompt.tolist()[:6] != log[:6]

    run(work())


def test_a_chat_never_leaves_out_a_completion_of_the_servers_history(serve: Any) -> None:
    """A completion has no messages, so a chat cannot render it. With the client's history a chat
    replaces it."""
    messages = [{"role": "user", "content": "hello"}]

    async def work() -> None:
        async with serve() as server:
            await server.chat("hello", conversation="mixed")
            await server.post(
                COMPLETIONS, prompt=" world", conversation="mixed", history="server", max_tokens=3
            )
            log = server.logs()[-1][: len(server.requests[-1].prompt) + 3]
            for path, body in (
                (CHAT, dict(messages=messages, history="server")),
                ("/v1/responses", dict(input="hello")),
            ):
                error = (await server.post(path, 409, conversation="mixed", **body))["error"]
                assert error["param"] == "conversation" and "/v1/completions" in error["message"]
            await server.post(
                COMPLETIONS, prompt=[7], conversation="mixed", history="server", max_tokens=3
            )
            assert server.requests[-1].prompt.tolist() == [*log, 7]
            for _ in range(2):  # the same reply: the second turn adds no message
                await server.chat("hello", conversation="mixed")
                await server.chat("more", conversation="mixed", history="server")
                await server.chat("hello", conversation="mixed")
            await server.post(COMPLETIONS, prompt=[7], conversation="ids")
            await server.post(CHAT, 409, messages=messages, conversation="ids", history="server")

    run(work())


def test_completions_go_on_behind_the_log_without_a_space_between() -> None:
    """With a tokenizer that adds one in front of every text."""

    async def work() -> None:
        speaker = Tokenizer(spaced_tokenizer())
        loop: Any = None  # gets no messages
        turns = TurnManager(HistoryStore(":memory:"), loop, loop, speaker)
        first = await turns.open_completion("", "c", "hello: a")
        await first.commit(speaker.encode("b"), " b", None, b"")
        for text in ("ba!", " ba!"):
            second = await turns.open_completion("", "c", text, server_history=True)
            second.close()
            assert speaker.decode(second.prompt) == "hello: a b" + text
        await turns.close()

    run(work())


def test_only_one_turn_of_a_server_history_is_in_flight(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.chat("hello", conversation="a")
            server.loop.pause()
            body = dict(
                messages=[{"role": "user", "content": "x"}], conversation="a", history="server"
            )
            slow = asyncio.create_task(server.post(CHAT, **body))
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            message = (await server.post(CHAT, 409, **body))["error"]["message"]
            assert "in flight" in message and "try again when it has ended" in message
            await server.post(CHAT, 409, **body)
            server.loop.go_on()
            await slow
            # a refused call leaves nothing behind
            await server.post(CHAT, 400, **body, max_tokens=0)
            await server.post(CHAT, **body)

    run(work())


def test_a_stream_ends_after_its_turn_is_stored(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            committed = []
            commit = server.store.commit

            def slow(*args: Any, **about: Any) -> Any:
                committed.append(args[1].messages[-1]["content"])
                return commit(*args, **about)

            server.store.commit = slow
            body = dict(messages=[{"role": "user", "content": "x"}], conversation="a", stream=True)
            response = await server.http.post(CHAT, json=body)
            assert committed == ["hello world " + str(len(server.requests[0].prompt))]
            assert response.text.endswith("data: [DONE]\n\n")

            def full(*_: Any, **__: Any) -> Any:
                raise RequestError(ErrorKind.STORAGE_FULL, "the disk is full")

            server.store.commit = full
            response = await server.http.post(CHAT, json=body)
            assert (
                '"finish_reason":"stop"' not in response.text or "the disk is full" in response.text
            )
            await server.post(CHAT, 507, **body | {"stream": False})

    run(work())


def test_conversations_are_listed_forked_kept_and_deleted(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for name in ("a", "with/slash", "c"):
                await server.chat("hello", conversation=name)
            page = await server.ask("GET", f"{CONVERSATIONS}?limit=2&order=asc")
            assert [entry["id"] for entry in page["data"]] == ["a", "with/slash"] and page[
                "has_more"
            ]
            page = await server.ask("GET", f"{CONVERSATIONS}?after=with%2Fslash&order=asc")
            assert [entry["id"] for entry in page["data"]] == ["c"] and not page["has_more"]
            assert page["data"][0]["kv_chunks"] == {"gpu": 1, "host": 2, "dropped": 3, "disk": 4}
            assert (await server.ask("GET", f"{CONVERSATIONS}/a"))["kv_chunks"] is None, (
                "the loop has not heard of it"
            )
            fork = await server.post(f"{CONVERSATIONS}/with%2Fslash/fork", id="f")
            assert fork["parent"] == "with/slash" and fork["title"] == "hello"
            await server.post(f"{CONVERSATIONS}/a/fork", 409, id="f")
            assert (await server.ask("POST", f"{CONVERSATIONS}/a/fork"))["id"].startswith("conv_")
            kept = await server.post(f"{CONVERSATIONS}/a", ttl_s=60, history_ttl_s=3600)
            assert (kept["ttl_s"], kept["history_ttl_s"]) == (60, 3600)
            kept = await server.ask("PATCH", f"{CONVERSATIONS}/a", json={"history_ttl_s": None})
            assert (kept["ttl_s"], kept["history_ttl_s"]) == (60, None)
            assert (await server.post(f"{CONVERSATIONS}/a/pin", ttl_s=100))[
                "pinned_until"
            ] is not None
            await server.chat("hello", conversation="a")
            assert (await server.post(f"{CONVERSATIONS}/a/unpin"))["pinned_until"] is None
            await asyncio.to_thread(eventually, lambda: len(server.loop.messages(Keep)) == 5)
            keeps = server.loop.messages(Keep)
            assert [keep.conversation for keep in keeps] == ["a"] * 5 and {
                keep.ttl for keep in keeps
            } == {60.0}
            assert [keep.pinned > 0 for keep in keeps] == [False, False, True, True, False]
            assert (await server.ask("DELETE", f"{CONVERSATIONS}/c"))["deleted"]
            (forgotten,) = server.loop.messages(Forget)
            assert (
                forgotten.conversation == "c" and len(forgotten.tokens) > 0 and not forgotten.shared
            )
            assert server.loop.messages(Fork)[0] == Fork("with/slash", "f")
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("POST", "/fork"),
                ("POST", "/pin"),
                ("PATCH", ""),
            ):
                await server.ask(method, f"{CONVERSATIONS}/c{path}", 404)
            for query in ("limit=0", "limit=x", "limit=" + "1" * 5000, "order=up", "what=1"):
                assert (await server.ask("GET", f"{CONVERSATIONS}?{query}", 400))["error"]["param"]
            created = await server.post(CONVERSATIONS)
            assert (
                await server.chat("x", conversation=created["id"], history="server")
            ).startswith("hello")
            await server.post(CONVERSATIONS, 409, id="a")

    run(work())


def test_every_name_that_is_taken_can_be_asked_for(serve: Any) -> None:
    names = ["a", "a\n", "\n", "two\nlines", "a/fork", "a%2Fb", "a?b#c", "é" * 1000]

    async def work() -> None:
        async with serve() as server:
            for name in names:
                await server.chat("hello", conversation=name)
            for count, name in enumerate(reversed(names), 1):
                path = f"{CONVERSATIONS}/{quote(name, safe='')}"
                assert (await server.ask("GET", path))["id"] == name
                assert (await server.post(f"{path}/fork", id="copy"))["parent"] == name
                for gone in (path, f"{CONVERSATIONS}/copy"):
                    await server.ask("DELETE", gone)
                left = await server.ask("GET", CONVERSATIONS)
                assert [entry["id"] for entry in left["data"]] == names[: len(names) - count][::-1]
            # a long one would stop every stream for seconds
            await server.post(f"{CONVERSATIONS}/a/pin", 413, ttl_s="1" * 70_000)
            await server.post(CONVERSATIONS, 400, items=[[]] * 30_000)
            for body in ({"id": "x" * 1001}, {"id": ""}):
                await server.post(CONVERSATIONS, 400, **body)
            await server.post(
                CHAT, 400, messages=[{"role": "user", "content": "x"}], conversation="x" * 1001
            )

    run(work())


def test_kv_of_a_turn_is_erased_at_its_end_if_its_conversation_was_deleted_meanwhile(
    serve: Any,
) -> None:
    async def work() -> None:
        async with serve() as server:
            for name in ("refused", "left", "anew"):
                await server.chat("hello", conversation=name)
            server.loop.pause()
            more = {"messages": [{"role": "user", "content": "more"}], "history": "server"}
            turns = {
                "refused": asyncio.create_task(
                    server.post(CHAT, 409, conversation="refused", **more)
                ),
                "left": asyncio.create_task(server.post(CHAT, conversation="left", **more)),
                "anew": asyncio.create_task(
                    server.chat("hello", "hi", "more", conversation="anew")
                ),
            }
            await asyncio.to_thread(server.loop.messages, Submit, 6)
            for name in turns:
                await server.ask("DELETE", f"{CONVERSATIONS}/{name}")
            turns["left"].cancel()  # the client hangs up
            server.loop.go_on()
            await asyncio.wait(turns.values())
            prompts = [request.prompt for request in server.requests]
            erased = {
                message.conversation: message.tokens
                for message in server.loop.messages(Forget, 5)[3:]
            }
            assert sorted(erased) == ["left", "refused"], (
                "a client's history makes the conversation anew"
            )
            assert erased["left"] in prompts and erased["refused"].tolist() in server.logs()
            await turns["refused"]
            await server.ask("GET", f"{CONVERSATIONS}/anew")
            await server.ask("DELETE", f"{CONVERSATIONS}/anew")
            assert len(server.loop.messages(Forget, 6)) == 6

    run(work())


def test_a_deletion_is_answered_when_its_data_cannot_be_read_any_more(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for name in ("a", "b", "c"):
                await server.chat("hello", conversation=name)
            server.loop.erasure = None  # it keeps them waiting
            waiting = asyncio.create_task(server.ask("DELETE", f"{CONVERSATIONS}/a"))
            await asyncio.to_thread(server.loop.messages, Forget, 1)
            await server.ask("GET", f"{CONVERSATIONS}/a", 404)
            assert not waiting.done()
            server.loop.say(Erased(Erasure.WHOLLY))
            assert (await waiting)["deleted"]
            server.loop.erasure = Erasure.REFUSED
            error = (await server.ask("DELETE", f"{CONVERSATIONS}/b", 500))["error"]
            assert "is deleted, but some of its KV" in error["message"]
            await server.chat("hello", conversation="b")
            server.loop.erasure = Erasure.LATER
            await server.ask("DELETE", f"{CONVERSATIONS}/b", 500)
            server.loop.erasure = None
            waiting = asyncio.create_task(server.ask("DELETE", f"{CONVERSATIONS}/c", 500))
            await asyncio.to_thread(server.loop.messages, Forget, 4)
            server.loop.say(Fatal("the books disagree"))
            await waiting

    run(work())


def test_histories_outlive_the_process(serve: Any, tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "history.sqlite"
        async with serve(path) as server:
            reply = await server.chat("hello", conversation="a")
            log = server.logs()[0]
        for history in ("server", "client"):
            async with serve(path) as server:
                whole = ["hello", reply, "and?"]
                contents = whole if history == "client" else whole[-1:]
                await server.chat(*contents, conversation="a", history=history)
                assert server.requests[0].prompt[: len(log)].tolist() == log

    run(work())


def test_a_new_process_says_of_what_is_stored_that_it_has_had_kv(
    serve: Any, tmp_path: Path
) -> None:
    """All but the log's last token, as far as the prompt is the same, and under the salt of the
    turn that is stored."""

    async def work() -> None:
        path = tmp_path / "history.sqlite"
        async with serve(path) as server:
            reply = await server.chat("hello", conversation="a")
            response = await server.post("/v1/responses", input="hello")
            for name in ("b", "c", "d", "e", "f"):
                await server.ask("POST", f"{CONVERSATIONS}/a/fork", json={"id": name})
            answer = await server.post(COMPLETIONS, prompt="hello", conversation="g", max_tokens=5)
            text = "hello" + answer["choices"][0]["text"]
            assert [request.stored_tokens for request in server.requests] == [0, 0, 0]
            chat, _, completion = server.logs()
            del completion[len(server.requests[-1].prompt) + 5 :]
        whole = ("hello", reply, "and?")

        async def unknown(log: list[int], asking: Callable[[Any], Any]) -> int:
            """Tokens of `log`, but for the last, that are not known when a new process is asked."""
            async with serve(path) as server:
                await asking(server)
                (request,) = server.requests
                assert request.stored_tokens <= common_prefix(array("i", log), request.prompt)
                return len(log) - 1 - request.stored_tokens

        assert (
            await unknown(
                chat, lambda server: server.chat("and?", conversation="a", history="server")
            )
            == 0
        )
        assert await unknown(chat, lambda server: server.chat(*whole, conversation="b")) == 0
        edited = await unknown(
            chat, lambda server: server.chat("hello", "no", "and?", conversation="c")
        )
        assert 0 < edited < len(chat) - 1
        body = dict(conversation="d", history="server", cache_salt="another")
        assert await unknown(chat, lambda server: server.chat("and?", **body)) == len(chat) - 1
        assert await unknown(chat, lambda server: server.chat(*whole)) == len(chat) - 1, (
            "without a name"
        )
        body = dict(conversation="e", max_tokens=3)
        assert (
            await unknown(chat, lambda server: server.post(COMPLETIONS, prompt=[*chat, 7], **body))
            == 0
        )
        body = dict(conversation="f", max_tokens=3, history="server")
        assert await unknown(chat, lambda server: server.post(COMPLETIONS, prompt=[7], **body)) == 0
        body = dict(conversation="g", max_tokens=3)
        assert (
            await unknown(
                completion, lambda server: server.post(COMPLETIONS, prompt=f"{text}!", **body)
            )
            == 0
        )
        body = dict(previous_response_id=response["id"])
        assert (
            await unknown(chat, lambda server: server.post("/v1/responses", input="and?", **body))
            == 0
        )

    run(work())


def test_an_aborted_turn_is_not_stored(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            server.loop.pause()
            body = dict(
                messages=[{"role": "user", "content": "x"}], conversation="a", history="client"
            )
            turn = asyncio.create_task(server.post(CHAT, **body))
            while not server.requests:
                await asyncio.sleep(0.005)
            turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await turn
            await server.ask("GET", f"{CONVERSATIONS}/a", 404)

    run(work())


@pytest.mark.parametrize("history", ["server", "client"])
def test_a_conversation_does_not_expire_while_a_turn_of_it_runs(
    serve: Any, monkeypatch: pytest.MonkeyPatch, history: str
) -> None:
    """Nor is it created again without its settings. Its TTL starts again at the turn's end, or ends
    if there is none."""
    clock = [1_000_000.0]
    monkeypatch.setattr(HistoryStore, "now", lambda self: clock[0])

    async def begun(server: Any, turn: int) -> asyncio.Task[Any]:
        """The conversation's time is over while this runs, and the store deletes what has
        expired."""
        contents = ["more"] if history == "server" else ["hello", "there", "more"]
        running = asyncio.create_task(server.chat(*contents, conversation="a", history=history))
        while len(server.requests) < turn:
            await asyncio.sleep(0.005)
        clock[0] += 1000
        await server.histories.expire_some()
        return running

    async def work() -> None:
        async with serve() as server:
            created = await server.post(CONVERSATIONS, id="a")
            await server.chat("hello", conversation="a")
            await server.post(f"{CONVERSATIONS}/a", ttl_s=60, history_ttl_s=100)
            await server.post(f"{CONVERSATIONS}/a/pin", ttl_s=5000)
            server.loop.pause()
            running = await begun(server, 2)
            assert len((await server.ask("GET", f"{CONVERSATIONS}/a"))["messages"]) == 2
            server.loop.go_on()
            await running
            clock[0] += 99
            kept = await server.ask("GET", f"{CONVERSATIONS}/a")
            assert (kept["ttl_s"], kept["history_ttl_s"], kept["created_at"]) == (
                60,
                100,
                created["created_at"],
            )
            assert kept["pinned_until"] is not None and len(kept["messages"]) == 4
            server.loop.pause()
            running = await begun(server, 3)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            await server.ask("GET", f"{CONVERSATIONS}/a", 404)
            assert (
                await server.histories.run(server.store._db.execute, "SELECT * FROM open_turns")
                == []
            )

    run(work())


def test_a_key_may_store_so_many_conversations(serve: Any) -> None:
    """Existing ones continue; one more is refused before any computation."""

    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            server.store.quota = 2
            await server.post(CONVERSATIONS, key="one", id="a")
            await server.chat("hello", conversation="b", key="one")
            for path, body in (
                (CONVERSATIONS, {}),
                (f"{CONVERSATIONS}/a/fork", {}),
                (
                    "/v1/chat/completions",
                    {"conversation": "c", "messages": [{"role": "user", "content": "hello"}]},
                ),
                ("/v1/completions", {"conversation": "c", "prompt": "hello"}),
                ("/v1/responses", {"input": "hello"}),
                ("/v1/responses", {"input": "hello", "conversation": "a"}),
            ):
                error = (await server.post(path, 429, key="one", **body))["error"]
                assert (
                    error["code"] == "insufficient_quota" and "2 conversations" in error["message"]
                )
            assert [request.owner for request in server.requests] == [key_digest("one")]
            await server.chat("hello", "there", "again", conversation="b", key="one")
            await server.chat("hello", conversation="c", key="two")
            await server.chat("hello", key="one")
            await server.ask("DELETE", f"{CONVERSATIONS}/a", key="one")
            await server.chat("hello", conversation="c", key="one")

    run(work())


def test_a_turn_that_was_let_in_is_stored(serve: Any) -> None:
    """Even if others were stored meanwhile: its reply is computed, and one of a response's two
    records is already written."""

    async def work() -> None:
        async with serve() as server:
            server.store.quota = 2
            await server.post(CONVERSATIONS, id="a")
            server.loop.pause()
            turns = [
                asyncio.create_task(server.post("/v1/responses", input="hello", conversation="a"))
            ]
            turns += [asyncio.create_task(server.chat("hello", conversation=name)) for name in "bc"]
            while len(server.requests) < 3:
                await asyncio.sleep(0.005)
            server.loop.go_on()
            await asyncio.gather(*turns)
            await server.post(CONVERSATIONS, 429)
            for name in "abc":
                assert len((await server.ask("GET", f"{CONVERSATIONS}/{name}"))["messages"]) == 2

    run(work())


def test_keys_keep_tenants_apart(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            refusal = await server.post(CHAT, 401, messages=[{"role": "user", "content": "x"}])
            assert refusal["error"]["code"] == "invalid_api_key"
            for key in ("", "three", "one two"):
                await server.ask("GET", CONVERSATIONS, 401, key)
            for path in ("/health", "/live", "/metrics", "/ping", "/ready", "/version"):
                assert (await server.http.get(path)).status_code == 200
            replies = [
                await server.chat("hello", conversation="a", key=key) for key in ("one", "two")
            ]
            assert replies[0] == replies[1]
            one, two = server.requests
            assert (
                one.prompt == two.prompt
                and one.conversation != two.conversation
                and one.salt != two.salt
            )
            assert b"" not in (one.salt, two.salt)
            await server.ask("DELETE", f"{CONVERSATIONS}/a", key="one")
            await server.ask("GET", f"{CONVERSATIONS}/a", 404, "one")
            assert len((await server.ask("GET", f"{CONVERSATIONS}/a", key="two"))["messages"]) == 2
            for key in ("one", "two"):
                await server.chat("hello", key=key, cache_salt="shared")
            assert server.requests[-1].salt == server.requests[-2].salt
            await server.chat("hello", key="one", cache_salt=key_digest("two"))
            assert server.requests[-1].salt not in (one.salt, two.salt)

    run(work())


def test_replies_of_one_owner_are_never_spliced_into_anothers_prompt(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            reply = await server.chat("hello", key="one")
            for key in ("one", "two"):
                await server.chat("hello", reply, "x", key=key)
            first, own, other = server.requests
            log = [*first.prompt, *spell(first)]
            assert own.prompt[: len(log)].tolist() == log
            assert other.prompt[: len(log)].tolist() != log

    run(work())


def test_tokenize_and_detokenize(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            answer = await server.post("/tokenize", prompt="hello world", return_token_strs=True)
            assert answer["count"] == len(answer["tokens"]) == 2 and answer["max_model_len"] == 2000
            assert answer["token_strs"] == ["hello", "Ġworld"]
            assert await server.post("/detokenize", tokens=answer["tokens"]) == {
                "prompt": "hello world"
            }
            messages = [{"role": "user", "content": "hello"}]
            tokenized = await server.post("/tokenize", messages=messages)
            await server.chat("hello")
            assert server.requests[-1].prompt.tolist() == tokenized["tokens"]
            closed = await server.post("/tokenize", messages=messages, add_generation_prompt=False)
            assert tokenized["tokens"][: closed["count"]] == closed["tokens"]
            text = (await server.post("/detokenize", tokens=closed["tokens"]))["prompt"]
            assert text == "<|turn|>user\nhello<|done|>\n"
            await server.post("/tokenize", 400)
            await server.post("/tokenize", 400, prompt="x", messages=messages)
            await server.post("/detokenize", 400, tokens=[9999])

    run(work())
