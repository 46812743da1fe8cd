"""Every behaviour of `check_openai`, on a real server of the demo engine: nothing fails, nothing is skipped."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "pensieve.scripts.openai_text", "pensieve.scripts.openai_output", "pensieve.scripts.openai_serving"
)

from pensieve.scripts import openai_output, openai_serving, openai_text  # noqa: E402
from pensieve.scripts.check_openai import behaviours, main, run  # noqa: E402
from pensieve.scripts.openai_server import Server as Asked  # noqa: E402
from pensieve.scripts.openai_server import Skipped  # noqa: E402

from .server import Server  # noqa: E402

KEY = "sesame"
CHECKS = [check for module in (openai_text, openai_output, openai_serving) for check in behaviours(module)]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Few seats and a short queue, so that it is soon full; a key, so that there is a wrong one."""
    cache = ("--gpu-kv-chunks", 400, "--host-kv-chunks", 100, "--max-model-len", 1024)
    seats = ("--max-num-seqs", 8, "--max-queue", 12)
    with Server(tmp_path_factory.mktemp("state"), *cache, *seats, "--api-key", KEY) as running:
        yield Asked(f"{running.url}/v1", "demo", KEY)


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_behaviour(asked, check):
    check(asked)


def test_there_are_as_many_as_the_readme_says_and_each_says_what_is_expected():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"tries {len(CHECKS)} things" in readme and all(check.__doc__ for check in CHECKS)


def passes(server):
    assert server == "a server"


def fails(server):
    assert server == "another server"


def misses_a_field(server):
    _ = server.choices


def finds_no_occasion(server):
    raise Skipped("it is too quick")


def test_a_line_for_each_and_the_sum(capsys):
    assert run([passes, fails, misses_a_field, finds_no_occasion], "a server") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    passes" and lines[1].startswith("FAIL  fails: assert")
    assert lines[2] == "FAIL  misses a field: AttributeError: 'str' object has no attribute 'choices'"
    assert lines[3:] == ["skip  finds no occasion: it is too quick", "1 passed, 2 failed, 1 skipped"]
    assert run([passes], "a server") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed"


def test_without_a_server_it_says_so(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main(["--url", f"http://127.0.0.1:{free.getsockname()[1]}/v1"]) == 2
    assert "does not list its models" in capsys.readouterr().err


def test_without_the_client_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main([]) == 2
    assert "pip install openai" in capsys.readouterr().err
