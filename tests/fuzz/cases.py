"""Bytes that no client should send, over raw sockets, and checks of the server's state afterwards.

Random bytes, requests with broken parts, bodies that are nearly right, requests in pieces,
hang-ups. No case may get an answer of 500, keep a whole request waiting, or leave open requests,
slots, file descriptors or memory behind. Case n of a seed always has the same bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 60.0  # for a whole request
# for an answer to something else: most of it is no request, and the server waits for the rest
PIECE_S = 0.15
SETTLE_S = 60.0  # after the last case, for its work to end
WARM_UP = 0.2  # share of the time after which memory and files are looked at first
BUSY_S = 120.0  # beyond the time, on a machine that has not sent some of everything in it
MORE_FILES = 8  # of the check's own clients, and of Python
MORE_MEMORY = 64 * 2**20  # bytes, for caches that fill slowly
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
ALLOWED_5XX = {501, 503}

PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/x",
    "/v1/conversations",
    "/tokenize",
    "/v1/conversations/a/fork",
    "/v1/conversations/a/pin",
    "/v1/conversations/a%2F..%2Fb",
    "/detokenize",
    "/v1/models",
    "/v1/models/../../etc/passwd",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/ui",
    "/ui/..%2f..%2fkey",
    "/%00",
)
METHODS = ("GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "get", "\x01")
HEADERS = (
    "Expect: 100-continue",
    "Connection: Upgrade\r\nUpgrade: websocket",
    "Upgrade: h2c",
    "Content-Encoding: gzip",
    "Authorization: Bearer \xff",
    "Range: bytes=0-",
    "X: " + "y" * 40_000,
    "Cookie: " + "a=b;" * 3000,
    " folded: x",
    "Content-Type: text/plain; charset=utf-7",
    "Transfer-Encoding: chunked",
    "Host: a\r\nHost: b",
    "X-Session-Id: \x7f",
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    1.5,
    1e308,
    "",
    "x" * 5000,
    "\ud800",
    "\x00",
    [],
    {},
    [[]],
    [{}],
    [None],
    {"a": {"b": [1]}},
    ["", 3],
    {"id": "../../etc/passwd"},
    {"type": "json_schema"},
    "../x",
    "<script>",
)
FIELDS = (
    "model",
    "prompt",
    "messages",
    "input",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "n",
    "stop",
    "bad_words",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "conversation",
    "conversation_params",
    "history",
    "cache_salt",
    "ttl_s",
    "id",
    "tokens",
    "min_tokens",
    "priority",
    "prompt_logprobs",
    "previous_response_id",
    "store",
    "guided_regex",
    "seed",
    "return_token_ids",
    "ignore_eos",
    "unknown",
)


ITEMS: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "hi", "annotations": []}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "1"},
    {"type": "local_shell_call", "id": "c", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c", "output": "a"},
    {"type": "item_reference", "id": f"msg_{0:032x}_0"},
    {
        "type": "mcp_call",
        "id": "m",
        "server_label": "s",
        "name": "f",
        "arguments": "{}",
        "output": "1",
    },
    {"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": [{"type": "image"}]},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a"}]},
    {"type": "web_search_call"},
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
    {"type": "custom", "name": "g", "format": {"type": "text"}},
    {
        "type": "custom",
        "name": "h",
        "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
    },
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    {"type": "web_search"},
)
CHOICES: tuple[Any, ...] = (
    "auto",
    "none",
    "required",
    {"type": "function", "name": "f"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "g"}]},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "n"}]},
)
MOST_PARTS = 6  # items of an input, or tools


@dataclass(frozen=True)
class Case:
    """`whole`: a request that must be answered. `pause`: seconds between its pieces. `hang_up`:
    nothing is read."""

    pieces: tuple[bytes, ...]
    whole: bool = False
    pause: float = 0.0
    hang_up: bool = False


def make_case(seed: int, number: int) -> Case:
    chance = random.Random(f"{seed}/{number}")
    match chance.randrange(8):
        case 0:
            return Case((chance.randbytes(chance.randrange(1, 3000)),))
        case 1:
            return Case((_mutated(chance, _request(chance, _body(chance))),))
        case 2:
            return Case((_request(chance, _mutated(chance, _body(chance))),), whole=True)
        case 3:
            return Case((_odd_request(chance),))
        case 4:
            text = _request(chance, _body(chance))
            cuts = sorted(chance.randrange(len(text)) for _ in range(chance.randrange(1, 5)))
            pieces = tuple(text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]))
            return Case(pieces, whole=True, pause=chance.choice((0.0, 0.02)))
        case 5:
            text = _request(chance, _body(chance))
            return Case((text[: chance.randrange(1, len(text))],), hang_up=True)
        case 6:
            return Case(
                (_request(chance, _body(chance)),), hang_up=True, pause=chance.random() * 0.05
            )
        case _:
            return Case(
                (b"".join(_request(chance, _body(chance)) for _ in range(chance.randrange(2, 5))),),
                whole=True,
            )


def _body(chance: random.Random) -> bytes:
    if chance.random() < 0.05:
        return b"[" * chance.choice((10, 1000, 100_000))
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": chance.randrange(1, 30)}
    if chance.random() < 0.4:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": chance.randrange(1, 30),
        }
    elif chance.random() < 0.4:
        body = {
            "input": _parts(chance, ITEMS),
            "tools": _parts(chance, TOOLS),
            "tool_choice": chance.choice(CHOICES),
            "max_output_tokens": chance.randrange(1, 30),
        }
    if chance.random() < 0.3:
        body["stream"] = True
    if chance.random() < 0.3:
        body["conversation"] = f"fuzz-{chance.randrange(20)}"
    for _ in range(chance.choice((0, 0, 1, 2, 5))):
        body[chance.choice(FIELDS)] = chance.choice(ODD_VALUES)
    return json.dumps(body).encode()


def _parts(chance: random.Random, parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the parts. Some of these have a field less or an odd value in one."""
    some = [dict(chance.choice(parts)) for _ in range(chance.randrange(MOST_PARTS))]
    for part in some:
        name = chance.choice([*part])
        match chance.randrange(8):
            case 0:
                del part[name]
            case 1:
                part[name] = chance.choice(ODD_VALUES)
    return some


