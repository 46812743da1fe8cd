"""`LLM` and the server where standard output and error are not those of a terminal: replaced as in
notebooks, editors' consoles and tests, closed, or missing as in a service without a console."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from pensieve.runtime.system import descendants

from .server import HTTP

REPLACED = """
import io, sys
sys.stdout = io.StringIO()
sys.stderr = io.StringIO()
"""
WRITE_ONLY = """
import sys
class Console:
    def write(self, text):
        return len(text)
    def flush(self):
        pass
sys.stdout = Console()
sys.stderr = Console()
"""
CLOSED = """
import sys
sys.stdout.close()
sys.stderr.close()
"""
MISSING = """
import sys
sys.stdout = None
sys.stderr = None
"""
STREAMS = {
    "replaced": REPLACED,
    "write-only": WRITE_ONLY,
    "closed": CLOSED,
    "missing": MISSING,
    "closed descriptors": "",
}
OFFLINE = """
from pathlib import Path
from pensieve import LLM, SamplingParams
from pensieve.runtime.system import give_up_after
if __name__ == "__main__":
    with give_up_after(600), LLM("demo", gpu_kv_bytes="8MiB", host_kv_bytes="8MiB") as llm:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        replies = llm.generate(["hello", "tea"], params)
    Path("replies").write_text(str([len(reply.outputs[0].token_ids) for reply in replies]))
"""
HANGING = """
import threading
from pensieve.runtime.system import give_up_after
with give_up_after(0.01):
    threading.Event().wait()
"""
SERVER = """
from pensieve.scripts.pensieve import main
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def command(streams: str, *words: object) -> list[str]:
    """Words that run Python, perhaps without the descriptors 1 and 2."""
    python = [sys.executable, *map(str, words)]
    if streams == "closed descriptors":
        return ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *python]
    return python


@pytest.mark.parametrize("streams", STREAMS)
def test_llm(streams, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(STREAMS[streams] + OFFLINE)
    ended = subprocess.run(command(streams, program), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "replies").read_text() == "[2, 2]"


@pytest.mark.parametrize("streams", ["replaced", "missing"])
def test_a_process_that_hangs_says_where(streams):
    ended = subprocess.run(
        command(streams, "-c", STREAMS[streams] + HANGING), capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "wait" in ended.stderr


def test_a_hang_is_not_written_into_another_file(tmp_path):
    """Without descriptors 1 and 2 the next files that are opened would get their numbers, and the
    stacks."""
    program = tmp_path / "program.py"
    start = "from pensieve.runtime.system import hold_streams\nhold_streams()\n"
    opened = "files = [open('histories', 'wb') for _ in range(3)]\n"
    program.write_text(start + opened + HANGING)
    ended = subprocess.run(command("closed descriptors", program), cwd=tmp_path)
    assert ended.returncode == 1
    assert (tmp_path / "histories").read_bytes() == b""


@pytest.mark.parametrize("streams", ["replaced", "closed", "closed descriptors"])
def test_the_server(streams, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys\n" + STREAMS[streams] + SERVER)
    options = ("--engine", "demo", "--port", 0, "--state-dir", tmp_path / "state")
    sizes = ("--gpu-kv-chunks", 100, "--host-kv-chunks", 100, "--max-model-len", 512)
    with subprocess.Popen(
        command(streams, program, "serve", *options, *sizes), cwd=tmp_path
    ) as server:
        try:
            url = f"http://127.0.0.1:{port_of(server)}/v1/completions"
            reply = answer(server, url, {"model": "demo", "prompt": "hello", "max_tokens": 2})
            assert reply.status_code == 200, reply.text
        finally:
            server.terminate()
        assert server.wait(60) == 0


def port_of(server: subprocess.Popen[bytes]) -> int:
    """The TCP port that it or a process of its listens on. Its log, which has it too, may go
    nowhere."""
    while server.poll() is None:
        links = []
        for process in (server.pid, *descendants(server.pid)):
            with contextlib.suppress(FileNotFoundError):  # ended, or closed meanwhile
                links += map(os.readlink, Path(f"/proc/{process}/fd").iterdir())
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in links:  # it listens
                return int(address.partition(":")[2], 16)
        time.sleep(0.01)
    raise AssertionError(f"the server has ended with status {server.returncode}")


def answer(server: subprocess.Popen[bytes], url: str, body: dict[str, object]) -> httpx.Response:
    """The reply to a request that is sent until the server listens."""
    while server.poll() is None:
        try:
            return HTTP.post(url, json=body)
        except httpx.TransportError:
            pass
    raise AssertionError(f"the server has ended with status {server.returncode}")
