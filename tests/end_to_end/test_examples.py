"""The examples of the README and of the page about the API against a server of the demo model,
which takes the place of the README's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .server import Server

ROOT = Path(__file__).parents[2]
FAILING = 'curl() { command curl --fail-with-body "$@"; echo; }; set -e\n'
"""Goes before examples for a shell: a refusal ends them with a status."""

TEA = "Tea is made by pouring hot water over the leaves of the tea plant."
COFFEE = "It keeps many people awake because it contains caffeine."
BREAD = "The yeast makes small bubbles, and so the dough rises."


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with Server(tmp_path, "--gpu-kv-chunks", 400, "--host-kv-chunks", 100) as running:
        yield running


def run(page: Path, begin: str, end: str, url: str) -> list[str]:
    """Output of each example between two headings of a page."""
    _, _, text = page.read_text().partition(f"\n## {begin}")
    text, separator, _ = text.partition(f"\n## {end}")
    assert separator
    outputs = []
    for language, example in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        example = example.replace("http://127.0.0.1:8000", url)
        example = example.replace("SmolLM2-135M-Instruct", "demo").replace("smollm2", "demo")
        command = (
            ["bash", "-c", FAILING + example]
            if language == "sh"
            else [sys.executable, "-c", example]
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, example + done.stdout + done.stderr
        outputs.append(done.stdout)
    return outputs


def test_the_readme(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with_curl, with_openai, offline = run(
        ROOT / "README.md", "Talk to it", "Your own model", server.url
    )
    assert TEA in with_curl and COFFEE in with_curl
    assert TEA in with_openai and TEA in offline
    messages = httpx.get(f"{server.url}/v1/conversations/tea").json()["messages"]
    assert len(messages) == 4, "the other examples leave the first one's conversation as it is"


def test_the_page_about_the_api(server: Server) -> None:
    page = ROOT / "docs" / "use" / "http-api.md"
    first, fork, rewind, responses, kept, items, session = run(
        page, "Conversations: continue", "Tools", server.url
    )
    assert TEA in first and COFFEE in first
    assert '"recomputed"' in fork
    for told in (fork, rewind, responses):
        assert BREAD in told
    assert COFFEE in responses and COFFEE not in rewind
    assert items == f"{['message'] * 5}\n"
    assert '"choices"' in session
    assert '"pinned_until"' in kept and '"deleted":true' in kept
