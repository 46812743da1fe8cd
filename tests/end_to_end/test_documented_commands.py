"""The commands of README.md and docs/use/ run as printed: without a GPU, on a server of the demo
model.

Each fenced block of a shell, of Python or of a terminal session is run, or `NOT_RUN` gives the
reason. A page is run from its first block to its last, in its own directory that looks like the
repository's root. Only addresses, ports and models change, and commands that test for ten minutes
do so for a few seconds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from .server import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "use").glob("*.md"))]
LANGUAGES = ("sh", "bash", "python", "console")
SECONDS = 300

NOT_RUN = {
    ("README.md", "make serve"): "installs into the checkout; CI runs `make test`",
    (
        "README.md",
        ".venv/bin/pensieve serve Qwen",
    ): "downloads a model, and needs 20 GiB for KV",
    (
        "anthropic.md",
        "export ANTHROPIC_BASE_URL",
    ): "starts Claude Code, which is no part of the tests",
    (
        "demo-model.md",
        "python -m benchmarks.demo_model.train",
    ): "needs a GPU, and texts to download",
    (
        "operations.md",
        "python -m benchmarks.check.soak --minutes 30\n",
    ): "runs for 30 minutes of twenty restarts; end_to_end/test_disk_server.py has a minute of it",
    ("operations.md", "python -m benchmarks.check.soak --minutes 30 --engine"): "the same",
    (
        "ray-serve.md",
        "pip install",
    ): "needs Ray and a database; end_to_end/test_ray_serve.py has both",
    (
        "routers.md",
        "pip install 'pensieve[events]'",
    ): "installs; end_to_end/test_kv_events.py serves with the same option",
    (
        "routers.md",
        "pip install 'pensieve[dynamo]'",
    ): "needs Dynamo; end_to_end/test_dynamo.py has it",
    (
        "shared-histories.md",
        "pip install",
    ): "needs a database; end_to_end/test_shared_histories.py has one",
    ("shared-histories.md", "pensieve import-histories"): "the same",
    (
        "tensor-parallel.md",
        "build_engine --checkpoint DIR",
    ): "needs four GPUs; end_to_end/test_ranks.py uses CPUs",
    ("tensor-parallel.md", "timeout 240 python -m pytest"): "needs four GPUs",
    (
        "triton.md",
        "pensieve triton-repository --engine DIR --output models --gpu",
    ): "needs tritonserver; tests/end_to_end/test_triton.py does the same",
    (
        "triton.md",
        "pensieve triton-repository --engine DIR --output models --tensors",
    ): "the same; tests/end_to_end/test_triton_ensemble.py",
}
"""(page, start of the block): why the block is not run."""


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    matches = re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page.name, language, text) for language, text in matches if language in LANGUAGES]


def reasons(block: Block) -> list[tuple[str, str]]:
    """The keys of NOT_RUN that name the block."""
    return [key for key in NOT_RUN if key[0] == block.page and block.text.startswith(key[1])]


WITH_BLOCKS = [page for page in PAGES if any(not reasons(block) for block in blocks(page))]


def test_every_reason_names_one_block():
    named = [key for page in PAGES for block in blocks(page) for key in reasons(block)]
    assert sorted(named) == sorted(NOT_RUN)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """For the pages that do not start a server themselves; README.md's model is the demo model."""
    names = ("--served-model-name", "demo", "SmolLM2-135M-Instruct")
    with Server(tmp_path_factory.mktemp("state"), *names) as running:
        yield running


class Reader:
    """Runs the commands of a page in a directory with links to all files of the repository's
    root."""

    def __init__(self, directory: Path, server: Server, stack: ExitStack):
        self._directory = directory
        self._url = server.url
        self._stack = stack
        for entry in ROOT.iterdir():
            (directory / entry.name).symlink_to(entry)
        if not (directory / ".venv").exists():
            (directory / ".venv").symlink_to(sys.prefix)
        home = directory / "home"
        home.mkdir()
        (home / ".curlrc").write_text("fail-with-body\n")  # a status from 400 on is an error
        places = dict(HOME=home, CURL_HOME=home, XDG_CACHE_HOME=home / "cache")
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
        self._environment = (
            os.environ | {name: str(place) for name, place in places.items()} | dict(PATH=path)
        )

    def follow(self, block: Block) -> None:
        text = re.sub(r"http://127\.0\.0\.1:(8000|8123)\b", self._url, block.text)
        text = text.replace('LLM("smollm2")', 'LLM("demo")')
        text = re.sub(r"--(seconds|max-time) 600\b", r"--\1 3", text)
        if block.language == "python":
            self._run([sys.executable, "-c", text])
        elif block.language == "console":
            for command, lines in sessions(text):
                self._shell(command, lines)
        elif text.startswith("pensieve serve "):
            self._serve(text)
        else:
            self._shell(text)

    def _serve(self, text: str) -> None:
        """From here on the page talks to this server. Its options are those printed, but for the
        port."""
        words = shlex.split(re.sub(r"--port \d+", "", text), comments=True)[2:]
        state = self._directory / f"state-{len(list(self._directory.glob('state-*')))}"
        engine = words.pop(words.index("--engine") + 1)
        words.remove("--engine")
        server = Server(state, *words, engine=engine, environment=self._environment)
        self._url = self._stack.enter_context(server).url

    def _shell(self, text: str, lines: str = "") -> None:
        self._run(["bash", "-euo", "pipefail", "-c", text], lines)

    def _run(self, words: list[str], lines: str = "") -> None:
        done = subprocess.run(
            words,
            cwd=self._directory,
            env=self._environment,
            input=lines,
            text=True,
            capture_output=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout}{done.stderr}"


def sessions(text: str) -> list[tuple[str, str]]:
    """The commands of a recorded session, each with the lines that its user typed: those behind
    `name> `."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [
        (
            part.split("\n", 1)[0],
            "".join(f"{line}\n" for line in re.findall(r"^[\w-]+> (.*)$", part, re.MULTILINE)),
        )
        for part in parts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.name)
def test_a_page_runs_as_printed(page: Path, server, tmp_path):
    with ExitStack() as stack:
        reader = Reader(tmp_path, server, stack)
        for block in blocks(page):
            if not reasons(block):
                reader.follow(block)
