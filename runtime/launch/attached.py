"""The connection to Triton's model, which listens at the socket of `--attach`. Imports little."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path

from ...scheduler.types import SettingError
from .settings import in_flags

log = logging.getLogger("pensieve")


@contextmanager
def telling_model(socket_path: Path | None) -> Iterator[None]:
    """Passes a SettingError on to Triton's model, if there is one: its load fails with this
    text."""
    try:
        yield
    except SettingError as error:
        if socket_path is not None and error.setting != "--attach":
            try:
                with connect(socket_path) as connection:
                    connection.send(in_flags(error))
            except SettingError as untold:
                log.error("%s", untold)
        raise


def connect(socket_path: Path) -> Connection:
    """Connects to the socket. SettingError if nothing listens there."""
    try:
        return Client(str(socket_path), "AF_UNIX")
    except OSError as error:
        raise SettingError(
            "--attach", f"cannot connect to {socket_path}: {error.strerror or error}"
        ) from error
