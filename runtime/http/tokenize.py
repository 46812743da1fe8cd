"""/tokenize and /detokenize, with vLLM's bodies."""

from __future__ import annotations

import asyncio
from typing import Annotated, ClassVar

from fastapi import FastAPI, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import check_continued
from ..frontend.body_base import Body
from ..frontend.chat_messages import (
    MOST_MESSAGES,
    Message,
    TemplateVariables,
    Tool,
    few_calls,
)
from ..frontend.request_builder import check_model
from ..messages import Ready
from ..text.tokenizer import Tokenizer
from .json_response import json_response
from .request_body import read_body


class TokenizeBody(Body):
    """Either a plain prompt or a dialogue, by default with the beginning of the next message."""

    IGNORED = frozenset({"media_io_kwargs", "mm_processor_kwargs"})
    NEUTRAL: ClassVar = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message] | None, BeforeValidator(few_calls)] = Field(
        default=None, min_length=1, max_length=MOST_MESSAGES
    )
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: list[Tool] = Field(default_factory=list)
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(ErrorKind.INVALID, "give either prompt or messages", "prompt")
        if self.continue_final_message:
            check_continued(self.messages or [], bool(self.add_generation_prompt))
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def add_tokenize(app: FastAPI, ready: Ready, tokenizer: Tokenizer | None) -> None:
    """Adds the endpoints."""

    def needed() -> Tokenizer:
        if tokenizer is None:
            raise RequestError(ErrorKind.INVALID, "this engine has no tokenizer")
        return tokenizer

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(TokenizeBody, request)
        check_model(body.model, ready)
        return await asyncio.to_thread(tokenized, needed(), body)

    def tokenized(tokenizer: Tokenizer, body: TokenizeBody) -> Response:
        tokens = _tokens(tokenizer, body)
        strings = {"token_strs": tokenizer.pieces(tokens)} if body.return_token_strs else {}
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": ready.max_model_len,
                "tokens": tokens,
                **strings,
            }
        )

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(DetokenizeBody, request)
        check_model(body.model, ready)
        return await asyncio.to_thread(detokenized, body)

    def detokenized(body: DetokenizeBody) -> Response:
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < ready.vocab_size:
            raise RequestError(
                ErrorKind.INVALID, f"token ids are from 0 to {ready.vocab_size - 1}", "tokens"
            )
        return json_response({"prompt": needed().decode_all(body.tokens)})


def _tokens(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    """A template writes special tokens itself, so by default they are added to a plain prompt
    only."""
    if body.messages is None:
        assert body.prompt is not None
        text = body.prompt
        special = body.add_special_tokens is not False
    else:
        messages = [message.for_template() for message in body.messages]
        tools = [tool.for_template() for tool in body.tools] or None
        text = tokenizer.render_chat(
            messages,
            body.add_generation_prompt is not False and not body.continue_final_message,
            tools,
            body.chat_template_kwargs,
            body.continue_final_message,
        )
        special = body.add_special_tokens is True
    return (tokenizer.encode(text) if special else tokenizer.encode_rendered(text)).tolist()
