"""The socket at which the server listens."""

from __future__ import annotations

import errno
import socket

from ...scheduler.types import SettingError


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. It is made before the model is loaded, so that a taken port is
    reported at once. Port 0: any free one.

    Raises SettingError. The parent closes its copy after the HTTP process has started.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OverflowError as error:
        raise SettingError("--port", f"must be between 0 and 65535, not {port}") from error
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise SettingError(
                "--port", f"{message}; take another port, or 0 for any free one"
            ) from error
        raise SettingError("--host", message) from error
    # Connections inherit it. Without it a token would wait up to 40 ms until the client's kernel
    # has acknowledged the one before. asyncio sets it too, but only on sockets that were created
    # with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
