"""The behaviour that users of the OpenAI API expect of a server: error classes, time-outs,
concurrency, stored turns."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai

from .asked_server import Server, error_of, texts, user, wait_until

LONG_PROMPT = "The river runs under the bridge and through the old town. " * 6
FLOOD = 40  # requests at once; a server that takes them all has no full queue to show


def test_a_bad_temperature_is_refused(server: Server) -> None:
    """BadRequestError that names the parameter."""
    error = server.refuses(openai.BadRequestError, lambda: server.chat(temperature=-1))
    assert error.param == "temperature" and "temperature" in error.message


def test_an_unknown_field_is_no_error(server: Server) -> None:
    """It is ignored, and so are fields that some servers have and others do not."""
    extra = {
        "no_such_field": 1,
        "user": "me",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
    }
    assert server.chat(extra_body=extra).choices


def test_an_ignored_field_is_named_in_a_header(server: Server) -> None:
    """Extension: a client can find out which of its fields had no effect."""
    ask = server.client.chat.completions.with_raw_response
    extra = {"no_such_field": 1, "nor_this": 2}
    answer = ask.create(model=server.model, messages=user("hi"), max_tokens=2, extra_body=extra)
    names = answer.headers.get("x-pensieve-ignored-fields")
    if names is None:
        server.skip("the server does not name the fields that it ignores")
    assert names == "no_such_field, nor_this"


def test_guided_fields_are_followed(server: Server) -> None:
    """vLLM's older names of structured outputs, which its clients still send."""
    cups = {
        "properties": {"cups": {"enum": [1, 2]}},
        "required": ["cups"],
        "additionalProperties": False,
    }
    for field, value, pattern in (
        ("guided_choice", ["green", "black"], "green|black"),
        ("guided_regex", "[0-9]{3}-[0-9]{2}", "[0-9]{3}-[0-9]{2}"),
        ("guided_grammar", 'root ::= "hot" | "cold"', "hot|cold"),
        ("guided_json", {"type": "object", **cups}, r'\{\s*"cups"\s*:\s*[12]\s*\}'),
    ):
        text = server.chat(max_tokens=40, extra_body={field: value}).choices[0].message.content
        assert re.fullmatch(pattern, text), (field, text)


def test_a_misspelt_field_of_an_extension_is_refused(server: Server) -> None:
    """Extension: BadRequestError that names it, where ignoring it would lose the history."""
    if server.raw("/v1/conversations")[0] != 200:
        server.skip("the server has no conversations")
    error = server.refuses(
        openai.BadRequestError, lambda: server.chat(extra_body={"converation": "c"})
    )
    assert "converation" in error.message


def test_a_session_stores_nothing(server: Server) -> None:
    """A session marks requests; it makes no conversation."""
    name = f"session-{uuid.uuid4().hex}"
    assert server.chat(
        extra_body={"session_id": name}, extra_headers={"X-Session-ID": name}
    ).choices
    assert server.raw(f"/v1/conversations/{name}")[0] == 404


def test_a_session_ends_once(server: Server) -> None:
    """Extension: its end is answered; after it there is no such session."""
    name = f"session-{uuid.uuid4().hex}"
    path = f"/v1/sessions/{name}"
    assert server.chat(extra_headers={"session-id": name}).choices
    status, _ = server.raw(path, method="DELETE")
    if status == 404:
        server.skip("the server has no end of a session")
    assert status == 200
    assert server.raw(path, method="DELETE")[0] == 404


def test_a_served_server_is_healthy(server: Server) -> None:
    """Start scripts wait for /health."""
    assert server.raw("/health")[0] == 200


def test_a_process_is_alive_and_tells_its_version(server: Server) -> None:
    """Equal to vLLM at /version; /live is an extension, for probes that restart a process."""
    status, body = server.raw("/version")
    assert status == 200 and json.loads(body)["version"]
    if server.raw("/live")[0] == 404:
        server.skip("the server has no /live")
    assert server.raw("/live")[0] == 200


def test_an_unknown_model_is_not_found(server: Server) -> None:
    """NotFoundError, wherever a model is named."""
    ask = server.client
    for call in (
        lambda: ask.chat.completions.create(model="no-such-model", messages=user("hi")),
        lambda: ask.completions.create(model="no-such-model", prompt="hi"),
        lambda: ask.responses.create(model="no-such-model", input="hi"),
        lambda: ask.models.retrieve("no-such-model"),
    ):
        error = server.refuses(openai.NotFoundError, call)
        assert error.code == "model_not_found" and "no-such-model" in error.message


def test_no_messages_are_refused(server: Server) -> None:
    """BadRequestError that names the parameter."""
    assert (
        server.refuses(openai.BadRequestError, lambda: server.chat(messages=[])).param == "messages"
    )


