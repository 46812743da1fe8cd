"""A chat in the terminal on a running server. After each reply a line says where its tokens came
from."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from ..runtime.launch.command_line import INTERRUPTED, CommandParser
from ..scheduler.types import SettingError

OK, NOT_FOUND, CONFLICT = 200, 404, 409  # statuses of answers
SOURCES = ("gpu", "host", "disk", "shared", "recomputed", "new")
CONNECT_SECONDS = 10
STORE_SECONDS = 10
LIST_PAGE = 100
HELP = """\
/new [name]    begin a conversation, or go on with the one of that name
/list          conversations on the server, with their titles
/fork [name]   go on in a copy of this conversation
/drop [name]   delete a conversation (this one)
/stats         tokens and times since the start, and how busy the server is
/help          this text
/quit          leave (Ctrl-D, or Ctrl-C at the prompt); Ctrl-C stops a reply"""


class ServerError(Exception):
    """The server refuses, or cannot be reached; the message is for the user. `status`: of its
    answer, 0 if there is none."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class Server:
    """The HTTP API. Each request has its own connection: closing it stops a reply."""

    def __init__(self, url: str, api_key: str | None, read_seconds: float | None = None):
        """`read_seconds`: the longest wait for a piece of an answer (default: no limit)."""
        self._read_seconds = read_seconds
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is not an address; write http://HOST:PORT")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(
            parts.netloc, timeout=CONNECT_SECONDS
        )
        self._path = parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the JSON of the server's answer."""
        with self._answer(method, path, body) as response:
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise ServerError(
                    f"{self.url}{path} does not answer in JSON", response.status
                ) from error

    def text(self, path: str) -> str:
        with self._answer("GET", path, None) as response:
            return response.read().decode()

    def events(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yields the objects of a stream. Closing this generator early stops the reply."""
        with self._answer("POST", path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ServerError(event["error"]["message"])
                    yield event

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.request(
                method, self._path + path, None if body is None else json.dumps(body), self._headers
            )
            connection.sock.settimeout(self._read_seconds)
            response = connection.getresponse()
            if response.status >= 400:
                hint = (
                    "; give one with --api-key or $OPENAI_API_KEY" if response.status == 401 else ""
                )
                raise ServerError(_reason(response) + hint, response.status)
            with response:  # until it is closed the server may see an open connection
                yield response
        except ConnectionRefusedError as error:
            raise ServerError(
                f"{self.url}: {error.strerror}; `pensieve serve PATH` starts a server"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _reason(response: http.client.HTTPResponse) -> str:
    text = response.read().decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {response.status} {response.reason}"


@dataclass(slots=True)
class ReplyFigures:
    """Figures of a reply: tokens by source, tokens generated, and seconds."""

    sources: dict[str, int] = field(default_factory=dict)
    generated: int = 0
    first_token: float = 0.0
    generating: float = 0.0

    def line(self, tier_names: Mapping[str, str]) -> str:
        came = " · ".join(
            f"{tier_names.get(name, name)} {self.sources.get(name, 0)}"
            for name in SOURCES
            if name not in ("disk", "shared") or self.sources.get(name)
        )
        rate = (
            f" at {(self.generated - 1) / self.generating:.0f}/s"
            if self.generated > 1 and self.generating
            else ""
        )
        return (
            f"{came} | first token {self.first_token * 1e3:.0f} ms | {self.generated} tokens{rate}"
        )


class Chat:
    """One conversation at a time; the server keeps its history."""

    def __init__(self, server: Server, options: argparse.Namespace):
        """Raises ServerError, and SettingError if another program than Pensieve is the server."""
        self._server = server
        self._options = options
        self._tier_names = tier_names(server)
        self._model = options.model or server.ask("GET", "/v1/models")["data"][0]["id"]
        self._turns: list[ReplyFigures] = []
        self._dim = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
        self._go_to(options.conversation)

    def run(self, lines: Iterator[str]) -> int:
        """Takes lines until they end. Returns how many failed."""
        failures = 0
        for line in lines:
            try:
                if not self.take(line.strip()):
                    break
            except ServerError as error:
                failures += 1
                print(f"error: {error}", file=sys.stderr, flush=True)
            except KeyboardInterrupt:
                print()
        return failures

    def take(self, line: str) -> bool:
        """Takes one line: a command or a message. Returns False if the user leaves."""
        if line.startswith("/"):
            name, _, argument = line[1:].partition(" ")
            if name in ("quit", "exit"):
                return False
            command = getattr(self, f"command_{name}", None)
            if command is None:
                print(f"there is no command /{name}\n{HELP}")
            else:
                command(argument.strip())
        elif line:
            self.say(line)
        return True

    def say(self, text: str) -> None:
        """Sends the message and shows the reply as it arrives; Ctrl-C stops it."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "conversation": self.conversation,
            "history": "server",
            "max_tokens": self._options.max_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_sources": True,
            "on_disconnect": "store",
        }
        turn = ReplyFigures()
        before = self._messages()
        try:
            with contextlib.closing(self._server.events("/v1/chat/completions", body)) as events:
                self._show(events, turn)
        except KeyboardInterrupt:
            print(self._faint(f"\n(stopped; {self._kept(before)})"))
            return
        except ServerError:
            if self._created and before == 0:
                with contextlib.suppress(ServerError):  # the first error is the one to tell
                    self._after_turn()
            raise
        self._turns.append(turn)
        print("\n" + self._faint(turn.line(self._tier_names)), flush=True)

    def _show(self, events: Iterator[dict[str, Any]], turn: ReplyFigures) -> None:
        sent = time.perf_counter()
        for event in events:
            now = time.perf_counter()
            turn.first_token = turn.first_token or now - sent
            for choice in event["choices"]:
                text = choice["delta"].get("content") or ""
                print(text, end="", flush=True)
                turn.generating = now - sent - turn.first_token
            if event.get("usage"):
                turn.generated = event["usage"]["completion_tokens"]
                turn.sources = event["usage"]["prompt_tokens_details"]

    def _faint(self, text: str) -> str:
        return text.join(self._dim)

    def _go_to(self, name: str | None) -> None:
        """Switches to the conversation of that name, which may be stored on the server, or to a new
        one."""
        self.conversation = name or new_name()
        self._exists = False  # until the server tells
        self._created = False  # by this command

    def _messages(self) -> int:
        """Returns how many messages the server has of the conversation, which begins with the first
        message."""
        if not self._exists:
            self._create()
        return len(self._about()["messages"])

    def _create(self) -> None:
        """Creates the conversation, unless it exists."""
        try:
            self._server.ask("POST", "/v1/conversations", {"id": self.conversation})
            self._created = True
        except ServerError as error:
            if error.status != CONFLICT:
                raise
        self._exists = True

    def _kept(self, before: int) -> str:
        """Tells what the server has stored of a turn that was stopped behind `before` messages. The
        server may have generated more than has arrived here, and stores it when it notices that the
        connection has ended."""
        try:
            after = self._after_turn()
        except ServerError:
            return "it is not known what the server has kept"
        if after is None:
            return "the server has not ended this turn yet"
        return "this part is kept" if after > before else "nothing is kept of this turn"

    def _after_turn(self) -> int | None:
        """Returns how many messages the conversation has when its turn has ended; None if that
        takes too long. Deletes a conversation without messages that this command has created."""
        until = time.monotonic() + STORE_SECONDS
        while time.monotonic() < until:
            about = self._about()
            if not about["in_flight"]:
                messages = len(about["messages"])
                if self._created and messages == 0:
                    self._server.ask("DELETE", self._path(self.conversation))
                    self._go_to(self.conversation)
                return messages
            time.sleep(0.05)
        return None

    def _about(self) -> dict[str, Any]:
        about: dict[str, Any] = self._server.ask("GET", self._path(self.conversation))
        return about

    # -- commands, by their names

    def command_new(self, name: str) -> None:
        self._go_to(name)
        print(f"this is {self.conversation}")

    def command_list(self, _: str) -> None:
        after = ""
        more = True
        while more:
            page = self._server.ask("GET", f"/v1/conversations?limit={LIST_PAGE}{after}")
            for entry in page["data"]:
                mark = "*" if entry["id"] == self.conversation else " "
                title = f"{entry['title']} " if entry["title"] else ""
                about = self._faint(f"{title}({entry['tokens']} tokens)")
                print(f"{mark} {entry['id']}", about)
            more = page.get("has_more", False)
            after = f"&after={quote(page['data'][-1]['id'], safe='')}" if more else ""

    def command_fork(self, name: str) -> None:
        copy = name or new_name()
        self._server.ask("POST", f"{self._path(self.conversation)}/fork", {"id": copy})
        print(f"this is {copy}, a copy of {self.conversation}")
        self._go_to(copy)

    def command_drop(self, name: str) -> None:
        dropped = name or self.conversation
        self._server.ask("DELETE", self._path(dropped))
        print(f"{dropped} is gone")
        if dropped == self.conversation:
            self.command_new("")

    def command_stats(self, _: str) -> None:
        turns = self._turns
        sources = sum((Counter(turn.sources) for turn in turns), Counter())
        came = " · ".join(f"{self._tier_names.get(name, name)} {sources[name]}" for name in SOURCES)
        print(
            f"{len(turns)} replies, {sum(turn.generated for turn in turns)} tokens; prompts: {came}"
        )
        if turns:
            times = sorted(turn.first_token for turn in turns)
            print(
                f"first token: median {times[len(times) // 2] * 1e3:.0f} ms, longest "
                f"{times[-1] * 1e3:.0f} ms"
            )
        for line in self._server.text("/metrics").splitlines():
            if line.startswith(("pensieve:num_requests", "pensieve:kv_slots")):
                print(line.removeprefix("pensieve:"))

    def command_help(self, _: str) -> None:
        print(HELP)

    @staticmethod
    def _path(conversation: str) -> str:
        return f"/v1/conversations/{quote(conversation, safe='')}"


