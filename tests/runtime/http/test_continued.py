"""A reply may go on from the text of the last message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pensieve.runtime.messages import Submit

from ..fake_loop import EOS, FakeLoop, byte_tokens

TOLD = [{"role": "user", "content": "A rhyme?"}, {"role": "assistant", "content": "Roses are"}]
RENDERED = "<s>user: A rhyme?\nassistant: Roses are"
Ask = Callable[..., Any]


def posted(ask: Ask, path: str, **body: Any) -> tuple[httpx.Response, str]:
    """The answer, and the text of the prompt."""
    loop = FakeLoop(lambda _: [*byte_tokens(" red"), EOS])

    async def work(http: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        response = await http.post(path, json={"model": "fake", **body})
        tokens = [token for m in loop.messages(Submit) for token in m.request.prompt]
        shown = await http.post("/detokenize", json={"tokens": tokens})
        return response, shown.json()["prompt"]

    answer: tuple[httpx.Response, str] = ask(work, loop)
    return answer


def test_a_chat_goes_on_from_its_last_message(ask: Ask) -> None:
    response, prompt = posted(
        ask,
        "/v1/chat/completions",
        messages=TOLD,
        continue_final_message=True,
        add_generation_prompt=False,
    )
    assert prompt == RENDERED
    # a leading space stays: it divides the reply from the text before it
    assert response.json()["choices"][0]["message"]["content"] == " red"


def test_a_message_of_the_assistant_is_a_beginning(ask: Ask) -> None:
    response, prompt = posted(ask, "/v1/messages", messages=TOLD, max_tokens=20)
    assert prompt == RENDERED
    assert response.json()["content"] == [{"type": "text", "text": " red"}]


def test_a_prompt_without_a_next_message(ask: Ask) -> None:
    _, prompt = posted(ask, "/v1/chat/completions", messages=TOLD[:1], add_generation_prompt=False)
    assert prompt == "<s>user: A rhyme?\n"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": True, "messages": TOLD[:1]}, "last message of the assistant"),
        ({"continue_final_message": True, "conversation": "c"}, "stored conversation"),
    ],
)
def test_what_cannot_be_continued_is_refused(ask: Ask, fields: Any, words: str) -> None:
    response, _ = posted(ask, "/v1/chat/completions", **{"messages": TOLD, **fields})
    assert response.status_code == 400 and words in response.text


def test_tokenize_counts_the_same_prompt(ask: Ask) -> None:
    response, _ = posted(ask, "/tokenize", messages=TOLD, continue_final_message=True)
    assert response.json()["count"] == len(RENDERED) - len("<s>") + 1