def test_wrong_types_are_refused(server: Server) -> None:
    """BadRequestError that names the parameter: the value is not guessed."""
    wrong: list[dict[str, Any]] = [
        {"max_tokens": "many"},
        {"stop": 5},
        {"n": 1.5},
        {"messages": "hello"},
    ]
    for options in wrong:
        error = server.refuses(openai.BadRequestError, partial(server.chat, **options))
        assert error.param in options, f"{options}: param is {error.param!r}"


def test_an_unknown_role_is_refused(server: Server) -> None:
    """BadRequestError about the messages."""
    messages = [{"role": "wizard", "content": "hi"}]
    error = server.refuses(openai.BadRequestError, lambda: server.chat(messages=messages))
    assert "role" in f"{error.param} {error.message}"


def test_a_prompt_beyond_the_context_is_told_both_numbers(server: Server) -> None:
    """BadRequestError with the code context_length_exceeded; its message has the prompt's tokens
    and the most."""
    prompt = [60] * (server.context + 10)
    error = server.refuses(openai.BadRequestError, lambda: server.complete(prompt))
    assert error.code == "context_length_exceeded"
    assert {str(len(prompt)), str(server.context)} <= set(re.findall(r"\d+", error.message))


def test_malformed_json_is_refused(server: Server) -> None:
    """400 with OpenAI's error object."""
    status, body = server.raw("/v1/chat/completions", b'{"model": ')
    assert (
        status == 400
        and error_of(body)["type"] == "invalid_request_error"
        and error_of(body)["message"]
    )


def test_an_unknown_path_is_not_found(server: Server) -> None:
    """404 with OpenAI's error object."""
    status, body = server.raw("/v1/no-such-path")
    assert status == 404 and error_of(body)["message"]


def test_a_wrong_key_is_refused(server: Server) -> None:
    """AuthenticationError with the code invalid_api_key."""
    stranger = openai.OpenAI(
        base_url=server.url, api_key="wrong-" + uuid.uuid4().hex, max_retries=0
    )
    try:
        stranger.models.list()
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key"
    else:
        server.skip("the server needs no key")


def test_a_full_queue_is_a_rate_limit(server: Server) -> None:
    """RateLimitError with a retry-after header, which the client would follow by itself; the others
    are answered."""

    async def flood() -> list[Any]:
        async with _asynchronous(server) as client:
            ask = client.chat.completions.create
            requests = [
                ask(model=server.model, messages=user(f"Story {n}"), max_tokens=8)
                for n in range(FLOOD)
            ]
            return await asyncio.gather(*requests, return_exceptions=True)

    answers = asyncio.run(flood())
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    others = [
        answer for answer in answers if isinstance(answer, BaseException) and answer not in refused
    ]
    assert not others, f"{others[0]!r}"
    if not refused:
        server.skip(f"its queue took {FLOOD} requests")
    assert (
        all(float(error.response.headers["retry-after"]) > 0 for error in refused)
        and len(refused) < FLOOD
    )


def test_a_request_that_times_out_is_given_up(server: Server) -> None:
    """APITimeoutError at the client, and the server does not go on with it."""
    impatient = server.client.with_options(timeout=0.5)
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(_long_chat, server, impatient, n=4)  # for long
        wait_until(lambda: request.done() or server.running >= 1, "the request is running")
    if request.exception() is None:
        server.skip("the server answers too quickly")
    server.refuses(openai.APITimeoutError, request.result)
    wait_until(lambda: server.running == 0, "the request is given up")


def test_a_closed_stream_is_given_up(server: Server) -> None:
    """close() in the middle of a stream ends the request at the server too."""
    stream = _long_chat(server, server.client, stream=True)
    for _ in range(3):
        next(stream)
    wait_until(lambda: server.running >= 1, "the request is running")
    stream.close()
    wait_until(lambda: server.running == 0, "the request is given up")


def test_many_chats_at_once_do_not_mix(server: Server) -> None:
    """Ten concurrent requests through AsyncOpenAI get the same replies as one by one."""
    questions = [f"What is number {number} good for?" for number in range(10)]

    async def together() -> list[str]:
        async with _asynchronous(server) as client:
            ask = client.chat.completions.create
            ways = [
                ask(model=server.model, messages=user(q), temperature=0, max_tokens=8)
                for q in questions
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*ways)]

    answers = asyncio.run(together())
    alone = [
        server.chat(q, temperature=0, max_tokens=8).choices[0].message.content
        for q in questions[:3]
    ]
    assert len(answers) == 10 and answers[:3] == alone


def test_streams_are_read_asynchronously(server: Server) -> None:
    """`async for` over a stream."""

    async def read() -> list[Any]:
        async with _asynchronous(server) as client:
            ask = dict(
                model=server.model,
                messages=user("Tell me about tea."),
                max_tokens=10,
                temperature=0,
            )
            return [
                chunk async for chunk in await client.chat.completions.create(**ask, stream=True)
            ]

    assert texts(asyncio.run(read())) == [server.chat(temperature=0).choices[0].message.content]


