"""Triton's model beside a stand-in for the python backend: what becomes of it when its engine ends."""

from __future__ import annotations

import importlib
import json
import sys
from unittest.mock import MagicMock

import pytest

from .fake_loop import eventually

NAME = "pensieve.runtime.triton_model"
ENGINE = """
import sys, time
from multiprocessing.connection import Connection
from pensieve.runtime.messages import Ready
from pensieve.runtime.triton_settings import TritonSettings
wire = Connection(int(sys.argv[2]))
wire.send(TritonSettings(sys.argv[1], None, None, "text", "info", 32, 10.0))
wire.send(Ready("fake", 100, 260, (2,), ""))
time.sleep(600)
"""


@pytest.fixture
def triton(monkeypatch):
    """The stand-in."""
    backend = MagicMock()
    backend.TritonModelException = type("TritonModelException", (Exception,), {})
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    monkeypatch.setattr(importlib.import_module(NAME), "configure_logging", lambda *_: None)  # pytest's stays
    yield backend
    del sys.modules[NAME]


@pytest.fixture
def model(triton, tmp_path):
    """Loaded, with an engine's process that does nothing."""
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "history.sqlite")]
    config = {"parameters": {"engine_command": {"string_value": json.dumps(command)}}}
    made = sys.modules[NAME].TritonPythonModel()
    made.initialize({"model_name": "mine", "model_config": json.dumps(config)})
    yield made
    made.finalize()
    assert made._process.returncode is not None and not made._thread.is_alive()


def test_without_its_engine_the_model_is_unloaded(triton, model):
    assert model.is_ready()
    model._process.kill()
    eventually(lambda: triton.unload_model.called)
    triton.unload_model.assert_called_once_with("mine")
    assert not model.is_ready()


def test_where_triton_unloads_nothing_the_log_says_so(triton, model, caplog):
    triton.unload_model.side_effect = triton.TritonModelException("explicit model unload is not allowed")
    model._process.kill()
    eventually(lambda: "the model stays loaded: explicit model unload is not allowed" in caplog.text)
    assert not model.is_ready()


def test_a_model_that_is_being_unloaded_does_not_ask_for_it(triton, model):
    model.finalize()
    assert not triton.unload_model.called
    model.finalize = lambda: None  # done
