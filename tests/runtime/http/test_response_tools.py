"""OpenAI's Responses API with tools, thoughts and formats, over a simulated loop."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from pensieve.runtime.frontend.bodies import parse
from pensieve.runtime.frontend.reply import Piece, Style
from pensieve.runtime.frontend.reply_forms import ReplyForms
from pensieve.runtime.frontend.reply_reader import ToolCall
from pensieve.runtime.http.response_writer import About, ResponseWriter
from pensieve.runtime.http.responses import ResponseBody
from pensieve.scheduler.types import (
    ErrorKind,
    FinishReason,
    RequestError,
    RequestId,
    RowResult,
    Sampling,
    Usage,
)

from ..served import Served, run, serve
from .test_messages import CALL, read, says

__all__ = ["serve"]  # a fixture

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\n"}}\n</tool_call>'
USER = {"role": "user", "content": "x"}
FUNCTION_CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "weather",
    "arguments": '{"city": "Oslo"}',
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}


async def respond(server: Served, status: int = 200, **body: Any) -> Any:
    return await server.post(RESPONSES, status, **{"input": "x", **body})


def parsed_body(**body: Any) -> ResponseBody:
    return parse(ResponseBody, json.dumps({"input": "x", **body}).encode())


def test_a_function_is_called(serve: Any) -> None:
    async def work() -> None:
        async with serve(answers=says(f"Let me see.\n{CALL}\n{CALL}")) as server:
            answer = await respond(server, tools=[WEATHER])
            message, *calls = answer["output"]
            assert message["content"][0]["text"] == "Let me see." and len(calls) == 2
            assert answer["status"] == "completed" and answer["tools"] == [WEATHER]
            for call in calls:
                assert call["id"].startswith("fc_") and call["call_id"].startswith("call_")
                assert (call["type"], call["name"]) == ("function_call", "weather")
                assert json.loads(call["arguments"]) == {"city": "Oslo"}
            one = await respond(server, tools=[WEATHER], parallel_tool_calls=False)
            assert len(one["output"]) == 2 and not one["parallel_tool_calls"]
            none = await respond(server, tools=[WEATHER], tool_choice="none")
            assert CALL in none["output"][0]["content"][0]["text"]
        async with serve(answers=says(CALL)) as server:
            assert [
                item["type"] for item in (await respond(server, tools=[WEATHER]))["output"]
            ] == ["function_call"]

    run(work())


def test_the_official_client_streams_calls(serve: Any) -> None:
    """Its helper puts the events together to the response that ends the stream."""

    async def work() -> None:
        async with serve(answers=says(f"See.{CALL}{PATCH_CALL}So.")) as server:
            client = openai.AsyncOpenAI(
                base_url="http://test/v1", api_key="none", http_client=server.http
            )
            tools: Any = [WEATHER, PATCH]
            async with client.responses.stream(model="fake", input="x", tools=tools) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            message = [
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
            ]
            kinds = [event.type for event in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            repeated = [kind for at, kind in enumerate(kinds) if kind not in kinds[at - 1 : at]]
            assert repeated[2:-1] == [
                *message,
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.output_item.added",
                "response.custom_tool_call_input.delta",
                "response.custom_tool_call_input.done",
                "response.output_item.done",
                *message,
            ]
            done = [event.item for event in events if event.type == "response.output_item.done"]
            last = events[-1]
            assert last.type == "response.completed"
            assert [item.id for item in done] == [item.id for item in final.output]
            assert [item.type for item in done] == [item.type for item in last.response.output]
            _, call, custom, _ = final.output
            assert call.type == "function_call" and json.loads(call.arguments)
            assert custom.type == "custom_tool_call" and custom.input == "*** a\n"
            assert custom.id.startswith("ctc_")
            # sent back, the items equal the reply: no part is tokenized again
            log = server.requests[0].prompt.tolist()
            outputs: Any = [
                {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
                {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
            ]
            again: Any = [USER, *(item.to_dict() for item in final.output), *outputs]
            await client.responses.create(model="fake", input=again, tools=tools)
            assert server.requests[-1].prompt.tolist()[: len(log)] == log
            text = await read(server)
            assert text.startswith("<|turn|>user\nx<|done|>\n<|turn|>assistant\nSee.So.<tool_call>")
            assert text.endswith(
                "<|turn|>tool\nsunny<|done|>\n<|turn|>tool\nok<|done|>\n<|turn|>assistant\n"
            )
            await client.responses.create(
                model="fake", input=outputs, tools=tools, previous_response_id=final.id
            )
            assert server.requests[-1].prompt == server.requests[-2].prompt

    run(work())


@pytest.mark.parametrize("joins", [False, True], ids=["line", "conversation"])
def test_a_stored_call_is_answered(serve: Any, joins: bool) -> None:
    async def work() -> None:
        async with serve(answers=says(CALL)) as server:
            body: dict[str, Any] = {"tools": [WEATHER]}
            if joins:
                await server.post("/v1/conversations", id="talk")
                body["conversation"] = "talk"
            first = await respond(server, **body)
            (call,) = first["output"]
            if not joins:
                body["previous_response_id"] = first["id"]
            await respond(server, input=[{**OUTPUT, "call_id": call["call_id"]}], **body)
            assert await read(server) == (
                f"<|turn|>user\nx<|done|>\n<|turn|>assistant\n{CALL}<|done|>\n"
                "<|turn|>tool\nsunny<|done|>\n<|turn|>assistant\n"
            )

    run(work())


def test_what_agents_send_is_understood(serve: Any) -> None:
    """Each item reaches the prompt, one message for the items of a reply."""
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "Z"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [{"a": 1}]}],
        },
        {**FUNCTION_CALL, "id": "fc_1", "status": "completed", "namespace": None},
        {"type": "local_shell_call", "call_id": "c2", "status": "completed", "action": shell},
        {**OUTPUT, "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "local_shell_call_output", "id": "c2", "output": "a.py"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        USER,
    ]
    body = {
        "input": items,
        "model": "fake",
        "instructions": "Be brief.",
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "tools": [WEATHER, {"type": "web_search"}, {**PATCH, "format": LARK}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }

    async def work() -> None:
        async with serve() as server:
            answer = await server.http.post(RESPONSES, json=body)
            assert answer.status_code == 200, answer.text
            ignored = answer.headers["x-pensieve-ignored-fields"].split(", ")
            assert set(ignored) == {
                "input.web_search_call",
                "tools.web_search",
                "tools.patch.format",
            }
            arguments = '{"type": "exec", "command": ["ls"], "env": {}}'
            shell_call = f'{{"name": "local_shell", "arguments": {arguments}}}'
            assert (
                await read(server)
                == "".join(
                    f"<|turn|>{role}\n{text}<|done|>\n"
                    for role, text in (
                        ("system", "Be brief."),
                        ("developer", "d"),
                        ("user", "x"),
                        ("assistant", f"I look.{CALL}<tool_call>\n{shell_call}\n</tool_call>"),
                        ("tool", "sunny"),
                        ("tool", "a.py"),
                        ("assistant", "No."),
                        ("user", "x"),
                    )
                )
                + "<|turn|>assistant\n"
            )
            assert [tool["name"] for tool in answer.json()["tools"]] == ["weather", "patch"]
            assert answer.json()["reasoning"]["effort"] == "medium"

    run(work())


def told_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def told_as(*messages: tuple[str, str]) -> str:
    return "".join(f"<|turn|>{role}\n{text}<|done|>\n" for role, text in messages)


SHELL_OUTPUT = {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
OTHER_PROVIDERS: dict[str, tuple[list[dict[str, Any]], str, set[str]]] = {
    "shell": (
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c1", "output": [SHELL_OUTPUT]},
        ],
        told_as(
            ("assistant", told_call("shell", '{"commands": ["ls"]}')),
            ("tool", json.dumps([SHELL_OUTPUT])),
        ),
        set(),
    ),
    "apply_patch": (
        [
            {
                "type": "apply_patch_call",
                "call_id": "c1",
                "status": "completed",
                "operation": {"type": "delete_file", "path": "a.py"},
            },
            {"type": "apply_patch_call_output", "call_id": "c1", "status": "completed"},
        ],
        told_as(
            ("assistant", told_call("apply_patch", '{"type": "delete_file", "path": "a.py"}')),
            ("tool", "completed"),
        ),
        set(),
    ),
    "mcp": (
        [
            {"type": "mcp_list_tools", "id": "m0", "server_label": "docs", "tools": []},
            {
                "type": "mcp_call",
                "id": "m1",
                "server_label": "docs",
                "name": "find",
                "arguments": '{"q": "tea"}',
                "output": "a leaf",
            },
            {
                "type": "mcp_call",
                "id": "m2",
                "server_label": "docs",
                "name": "find",
                "arguments": "{",
                "error": {"code": 5},
            },
            {"role": "assistant", "content": "It is a leaf."},
        ],
        told_as(
            ("assistant", told_call("docs__find", '{"q": "tea"}')),
            ("tool", "a leaf"),
            ("assistant", told_call("docs__find", '{"arguments": "{"}')),
            ("tool", '{"code": 5}'),
            ("assistant", "It is a leaf."),
        ),
        {"input.mcp_list_tools"},
    ),
    "code": (
        [
            {
                "type": "code_interpreter_call",
                "id": "i1",
                "code": "1+1",
                "container_id": "k",
                "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "http://a"}],
            },
            {"type": "code_interpreter_call", "id": "i2", "code": "1", "outputs": None},
        ],
        told_as(
            ("assistant", told_call("code_interpreter", '{"code": "1+1"}')),
            (
                "tool",
                '[{"type": "logs", "logs": "2"}, "[image left out: this model reads text only]"]',
            ),
        ),
        {"code_interpreter_call.image", "input.code_interpreter_call"},
    ),
    "files": (
        [
            {
                "type": "file_search_call",
                "id": "f1",
                "queries": ["tea"],
                "results": [{"filename": "a", "text": "b"}],
            },
            {"type": "file_search_call", "id": "f2", "queries": ["tea"], "results": None},
        ],
        told_as(
            ("assistant", told_call("file_search", '{"queries": ["tea"]}')),
            ("tool", '[{"filename": "a", "text": "b"}]'),
        ),
        {"input.file_search_call"},
    ),
    "computer": (
        [
            {"type": "computer_call", "call_id": "c1", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "c1",
                "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,"},
            },
        ],
        told_as(
            ("assistant", told_call("computer", '{"type": "screenshot"}')),
            ("tool", "[image left out: this model reads text only]"),
        ),
        {"computer_call_output.computer_screenshot"},
    ),
    "without effect": (
        [
            {"type": "compaction", "encrypted_content": "Z"},
            {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "tea"}},
            {"type": "image_generation_call", "id": "g1", "result": "iVBO"},
        ],
        "",
        {"input.compaction", "input.web_search_call", "input.image_generation_call"},
    ),
}


@pytest.mark.parametrize("name", OTHER_PROVIDERS)
def test_a_history_of_another_provider_goes_on(serve: Any, name: str) -> None:
    items, told, left_out = OTHER_PROVIDERS[name]
    body = {"model": "fake", "input": [USER, *items, USER]}

    async def work() -> None:
        async with serve() as server:
            answer = await server.http.post(RESPONSES, json=body)
            assert answer.status_code == 200, answer.text
            named = answer.headers.get("x-pensieve-ignored-fields", "")
            assert set(filter(None, named.split(", "))) == left_out
            user = told_as(("user", "x"))
            assert await read(server) == f"{user}{told}{user}<|turn|>assistant\n"
        async with serve(strict=True) as server:
            answer = await server.http.post(RESPONSES, json=body)
            assert answer.status_code == (400 if left_out else 200)
            assert not left_out or any(field in answer.text for field in left_out)

    run(work())


def test_a_call_without_an_id_has_that_of_its_place() -> None:
    code = {"type": "code_interpreter_call", "code": "1", "outputs": []}
    items = [
        {**code, "id": ""},
        {"type": "file_search_call", "queries": ["a"], "results": []},
        {"type": "mcp_call", "name": "n", "arguments": "{}", "output": "x"},
        {"type": "local_shell_call", "call_id": None, "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {**code, "id": "c5"},
    ]
    wishes = parsed_body(input=[USER, *items, USER]).generate()
    ids = [call["id"] for message in wishes.messages for call in message.get("tool_calls", ())]
    assert ids == ["item_1", "item_2", "item_3", "item_4", "c5"]
    results = [message["tool_call_id"] for message in wishes.messages if message["role"] == "tool"]
    assert results == ["item_1", "item_2", "item_3", "c", "c5"]


NAMED = {"type": "function", "name": "weather"}


@pytest.mark.parametrize(
    ("choice", "words", "others"),
    [
        ("required", ["weather", "patch"], []),
        (NAMED, ["weather"], ["patch"]),
        ({"type": "custom", "name": "patch"}, ["patch", "[a-z]+"], ["weather"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [NAMED]}, ["weather"], ["patch"]),
    ],
)
def test_a_call_is_forced(choice: Any, words: list[str], others: list[str]) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    tools = [WEATHER, {**PATCH, "format": form}]
    body = parsed_body(tools=tools, tool_choice=choice)
    wishes = body.generate()
    assert wishes.form is not None and wishes.form.param == "tools"
    assert wishes.form.tools is not None
    grammar = wishes.form.tools.grammar(ReplyForms())
    assert all(word in grammar for word in words)
    assert not any(word in grammar for word in others)
    assert len(wishes.tools) == 2  # another choice changes no prompt


def test_allowed_tools_change_no_prompt(serve: Any) -> None:
    """Their purpose is that the prompt's KV stays. A call of another tool is content."""
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED, {"type": "web_search"}]}

    async def work() -> None:
        async with serve(answers=says(f"{CALL}{PATCH_CALL}")) as server:
            tools = [WEATHER, PATCH]
            whole = await respond(server, tools=tools)
            allowed = await respond(server, tools=tools, tool_choice=choice)
            assert server.requests[0].prompt == server.requests[1].prompt
            assert [item["type"] for item in whole["output"]] == [
                "function_call",
                "custom_tool_call",
            ]
            assert [item["type"] for item in allowed["output"]] == ["message", "function_call"]
            assert allowed["output"][0]["content"][0]["text"] == PATCH_CALL

    run(work())
    wishes = parsed_body(tools=[WEATHER, PATCH], tool_choice=choice).generate()
    assert len(wishes.tools) == 2
    assert wishes.form is None


