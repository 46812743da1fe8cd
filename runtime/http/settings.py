"""The HTTP process's settings. They are plain data, because they are sent to another process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

from ...scheduler.declaration import SERVERS, User, setting
from ..observe.logs import LOG_FORMATS, LOG_LEVELS

MIB = 2**20
HTTP = "HTTP"
_http = partial(setting, group=HTTP, users=User.SERVER)
_both = partial(setting, group=HTTP, users=SERVERS)


@dataclass(frozen=True, kw_only=True)
class HTTPOptions:
    """What users set and the HTTP process takes as it is."""

    reasoning_parser: str = _http(
        "auto",
        "the form of a model's thoughts: vLLM's name of it, or none",
        unit="NAME",
        users=User.SERVER | User.OFFLINE,
    )
    tool_call_parser: str = _http(
        "auto", "the form of a model's tool calls: vLLM's name of it", unit="NAME"
    )
    strict_fields: bool = _http(
        False,
        "refuse unknown fields of requests",
        "ignore them and name them in a header",
    )
    keep_tokens_left: bool = _http(
        False,
        "give Claude Code's count of its remaining tokens to the model",
        "leave it out: it changes in each prompt",
    )
    history_ttl: float | None = _both(
        None,
        "stored conversations are deleted so long after their last turn",
        "never",
        unit="SECONDS",
        least=0,
        between=True,
    )
    max_requests_per_client: int | None = _http(
        None,
        "open sequences, each prompt times n; then 429, or 400 for a single request with more",
        "any number",
        least=1,
    )
    max_conversations_per_owner: int | None = _both(
        None, "that are stored; more are refused with 429", "any number", least=1
    )
    max_body_bytes: int = _http(32 * MIB, "then 413", unit="SIZE")
    max_connections: int = _http(4096, "then 503", least=1)
    api_server_count: int | None = _http(
        None,
        "processes that serve clients at the port",
        "1 below 8 cores, then a quarter of the cores, at most 4",
        least=1,
    )
    client_timeout: float = _http(
        30.0,
        "for a client to send a request, or to take an answer; then it is cut off",
        unit="SECONDS",
        least=0,
        between=True,
    )
    cors_origins: tuple[str, ...] = _http(
        (),
        "web pages of these origins may use the API, as https://chat.example.org; *: all",
        "none",
        unit="ORIGIN",
    )
    otlp_traces_endpoint: str | None = _http(
        None,
        "send a span for each request there, as http://HOST:4318/v1/traces",
        "none",
        unit="URL",
    )
    log_format: str = _both("text", "of each line of the log", choices=LOG_FORMATS)
    log_level: str = _both("info", "of the log's least important lines", choices=LOG_LEVELS)


@dataclass(frozen=True)
class HTTPSettings(HTTPOptions):
    """The options, and what their files hold.

    chat_template   its source, None: the engine's own
    api_keys        digests of the keys (`key_digest`), one of which every call needs; none:
                    no keys
    histories       where histories are stored (`databases.open_database`); ":memory:" stores
                    nothing
    server          this server's name for users and in a shared database, None: it has none
    """

    chat_template: str | None = None
    api_keys: tuple[str, ...] = ()
    histories: str = ":memory:"
    server: str | None = None

    @property
    def workers(self) -> int:
        """Processes besides the HTTP process that have the connections; 0: it has them itself."""
        count = self.api_server_count or 1
        return count if count > 1 else 0


DEFAULTS = HTTPSettings()


def key_digest(key: str) -> str:
    """The form of a key that the server keeps; also the name of the key's owner."""
    return hashlib.sha256(key.encode()).hexdigest()
