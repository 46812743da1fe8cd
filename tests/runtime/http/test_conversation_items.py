"""OpenAI's items of conversations, with the official client and by hand."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import TypeAdapter

from pensieve.runtime.conversations.transcript import Message, without_ids
from pensieve.runtime.http import conversations
from pensieve.runtime.http.conversation_items import (
    items_of,
    with_messages,
    without_item,
)
from pensieve.runtime.http.response_items import Input, messages_of
from pensieve.runtime.messages import Forget
from pensieve.scheduler.types import ErrorKind, RequestError

from ..odd_tokenizer import byte_by_byte
from ..served import CHAT, DONE, Served, run, serve

__all__ = ["serve"]  # a fixture

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
INPUT: TypeAdapter[Any] = TypeAdapter(Input)

user = {"role": "user", "content": "hello"}


def client_of(server: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=server.http)


async def prompt_text(server: Served) -> str:
    """The text of the last request's prompt."""
    tokens = server.requests[-1].prompt.tolist()
    return str((await server.post("/detokenize", tokens=tokens))["prompt"])


async def ids(server: Served, conversation: str) -> list[str]:
    page = await server.ask("GET", f"{CONVERSATIONS}/{conversation}/items?order=asc&limit=100")
    return [item["id"] for item in page["data"]]


