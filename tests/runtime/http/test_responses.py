"""OpenAI's Responses API, by hand and with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from pensieve.runtime.messages import Forget

from ..conversations.test_store import full_disk
from ..served import Served, run, serve

__all__ = ["serve"]  # a fixture

pytestmark = pytest.mark.usefixtures("histories_at")  # with both databases

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


async def respond(server: Served, status: int = 200, key: str | None = None, **body: Any) -> Any:
    return await server.post(RESPONSES, status, key, **body)


def text_of(response: Any) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_the_prompt_of_a_response_is_counted(serve: Any) -> None:
    """LiteLLM's proxy asks so for Anthropic's clients."""

    async def work() -> None:
        async with serve() as server:
            path = f"{RESPONSES}/input_tokens"
            first = await respond(server, input="hello", instructions="be brief")
            assert await server.post(path, input="hello", instructions="be brief") == {
                "object": "response.input_tokens",
                "input_tokens": first["usage"]["input_tokens"],
            }
            item = {"type": "item_reference", "id": first["output"][0]["id"]}
            user = {"role": "user", "content": "x"}
            for more in (
                {"input": "more", "previous_response_id": first["id"]},
                {"input": [user, item, user]},
            ):
                requests = len(server.requests)
                counted = await server.post(path, **more)
                assert len(server.requests) == requests
                answer = await respond(server, **more)
                assert answer["usage"]["input_tokens"] == counted["input_tokens"]
            without = await server.post(path, instructions="be brief")
            assert 0 < without["input_tokens"] < first["usage"]["input_tokens"]
            previous = {"previous_response_id": first["id"]}
            counts = [
                (await server.post(path, **previous, **more))["input_tokens"]
                for more in ({"input": None}, {"input": [user]}, {"input": [user, user]})
            ]
            assert counts[0] < counts[1] and counts[1] - counts[0] == counts[2] - counts[1]
            refused = await server.post(path, 400)
            assert "empty" in refused["error"]["message"]
            await respond(server, 400, instructions="be brief")
            conversation = await server.post(CONVERSATIONS)
            refused = await server.post(path, 400, input="x", conversation=conversation["id"])
            assert refused["error"]["param"] == "conversation"

    run(work())


def test_references_lengthen_a_body_by_the_items_that_they_name(serve: Any) -> None:
    """A reference is short, and one item may be named thousands of times."""

    async def work() -> None:
        async with serve(max_body_bytes=5000) as server:
            (item,) = (await respond(server, input="hello"))["output"]
            size = len(json.dumps(item))
            reference = {"type": "item_reference", "id": item["id"]}
            fits = [reference] * (5000 // size)
            assert len(json.dumps(fits)) < 2500
            await respond(server, input=fits)
            for path in (RESPONSES, f"{RESPONSES}/input_tokens"):
                requests = len(server.requests)
                refused = await server.post(path, 413, input=[*fits, reference])
                assert refused["error"]["param"] == "input"
                assert len(server.requests) == requests

    run(work())


def test_responses_go_on_from_any_earlier_one(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            first = await respond(server, input="hello", instructions="be brief")
            assert (
                first["status"] == "completed"
                and first["store"]
                and text_of(first).startswith("hello world")
            )
            log = server.logs()[0]
            for number in range(2):  # the first one is a snapshot: both go on from it
                body = dict(
                    input=f"more {number}",
                    previous_response_id=first["id"],
                    instructions="be brief",
                )
                again = await respond(server, **body)
                assert server.requests[-1].prompt[: len(log)].tolist() == log
                assert server.requests[-1].conversation == server.requests[0].conversation
            assert again["previous_response_id"] == first["id"]
            assert await server.ask("GET", f"{RESPONSES}/{again['id']}") == again
            assert (await server.ask("DELETE", f"{RESPONSES}/{first['id']}"))["deleted"]
            await respond(server, 404, input="x", previous_response_id=first["id"])
            last = await respond(server, input="x", previous_response_id=again["id"], store=False)
            text = (await server.post("/detokenize", tokens=server.requests[-1].prompt.tolist()))[
                "prompt"
            ]
            contents = [
                part.split("<|done|>")[0].split("\n", 1)[1] for part in text.split("<|turn|>")[1:-1]
            ]
            assert contents == ["hello", text_of(first), "more 1", text_of(again), "x"]
            await server.ask("GET", f"{RESPONSES}/{last['id']}", 404)

    run(work())


def test_the_kv_of_a_response_is_forgotten_with_it_and_that_of_its_line_with_the_last(
    serve: Any,
) -> None:
    async def work() -> None:
        async with serve() as server:
            first = await respond(server, input="hello")
            second = await respond(server, input="more", previous_response_id=first["id"])
            for response in (first, second):
                await server.ask("DELETE", f"{RESPONSES}/{response['id']}")
            logs = server.logs()
            told = [
                (gone.conversation, gone.tokens.tolist(), gone.shared)
                for gone in server.loop.messages(Forget)
            ]
            assert told == [
                (None, logs[0], len(logs[0])),
                (server.requests[0].conversation, logs[1], 0),
            ]

    run(work())


@pytest.mark.parametrize("joins", [False, True], ids=["line", "conversation"])
def test_what_responses_have_in_common_is_stored_once(serve: Any, joins: bool) -> None:
    async def work() -> None:
        async with serve() as server:
            body: dict[str, Any] = {}
            if joins:
                await server.post(CONVERSATIONS, id="talk")
                body = {"conversation": "talk"}
            contents = []
            for number in range(6):
                last = await respond(server, input=f"question {number}", **body)
                contents += [f"question {number}", text_of(last)]
                if not joins:
                    body = {"previous_response_id": last["id"]}
            stored = server.store._db.execute("SELECT sum(length(tokens) / 4) FROM turns")[0][0]
            assert stored == len(server.logs()[-1])
            await server.ask("DELETE", f"{CONVERSATIONS}/talk", 200 if joins else 404)
            await respond(server, input="x", previous_response_id=last["id"], store=False)
            text = (await server.post("/detokenize", tokens=server.requests[-1].prompt.tolist()))[
                "prompt"
            ]
            assert [
                part.split("<|done|>")[0].split("\n", 1)[1] for part in text.split("<|turn|>")[1:-1]
            ] == [
                *contents,
                "x",
            ]

    run(work())


def test_responses_join_a_conversation_and_take_message_items(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            body = dict(conversation="talk", key="one")
            await respond(server, 404, input="hello", **body)
            await server.post(CONVERSATIONS, id="talk", key="one")
            part = {"type": "input_text", "text": "hello"}
            first = await respond(server, input=[{"role": "user", "content": [part]}], **body)
            second = await respond(server, input="more", **body)
            whole = await server.ask("GET", f"{CONVERSATIONS}/talk", key="one")
            contents = [message["content"] for message in whole["messages"]]
            assert contents == ["hello", text_of(first), "more", text_of(second)]
            await server.ask("GET", f"{RESPONSES}/{first['id']}", 404, "two")
            sent_back = [
                {"role": "user", "content": "hello"},
                *first["output"],
                {"role": "user", "content": "more"},
            ]
            await respond(server, input=sent_back, key="one")
            assert server.requests[-1].prompt == server.requests[-2].prompt
            for wrong in (
                dict(input=""),
                dict(input="x", tool_choice={"type": "web_search"}),
                dict(input="x", background=True),
                dict(input="x", conversation="talk", previous_response_id=first["id"]),
            ):
                await respond(server, 400, "one", **wrong)

    run(work())


def test_a_turn_is_in_its_conversation_and_a_response_or_in_neither(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            await server.post(CONVERSATIONS, id="talk")
            insert = server.store._insert

            def full(*_: Any, **__: Any) -> Any:
                raise full_disk(server.store.shared)

            server.store._insert = full  # of the response: the conversation is there
            await respond(server, 507, input="hello", conversation="talk")
            assert (await server.ask("GET", f"{CONVERSATIONS}/talk"))["messages"] == []
            server.store._insert = insert
            await server.until_healthy(True)
            answer = await respond(server, input="hello", conversation="talk")
            messages = (await server.ask("GET", f"{CONVERSATIONS}/talk"))["messages"]
            assert [message["content"] for message in messages] == ["hello", text_of(answer)]
            assert (await server.ask("GET", f"{RESPONSES}/{answer['id']}"))["id"] == answer["id"]

    run(work())


def test_the_official_client_streams_responses(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=server.http
            )
            first = await client.responses.create(model="fake", input="hello", max_output_tokens=5)
            assert (first.status, first.output_text) == ("incomplete", "hello")
            assert (
                first.incomplete_details is not None
                and first.incomplete_details.reason == "max_output_tokens"
            )
            kinds = []
            text = ""
            async with client.responses.stream(
                model="fake", input="more", previous_response_id=first.id
            ) as stream:
                async for event in stream:
                    assert event.sequence_number == len(kinds)
                    kinds.append(event.type)
                    text += event.delta if event.type == "response.output_text.delta" else ""
                final = await stream.get_final_response()
            assert final.output_text == text and text.startswith("hello world")
            assert final.usage is not None and final.usage.input_tokens == len(
                server.requests[-1].prompt
            )
            assert final.usage.input_tokens_details.cached_tokens > 0
            assert list(dict.fromkeys(kinds)) == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert (await client.responses.retrieve(final.id)).output_text == text
            await client.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(final.id)
            created = await client.conversations.create()
            await client.responses.create(model="fake", input="hello", conversation=created.id)
            assert (await client.conversations.retrieve(created.id)).id == created.id
            assert (await client.conversations.delete(created.id)).deleted

    run(work())


def test_a_stream_that_fails_ends_with_a_failed_response(serve: Any) -> None:
    async def work() -> None:
        async with serve(dies_with=1) as server:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=server.http
            )
            stream = await client.responses.create(model="fake", input="hello", stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1]
            assert last.type == "response.failed" and last.response.status == "failed"
            assert last.response.error is not None and last.response.error.code == "server_error"
            assert "the books disagree" in last.response.error.message

    run(work())


def test_what_would_have_no_effect_on_a_response_is_refused(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            for body in ({"max_tokens": 5}, {"return_token_ids": True}):
                refused = await respond(server, 400, input="hello", **body)
                assert [refused["error"]["param"]] == list(body)

    run(work())


def test_what_openai_alone_has_is_refused_with_another_way(serve: Any) -> None:
    async def work() -> None:
        async with serve() as server:
            refused = await server.post(f"{RESPONSES}/compact", 404, model="fake", input="x")
            assert "truncation: auto" in refused["error"]["message"]

    run(work())
