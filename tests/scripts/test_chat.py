"""The terminal chat, through a pipe and through a terminal, against a fake server."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from argparse import Namespace
from importlib.resources import files

import pytest

from pensieve.scripts.chat import Chat, Server, main

from .fake_server import ENDLESS, NOTHING_TO_STORE, FakeServer, Handler

CHAT = [sys.executable, "-m", "pensieve.scripts.pensieve", "chat"]
LINE = r"device 128 · host 64 · recomputed 5 · new 17 \| first token \d+ ms \| \d+ tokens at \d+/s"


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


def piped(server, *lines, options=()):
    """The finished chat after these lines of standard input."""
    command = [*CHAT, "--url", server.url, *options]
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    environment |= {"PYTHONIOENCODING": "utf-8"}
    text = "".join(line + "\n" for line in lines)
    return subprocess.run(
        command, input=text, capture_output=True, encoding="utf-8", timeout=60, env=environment
    )


def test_the_terminal_and_the_page_begin_with_one_temperature(capsys):
    """A low one: with a high one the demo model answers about another subject now and then."""
    with pytest.raises(SystemExit):
        main(["--help"])
    default = re.search(r"--temperature T\s.*\(default ([\d.]+)\)", capsys.readouterr().out)[1]
    page = (files("pensieve.runtime.http") / "ui" / "index.html").read_text()
    assert re.search(r'<input id="temperature".*value="([\d.]+)"', page)[1] == default == "0.3"


def test_a_script_talks_through_a_pipe(server):
    options = (
        "--conversation",
        "tea",
        "--max-tokens",
        "9",
        "--temperature",
        "0",
        "--api-key",
        "secret",
    )
    done = piped(server, "hello there", "", "and now?", options=options)
    assert (done.returncode, done.stderr) == (0, "")
    first, first_line, second, second_line = done.stdout.splitlines()
    assert (first.strip(), second.strip()) == ("you said hello there", "you said and now?")
    assert re.fullmatch(LINE, first_line) and re.fullmatch(LINE, second_line), (
        "no escape codes, no prompts"
    )
    assert server.conversations == {"tea": ["hello there", "and now?"]}
    assert server.keys == ["Bearer secret"] * 2
    first, body = server.bodies
    assert body["messages"] == [{"role": "user", "content": "and now?"}], (
        "the server keeps the history"
    )
    assert first["history"] == body["history"] == "server"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 9, 0.0)
    assert body["return_sources"] and body["stream_options"] == {"include_usage": True}


def test_commands(server):
    done = piped(
        server,
        "one",
        "/fork a/b ü",
        "two",
        "/list",
        "/drop",
        "three",
        "/drop first",
        "/new fourth",
        "four",
        "/stats",
        "/help",
        "/nonsense",
        "/quit",
        "never said",
        options=("--conversation", "first"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    assert (
        "this is a/b ü, a copy of first" in out
        and "  first (7 tokens)\n* a/b ü (7 tokens)\n" in out
    )
    assert "a/b ü is gone\nthis is chat-" in out and "first is gone\nthis is fourth" in out
    (third,) = (name for name in server.conversations if name.startswith("chat-"))
    assert server.conversations == {third: ["three"], "fourth": ["four"]}
    assert (
        "4 replies, 15 tokens; prompts: device 512 · host 256 · disk 0 · shared 0 · recomputed 20 "
        "· new 68" in out
    )
    assert "first token: median" in out
    assert 'num_requests_running 1.0\nkv_slots{tier="gpu"} 7.0\n' in out and "other" not in out
    assert out.count("/fork [name]") == 2 and "there is no command /nonsense" in out
    assert "never said" not in out


def test_a_stored_conversation_goes_on(server):
    server.conversations["tea"] = ["before"]
    piped(
        server,
        "after",
        "/new coffee",
        "black",
        "/new tea",
        "at last",
        options=("--conversation", "tea"),
    )
    assert server.conversations == {"tea": ["before", "after", "at last"], "coffee": ["black"]}
    assert [body["history"] for body in server.bodies] == ["server"] * 3


def test_long_lists_come_in_pages_with_titles(server):
    server.conversations = {f"c{n}": [] for n in range(5)}
    server.titles["c3"] = "How is tea made?"
    assert piped(server, "/list").stdout.splitlines() == [
        f"  c{n} {'How is tea made? ' if n == 3 else ''}(7 tokens)" for n in range(5)
    ]


def test_what_the_server_refuses_is_told_and_the_chat_goes_on(server):
    done = piped(server, "too much", "no key", "break", "/drop unknown", "hello")
    assert done.returncode == 1, "a script must know"
    assert done.stderr.splitlines() == [
        "error: the queue is full",
        "error: this server needs a valid API key; give one with --api-key or $OPENAI_API_KEY",
        "error: the books disagree",
        "error: there is no conversation 'unknown'",
    ]
    assert "you said hello" in done.stdout


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "refused; `pensieve serve PATH` starts"),
        ("localhost", "is not an address"),
    ],
)
def test_no_server(url, message):
    done = subprocess.run(
        [*CHAT, "--url", url], input="hi\n", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


class OtherHandler(Handler):
    """A server of OpenAI's API that knows no conversations. Its `health`: status and content."""

    health = (404, b"{}")

    def do_GET(self):
        if self.path == "/health":
            self._send(*self.health)
        else:
            super().do_GET()


