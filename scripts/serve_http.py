"""What the options say of the HTTP process: checked before anything starts."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from urllib.parse import urlsplit

from ..runtime.http.auth import key_digest
from ..runtime.http.settings import HTTPSettings
from ..runtime.text.tokenizer import ChatTemplate
from ..scheduler.types import SettingError
from .sizes import parse_bytes


def http_settings(args: argparse.Namespace) -> HTTPSettings:
    """SettingError names the flag at fault."""
    if args.max_requests_per_client is not None and args.max_requests_per_client < 1:
        raise SettingError("--max-requests-per-client", f"must be at least 1, not {args.max_requests_per_client}")
    if args.max_conversations_per_owner is not None and args.max_conversations_per_owner < 1:
        raise SettingError(
            "--max-conversations-per-owner", f"must be at least 1, not {args.max_conversations_per_owner}"
        )
    keys = read_api_keys(args.api_key, args.api_key_file)
    if args.owner_kv_bytes is not None and not keys:
        raise SettingError("--owner-kv-bytes", "needs --api-key: without keys there is one owner")
    if args.history_ttl is not None and not args.history_ttl > 0:
        raise SettingError("--history-ttl", f"must be more than 0 seconds, not {args.history_ttl}")
    if args.max_connections < 1:
        raise SettingError("--max-connections", f"must be at least 1, not {args.max_connections}")
    if not args.client_timeout > 0:
        raise SettingError("--client-timeout", f"must be more than 0 seconds, not {args.client_timeout}")
    if not args.shutdown_timeout >= 0:
        raise SettingError("--shutdown-timeout", f"must not be negative, not {args.shutdown_timeout}")
    if args.otlp_traces_endpoint is not None:
        check_traces_endpoint(args.otlp_traces_endpoint)
    return HTTPSettings(
        max_requests_per_client=args.max_requests_per_client,
        max_body_bytes=parse_bytes(args.max_body_bytes, "--max-body-bytes"),
        max_connections=args.max_connections,
        client_timeout=args.client_timeout,
        chat_template=None if args.chat_template is None else read_chat_template(args.chat_template),
        api_keys=tuple(key_digest(key) for key in keys),
        history_file=str(args.state_dir / "history.sqlite"),
        history_ttl=args.history_ttl,
        max_conversations_per_owner=args.max_conversations_per_owner,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        log_format=args.log_format,
        log_level=args.log_level,
    )


def check_traces_endpoint(endpoint: str) -> None:
    """SettingError if it is no URL, or nothing is installed to send spans. Whether it answers is not asked."""
    setting, exporter = "--otlp-traces-endpoint", "opentelemetry-exporter-otlp-proto-http"
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SettingError(setting, f"must be a URL as http://127.0.0.1:4318/v1/traces, not {endpoint!r}")
    try:
        importlib.metadata.version(exporter)
    except importlib.metadata.PackageNotFoundError:
        raise SettingError(setting, f"needs more packages: pip install {exporter}") from None


def read_api_keys(keys: list[str], path: Path | None) -> list[str]:
    """Those of the command line and those of the file, whose empty lines and lines with # say nothing."""
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError("--api-key-file", f"cannot read {path}: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise SettingError("--api-key-file", f"{path} holds no key")
        keys = [*keys, *found]
    if not all(key.strip() for key in keys):
        raise SettingError("--api-key", "a key must not be empty")
    return keys


def read_chat_template(path: Path) -> str:
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--chat-template", f"cannot read {path}: {error}") from error
    ChatTemplate(source, {}, "--chat-template")  # whether it parses
    return source