def _request(chance: random.Random, body: bytes) -> bytes:
    path = "/v1/responses" if b'"input":' in body else chance.choice(PATHS[:3])
    method, path = ("POST", path) if chance.random() < 0.7 else ("GET", chance.choice(PATHS))
    if method == "GET" or chance.random() < 0.2:
        body = b"" if method == "GET" else b"{}"
    head = f"{method} {path} HTTP/1.1\r\nHost: fuzz\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _odd_request(chance: random.Random) -> bytes:
    """Wrong methods, headers and lengths."""
    body = _body(chance)
    length = chance.choice((len(body), len(body) + 5, 0, -1, 10**30, "0x10", "1_0", "+5", ""))
    target = chance.choice(
        (*PATHS, "*", "http://other/", "//", "/" + "a" * 70_000, "/?" + "&" * 9000)
    )
    lines = [
        f"{chance.choice(METHODS)} {target} HTTP/{chance.choice(('1.1', '1.0', '2.0', '9'))}",
        "Host: fuzz",
    ]
    lines += [chance.choice(HEADERS) for _ in range(chance.randrange(4))]
    lines += [f"Content-Length: {length}"] * chance.randrange(3)
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def _mutated(chance: random.Random, text: bytes) -> bytes:
    changed = bytearray(text)
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at : at + 1] = chance.randbytes(1)
            case _:
                changed[at:at] = changed[at : at + chance.randrange(1, 200)]
    return bytes(changed)


