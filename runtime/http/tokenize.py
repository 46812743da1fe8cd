"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from pydantic import Field, model_validator

from ...scheduler.types import RequestError
from ..frontend.bodies import parse
from ..frontend.body_base import Body
from ..frontend.chat_messages import MOST_MESSAGES, Message
from ..frontend.request_builder import check_model
from ..messages import Ready
from ..text.tokenizer import Tokenizer


class TokenizeBody(Body):
    """Either a plain prompt or a dialogue, which by default is the prompt of its next message."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(400, "give either prompt or messages", "prompt")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]


def add_tokenize(app: FastAPI, ready: Ready, tokenizer: Tokenizer | None) -> None:
    """Adds the endpoints."""

    def needed() -> Tokenizer:
        if tokenizer is None:
            raise RequestError(400, "this engine has no tokenizer")
        return tokenizer

    def check(model: str | None) -> None:
        if model is not None:
            check_model(model, ready)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await asyncio.to_thread(parse, TokenizeBody, await request.body())
        check(body.model)
        tokens = await asyncio.to_thread(_tokens, needed(), body)
        strings = {"token_strs": needed().pieces(tokens)} if body.return_token_strs else {}
        return {"count": len(tokens), "max_model_len": ready.max_model_len, "tokens": tokens, **strings}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await asyncio.to_thread(parse, DetokenizeBody, await request.body())
        check(body.model)
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < ready.vocab_size:
            raise RequestError(400, f"token ids are from 0 to {ready.vocab_size - 1}", "tokens")
        return {"prompt": await asyncio.to_thread(needed().decode_all, body.tokens)}


def _tokens(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    """A template writes special tokens itself, so by default they are added to a plain prompt only."""
    if body.messages is None:
        assert body.prompt is not None
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        messages = [message.for_template() for message in body.messages]
        text = tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
        special = body.add_special_tokens is True
    return (tokenizer.encode(text) if special else tokenizer.encode_rendered(text)).tolist()
