"""Options of the HTTP process; reads the files that some of them name."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from ...scheduler.types import SettingError
from ..conversations.databases import has_password, is_url
from ..http.settings import HTTPOptions, HTTPSettings, key_digest
from ..system import usable_cores
from ..text.tokenizer import ChatTemplate
from .settings import HISTORY_FILE, HISTORY_URL, ServeSettings

MOST_SERVERS = 4  # by default


def http_settings(settings: ServeSettings) -> HTTPSettings:
    """Returns the HTTP process's settings, once the state directory is known. SettingError as
    `client_settings`."""
    client = client_settings(settings)
    histories = client.histories or str(settings.state_directory / HISTORY_FILE)
    return replace(client, histories=histories, server=server_name(settings.disk_directory))


def client_settings(settings: ServeSettings) -> HTTPSettings:
    """Returns the part that needs no state directory; reads the files that the options name.
    `histories` is "" if no option names a database. SettingError names the flag at fault."""
    keys = read_api_keys(settings.api_key, settings.api_key_file)
    if settings.otlp_traces_endpoint is not None:
        check_traces_endpoint(settings.otlp_traces_endpoint)
    url = history_url(settings.history_url, settings.history_url_file)
    options = {one.name: getattr(settings, one.name) for one in fields(HTTPOptions)}
    if settings.api_server_count is None:
        options["api_server_count"] = min(max(1, usable_cores() // 4), MOST_SERVERS)
    return HTTPSettings(
        **options,
        chat_template=None
        if settings.chat_template is None
        else read_chat_template(settings.chat_template),
        api_keys=tuple(key_digest(key) for key in keys),
        histories=url or "",
    )


def history_url(url: str | None, path: Path | None) -> str | None:
    """The URL of a shared database: of the option, the file, or the environment. SettingError names
    it."""
    setting = "--history-url"
    if url is not None and is_url(url) and has_password(url):
        cure = (
            f"put the URL into {HISTORY_URL} or --history-url-file, or the password into ~/.pgpass"
        )
        raise SettingError(setting, f"must not hold a password, which others can see here: {cure}")
    if path is not None:
        setting = "--history-url-file"
        try:
            url = path.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(setting, f"cannot read {path}: {error}") from error
    elif url is None:
        setting = HISTORY_URL
        url = os.environ.get(HISTORY_URL) or None
    if url is not None and not is_url(url):  # it may be a password: it is not shown
        raise SettingError(setting, "must be a URL as postgresql://USER@HOST:5432/NAME")
    return url


def server_name(directory: Path) -> str:
    """Of the server whose KV is in this directory, for its life: the host's name and some digits.
    SettingError."""
    path = directory / "server"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        name = path.read_text("utf-8").strip() if path.exists() else ""
        if not name:  # or a full disk took only the file's name
            name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
            path.write_text(name, "utf-8")
        return name
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--state-dir", f"cannot use {path}: {error}") from error


def check_traces_endpoint(endpoint: str) -> None:
    """SettingError if it is not a URL, or no package to send spans is installed. No connection is
    made."""
    setting, exporter = "--otlp-traces-endpoint", "opentelemetry-exporter-otlp-proto-http"
    try:
        url = urlsplit(endpoint)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise SettingError(
            setting, f"must be a URL as http://127.0.0.1:4318/v1/traces, not {endpoint!r}"
        )
    try:
        importlib.metadata.version(exporter)
    except importlib.metadata.PackageNotFoundError:
        raise SettingError(setting, f"needs more packages: pip install {exporter}") from None


def read_api_keys(keys: Sequence[str], path: Path | None) -> Sequence[str]:
    """Returns the keys of the command line and of the file. The file's empty lines and lines with #
    are skipped."""
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError("--api-key-file", f"cannot read {path}: {error}") from error
        api_keys = [line for line in lines if line and not line.startswith("#")]
        if not api_keys:
            raise SettingError("--api-key-file", f"{path} holds no key")
        keys = [*keys, *api_keys]
    if not all(key.strip() for key in keys):
        raise SettingError("--api-key", "a key must not be empty")
    return list(keys)


def read_chat_template(path: Path) -> str:
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("--chat-template", f"cannot read {path}: {error}") from error
    ChatTemplate(source, {}, "--chat-template")  # raises if it does not parse
    return source
