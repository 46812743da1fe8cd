"""What the HTTP process is told by the command line, all of it plain data: it goes to another process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HTTPSettings:
    """max_requests_per_client   sequences a client may have open, None: any number (`limits.ClientLimit`)
    max_body_bytes            a longer body is refused with 413
    max_connections           one more is answered with 503 and closed
    cors_origins              whose web pages may use the API, "*": all; none: only the server's own
    client_timeout            seconds a client may take to send a request or to take an answer, then it is cut off
                              (`connections.PatientProtocol`)
    chat_template             its source, None: the engine's own
    strict_fields             unknown fields are refused, not ignored
    api_keys                  digests of the keys (`api_keys.key_digest`) of which every call needs one; none: no keys
    histories                 where they are stored (`databases.open_database`); ":memory:" keeps nothing
    server                    what this server is called in a shared database, None: there is none
    history_ttl               seconds after their last turn after which stored conversations are deleted, None: never
    max_conversations_per_owner
                              stored conversations an API key may have, None: any number
    otlp_traces_endpoint      where spans go (`tracing.Tracing`), None: nowhere
    log_format, log_level     as `logs.configure_logging` takes them
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
