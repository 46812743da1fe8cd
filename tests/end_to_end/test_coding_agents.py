"""Agents that people have, as they are, each in a session of three turns with a scripted model.

The first and the third turn call a tool. Each further request must find its prompt's KV, and none
may be refused. `make clients` installs the agents.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.scripted_model import OTHERWISE, scripted_server, tool_call

pytestmark = pytest.mark.slow

CLIENTS = Path(sys.prefix) / "clients"
AGENTS = CLIENTS / "openai-agents" / "bin" / "python"
SECONDS = 120  # of one run of a client
QUESTIONS = ["Part one: read notes.txt.", "Part two: who is it for?", "Part three: count boats."]
READ, COUNTED = "The harbour opens at seven.", "forty-two boats"
ANSWERS = ["At seven o'clock.", "It is for fishermen.", "There are many."]
COUNT = "printf 'forty-%s boats' two"
"""The command does not hold the text that it prints, which only the tool's result can bring."""
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
"""An image in PNG."""
SHARE = 0.9  # of a prompt that is found, from the second request on


def installed(path):
    """Skips the test where the client is missing."""
    return pytest.mark.skipif(not path.exists(), reason=f"no {path}: run `make clients`")


class Place:
    """A home and a folder to work in, with a text and an image to read."""

    def __init__(self, directory):
        self.home = directory / "home"
        self.work = directory / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.notes = self.work / "notes.txt"
        self.notes.write_text(READ + "\n")
        self.image = self.work / "pixel.png"
        self.image.write_bytes(PIXEL)

    def run(self, *words, **environment):
        """Returns what the command writes to its standard output, which ends in the answer."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def script(read, count):
    """What the model says: two tool calls, and an answer to each turn."""
    return {
        "Part one": read,
        READ: ANSWERS[0],
        "Part two": ANSWERS[1],
        "Part three": count,
        COUNTED: ANSWERS[2],
    }


def check(log):
    """Five requests (two of them bring results), all accepted, and all but the first find most of
    their prompts. Of a server that has ended: its log is complete."""
    refused = [line for line in log if "refused status=4" in line]
    assert not refused
    counts = re.findall(r"prompt_tokens=(\d+) cached_tokens=(\d+)", "\n".join(log))
    assert len(counts) == 5
    assert all(int(cached) / int(prompt) >= SHARE for prompt, cached in counts[1:]), counts


def check_whole_turns(log):
    """Each prompt finds the one before it and its reply, up to the last token."""
    names = ("prompt_tokens", "cached_tokens", "generated_tokens")
    counts = re.findall(" ".join(rf"{name}=(\d+)" for name in names), "\n".join(log))
    turns = [tuple(map(int, turn)) for turn in counts]
    assert len(turns) == 5
    for (prompt, _, generated), (_, cached, _) in pairwise(turns):
        assert cached >= prompt + generated - 1, turns


def check_image(log, part):
    """Three requests, the last two with the image that a tool has read, whose part is named."""
    assert not [line for line in log if "refused status=4" in line]
    assert [line for line in log if f"{part} in requests" in line]
    assert len([line for line in log if "INFO request" in line]) == 3


CLAUDE = CLIENTS / "node_modules" / ".bin" / "claude"
LISTED = "claude-opus-5"


@installed(CLAUDE)
@pytest.mark.parametrize("model", ["scripted", LISTED])
def test_claude_code(tmp_path, place, model):
    """A model of its own list gets other prompts: system messages say how many tokens are left."""
    says = script(
        tool_call("Read", file_path=str(place.notes)),
        tool_call("Bash", command=COUNT, description="Counts the boats"),
    )
    with scripted_server(tmp_path, says, "--served-model-name", model) as server:
        environment = {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        for number, question in enumerate(QUESTIONS):
            again = ["--continue"] if number else []
            words = (CLAUDE, "-p", question, "--allowedTools", "Read,Bash", *again)
            assert place.run(*words, **environment) == ANSWERS[number]
    check(server.log)


@installed(CLAUDE)
def test_claude_code_goes_on_after_an_image(tmp_path, place):
    says = {"Part one": tool_call("Read", file_path=str(place.image)), "Part two": ANSWERS[1]}
    with scripted_server(tmp_path, says) as server:
        environment = {
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "scripted",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        for question, again, answer in (
            (QUESTIONS[0], [], OTHERWISE),
            (QUESTIONS[1], ["--continue"], ANSWERS[1]),
        ):
            words = (CLAUDE, "-p", question, "--allowedTools", "Read", *again)
            assert place.run(*words, **environment).endswith(answer)
    check_image(server.log, "tool_result.image")


OPENCODE = CLIENTS / "node_modules" / ".bin" / "opencode"


@installed(OPENCODE)
@pytest.mark.parametrize("package", ["openai-compatible", "openai", "anthropic"])
def test_opencode(tmp_path, place, package):
    """Speaks three APIs. The model's thoughts come back in each, so all of a turn's KV is found."""
    says = script(
        tool_call("read", filePath=str(place.notes)),
        tool_call("bash", command=COUNT, description="Counts the boats"),
    )
    says = {
        marker: f"<think>\nThat says: {marker}\n</think>\n\n{text}" for marker, text in says.items()
    }
    with scripted_server(tmp_path, says) as server:
        model = {"reasoning": True, "limit": {"context": 200_000, "output": 32_000}}
        if package == "openai-compatible":
            model["interleaved"] = {"field": "reasoning_content"}
        provider = {
            "npm": f"@ai-sdk/{package}",
            "options": {"baseURL": f"{server.url}/v1", "apiKey": "none"},
            "models": {"scripted": model},
        }
        config = {
            "provider": {"pensieve": provider},
            "model": "pensieve/scripted",
            "small_model": "pensieve/scripted",
        }
        (place.work / "opencode.json").write_text(json.dumps(config))
        offline = {
            f"OPENCODE_DISABLE_{name}": "1"
            for name in ("MODELS_FETCH", "AUTOUPDATE", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
        }
        for number, question in enumerate(QUESTIONS):
            # with a title of its own it asks for none
            again = ["--continue"] if number else ["--title", "The harbour"]
            answer = place.run(OPENCODE, "run", *again, question, **offline)
            assert answer.endswith(ANSWERS[number])
    check(server.log)
    check_whole_turns(server.log)


CODEX = CLIENTS / "node_modules" / ".bin" / "codex"
CODEX_CONFIG = """
model = "scripted"
model_provider = "pensieve"
model_context_window = 262144
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.pensieve]
name = "Pensieve"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