@pytest.mark.usefixtures("histories_at")  # with both databases
def test_the_official_client(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            client = client_of(server)
            conversations = client.conversations
            first: Any = {"role": "user", "content": "What is the weather?"}
            created = await conversations.create(items=[first], metadata={"topic": "weather"})
            assert (created.object, created.metadata) == ("conversation", {"topic": "weather"})
            updated = await conversations.update(created.id, metadata={"topic": "rain", "n": "1"})
            assert updated.metadata == {"topic": "rain", "n": "1"}
            assert (await conversations.update(created.id, metadata=None)).metadata == {}
            call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            output: Any = {"type": "function_call_output", "call_id": "c", "output": "rain"}
            text: Any = [{"type": "output_text", "text": "It rains.", "annotations": []}]
            reply: Any = {"type": "message", "role": "assistant", "content": text}
            added = await conversations.items.create(
                created.id, items=[call, output, reply], include=["reasoning.encrypted_content"]
            )
            kinds = ["function_call", "function_call_output", "message"]
            assert [item.type for item in added.data] == kinds and not added.has_more
            assert (added.first_id, added.last_id) == (added.data[0].id, added.data[2].id)
            response = await client.responses.create(
                model="fake", input="And tomorrow?", conversation=created.id
            )
            assert response.conversation is not None and response.conversation.id == created.id
            listed = [item async for item in conversations.items.list(created.id, order="asc")]
            in_pages = [item async for item in conversations.items.list(created.id, limit=2)]
            assert [item.id for item in in_pages] == [item.id for item in listed][::-1]
            assert [item.type for item in listed] == ["message", *kinds, "message", "message"]
            assert [item.id for item in listed[1:4]] == [item.id for item in added.data]
            assert listed[-1].id == response.output[0].id
            assert all(getattr(item, "status", None) == "completed" for item in listed)
            for item in listed:
                seen = await conversations.items.retrieve(str(item.id), conversation_id=created.id)
                assert seen == item
            page = await conversations.items.list(created.id, after=str(listed[1].id), order="asc")
            assert page.data[0] == listed[2] and not page.has_more
            # they are the messages that the other endpoints have
            again = [item.model_dump(exclude_unset=True) for item in listed]
            whole = await server.ask("GET", f"{CONVERSATIONS}/{created.id}")
            given = INPUT.validate_python(again, context=[])
            assert [one.for_template() for one in messages_of(given)] == whole["messages"]
            stream = await client.responses.create(
                model="fake", input="Thanks.", conversation={"id": created.id}, stream=True
            )
            *_, last = [event async for event in stream]
            assert last.type == "response.completed"
            assert (await ids(server, created.id))[-1] == last.response.output[0].id
            await conversations.items.delete(str(listed[0].id), conversation_id=created.id)
            left = await ids(server, created.id)
            assert left[:5] == [item.id for item in listed[1:]]
            for call_it in (
                lambda: conversations.items.retrieve(str(listed[0].id), conversation_id=created.id),
                lambda: conversations.items.delete(str(listed[0].id), conversation_id=created.id),
                lambda: conversations.items.list(created.id, after="msg_1"),
                lambda: conversations.items.list("unknown"),
                lambda: conversations.items.create("unknown", items=[first]),
                lambda: client.responses.create(model="fake", input="x", conversation="unknown"),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call_it()
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(
                    model="fake",
                    input="x",
                    conversation=created.id,
                    previous_response_id=response.id,
                )
            assert refused.value.param == "previous_response_id"
            assert (await conversations.delete(created.id)).deleted

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_a_conversation_of_chats_has_items_and_one_of_items_goes_on_in_chats(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            reply = await server.chat("hello", conversation="tea")
            page = await server.ask("GET", f"{CONVERSATIONS}/tea/items")
            assert [item["content"][0]["text"] for item in page["data"]] == [reply, "hello"]
            await server.post(f"{CONVERSATIONS}/tea", metadata={"cup": "1"})
            fork = await server.post(f"{CONVERSATIONS}/tea/fork", id="green")
            assert (fork["parent"], fork["metadata"]) == ("tea", {"cup": "1"})
            assert await ids(server, "green") == await ids(server, "tea")
            await server.post(f"{CONVERSATIONS}/green/items", items=[user])
            assert (await ids(server, "green"))[:2] == await ids(server, "tea")
            await server.chat("more", conversation="green", history="server")
            text = await prompt_text(server)
            log = server.logs()[0]
            assert server.requests[-1].prompt[: len(log)].tolist() == log
            assistant = {"role": "assistant", "content": reply}
            more = {"role": "user", "content": "more"}
            await server.post(CHAT, messages=[user, assistant, user, more])  # without a name
            assert await prompt_text(server) == text
            whole = await server.ask("GET", f"{CONVERSATIONS}/green")
            assert [message["content"] for message in whole["messages"][:4]] == [
                "hello",
                reply,
                "hello",
                "more",
            ]
            assert all(message.keys() == user.keys() for message in whole["messages"])
            await server.post(f"{CONVERSATIONS}/green/pin")
            await server.post(CONVERSATIONS, id="many", items=[user] * 21)
            assert len(await ids(server, "many")) == 21
            reference = {"type": "item_reference", "id": (await ids(server, "tea"))[0]}
            refused = await server.post(RESPONSES, 404, input=[reference])
            assert "added to a conversation" in refused["error"]["message"]

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_behind_a_deleted_item_the_next_turn_computes_all_anew(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            dialogue = ["hello"]
            dialogue.append(await server.chat(*dialogue, conversation="c"))
            for number in (1, 2):
                dialogue.append(f"more {number}")
                body = dict(conversation="c", history="server")
                dialogue.append(await server.chat(dialogue[-1], **body))
            before = await ids(server, "c")
            logs = server.logs()
            path = f"{CONVERSATIONS}/c/items"
            described = await server.ask("DELETE", f"{path}/{before[3]}")
            assert described["tokens"] == len(logs[0])
            assert await ids(server, "c") == [*before[:3], *before[4:]]
            (gone,) = server.loop.messages(Forget, 1)
            assert (gone.conversation, gone.tokens.tolist()) == ("c", logs[2])
            assert gone.shared == len(logs[0])
            await server.chat("last", conversation="c", history="server")
            assert server.requests[-1].prompt[: len(logs[0])].tolist() == logs[0]
            text = await prompt_text(server)
            assert "".join(text.split(dialogue[3])) == text  # it is not there
            messages = [
                {"role": "user" if at % 2 == 0 else "assistant", "content": content}
                for at, content in enumerate(dialogue)
                if at != 3
            ]
            await server.post(CHAT, messages=[*messages, {"role": "user", "content": "last"}])
            assert await prompt_text(server) == text
            for item in reversed(await ids(server, "c")):
                await server.ask("DELETE", f"{path}/{item}")
            empty = await server.ask("GET", f"{CONVERSATIONS}/c")
            assert (empty["messages"], empty["tokens"], empty["title"]) == ([], 0, None)
            page = await server.ask("GET", path)
            assert (page["data"], page["first_id"], page["has_more"]) == ([], None, False)
            await server.chat("hello", conversation="c", history="server")

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_forks_branches_and_responses_keep_what_is_deleted_elsewhere(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="c")
            answer = await server.post(RESPONSES, input="hello", conversation="c")
            await server.post(f"{CONVERSATIONS}/c/fork", id="fork")
            path = f"{CONVERSATIONS}/c/items"
            for item in reversed(await ids(server, "c")):
                await server.ask("DELETE", f"{path}/{item}")
            log = server.logs()[0]
            await server.chat("more", conversation="fork", history="server")
            assert server.requests[-1].prompt[: len(log)].tolist() == log
            await server.post(RESPONSES, input="more", previous_response_id=answer["id"])
            assert server.requests[-1].prompt[: len(log)].tolist() == log
            assert (await ids(server, "fork"))[1] == answer["output"][0]["id"]
            assert not server.loop.messages(Forget)

    run(work())


def test_ids_are_the_same_after_a_restart(serve: Any, tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"

    async def work() -> None:
        async with serve(path) as server:
            await server.post(CONVERSATIONS, id="c", items=[user, {**user, "role": "assistant"}])
            await server.post(RESPONSES, input="one", conversation="c")
            await server.chat("two", conversation="c", history="server")
            before = await ids(server, "c")
            await server.ask("DELETE", f"{CONVERSATIONS}/c/items/{before[1]}")
        async with serve(path) as server:
            assert await ids(server, "c") == [before[0], *before[2:]]
            await server.chat("three", conversation="c", history="server")
            assert (await ids(server, "c"))[:5] == [before[0], *before[2:]]

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_thoughts_and_calls_are_items_of_their_own(serve: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    answer = [*byte_by_byte(f"Let me see.{call}{call}"), DONE]

    async def work() -> None:
        async with serve(answers=lambda _: answer) as server:
            await server.post(CONVERSATIONS, id="c")
            response = await server.post(RESPONSES, input="hello", conversation="c", tools=[tool])
            page = await server.ask("GET", f"{CONVERSATIONS}/c/items?order=asc")
            for item, written in zip(page["data"][1:], response["output"], strict=True):
                assert item.keys() == written.keys()
                assert (item["id"], item["type"]) == (written["id"], written["type"])
            last = page["data"][-1]["id"]
            await server.ask("DELETE", f"{CONVERSATIONS}/c/items/{last}")
            result = {"type": "function_call_output", "output": "rain"}
            result["call_id"] = response["output"][1]["call_id"]
            await server.post(f"{CONVERSATIONS}/c/items", items=[result])
            whole = await server.ask("GET", f"{CONVERSATIONS}/c")
            kinds = [message["role"] for message in whole["messages"]]
            assert kinds == ["user", "assistant", "tool"]
            (kept,) = whole["messages"][1]["tool_calls"]
            assert kept["id"] == result["call_id"]

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_items_that_cannot_be_added_or_deleted(serve: Any) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}

    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            await server.post(CONVERSATIONS, key="one", id="c", items=[{**user, "status": "x"}])
            await server.post(CONVERSATIONS, 400, "one", ttl_s=5)
            path = f"{CONVERSATIONS}/c/items"
            for status, key, body in (
                (404, "two", dict(items=[user])),
                (401, None, dict(items=[user])),
                (400, "one", dict(items=[])),
                (400, "one", dict()),
                (400, "one", dict(items=[image])),
                (400, "one", dict(items=[{"type": "unknown"}])),
                (400, "one", dict(items=[{"type": "item_reference", "id": "msg_1"}])),
            ):
                await server.post(path, status, key, **body)
            for query in ("limit=0", "limit=101", "order=up", "what=1"):
                await server.ask("GET", f"{path}?{query}", 400, "one")
            many = {str(number): "" for number in range(17)}
            for metadata in (many, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}):
                await server.post(CONVERSATIONS, 400, "one", metadata=metadata)
                await server.post(f"{CONVERSATIONS}/c", 400, "one", metadata=metadata)
            (only,) = (await server.ask("GET", path, 200, "one"))["data"]
            await server.ask("GET", f"{path}/{only['id']}", 404, "two")
            await server.ask("DELETE", f"{path}/{only['id']}", 404, "two")
            body = dict(messages=[user], conversation="c", history="server")
            server.loop.pause()
            turn = asyncio.create_task(server.post(CHAT, key="one", **body))
            while not (await server.ask("GET", f"{CONVERSATIONS}/c", 200, "one"))["in_flight"]:
                await asyncio.sleep(0.001)
            await server.post(path, 409, "one", items=[user])
            await server.ask("DELETE", f"{path}/{only['id']}", 409, "one")
            server.loop.go_on()
            await turn
            await server.post("/v1/completions", key="one", prompt="hello", conversation="d")
            assert (await server.ask("GET", f"{CONVERSATIONS}/d/items", 200, "one"))["data"] == []
            refused = await server.post(f"{CONVERSATIONS}/d/items", 409, "one", items=[user])
            assert "completion" in refused["error"]["message"]

    run(work())


def function_call(id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}


def output(id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": "o"}


CODE = {"type": "code_interpreter_call", "code": "1", "outputs": []}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]}
UNREADABLE = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
REPLY = {"role": "assistant", "content": "hm"}


async def added(server: Served, conversation: str, *requests: list[Any]) -> list[Any]:
    """Adds items in these requests. Returns the messages of the new conversation."""
    await server.post(CONVERSATIONS, id=conversation)
    path = f"{CONVERSATIONS}/{conversation}/items"
    listed: list[Any] = []
    for items in requests:
        page = await server.post(path, items=items)
        listed += page["data"]
    assert (await server.ask("GET", f"{path}?order=asc&limit=100"))["data"] == listed
    assert len({item["id"] for item in listed}) == len(listed)
    return list((await server.ask("GET", f"{CONVERSATIONS}/{conversation}"))["messages"])


@pytest.mark.parametrize(
    "items",
    [
        [user, function_call("a"), function_call("b"), output("a"), output("b"), REPLY],
        [user, THOUGHT, REPLY, function_call("a"), function_call("b"), output("b"), REPLY, user],
        [user, REPLY, REPLY, user],
        [user, UNREADABLE, THOUGHT, UNREADABLE, function_call("a"), output("a"), UNREADABLE],
    ],
)
def test_items_of_one_reply_may_come_in_several_requests(serve: Any, items: list[Any]) -> None:
    """`OpenAIConversationsSession` sends at most 20 items at once."""

    async def work() -> None:
        async with serve() as server:
            once = await added(server, "once", items)
            for size in (1, 2, 3):
                parts = [items[at : at + size] for at in range(0, len(items), size)]
                assert await added(server, f"by {size}", *parts) == once
            await server.chat("x", conversation="once", history="server")

    run(work())


def test_a_reply_that_a_model_began_keeps_its_ids(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            body = dict(input="hello", conversation=(await server.post(CONVERSATIONS))["id"])
            reply = (await server.post(RESPONSES, **body))["output"][0]["id"]
            path = f"{CONVERSATIONS}/{body['conversation']}/items"
            call = (await server.post(path, items=[function_call("a"), output("a")]))["data"]
            assert (await ids(server, body["conversation"]))[1:] == [
                reply,
                *(item["id"] for item in call),
            ]
            await server.ask("DELETE", f"{path}/{call[0]['id']}")
            assert (await ids(server, body["conversation"]))[1:] == [reply, call[1]["id"]]

    run(work())


def test_calls_without_ids_have_one_each_over_several_requests(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            requests = [[CODE], [CODE, user, CODE], [CODE], [{**CODE, "id": "c"}], [CODE]]
            messages = await added(server, "c", *requests)
            calls = [call["id"] for one in messages for call in one.get("tool_calls", ())]
            results = [one["tool_call_id"] for one in messages if one["role"] == "tool"]
            assert calls == results and len(set(calls)) == 6 and "c" in calls

    run(work())


def test_ids_that_clients_give_stay(serve: Any) -> None:
    """Also those of calls whose result comes later."""

    async def work() -> None:
        async with serve() as server:
            named = function_call("item_0"), output("item_0")
            messages = await added(server, "c", [named[0]], [named[1], CODE], [CODE])
            calls = [call["id"] for one in messages for call in one.get("tool_calls", ())]
            assert calls[:2] == ["item_0", "item_1"]
            assert messages[1]["tool_call_id"] == "item_0"
            messages = await added(server, "d", [function_call("c")], [function_call("c")])
            (both,) = messages
            assert [call["id"] for call in both["tool_calls"]] == ["c", "c"]

    run(work())


def test_items_that_say_nothing_are_no_messages(serve: Any) -> None:
    """What another provider encrypted, and items of its own tools."""

    async def work() -> None:
        async with serve() as server:
            assert await added(server, "c", [UNREADABLE]) == []
            assert await added(server, "d", [user, UNREADABLE, {"type": "web_search_call"}]) == [
                user
            ]
            assert await added(server, "e", [{"type": "web_search_call"}], [user]) == [user]
            plain = await server.post(RESPONSES, input=[user, user])
            answer = await server.post(RESPONSES, input=[user, UNREADABLE, user])
            assert answer["usage"] == plain["usage"]
            refused = await server.post(RESPONSES, 400, input=[UNREADABLE])
            assert "empty" in refused["error"]["message"]

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_a_turn_with_the_clients_history_that_an_edit_overtakes_is_a_branch(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="c", items=[user])
            server.loop.pause()
            turn = asyncio.create_task(server.chat("hello", conversation="c"))
            while not (await server.ask("GET", f"{CONVERSATIONS}/c"))["in_flight"]:
                await asyncio.sleep(0.001)
            await server.post(f"{CONVERSATIONS}/c/items", items=[user])
            server.loop.go_on()
            await turn
            whole = await server.ask("GET", f"{CONVERSATIONS}/c")
            assert [message["content"] for message in whole["messages"]] == ["hello", "hello"]

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_a_completion_behind_items_without_tokens_is_refused(serve: Any) -> None:
    completion = dict(prompt=" and then", conversation="c", history="server")

    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="c", items=[user])
            for _ in range(2):  # items alone, and items behind a turn
                refused = await server.post("/v1/completions", 409, **completion)
                assert "chat or a response" in refused["error"]["message"]
                await server.chat("more", conversation="c", history="server")
                log = server.logs()[-1]
                await server.post("/v1/completions", **completion)
                assert server.requests[-1].prompt[: len(log)].tolist() == log
                await server.ask("DELETE", f"{CONVERSATIONS}/c")
                await server.chat("hello", conversation="c")
                await server.post(f"{CONVERSATIONS}/c/items", items=[user])

    run(work())


@pytest.mark.usefixtures("histories_at")
def test_an_equal_reply_behind_items_is_no_completion(serve: Any) -> None:
    same = {"role": "assistant", "content": "same"}

    async def work() -> None:
        async with serve(answers=lambda _: [*byte_by_byte("same"), DONE]) as server:
            await server.post(CONVERSATIONS, id="c", items=[user, same])
            await server.chat("hello", conversation="c")
            await server.chat("more", conversation="c", history="server")
            await server.post(f"{CONVERSATIONS}/c/items", items=[user])
            for completes in (False, True):
                await server.ask("DELETE", f"{CONVERSATIONS}/c")
                await server.post(CONVERSATIONS, id="c", items=[user, same])
                await server.chat("hello", conversation="c")
                if completes:
                    body = dict(prompt=" and then", conversation="c", history="server")
                    await server.post("/v1/completions", **body)
                status = 409 if completes else 200
                await server.post(f"{CONVERSATIONS}/c/items", status, items=[user])

    run(work())


def test_a_path_behind_items_that_is_no_items_id_names_a_conversation(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for name in ("a", "a/items", "a/items/b"):
                await server.post(CONVERSATIONS, id=name)
            path = f"{CONVERSATIONS}/a/items"
            assert (await server.ask("GET", f"{path}/b"))["id"] == "a/items/b"
            assert (await server.post(f"{path}/b", metadata={"k": "v"}))["metadata"] == {"k": "v"}
            (added,) = (await server.post(path, items=[user]))["data"]
            assert (await server.ask("GET", path))["data"] == [added]
            assert (await server.ask("GET", f"{path}/{added['id']}")) == added
            assert (await server.ask("DELETE", f"{path}/{added['id']}"))["id"] == "a"
            await server.ask("GET", f"{path}/msg_1", 404)
            for name in ("a/items/b", "a/items", "a"):
                await server.ask("DELETE", f"{CONVERSATIONS}/{name}")
            assert (await server.ask("GET", CONVERSATIONS))["data"] == []

    run(work())


def test_calls_are_read_outside_of_the_event_loops_thread(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of one body's calls may be megabytes of JSON."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    threads = list[threading.Thread]()

    def watched(items: Any) -> Any:
        threads.append(threading.current_thread())
        return messages_of(items)

    monkeypatch.setattr(conversations, "messages_of", watched)

    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="c", items=[call])
            await server.post(f"{CONVERSATIONS}/c/items", items=[call])
            assert len(threads) == 2 and threading.current_thread() not in threads

    run(work())


def test_the_prompt_behind_a_deleted_item_is_no_surprise(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="c")
            for text in ("one", "two", "three"):
                await server.chat(text, conversation="c", history="server")
            await server.ask("DELETE", f"{CONVERSATIONS}/c/items/{(await ids(server, 'c'))[2]}")
            await server.chat("four", conversation="c", history="server")
            assert "the prompt of session" not in caplog.text
            await server.chat("five", conversation="c")  # only this one: the client's own history
            assert "the prompt of session 'c' changed" in caplog.text

    run(work())


def any_dialogue(draw: random.Random) -> list[Message]:
    """No two replies in a row: as items they would be one."""
    messages: list[Message] = []
    for _ in range(draw.randrange(1, 8)):
        role = draw.choice(("user", "system", "developer", "tool", "assistant"))
        if role == "assistant" and messages and messages[-1]["role"] == role:
            role = "user"
        parts = [{"type": "text", "text": draw.choice("ab")} for _ in range(2)]
        message: Message = {"role": role, "content": draw.choice(("a", "b", "", parts))}
        if role == "tool":
            message["tool_call_id"] = "c1"
        if role == "assistant":
            message["content"] = draw.choice(("a", ""))
            calls = [
                {"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1.5}}}
                for id in ("c1", "c1", "c2")[: draw.randrange(4)]
            ]
            message |= {"tool_calls": calls} if calls else {}
            message |= {"reasoning_content": "hm"} if draw.random() < 0.5 else {}
        messages.append(message)
    return messages


def test_items_say_all_of_a_dialogue_and_each_can_be_deleted() -> None:
    draw = random.Random(1)
    for _ in range(300):
        messages = any_dialogue(draw)
        items = items_of(messages)
        given = INPUT.validate_python(items, context=[])
        assert [message.for_template() for message in messages_of(given)] == messages
        assert len({item["id"] for item in items}) == len(items)
        while items:
            item = draw.choice(items)
            messages = without_item(messages, item["id"])
            items.remove(item)
            assert items_of(messages) == items
            with pytest.raises(RequestError):
                without_item(messages, item["id"])
            if draw.random() < 0.3:
                messages = [*messages, {"role": "user", "content": draw.choice("ab")}]
                assert items_of(messages)[:-1] == items
                items = items_of(messages)
                assert len({item["id"] for item in items}) == len(items)
        assert messages == []


def test_a_dialogue_is_as_long_as_a_request_may_be() -> None:
    messages = [user] * 3
    assert without_ids(with_messages(messages, [user], 1000)) == [user] * 4
    kanji = {**user, "content": "茶" * 250}  # 750 bytes
    assert with_messages(messages, [kanji], 1000)[-1] == kanji
    for longer in ([user] * 16_384, [{**user, "content": "x" * 1000}]):
        with pytest.raises(RequestError) as error:
            with_messages(messages, longer, 1000)
        assert error.value.kind is ErrorKind.TOO_LARGE