@dataclass
class Findings:
    """Filled by all threads, under `lock`. `faults`: (case, description of its fault)."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)
    cases: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, number: int, statuses: Sequence[int], fault: str | None) -> None:
        with self.lock:
            self.cases += 1
            self.statuses.update(map(str, statuses) if statuses else ["none"])
            if fault is not None:
                self.faults.append((number, fault))

    @property
    def some_of_everything(self) -> bool:
        """Among the cases were whole requests, good and bad."""
        return self.cases > 10 and all(self.statuses[status] for status in ("200", "400"))


def send(case: Case, host: str, port: int) -> tuple[list[int], str | None]:
    """Sends the case. Returns the received statuses, and the fault or None."""
    received = b""
    with socket.create_connection((host, port), timeout=ANSWER_S) as wire:
        try:
            for piece in case.pieces:
                wire.sendall(piece)
                time.sleep(case.pause)
            if case.hang_up:
                return [], None
            wire.settimeout(ANSWER_S if case.whole else PIECE_S)
            while b"\r\n\r\n" not in received or (not case.whole and len(received) < 1 << 16):
                data = wire.recv(1 << 16)
                if not data:
                    break
                received += data
        except TimeoutError:
            if case.whole and not received:
                return [], f"no answer within {ANSWER_S} s"
        except OSError:  # cut off: its good right, after nonsense
            pass
    statuses = [int(status) for status in STATUS.findall(received)]
    wrong = [status for status in statuses if status >= 500 and status not in ALLOWED_5XX]
    return statuses, f"answered with {wrong[0]}" if wrong else None


def fuzz(url: str, seconds: float, seed: int, workers: int, pids: Sequence[int]) -> Findings:
    """Sends cases until the time is up, and some of everything is sent; then checks that the server
    has no remains."""
    host, port = address(url)
    findings = Findings()
    numbers = itertools.count()
    begun = time.monotonic()

    def goes_on(seconds: float) -> bool:
        lasts = time.monotonic() - begun
        return lasts < seconds or (not findings.some_of_everything and lasts < seconds + BUSY_S)

    def work() -> None:
        while goes_on(seconds):
            number = next(numbers)
            findings.note(number, *send(make_case(seed, number), host, port))

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    while goes_on(seconds * WARM_UP):
        time.sleep(0.01)
    before = _resources(pids)
    for thread in threads:
        thread.join()
    for fault in (*_unfinished(url), *_grown(before, pids)):
        findings.faults.append((-1, fault))
    return findings


def _unfinished(url: str) -> Iterator[str]:
    """Waits for the server to be idle; yields the remains at the end."""
    until = time.monotonic() + SETTLE_S
    left = {"metrics": 1.0}
    while left and time.monotonic() < until:
        time.sleep(0.3)
        with contextlib.suppress(OSError):
            left = {name: value for name, value in _gauges(url).items() if value}
    for name, value in left.items():
        yield f"{name} is {value:g} after {SETTLE_S:g} s of rest"


def _gauges(url: str) -> dict[str, float]:
    """The gauges that are 0 in an idle server."""
    idle = ("num_requests_running", "num_requests_waiting", 'kv_slots{state="in_use",tier="gpu"}')
    with urllib.request.urlopen(f"{url}/metrics", timeout=ANSWER_S) as answer:
        lines = dict(
            line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"
        )
    return {name: float(lines.get(f"pensieve:{name}", 0)) for name in idle}


def _resources(pids: Sequence[int]) -> dict[int, tuple[int, int]]:
    """(open files, bytes of memory) of each process."""
    resources = {}
    for pid in pids:
        memory = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        resources[pid] = (
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(memory[1]) * 1024 if memory else 0,
        )
    return resources


def _grown(before: dict[int, tuple[int, int]], pids: Sequence[int]) -> Iterator[str]:
    for pid, (files, memory) in _resources(pids).items():
        if files > before[pid][0] + MORE_FILES:
            yield f"process {pid} has {files} open files, and had {before[pid][0]}"
        if memory > before[pid][1] + MORE_MEMORY:
            yield f"process {pid} takes {memory >> 20} MiB, and took {before[pid][1] >> 20}"


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"--url must be like http://127.0.0.1:8000, not {url!r}")
    return parts.hostname, parts.port or 80
