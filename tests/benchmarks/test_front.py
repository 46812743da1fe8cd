"""The HTTP process between a loop and a client without a model."""

import json

import pytest

from benchmarks.front import main


def test_tokens_pass_from_the_loop_to_the_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--streams", "2", "--tokens", "20", "--step-ms", "1"])
    figures = json.loads(capsys.readouterr().out)
    assert 1 <= figures["tokens/event"] < 20
    assert figures["bytes/token"] > 1
    assert figures["tokens/s"] > 0
