"""A server for these tests: through the official client, or raw where the client is in the way."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import anthropic
import openai
import pytest

WAIT_S = 60.0
RUNNING = "pensieve:num_requests_running"

Messages = list[dict[str, Any]]
Refusal = TypeVar("Refusal", bound=openai.APIError | anthropic.APIError)


@dataclass(frozen=True)
class Server:
    """`url` ends in /v1. `shows_all`: a test that does not apply to it fails instead of being
    skipped."""

    url: str
    model: str
    api_key: str
    shows_all: bool = False

    def skip(self, reason: str) -> NoReturn:
        """Ends a test that does not apply to this server."""
        if self.shows_all:
            pytest.fail(f"skipped: {reason}")
        pytest.skip(reason)

    @cached_property
    def client(self) -> Any:
        """An `openai.OpenAI`, typed as Any because its overloads do not take options from a dict.
        It does not retry: the server's first answer counts."""
        return openai.OpenAI(base_url=self.url, api_key=self.api_key, max_retries=0, timeout=60)

    @cached_property
    def anthropic(self) -> Any:
        """An `anthropic.Anthropic`. It does not try again either. Skips the test if the server has
        no /v1/messages."""
        if self.raw("/v1/messages", b"{}")[0] in (404, 405):
            self.skip("the server has no /v1/messages")
        return anthropic.Anthropic(
            base_url=self.url.removesuffix("/v1"), api_key=self.api_key, max_retries=0, timeout=60
        )

    def message(self, content: Any = "Tell me about tea.", **options: Any) -> Any:
        """A message of Anthropic's API; `messages` replaces `content`."""
        options = {"messages": user(content), "max_tokens": 10, **options}
        return self.anthropic.messages.create(model=self.model, **options)

    def chat(self, content: str = "Tell me about tea.", **options: Any) -> Any:
        """A chat completion; options are those of `chat.completions.create`, of which `messages`
        replaces `content`."""
        options = {"messages": user(content), "max_tokens": 10, **options}
        return self.client.chat.completions.create(model=self.model, **options)

    def complete(self, prompt: Any = "Tea is", **options: Any) -> Any:
        return self.client.completions.create(
            model=self.model, prompt=prompt, **{"max_tokens": 8, **options}
        )

    def respond(self, content: Any = "Tell me about tea.", **options: Any) -> Any:
        options = {"input": content, "max_output_tokens": 16, **options}
        return self.client.responses.create(model=self.model, **options)

    def refuses(self, kind: type[Refusal], ask: Callable[[], Any]) -> Refusal:
        """Returns the error of this kind that `ask` raises; its message must not be empty."""
        try:
            answer = ask()
        except kind as error:
            assert error.message, "the error has no message"
            return error
        raise AssertionError(f"no {kind.__name__} but {answer!r:.200}")

    def raw(
        self, path: str, body: bytes | None = None, method: str | None = None
    ) -> tuple[int, str]:
        """Status and body of a GET, or of a POST of `body`, or of `method`, below the server's
        root."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        url = self.url.removesuffix("/v1") + path
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @cached_property
    def context(self) -> int:
        """Tokens of the longest context."""
        context = getattr(self.client.models.list().data[0], "max_model_len", None)
        if context is None:
            self.skip("the server does not tell max_model_len")
        return int(context)

    @property
    def running(self) -> float:
        """Requests that the engine works on."""
        status, text = self.raw("/metrics")
        values = [
            line.split()[-1]
            for line in text.splitlines()
            if line.startswith((RUNNING + " ", RUNNING + "{"))
        ]
        if status != 200 or not values:
            self.skip(f"the server does not tell {RUNNING}")
        return sum(map(float, values))


def user(content: Any) -> Messages:
    return [{"role": "user", "content": content}]


def texts(chunks: Sequence[Any], choices: int = 1) -> list[str]:
    """The text of each choice of streamed chat."""
    joined = [""] * choices
    for chunk in chunks:
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    return joined


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """`response_format` for a JSON schema."""
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, f"after {WAIT_S:.0f} s still not: {what}"
        time.sleep(0.02)


def error_of(body: str) -> dict[str, Any]:
    """OpenAI's error object in a raw answer."""
    return dict(json.loads(body)["error"])
