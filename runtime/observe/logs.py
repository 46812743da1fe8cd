"""Logging of both processes: lines of text for people, or one JSON object per line for machines.

The fields of an event are passed in `extra={"fields": {...}}` of the logging call. Users' text is
never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class TextFormatter(logging.Formatter):
    """The message, then the event's fields as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(
            f" {name}={_shown(value)}"
            for name, value in _fields(record).items()
            if value is not None
        )
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, the event's fields, and the traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def configure_logging(form: str, level: str) -> None:
    """Makes every logger of this process write to standard error. One of LOG_FORMATS, one of
    LOG_LEVELS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for client in ("httpx", "httpx2"):  # huggingface_hub's: they log each request
        logging.getLogger(client).setLevel(logging.WARNING)


@contextmanager
def shown_while_open() -> Iterator[None]:
    """Shows the program's own messages on standard error while this is open, if nothing else does:
    for programs that use the library and have set up no logging."""
    logger = logging.getLogger("pensieve")
    if logger.hasHandlers():
        yield
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("pensieve: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _shown(value: Any) -> str:
    """Quotes values with spaces or line ends, such as names chosen by clients, so that each stays
    one word on one line."""
    text = str(value)
    return text if text.isprintable() and not set(text) & {" ", '"', "="} else json.dumps(text)
