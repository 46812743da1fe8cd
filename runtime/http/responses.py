"""OpenAI's Responses API: the body of /v1/responses, and the endpoints of stored responses.

A stored response is the state of a conversation that never changes: any number of later responses
may continue it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field, TypeAdapter, model_validator

from ...scheduler.types import ErrorKind, RequestError
from ..conversations.schema import Name
from ..conversations.transcript import Message
from ..conversations.turns import TurnManager, Turns
from ..frontend.bodies import GenerationBody, dialogue
from ..frontend.body_base import Body, NonEmpty
from ..frontend.chat_messages import TemplateVariables, Tool, with_thinking
from ..frontend.generate import Generate
from ..frontend.reply import Style
from ..frontend.structured_output import GUIDED, ReplyForm, ResponseFormat, reply_form
from ..text.tokenizer import Tokenizer
from .auth import owner_of
from .response_items import (
    Input,
    Item,
    Items,
    LeftOut,
    ReferenceItem,
    messages_of,
    response_of,
    says_nothing,
)
from .response_tools import ChosenTools, ToolChoice, Tools, chosen_tools, own_tools
from .response_writer import About, ResponseWriter

Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Parts of output items. Of these, answers of this server have only `encrypted_content`."""


class Reasoning(Body):
    """`effort`: passed to the chat template. `summary`: thoughts are answered where clients that
    ask for one look for it, whole: nothing here makes a shorter one."""

    IGNORED = frozenset({"context", "generate_summary", "mode"})

    effort: NonEmpty | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    """`schema`: of `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise RequestError(ErrorKind.INVALID, "a format json_schema needs a schema", "schema")
        return self

    def for_chat(self) -> ResponseFormat:
        """The format in the form of chats."""
        schema = {"schema": self.schema_} if self.schema_ is not None else None
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Body):
    IGNORED = frozenset({"verbosity"})

    format: TextFormat = TextFormat()


class ResponseBody(GenerationBody):
    """POST /v1/responses."""

    # the limit is of calls that the server runs
    IGNORED = (GenerationBody.IGNORED | {"client_metadata", "max_tool_calls"}) - {
        "store",
        "metadata",
    }
    NEUTRAL: ClassVar = {
        **GenerationBody.NEUTRAL,
        **dict.fromkeys(("response_format", "structured_outputs", *GUIDED), ()),
        "background": (False,),
        "context_management": ([],),
        "enable_response_messages": (False,),
        "image": (),
        "on_disconnect": ("discard",),
        "previous_input_messages": ([],),
        "previous_response": (),
        "prompt": (),
        "top_logprobs": (0,),
    }

    input: Input
    include: list[Included] = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    previous_response_id: NonEmpty | None = None
    store: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_history(self) -> ResponseBody:
        if self.previous_response_id is not None and self.conversation_id is not None:
            raise RequestError(
                ErrorKind.INVALID,
                "a response goes on from previous_response_id or from conversation",
                "previous_response_id",
            )
        if all(map(says_nothing, self.input)) and not self._counts_without_input():
            raise RequestError(ErrorKind.INVALID, "the input is empty", "input")
        if self.max_tokens is not None:
            raise RequestError(
                ErrorKind.INVALID,
                "the length of a response is limited by max_output_tokens",
                "max_tokens",
            )
        if self.return_token_ids:
            raise RequestError(
                ErrorKind.INVALID,
                "return_token_ids is not supported for responses",
                "return_token_ids",
            )
        return self

    @model_validator(mode="after")
    def _tools_can_be_chosen(self) -> ResponseBody:
        self._chosen()
        return self

    def generate(self) -> Generate:
        """See `GenerationBody`."""
        instructions: tuple[Message, ...] = ()
        if self.instructions is not None:
            instructions = ({"role": "system", "content": self.instructions},)
        effort = self.reasoning.effort if self.reasoning is not None else None
        shown, callable_tools, choice = self._chosen()
        messages = messages_of(self.input)
        chat = dialogue(messages, shown, choice, self.parallel_tool_calls)
        return replace(
            super().generate(),
            **{**chat, "prompt_field": "input"},
            callable_names=_names(callable_tools) if len(callable_tools) < len(shown) else None,
            template_variables=with_thinking(self.chat_template_kwargs, None, effort),
            form=self._form(),
            response=True,
            previous=self.previous_response_id,
            instructions=instructions,
            store=self.store,
            limit=self.max_output_tokens,
            limit_field="max_output_tokens",
        )

    def writer(self, model: str, tokenizer: Tokenizer | None) -> ResponseWriter:
        """Returns the writer of the answer of `model`."""
        tools = {tool.full_name: tool for tool in own_tools(self.tools)}
        encrypted = not self.store or "reasoning.encrypted_content" in self.include
        summaries = self.reasoning is not None and self.reasoning.summary is not None
        about = About(self._repeated(), tools, encrypted, summaries, self.store, self.stream)
        return ResponseWriter(Style(model, False, False, self.return_sources), about)

    def _chosen(self) -> ChosenTools:
        return chosen_tools(self.tools, self.tool_choice)

    def _counts_without_input(self) -> bool:
        return False

    def _form(self) -> ReplyForm | None:
        _, callable_tools, choice = self._chosen()
        wanted = self.text.format.for_chat() if self.text is not None else None
        return reply_form(
            wanted, {}, callable_tools, choice, self.parallel_tool_calls, "text.format"
        )

    def _repeated(self) -> dict[str, Any]:
        """The fields that the answer repeats."""
        conversation = self.conversation_id
        choice = self.tool_choice
        text = self.text if self.text is not None else TextOptions()
        reasoning = self.reasoning if self.reasoning is not None else Reasoning()
        return {
            "conversation": {"id": conversation} if conversation is not None else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": self.store,
            "text": text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, BaseModel)
            else choice,
            "tools": [tool.echo() for tool in self.tools if not isinstance(tool, LeftOut)],
            "truncation": "auto" if self.truncates else "disabled",
        }


class CountedBody(ResponseBody):
    """POST /v1/responses/input_tokens."""

    input: Input = Field(default_factory=list)

    def _counts_without_input(self) -> bool:
        return self.instructions is not None or self.previous_response_id is not None


def _names(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.function.name for tool in tools)


_ITEMS: TypeAdapter[Items] = TypeAdapter(Items)


async def with_stored_items(
    body: ResponseBody, histories: Turns, owner: str, most_bytes: int
) -> ResponseBody:
    """Returns the body with the items to which its references refer. Raises RequestError:
    NOT_FOUND for an id that no item of a stored response has, TOO_LARGE if these items have more
    than `most_bytes`, as often as they are referred to."""
    references = [item.id for item in body.input if isinstance(item, ReferenceItem)]
    if not references:
        return body
    stored: dict[str, Any] = {}
    for response in dict.fromkeys(map(response_of, references)):
        if response is not None:
            stored |= await _output(histories, Name(owner, response, "response"))
    for id in references:
        if id not in stored:
            raise RequestError(
                ErrorKind.NOT_FOUND,
                f"Item with id {id!r} not found: no stored response has it. A response is stored "
                "only with store: true, and items that a client has added to a conversation belong "
                "to none: send the whole item.",
                "input",
            )
    counts = Counter(references)
    referred = await asyncio.to_thread(_referred, stored, counts, most_bytes)
    items = [referred[item.id] if isinstance(item, ReferenceItem) else item for item in body.input]
    return body.model_copy(update={"input": items})


def _referred(
    stored: Mapping[str, Any], counts: Mapping[str, int], most_bytes: int
) -> dict[str, Item]:
    """The items by their ids. `counts`: how often each is in the input."""
    left = most_bytes
    for id, count in counts.items():
        left -= count * len(json.dumps(stored[id], ensure_ascii=False).encode())
        if left < 0:
            raise RequestError(
                ErrorKind.TOO_LARGE,
                f"the items that the references name have more than {most_bytes} bytes together",
                "input",
            )
    return {id: _ITEMS.validate_python([stored[id]])[0] for id in counts}


async def _output(histories: Turns, name: Name) -> dict[str, Any]:
    """The items of a stored response by their ids; none if there is no such response."""
    try:
        stored = await histories.get(name)
    except RequestError as error:
        if error.kind is not ErrorKind.NOT_FOUND:
            raise
        return {}
    assert stored.body is not None
    return {item["id"]: item for item in json.loads(stored.body)["output"]}


def add_responses(app: FastAPI, histories: TurnManager) -> None:
    """Adds the endpoints of stored responses."""
    router = APIRouter(prefix="/v1/responses")

    @router.post("/compact", include_in_schema=False)
    async def compact() -> None:
        raise RequestError(
            ErrorKind.NOT_FOUND,
            "this server does not compact responses: send truncation: auto, and the oldest tokens "
            "leave a context that is full, or have the client summarize the history itself",
        )

    @router.get("/{id}")
    async def look(id: str, request: Request) -> dict[str, Any]:
        stored = await histories.get(Name(owner_of(request), id, "response"))
        assert stored.body is not None
        return dict(json.loads(stored.body))

    @router.delete("/{id}")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        await histories.delete(Name(owner_of(request), id, "response"))
        return {"id": id, "object": "response", "deleted": True}

    app.include_router(router)