def test_answers_carry_a_request_id(server: Server) -> None:
    """`_request_id`, from the header x-request-id, names the answer in reports; two answers have
    two."""
    answers = [server.chat(max_tokens=1) for _ in range(2)]
    assert (
        all(answer._request_id for answer in answers)
        and len({answer._request_id for answer in answers}) == 2
    )
    with server.client.chat.completions.with_streaming_response.create(
        model=server.model, messages=user("hi"), max_tokens=1, stream=True
    ) as streamed:
        assert streamed.request_id


def test_a_response_is_whole(server: Server) -> None:
    """`responses.create`: text, status and usage."""
    response = server.respond(temperature=0)
    assert response.object == "response" and response.output_text and response.error is None
    assert (
        response.status == "completed" or response.incomplete_details.reason == "max_output_tokens"
    )
    assert (
        response.usage.total_tokens
        == response.usage.input_tokens + response.usage.output_tokens
        > 0
    )


def test_a_response_is_streamed(server: Server) -> None:
    """The documented events, numbered, with the text of the whole response."""
    events = list(server.respond(temperature=0, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    streamed = "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    assert streamed == events[-1].response.output_text == server.respond(temperature=0).output_text


def test_a_response_goes_on_from_another(server: Server) -> None:
    """previous_response_id: the earlier dialogue is part of the prompt."""
    first = server.respond(LONG_PROMPT)
    second = server.respond("Go on.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    server.refuses(
        openai.NotFoundError, lambda: server.respond("Go on.", previous_response_id="resp_unknown")
    )


def test_a_response_is_sent_back_as_input(server: Server) -> None:
    """A client that keeps the history appends `output` to its input, and puts instructions
    first."""
    question = user("Tell me about tea.")
    ask = dict(model=server.model, max_output_tokens=16)
    first = server.client.responses.create(input=question, store=False, **ask)
    again = [*question, *first.output, *user("Go on.")]
    second = server.client.responses.create(
        input=again, instructions="You are brief.", store=False, **ask
    )
    assert second.instructions == "You are brief." and second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_a_stored_response_is_retrieved_and_deleted(server: Server) -> None:
    """Until it is deleted; one with store=False never."""
    responses = server.client.responses
    stored, passing = server.respond(), server.respond(store=False)
    assert responses.retrieve(stored.id).output_text == stored.output_text
    responses.delete(stored.id)
    for gone in (stored, passing):
        server.refuses(openai.NotFoundError, partial(responses.retrieve, gone.id))


def test_a_second_turn_is_cached(server: Server) -> None:
    """usage.prompt_tokens_details.cached_tokens: most of the first turn's prompt is not computed
    again."""
    messages = user(f"{uuid.uuid4().hex} {LONG_PROMPT}")
    first = server.chat(messages=messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        *user("Go on."),
    ]
    usage = server.chat(messages=messages).usage
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 2
    assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_conversation_keeps_its_history(server: Server) -> None:
    """An extension: a chat names a conversation and sends only new messages, and the number of
    cached tokens grows."""
    name = f"check-{uuid.uuid4().hex}"
    if server.raw("/v1/conversations")[0] != 200:
        server.skip("the server has no conversations")
    first = server.chat(LONG_PROMPT, extra_body={"conversation": name})
    further = {"conversation": name, "history": "server"}
    turns = [first, *(server.chat("Go on.", extra_body=further) for _ in range(2))]
    prompts = [turn.usage.prompt_tokens for turn in turns]
    cached = [turn.usage.prompt_tokens_details.cached_tokens for turn in turns]
    assert prompts == sorted(set(prompts)) and cached[0] < cached[1] < cached[2]
    history = json.loads(server.raw(f"/v1/conversations/{name}")[1])["messages"]
    assert [message["role"] for message in history] == ["user", "assistant"] * 3
    server.client.conversations.delete(name)
    assert server.raw(f"/v1/conversations/{name}")[0] == 404


def test_a_conversation_object_is_made_and_used(server: Server) -> None:
    """`conversations.create`, then two responses in it: the second reads the first."""
    conversation = server.client.conversations.create()
    first, second = (
        server.respond(text, conversation=conversation.id) for text in (LONG_PROMPT, "Go on.")
    )
    assert (
        second.usage.input_tokens > first.usage.input_tokens
        and second.conversation.id == conversation.id
    )
    assert server.client.conversations.retrieve(conversation.id).id == conversation.id
    assert server.client.conversations.delete(conversation.id).deleted


def _asynchronous(server: Server) -> Any:
    return openai.AsyncOpenAI(
        base_url=server.url, api_key=server.api_key, max_retries=0, timeout=60
    )


def _long_chat(server: Server, client: Any, **options: Any) -> Any:
    """Half of the context, of a token that does not end the answer."""
    ask = dict(
        messages=user("Tell me a story."), max_tokens=server.context // 2, logit_bias={"70": 100}
    )
    return client.chat.completions.create(model=server.model, **ask, **options)