@installed(CODEX)
def test_codex(tmp_path, place):
    """The model's thoughts come back, and count once: the longest prompt has 22,000 tokens, so the
    history is not compacted, which would be another request."""
    says = script(
        tool_call("exec_command", cmd="cat notes.txt"), tool_call("exec_command", cmd=COUNT)
    )
    says = {
        marker: f"<think>\n{'I wonder. ' * 300}That says: {marker}\n</think>\n\n{text}"
        for marker, text in says.items()
    }
    settings = place.home / ".codex" / "config.toml"
    settings.parent.mkdir()
    with scripted_server(tmp_path, says) as server:
        limit = "model_auto_compact_token_limit = 22700\n"
        settings.write_text(limit + CODEX_CONFIG.format(url=server.url))
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        for number, question in enumerate(QUESTIONS):
            again = ["resume", "--last"] if number else []
            assert place.run(CODEX, "exec", *again, *free, question) == ANSWERS[number]
    check(server.log)
    check_whole_turns(server.log)


@installed(CODEX)
def test_codex_goes_on_after_an_image(tmp_path, place):
    says = {"Part one": tool_call("view_image", path=str(place.image)), "Part two": ANSWERS[1]}
    settings = place.home / ".codex" / "config.toml"
    settings.parent.mkdir()
    with scripted_server(tmp_path, says) as server:
        settings.write_text(CODEX_CONFIG.format(url=server.url))
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        assert place.run(CODEX, "exec", *free, QUESTIONS[0]) == OTHERWISE
        again = ("exec", "resume", "--last", *free, QUESTIONS[1])
        assert place.run(CODEX, *again) == ANSWERS[1]
    check_image(server.log, "function_call_output.input_image")


@installed(AGENTS)
@pytest.mark.parametrize("session", [False, True], ids=["history", "session"])
def test_openai_agents(tmp_path, place, session):
    says = script(tool_call("look_up", subject="hours"), tool_call("look_up", subject="boats"))
    program = Path(__file__).with_name("agents_chat.py")
    with scripted_server(tmp_path, says) as server:
        request = {
            "url": f"{server.url}/v1",
            "questions": QUESTIONS,
            "notes": {"hours": READ, "boats": COUNTED},
            "session": session,
        }
        printed = place.run(AGENTS, program, json.dumps(request))
    assert json.loads(printed) == ANSWERS
    check(server.log)
