"""Lines of the log: for people and for machines, one line for each event with any conversation
name."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator

import pytest

from pensieve.runtime.observe.logs import configure_logging, shown_while_open

Configured = Callable[[str, str], io.StringIO]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Configured]:
    """Configures the process's logging into a buffer; afterwards it is as it was."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    root.handlers[:] = []  # pytest's own are not to be closed

    def configure(form: str, level: str) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        configure_logging(form, level)
        return sys.stderr

    yield configure
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text(configured: Configured) -> None:
    out = configured("text", "info")
    log = logging.getLogger("some.room")
    log.info(
        "serving %s",
        "tea",
        extra={"fields": {"port": 8000, "nothing": None, "name": "a b\n=", "share": 0.5}},
    )
    (line,) = out.getvalue().splitlines()
    assert line.endswith(r'INFO serving tea port=8000 name="a b\n=" share=0.5')


def test_json(configured: Configured) -> None:
    out = configured("json", "info")
    log = logging.getLogger("some.room")
    log.info(
        "request", extra={"fields": {"conversation": "Tee\n☕", "ttft_ms": 1.5, "missing": None}}
    )
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it broke")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first.pop("time")[10:11] == "T"
    assert first == {
        "level": "info",
        "logger": "some.room",
        "message": "request",
        "conversation": "Tee\n☕",
        "ttft_ms": 1.5,
        "missing": None,
    }
    assert second["level"] == "error" and "ValueError: no" in second["exception"]


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("info", 1), ("warning", 0)])
def test_levels(configured: Configured, level: str, lines: int) -> None:
    out = configured("text", level)
    log = logging.getLogger("some.room")
    log.debug("one")
    log.info("two")
    assert len(out.getvalue().splitlines()) == lines


def test_a_library_shows_its_start_where_no_logging_is_set_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("pensieve")
    with shown_while_open():
        logger.info("for the handlers of the program")
    monkeypatch.setattr(logger, "propagate", False)  # those of pytest do not count
    with shown_while_open():
        logging.getLogger("pensieve.runtime.llm").info("ready after 1.0 s")
    logger.info("later")
    assert capsys.readouterr().err == "pensieve: ready after 1.0 s\n"
