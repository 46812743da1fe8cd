"""Replies with grammars through the whole server: the real loop, matcher and HTTP. Some grammars
fail on the way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.executor import Executor
from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.http.app import create_app
from pensieve.runtime.service import Service
from pensieve.runtime.step.grammar import Grammars
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.plan import StepPlan
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.step_timing import StepTiming

from .fake_engine import VOCAB, FakeEngine, reply
from .fake_loop import EOS, byte_tokens, ready

LAYERS, LETTERS = 2, 260


def ambiguous(secret: str = "b") -> str:
    """Each `a` adds a hundred ways to go on. From about the twentieth on llguidance gives up."""
    rules = [f'r{at}: "a" r{at} | ""' for at in range(100)]
    return "\n".join(
        [f"start: ({' | '.join(f'r{at}' for at in range(100))}) {json.dumps(secret)}", *rules]
    )


ENTANGLED = 'start: "xx" X\nX: /[ab]*a[ab]{60}c/ & /[ab]*b[ab]{61}c/ & /[ab]*a[ab]{63}c/'
"""Its third lexeme has more states than llguidance builds: it gives up when it looks for the
allowed tokens."""


class LetterEngine(FakeEngine):
    """With a byte tokenizer's vocabulary. If a grammar forbids the context's token, it gives the
    first allowed one."""

    vocab_size = LETTERS

    def forward(self, *arguments: Any) -> torch.Tensor:
        return torch.nn.functional.pad(super().forward(*arguments), (0, LETTERS - VOCAB))


class Running(NamedTuple):
    http: httpx.AsyncClient
    scheduler: Scheduler


@contextlib.asynccontextmanager
async def server(directory: Path, **settings: Any) -> AsyncIterator[Running]:
    defaults = dict(gpu_kv_chunks=200, host_kv_chunks=0, max_model_len=256, chunk_tokens=8)
    config = SchedulerConfig(**(defaults | settings))
    cost = analytic_profile(
        chunk_tokens=8,
        parameters=1_000_000,
        layers=LAYERS,
        attention_width=64,
        chunk_bytes=1 << 10,
        max_context=256,
        flops_per_s=1e12,
        link_bytes_per_s=1e9,
        step_base_seconds=1e-3,
    )
    ours, theirs = multiprocessing.Pipe()
    grammars = Grammars(directory, LETTERS, (EOS,))
    scheduler = Scheduler(config, cost)
    executor = Executor(CpuDevice(), LetterEngine(LAYERS), config, grammars=grammars)
    service = Service(scheduler, executor, ours, StepTiming(cost))
    about = ready(str(directory))
    loop = threading.Thread(target=service.run, args=(about,))
    loop.start()
    assert await asyncio.to_thread(theirs.recv) == about
    client = EngineClient(theirs)
    try:
        app = create_app(client, about, Tokenizer.load(directory))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=120
        ) as http:
            yield Running(http, scheduler)
    finally:
        service.drain(0.0)
        await client.closed.wait()
        loop.join()


PROMPT = [7, 8, 9, 44, 5]


async def complete(running: Running, grammar: str | None = None, **body: Any) -> httpx.Response:
    form = {} if grammar is None else {"structured_outputs": {"grammar": grammar}}
    body = (
        {
            "model": "fake",
            "prompt": PROMPT,
            "max_tokens": 60,
            "ignore_eos": not form,
            "temperature": 0,
        }
        | form
        | body
    )
    return await running.http.post("/v1/completions", json=body)


async def is_unchanged(running: Running) -> None:
    """The state is consistent, no request is left, and the next one is served."""
    answer = await complete(running, max_tokens=3, return_token_ids=True)
    assert answer.json()["choices"][0]["token_ids"] == reply(PROMPT, 3, LAYERS)


@pytest.mark.parametrize("grammar", [ambiguous(), ENTANGLED], ids=["at a token", "before a token"])
@pytest.mark.parametrize("stop", [[], ["never"]], ids=["", "confirmed"])
def test_the_client_gets_an_error_and_others_their_replies(
    grammar: str, stop: list[str], tokenizer_directory: Path
) -> None:
    async def work() -> None:
        async with server(tokenizer_directory) as running:
            plain, bad, good = await asyncio.gather(
                complete(running, return_token_ids=True),
                complete(running, grammar, conversation="lost", stop=stop),
                complete(running, 'start: "a" "b"~30 "z"', conversation="kept"),
            )
            assert bad.status_code == 500, bad.text
            error = bad.json()["error"]
            assert "grammar" in error["message"] and error["type"] == "server_error"
            assert plain.json()["choices"][0]["token_ids"] == reply(PROMPT, 60, LAYERS)
            (choice,) = good.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("a" + "b" * 30 + "z", "stop")
            await is_unchanged(running)
            for conversation, status in (("lost", 404), ("kept", 200)):
                assert (
                    await running.http.get(f"/v1/conversations/{conversation}")
                ).status_code == status
                assert (conversation in running.scheduler.conversations) == (status == 200)

    asyncio.run(work())


def test_in_a_stream_the_error_comes_behind_what_was_said(tokenizer_directory: Path) -> None:
    async def work() -> None:
        async with server(tokenizer_directory) as running:
            answer = await complete(running, ambiguous(), stream=True, conversation="lost")
            assert answer.status_code == 200
            *events, error, done = [line[6:] for line in answer.text.splitlines() if line]
            choices = [json.loads(event)["choices"][0] for event in events]
            text = "".join(choice["text"] for choice in choices)
            assert (
                text
                and set(text) == {"a"}
                and not any(choice["finish_reason"] for choice in choices)
            )
            assert "grammar" in json.loads(error)["error"]["message"] and done == "[DONE]"
            await is_unchanged(running)
            assert (await running.http.get("/v1/conversations/lost")).status_code == 404

    asyncio.run(work())


def test_all_choices_of_a_call_fail_together(tokenizer_directory: Path) -> None:
    async def work() -> None:
        async with server(tokenizer_directory) as running:
            assert (await complete(running, ambiguous(), n=3)).status_code == 500
            await is_unchanged(running)

    asyncio.run(work())


def begin_together(scheduler: Scheduler, count: int) -> None:
    """Makes no plan before `count` requests are there."""
    next_plan = scheduler.next_plan

    def wait_for_all(now: float) -> StepPlan | None:
        if len(scheduler.open_requests()) < count:
            return None
        scheduler.next_plan = next_plan  # type: ignore[method-assign]
        return next_plan(now)

    scheduler.next_plan = wait_for_all  # type: ignore[method-assign]


def test_replies_that_are_suspended_go_on_where_they_were(tokenizer_directory: Path) -> None:
    async def work() -> None:
        async with server(tokenizer_directory, gpu_kv_chunks=40, generation_reserve=0.0) as running:
            begin_together(running.scheduler, 4)
            text = "".join(chr(ord("a") + at * at % 26) for at in range(200))
            form = f'start: "{text}"'
            prompts = ([number, *PROMPT] for number in range(50, 54))
            ask = (complete(running, form, prompt=prompt, max_tokens=240) for prompt in prompts)
            answers = [answer.json()["choices"][0] for answer in await asyncio.gather(*ask)]
            assert [(answer["text"], answer["finish_reason"]) for answer in answers] == [
                (text, "stop")
            ] * 4
            assert running.scheduler.stats().suspensions

    asyncio.run(work())


def test_nothing_that_users_say_is_logged(
    tokenizer_directory: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither the prompt nor the grammar nor the reply, with or without a failure."""
    caplog.set_level(logging.DEBUG)
    prompt, grammar, reply = "prompt-marker", "grammar-marker", "reply-marker"

    async def work() -> None:
        async with server(tokenizer_directory) as running:
            begun = ambiguous(grammar).replace("start: ", f"start: {json.dumps(reply)} ")
            for number, (form, status) in enumerate(
                ((f'start: "{reply}"', 200), (begun, 500), (f'start: "{grammar}" X', 400))
            ):
                for body in ({"prompt": prompt}, {"prompt": prompt, "stop": ["stop-marker"]}):
                    answer = await complete(running, form, **body, user=f"user-marker{number}")
                    assert answer.status_code == status, answer.text
                    assert status != 200 or reply in answer.text
            streamed = await complete(running, begun, prompt=prompt, stream=True)
            assert streamed.status_code == 200 and "error" in streamed.text
            text = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": reply}}}
            answer = await running.http.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": prompt}],
                    "response_format": text,
                    "max_tokens": 50,
                },
            )
            assert answer.status_code == 200

    asyncio.run(work())
    ours = [
        record.getMessage() + str(record.__dict__)
        for record in caplog.records
        if "pensieve" in record.name
    ]
    # llguidance's, between tokens
    logged = "\n".join([*ours, caplog.text, *capfd.readouterr()]).replace("‧", "")
    assert "matcher" in logged, "a failure is logged"
    tokens = [str(byte_tokens(word))[1:-1] for word in (prompt, grammar, reply)]
    assert not [word for word in ("marker", *tokens) if word in logged], logged
