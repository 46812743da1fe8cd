"""The HTTP process's settings from the command line. They are plain data, because they are sent to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """max_requests_per_client   the most open sequences of a client, None: any number (`limits.ClientLimit`)
    max_body_bytes            a longer body is refused with 413
    max_connections           one more is answered with 503 and closed
    cors_origins              origins of web pages that may use the API, "*": all; none: only the server's own
    client_timeout            seconds that a client may take to send a request or to read an answer; then it is cut off
                              (`connection_limits.PatientProtocol`)
    chat_template             its source, None: the engine's own
    strict_fields             unknown fields are refused, not ignored
    api_keys                  digests of the keys (`auth.key_digest`), one of which every call needs; none: no keys
    histories                 where histories are stored (`databases.open_database`); ":memory:" stores nothing
    server                    this server's name for users and in a shared database, None: it has none
    history_ttl               seconds after their last turn until stored conversations are deleted, None: never
    max_conversations_per_owner
                              the most stored conversations of an API key, None: any number
    otlp_traces_endpoint      URL for spans (`otel.Tracing`), None: no spans
    log_format, log_level     as in `logs.configure_logging`
    """

    max_requests_per_client: int | None = None
    max_body_bytes: int = 32 * 1024**2
    max_connections: int = 4096
    client_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    strict_fields: bool = False
    api_keys: tuple[str, ...] = ()
    histories: str = ":memory:"
    server: str | None = None
    history_ttl: float | None = None
    max_conversations_per_owner: int | None = None
    otlp_traces_endpoint: str | None = None
    log_format: str = "text"
    log_level: str = "info"


DEFAULTS = HTTPSettings()