def tier_names(server: Server) -> dict[str, str]:
    """What the server calls its tiers. Raises SettingError if it is another program's."""
    try:
        health = server.ask("GET", "/health")
    except ServerError as error:
        if error.status not in (OK, NOT_FOUND):
            raise
        health = None
    if not isinstance(health, dict) or "tier_names" not in health:
        raise SettingError(
            "--url",
            f"{server.url} has no conversations of Pensieve; use a client of OpenAI's API there",
        )
    names: dict[str, str] = health["tier_names"]
    return names


def new_name() -> str:
    return f"chat-{secrets.token_hex(3)}"


def typed_lines(chat: Chat) -> Iterator[str]:
    """Yields the user's lines, with a prompt, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing, where Python has it)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input(f"{chat.conversation}> ")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    command = CommandParser(
        prog="pensieve chat",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = command.add_argument
    option("--url", default="http://127.0.0.1:8000", help="the server (default %(default)s)")
    option(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        metavar="KEY",
        help="(default: $OPENAI_API_KEY)",
    )
    option("--model", metavar="NAME", help="(default: the server's first)")
    option("--conversation", metavar="NAME", help="one to go on with (default: a new one)")
    option(
        "--max-tokens",
        type=int,
        default=256,
        metavar="N",
        help="longest reply (default %(default)s)",
    )
    option(
        "--temperature",
        type=float,
        default=0.3,
        metavar="T",
        help="0: always the likeliest (default %(default)s)",
    )
    options = command.parse_args(argv)
    try:
        chat = Chat(Server(options.url, options.api_key), options)
    except ServerError as error:
        print(f"pensieve chat: {error}", file=sys.stderr)
        return 1
    except SettingError as error:
        command.error(str(error))
    if sys.stdin.isatty():
        print(f"{chat.conversation} on {options.url}; /help lists the commands")
        chat.run(typed_lines(chat))
        return 0
    try:
        return 1 if chat.run(sys.stdin) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