@pytest.mark.parametrize("health", [(200, b""), (404, b"{}"), (200, b'{"status": "ok"}')])
def test_a_server_that_is_not_pensieve(health, monkeypatch, capsys):
    monkeypatch.setattr(OtherHandler, "health", health)
    with FakeServer(OtherHandler) as other, pytest.raises(SystemExit) as ended:
        main(["--url", other.url])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"pensieve chat: --url: {other.url} has no conversations of Pensieve; use a client of "
        "OpenAI's API there\n"
    )


class Terminal:
    """The chat in its own terminal."""

    def __init__(self, *options):
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            # it is ignored if the tests run in the background
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [*CHAT, *options])
        self._seen = ""

    def type(self, text):
        os.write(self._file, text.encode())

    def expect(self, pattern, seconds=120):
        """Reads until the pattern matches; text up to the end of the match is not read again."""
        until = time.monotonic() + seconds
        while not (match := re.search(pattern, self._seen)):
            ready, _, _ = select.select([self._file], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{pattern!r} never came: {self._seen!r}"
            self._seen += os.read(self._file, 65536).decode()
        self._seen = self._seen[match.end() :]
        return match[0]

    def leave(self, key, seconds=120):
        """Presses the key until the chat has ended; returns its exit status.

        One key would be enough, except for a gap in Python's readline: a signal between the prompt
        and the next wait is only seen with the next key. A second signal might hit an interpreter
        that is ending.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.type(key)
            key = "\n" if key == "\x03" else key
            for _ in range(100):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    os.close(self._file)
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.01)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"{key!r} does not end the chat")


def test_a_terminal_shows_a_prompt_and_a_dim_line(server):
    terminal = Terminal("--url", server.url, "--conversation", "tea")
    terminal.expect("tea on http://.*help")
    terminal.expect("tea> ")
    terminal.type("hello there\n")
    terminal.expect("you said hello there")
    assert re.search(LINE, terminal.expect(r"\x1b\[2mdevice .*\x1b\[0m"))
    terminal.expect("tea> ")
    terminal.type("/new coffee\n")
    terminal.expect("coffee> ")
    assert terminal.leave("\x04") == 0


def test_ctrl_c_stops_a_reply_and_a_second_one_leaves(server):
    terminal = Terminal("--url", server.url, "--conversation", "tea")
    terminal.expect("tea> ")
    terminal.type("wait\n")
    terminal.expect(r"\.\.\.")
    terminal.type("\x03")
    terminal.expect("stopped; this part is kept")
    assert server.stopped.wait(60), "the server is told by the connection's end"
    terminal.expect("tea> ")
    terminal.type("still there?\n")
    terminal.expect("you said still there")
    terminal.expect("tea> ")
    assert server.conversations == {"tea": ["wait", "still there?"]}
    assert server.bodies[-1]["history"] == "server", "the reply that was stopped is in it"
    assert terminal.leave("\x03") == 0


class StoppedServer(Server):
    """The user presses Ctrl-C at the first event of the answer to an endless message."""

    def events(self, path, body):
        with contextlib.closing(super().events(path, body)) as events:
            for event in events:
                yield event
                if body["messages"][-1]["content"] in ENDLESS:
                    raise KeyboardInterrupt


@pytest.mark.parametrize("message", ["think", "call", "late"])
def test_a_turn_that_is_stopped_before_its_content_is_shown_may_be_kept(
    server, message, monkeypatch, capsys
):
    """In a thought, in a call, or before what the server has generated has arrived."""
    monkeypatch.setattr("pensieve.scripts.chat.Server", StoppedServer)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{message}\nhello\n"))
    assert main(["--url", server.url, "--conversation", "tea"]) == 0
    assert "stopped; this part is kept" in capsys.readouterr().out
    assert server.conversations == {"tea": [message, "hello"]}
    assert server.bodies[-1]["history"] == "server", "the turn that was stopped is in it"


@pytest.mark.parametrize("before", [[], ["one"]])
def test_a_turn_of_which_the_server_stores_nothing_is_not_kept(server, before, monkeypatch, capsys):
    monkeypatch.setattr("pensieve.scripts.chat.Server", StoppedServer)
    lines = [*before, NOTHING_TO_STORE, "hello"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["--url", server.url, "--conversation", "tea"]) == 0
    assert "stopped; nothing is kept of this turn" in capsys.readouterr().out
    assert server.conversations == {"tea": [*before, "hello"]}


@pytest.mark.parametrize("message", ["too much", "break", NOTHING_TO_STORE])
def test_a_first_message_without_an_answer_leaves_no_conversation(
    server, message, monkeypatch, capsys
):
    monkeypatch.setattr("pensieve.scripts.chat.Server", StoppedServer)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{message}\n"))
    main(["--url", server.url, "--conversation", "tea"])
    assert server.conversations == {}
    assert len(capsys.readouterr().err.splitlines()) == (message != NOTHING_TO_STORE)


@pytest.mark.parametrize("stored", [[], ["one"]])
def test_a_conversation_of_someone_else_is_left_as_it_is(server, stored, monkeypatch):
    server.conversations["tea"] = stored
    monkeypatch.setattr("sys.stdin", io.StringIO("too much\n"))
    assert main(["--url", server.url, "--conversation", "tea"]) == 1
    assert server.conversations == {"tea": stored}


def test_two_chats_may_begin_one_conversation(server, monkeypatch, capsys):
    class OvertakenServer(Server):
        def ask(self, method, path, body=None):
            if (method, path) == ("POST", "/v1/conversations"):
                server.conversations["tea"] = []  # the other chat's
            return super().ask(method, path, body)

    monkeypatch.setattr("pensieve.scripts.chat.Server", OvertakenServer)
    monkeypatch.setattr("sys.stdin", io.StringIO("too much\nhello\n"))
    assert main(["--url", server.url, "--conversation", "tea"]) == 1
    assert capsys.readouterr().err == "error: the queue is full\n"
    assert server.conversations == {"tea": ["hello"]}


def test_a_turn_whose_server_ends_may_be_kept(server, monkeypatch, capsys):
    class EndedServer(StoppedServer):
        def events(self, path, body):
            try:
                yield from super().events(path, body)
            except KeyboardInterrupt:
                server.shutdown()
                server.server_close()
                raise

    monkeypatch.setattr("pensieve.scripts.chat.Server", EndedServer)
    monkeypatch.setattr("sys.stdin", io.StringIO("late\n"))
    assert main(["--url", server.url, "--conversation", "tea"]) == 0
    shown = capsys.readouterr()
    assert "stopped; it is not known what the server has kept" in shown.out and not shown.err


def test_a_turn_that_the_server_does_not_end_is_not_called_lost(server, monkeypatch, capsys):
    monkeypatch.setattr("pensieve.scripts.chat.Server", StoppedServer)
    monkeypatch.setattr("pensieve.scripts.chat.STORE_SECONDS", 0)
    monkeypatch.setattr("sys.stdin", io.StringIO("late\n"))
    assert main(["--url", server.url, "--conversation", "tea"]) == 0
    assert "stopped; the server has not ended this turn yet" in capsys.readouterr().out


def test_a_conversation_that_is_gone_is_told_and_not_begun_again(server, capsys):
    def lines():
        yield "one"
        server.conversations.clear()  # it has expired
        yield "two"

    options = Namespace(model=None, conversation="tea", max_tokens=9, temperature=0.0)
    assert Chat(Server(server.url, None), options).run(lines()) == 1
    assert "error: unknown" in capsys.readouterr().err and not server.conversations