@pytest.mark.parametrize(
    "form",
    [{"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": {"type": "object"}}],
)
def test_a_format_is_followed(form: dict[str, Any]) -> None:
    body = parsed_body(text={"format": form, "verbosity": "low"})
    wanted = body.generate().form
    assert wanted is not None and wanted.param == "text.format"
    with_tools = parsed_body(text={"format": form}, tools=[WEATHER]).generate().form
    assert with_tools is not None and with_tools.tools is not None
    assert "weather" in with_tools.tools.grammar(ReplyForms())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": [USER, {"type": "unheard_call"}]}, "item 1|unheard_call"),
        (
            {"input": [USER, {"type": "shell_call_output", "output": "a"}]},
            "input.1.function_call_output.call_id",
        ),
        ({"input": [USER, {"type": ["x"]}]}, "item 1"),
        ({"input": [USER, 5]}, "input.1"),
        ({"input": [{**FUNCTION_CALL, "call_id": 5, "name": None}]}, "input.0.function_call"),
        ({"input": [{**FUNCTION_CALL, "arguments": "{"}]}, "JSON object"),
        ({"input": [{**OUTPUT, "output": [{"type": "computer"}]}]}, "'computer'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "'input_image'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.message.role"),
        ({"input": [{"type": "web_search_call"}]}, "empty"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER, {**PATCH, "name": "weather"}]}, "a name of its own"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "syntax"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "'other'"),
        ({"tool_choice": {"type": "file_search"}}, "file_search"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "requires tools"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "schema"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(serve: Any, body: Any, words: str) -> None:
    async def work() -> None:
        async with serve() as server:
            error = (await respond(server, 400, **body))["error"]
            assert all(word in error["message"] for word in words.split("|")), error
            assert error["param"].split(".")[0] in body

    run(work())


def test_strict_fields_refuse_tools_that_are_left_out(serve: Any) -> None:
    async def work() -> None:
        async with serve(strict=True) as server:
            refused = await respond(server, 400, tools=[{"type": "web_search"}])
            assert "tools.web_search" in refused["error"]["message"]

    run(work())


def reply_of(thoughts: str, text: str, *calls: ToolCall, finish: FinishReason) -> Any:
    """A reply as the writer reads it."""
    request = SimpleNamespace(prompt=[1, 2], choice=0, sampling=Sampling(temperature=0.5))
    return SimpleNamespace(
        request=request,
        tokens=[5, 6, 7],
        thoughts=[thoughts],
        content=[text],
        calls=calls,
        reasoning_tokens=2,
        sources=Usage(),
        truncated=0,
        finish=finish,
    )


def writer(stream: bool, store: bool = True) -> ResponseWriter:
    return ResponseWriter(Style("fake", False, False), About({}, {}, False, False, store, stream))


def parsed(events: str) -> list[dict[str, Any]]:
    return [json.loads(event.split("data: ")[1]) for event in events.split("\n\n") if event]


@pytest.mark.parametrize("text", ["It is.", ""])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_thoughts_are_an_item_of_their_own(text: str, finish: FinishReason) -> None:
    """Whole and streamed are equal, but for the ids."""
    reply = reply_of("Let me think.", text, finish=finish)
    whole = writer(stream=False).whole([reply])
    status = "completed" if finish is FinishReason.STOP else "incomplete"
    assert whole["status"] == status and whole["output"][-1]["status"] == status
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    reasoning, *message = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert reasoning["summary"] == [] and reasoning["id"].startswith("rs_")
    assert [item["content"][0]["text"] for item in message] == [text] * bool(text)
    streamed = writer(stream=True)
    result = RowResult(RequestId(1))
    events = streamed.opening([reply])
    events += streamed.piece(0, Piece("", result, thought="Let me "), None)
    events += streamed.piece(0, Piece(text[:2], result, thought="think."), None)
    events += streamed.piece(0, Piece(text[2:], result), "stop")
    stored = json.loads(streamed.stored([reply]) or "")
    all_events = parsed(events + streamed.closing([reply]))
    last = all_events[-1]
    assert last["type"] == f"response.{status}" and last["response"] == stored
    done = [event["item"] for event in all_events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"]
    assert [{**item, "id": ""} for item in done] == [{**item, "id": ""} for item in whole["output"]]
    assert [event["type"] for event in all_events[2:8]] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
    ]


def test_a_response_that_is_not_stored_is_not_built_for_the_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its items have ids in the history all the same."""
    reply = reply_of("Let me think.", "It is.", finish=FinishReason.STOP)
    unstored = writer(stream=False, store=False)
    with monkeypatch.context() as patched:
        patched.setattr(ResponseWriter, "whole", None)
        assert unstored.stored([reply]) is None
        (ids,) = unstored.item_ids([reply]).values()
    assert ids == [item["id"] for item in unstored.whole([reply])["output"]]


def test_an_empty_reply_is_an_empty_message() -> None:
    reply = reply_of("", "", finish=FinishReason.STOP)
    (item,) = writer(stream=False).whole([reply])["output"]
    assert item["content"][0]["text"] == ""
    streamed = writer(stream=True)
    events = streamed.opening([reply]) + streamed.piece(
        0, Piece("", RowResult(RequestId(1))), "stop"
    )
    last = parsed(events + streamed.closing([reply]))[-1]
    assert last["response"]["output"][0]["content"] == item["content"]


TEAM = {
    "type": "namespace",
    "name": "team",
    "description": "Sub-agents.",
    "tools": [{**WEATHER, "name": "ask"}, {**PATCH, "name": "tell"}],
}
TEAM_CALLS = "".join(
    f'<tool_call>\n{{"name": "team__{name}", "arguments": {{"{key}": "x"}}}}\n</tool_call>'
    for name, key in (("ask", "city"), ("tell", "input"))
)


def test_the_tools_of_a_namespace_are_called(serve: Any) -> None:
    """Codex takes no call whose namespace is a part of its name."""

    async def work() -> None:
        async with serve(answers=says(TEAM_CALLS)) as server:
            tools = [{"type": "web_search"}, TEAM, WEATHER]
            answer = await server.http.post(RESPONSES, json={"input": "x", "tools": tools})
            assert answer.headers["x-pensieve-ignored-fields"] == "tools.web_search"
            first = answer.json()
            assert first["tools"][0]["tools"][0]["name"] == "ask"
            calls = first["output"]
            assert [(call["namespace"], call["name"]) for call in calls] == [
                ("team", "ask"),
                ("team", "tell"),
            ]
            assert [call["type"] for call in calls] == ["function_call", "custom_tool_call"]
            log = server.requests[0].prompt.tolist()
            await respond(server, input=[USER, *calls, OUTPUT], tools=tools)
            assert server.requests[-1].prompt.tolist()[: len(log)] == log
            assert TEAM_CALLS in await read(server)

    run(work())


def test_a_namespace_is_told_to_the_model_and_may_be_chosen() -> None:
    wishes = parsed_body(tools=[WEATHER, TEAM]).generate()
    functions = [tool["function"] for tool in wishes.tools]
    assert [function["name"] for function in functions] == ["weather", "team__ask", "team__tell"]
    assert functions[1]["description"].endswith("About all tools team__*: Sub-agents.")
    assert "Sub-agents" not in functions[2]["description"]
    references = [{"type": "namespace", "name": "team"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": references}
    form = parsed_body(tools=[WEATHER, TEAM], tool_choice=choice).generate().form
    assert form is not None and form.tools is not None
    assert [one["name"] for one in form.tools.functions] == ["team__ask", "team__tell"]
    with pytest.raises(RequestError, match="a name of its own"):
        parsed_body(tools=[TEAM, TEAM])


def test_a_choice_leaves_no_field_ignored() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
    for choice in (NAMED, allowed, "required"):
        ignored: list[str] = []
        text = json.dumps({"input": "hello", "tools": [WEATHER], "tool_choice": choice})
        parse(ResponseBody, text.encode(), ignored)
        assert ignored == []
    with pytest.raises(RequestError, match="mode"):
        parsed_body(tools=[WEATHER], tool_choice={**allowed, "mode": "x"})
    infinite = json.dumps({"input": "hello", "tools": [{**WEATHER, "x": float("inf")}]})
    with pytest.raises(RequestError, match="number"):
        parse(ResponseBody, infinite.replace("Infinity", "1e999").encode())


@pytest.mark.parametrize("stream", [False, True])
def test_a_reference_stands_for_its_stored_item(serve: Any, stream: bool) -> None:
    """The AI SDK sends the ids of all that it got in earlier turns."""

    async def work() -> None:
        thought = "<think>\nHm.\n</think>\n\n"
        async with serve(answers=says(f"{thought}See.{CALL}{PATCH_CALL}")) as server:
            tools = [WEATHER, PATCH]
            answer = await server.http.post(
                RESPONSES, json={"input": "x", "tools": tools, "stream": stream}
            )
            first = answer.json() if not stream else parsed(answer.text)[-1]["response"]
            items = first["output"]
            assert [item["id"].split("_")[0] for item in items[-3:]] == ["msg", "fc", "ctc"]
            assert len({item["id"] for item in items}) == len(items)
            outputs = [
                {"type": "function_call_output", "call_id": items[-2]["call_id"], "output": "a"},
                {"type": "custom_tool_call_output", "call_id": items[-1]["call_id"], "output": "b"},
            ]
            references = [{"type": "item_reference", "id": item["id"]} for item in items]
            bare = [{"id": item["id"]} for item in items]
            untyped = [{"type": None, "id": item["id"]} for item in items]
            for past in (items, references, bare, untyped):
                await respond(server, input=[USER, *past, *outputs, USER], tools=tools)
            assert len({tuple(request.prompt) for request in server.requests[-4:]}) == 1

    run(work())


def test_a_reference_to_no_stored_item_is_not_found(serve: Any) -> None:
    async def work() -> None:
        async with serve(keys=("one", "two")) as server:
            ask = partial(server.post, RESPONSES)
            stored = (await ask(200, "one", input="x"))["output"][0]["id"]
            lost = (await ask(200, "one", input="x", store=False))["output"][0]["id"]
            past_the_end = stored.rpartition("_")[0] + "_7"
            for key, id in (
                ("one", lost),
                ("one", past_the_end),
                ("one", "msg_1"),
                ("one", "x" * 900),
                ("two", stored),
            ):
                reference = {"type": "item_reference", "id": id}
                error = (await ask(404, key, input=[USER, reference]))["error"]
                assert error["message"].startswith(f"Item with id '{id}' not found")
                assert error["param"] == "input"
            reference = {"type": "item_reference", "id": stored}
            await ask(200, "one", input=[USER, reference, USER], store=False)

    run(work())


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (
            {"input": [{"type": "web_search_call"}, USER, {"role": "tool", "content": "x"}]},
            "input.2",
        ),
        (
            {"input": [{"type": "web_search_call"}, {**FUNCTION_CALL, "arguments": "{"}]},
            "input.1",
        ),
        ({"tools": [{"type": "web_search"}, WEATHER, {**WEATHER, "name": ""}]}, "tools.2"),
    ],
)
def test_errors_name_the_place_that_the_client_sent(serve: Any, body: Any, place: str) -> None:
    async def work() -> None:
        async with serve() as server:
            error = (await respond(server, 400, **body))["error"]
            assert f"{place}." in f"{error['message']} {error['param']}", error

    run(work())


def test_a_response_that_fails_has_what_was_sent() -> None:
    reply = reply_of("", "", finish=FinishReason.STOP)
    streamed = writer(stream=True)
    events = streamed.opening([reply])
    events += streamed.piece(0, Piece("So", RowResult(RequestId(1))), None)
    events += streamed.failure(RequestError(ErrorKind.UNAVAILABLE, "It ends."))
    last = parsed(events)[-1]["response"]
    assert last["status"] == "failed" and last["error"]["message"] == "It ends."
    (item,) = last["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "So")
