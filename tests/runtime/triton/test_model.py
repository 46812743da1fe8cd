"""Triton's model with a stand-in for the python backend: its state after its engine ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from pensieve.runtime.conversations import transcript as past_turns
from pensieve.runtime.conversations import turns
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.conversations.store import HistoryStore
from pensieve.runtime.frontend.engine_client import EngineClient
from pensieve.runtime.messages import Forget
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.runtime.triton.ensemble import EnsembleTensors
from pensieve.runtime.triton.llmapi import LlmapiTensors

from ...pausing import pause
from ..conversations.test_store import transcript
from ..fake_loop import FakeLoop, eventually, ready, save_tokenizer, say

NAME = "pensieve.runtime.triton.model"
ENGINE = """
import socket, sys, time
from multiprocessing.connection import Connection
from pensieve.runtime.messages import Ready
from pensieve.runtime.messages import TritonSettings
_, history, attach, path = sys.argv
assert attach == "--attach"
made = socket.socket(socket.AF_UNIX)
made.connect(path)
wire = Connection(made.detach())
wire.send(TritonSettings(history, None, None, None, "text", "info", 10.0))
wire.send(Ready("fake", 100, 260, (2,), "", 32, 100))
time.sleep(600)
"""


@pytest.fixture
def triton(monkeypatch):
    """The stand-in."""
    backend = MagicMock()
    backend.TritonModelException = type("TritonModelException", (Exception,), {})
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    # pytest's stays
    monkeypatch.setattr(importlib.import_module(NAME), "configure_logging", lambda *_: None)
    yield backend
    del sys.modules[NAME]


@pytest.fixture
def model(triton, tmp_path):
    """Loaded, with an engine's process that does nothing."""
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "history.sqlite")]
    config = {"parameters": {"engine_command": {"string_value": json.dumps(command)}}}
    opened = sys.modules[NAME].TritonPythonModel()
    opened.initialize({"model_name": "mine", "model_config": json.dumps(config)})
    yield opened
    opened.finalize()
    assert opened._process.returncode is not None and not opened._thread.is_alive()


def test_without_its_engine_the_model_is_unloaded(triton, model):
    assert model.is_ready()
    model._process.kill()
    eventually(lambda: triton.unload_model.called)
    triton.unload_model.assert_called_once_with("mine")
    assert not model.is_ready()


def test_where_triton_unloads_nothing_the_log_says_so(triton, model, caplog):
    triton.unload_model.side_effect = triton.TritonModelException(
        "explicit model unload is not allowed"
    )
    model._process.kill()
    eventually(
        lambda: "the model stays loaded: explicit model unload is not allowed" in caplog.text
    )
    assert not model.is_ready()


def test_a_model_that_is_being_unloaded_does_not_ask_for_it(triton, model):
    model.finalize()
    assert not triton.unload_model.called
    model.finalize = lambda: None  # done


def test_an_engine_that_does_not_end_is_killed(triton, model):
    pause(model._process.pid)  # a stopped process does not handle SIGTERM
    model._settings = replace(model._settings, end_seconds=0.2)
    model.finalize()
    assert model._process.returncode == -signal.SIGKILL
    model.finalize = lambda: None  # done


class Asking:
    """A request from Triton; `said` are its responses: errors by their code, None for one
    without."""

    def __init__(self, triton, **inputs):
        triton.InferenceResponse = lambda _, error: error
        triton.TritonError = MagicMock(
            side_effect=lambda _, code: code, CANCELLED="CANCELLED", INTERNAL="INTERNAL"
        )
        tensors = [MagicMock() for _ in inputs]
        for tensor, (name, value) in zip(tensors, inputs.items(), strict=True):
            tensor.name.return_value = name
            tensor.as_numpy.return_value = np.array([value])
        self.request_id = lambda: "a"
        self.correlation_id = lambda: 0
        self.inputs = lambda: tensors
        self.get_response_sender = lambda: SimpleNamespace(
            is_cancelled=lambda: False, send=self._send
        )
        self.sent = []

    def _send(self, response, flags):
        self.sent.append(response)


@contextlib.asynccontextmanager
async def desk_before(loop, directory, history_ttl=None):
    """A desk whose engine is played by hand, which ends with it."""
    directory = save_tokenizer(directory)
    client = EngineClient(loop.client_end)
    store = HistoryStore(directory / "history.sqlite", history_ttl)
    desk = sys.modules[NAME].TritonFrontend(
        client, ready(), Tokenizer.load(directory), store, LlmapiTensors(chunk_tokens=32)
    )
    yield desk
    loop.close()
    await desk.close()
    loop.join()


PROMPT = {"text_input": b"x", "sampling_param_max_tokens": 100}


def test_what_has_expired_is_forgotten_without_a_request(triton, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "EXPIRY_SECONDS", 0.01)
    loop = FakeLoop(say("y"))
    store = HistoryStore(tmp_path / "history.sqlite")
    store.commit(Name("", "old"), transcript("0", "1"), 1.0)
    store.close()

    async def one():
        async with desk_before(loop, tmp_path, history_ttl=1000.0):
            await asyncio.to_thread(eventually, lambda: len(loop.messages(Forget)) == 1)

    asyncio.run(one())


def test_a_request_is_stopped_while_its_prompt_is_still_looked_at(triton, tmp_path):
    request, stop = Asking(triton, **PROMPT), Asking(triton, stop=True)

    async def both():
        async with desk_before(FakeLoop(say("y" * 100)), tmp_path) as desk:
            await asyncio.gather(desk.answer(request), desk.answer(stop))

    asyncio.run(both())
    assert request.sent == stop.sent == ["CANCELLED"]


def test_a_request_whose_tensors_cannot_be_read_is_answered(triton, tmp_path):
    request = Asking(triton, **PROMPT)
    request.inputs()[0].as_numpy.side_effect = UnicodeDecodeError("utf8", b"x", 0, 1, "bad")

    async def one():
        async with desk_before(FakeLoop(say("y")), tmp_path) as desk:
            with pytest.raises(UnicodeDecodeError):  # for the log
                await desk.answer(request)

    asyncio.run(one())
    assert request.sent == ["INTERNAL"]


@pytest.mark.parametrize("tensors", ["none", "of no rows"])
def test_a_batch_without_a_prompt_is_answered(triton, tmp_path, tensors):
    """Triton passes both on: all inputs are optional."""
    request = Asking(triton, **({} if tensors == "none" else {"text_input": b"x"}))
    triton.TritonError.INVALID_ARG = "INVALID_ARG"
    for tensor in request.inputs():
        tensor.shape.return_value = [0, 1]
        tensor.as_numpy.return_value = np.empty((0, 1), object)

    async def one():
        async with desk_before(FakeLoop(say("y")), tmp_path) as desk:
            desk._tensors = EnsembleTensors(chunk_tokens=32)
            await desk.answer(request)

    asyncio.run(one())
    assert request.sent == ["INVALID_ARG"]


def test_a_turn_that_ends_with_the_engine_is_committed(triton, tmp_path, monkeypatch):
    request = Asking(triton, conversation_id=b"tea", **PROMPT)
    loop = FakeLoop(say("y" * 9))
    read = past_turns.tokens_inside

    def slowly(*args):
        loop.close()
        time.sleep(0.5)
        return read(*args)

    monkeypatch.setattr("pensieve.runtime.conversations.turns.tokens_inside", slowly)

    async def one():
        async with desk_before(loop, tmp_path) as desk:
            answer = asyncio.create_task(desk.answer(request))
            await desk.engine_ended()
        await answer

    asyncio.run(one())
    assert request.sent == [None]
