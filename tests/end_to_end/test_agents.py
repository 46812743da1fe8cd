"""Recorded agent sessions through /v1/messages, with Anthropic's client: no turn loses the cache of
the one before it.

The sessions are read from the folder PENSIEVE_DATA, where they are there.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
from pathlib import Path

import anthropic
import pytest

from pensieve.runtime.http.messages import BILLING

from .server import Server

DATA = Path(os.environ.get("PENSIEVE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CHUNK, CONTEXT = 32, 4096
# recorded lengths are divided by it: a turn of 30,000 tokens fits the demo model's context
SCALE = 32
LONGEST = 200  # characters of a recorded message, for the same reason
KEPT = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
WORDS = [
    "the",
    "river",
    "runs",
    "under",
    "a",
    "bridge",
    "through",
    "an",
    "old",
    "town",
    "with",
    "many",
    "boats",
]
TOOL = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"enum": ["src/main.py", "docs/README.md", "tests/test_main.py"]}},
        "required": ["path"],
        "additionalProperties": False,
    },
}
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def recorded(name):
    """The lines of a recording."""
    if not (DATA / name).is_file():
        pytest.skip(f"no recorded sessions at {DATA / name}; PENSIEVE_DATA names their folder")
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def agent(tmp_path_factory):
    """A client of a server whose template writes tools and their calls as models read them."""
    directory = tmp_path_factory.mktemp("agents")
    (directory / "template.jinja").write_text(TEMPLATE)
    cache = ("--gpu-kv-chunks", 800, "--host-kv-chunks", 100, "--max-model-len", CONTEXT)
    with Server(
        directory / "state", *cache, "--chat-template", directory / "template.jinja"
    ) as server:
        yield anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


class Session:
    """Sends turns like Claude Code, and checks how much each one finds in the cache.

    The first line of the system prompt differs in each request. Markers move to the end of the
    dialogue.
    """

    def __init__(self, client, name, system):
        self.client = client
        self.name = name
        self.system = system
        # log: tokens of the last turn that had KV, reply included
        self.prompt = self.log = self.turns = self.cached = 0

    def ask(self, messages, max_tokens, **options):
        """Returns the reply; streamed, as every other one, or whole."""
        *before, last = messages
        content = last["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        billing = (
            f"{BILLING} cc_version=2.1.42.{self.turns:03x}; cc_entrypoint=cli; "
            f"cch={self.turns * 7919:05x};"
        )
        ask = dict(
            model="demo",
            max_tokens=max_tokens,
            messages=[*before, {**last, "content": [*blocks[:-1], {**blocks[-1], **KEPT}]}],
            system=[
                {"type": "text", "text": billing},
                {"type": "text", "text": self.system, **KEPT},
            ],
            metadata={
                "user_id": json.dumps(
                    {"device_id": "d", "account_uuid": "", "session_id": self.name}
                )
            },
            extra_body={"temperature": 0},
            **options,
        )
        if self.turns % 2:
            reply = self.client.messages.create(**ask)
        else:
            with self.client.messages.stream(**ask) as stream:
                reply = stream.get_final_message()
        self.cached = reply.usage.cache_read_input_tokens
        assert self.cached >= self.prompt // CHUNK * CHUNK, f"turn {self.turns} of {self.name}"
        self.prompt = self.cached + reply.usage.input_tokens
        self.turns += 1
        return reply


@pytest.mark.slow
def test_a_recorded_coding_session_loses_no_cache(agent):
    """The client sends recorded replies, which this model did not generate: the next turn finds all
    full chunks of a turn's prompt."""
    turns = 0
    for line in recorded("miniswe_text.jsonl.gz")[:2]:
        session = Session(agent, line["conversation"], "You are a careful engineer. " * 10)
        recording = [
            {**message, "content": message["content"][:LONGEST]} for message in line["messages"]
        ]
        for count in range(1, len(recording), 2):
            messages = recording[:count]
            if count_tokens(agent, session, messages) > CONTEXT - 8:
                break
            session.ask(messages, 8)
        turns += session.turns
    assert turns >= 30


@pytest.mark.slow
def test_a_session_with_tools_loses_neither_prompts_nor_replies(agent):
    """Turns of recorded lengths, tools used where they were. The client sends back the blocks that
    it got: all tokens of prompt and reply are found, but for the reply's last one, which has no KV
    when its turn ends."""
    lines = recorded("claude_code_32k.jsonl.gz")
    grouped = [
        list(turns) for _, turns in itertools.groupby(lines, key=lambda line: line["conversation"])
    ]
    sessions = [turns for turns in grouped if 10 <= len(turns) <= 14][:2]
    assert len(sessions) == 2
    for number, turns in enumerate(sessions):
        system_tokens = turns[0]["system_tokens"]
        session = Session(agent, turns[0]["conversation"], turn_text(system_tokens // SCALE, 0))
        messages = []
        reply = None
        had_kv = 0
        for turn, following in itertools.zip_longest(turns, turns[1:]):
            new = turn_text(
                max(1, (turn["input_tokens"] - turn.get("system_tokens", 0)) // SCALE),
                session.turns,
            )
            uses = (
                [block.id for block in reply.content if block.type == "tool_use"]
                if reply is not None
                else []
            )
            results = [{"type": "tool_result", "tool_use_id": use, "content": new} for use in uses]
            messages.append({"role": "user", "content": results or new})
            choice = "any" if following is not None and following["kind"] == "tool" else "auto"
            options = {
                "tools": [TOOL],
                "tool_choice": {"type": choice, "disable_parallel_tool_use": True},
            }
            reply = session.ask(messages, 80, **options)
            # the unfilled chunk at the end too: the session's dialogue claims it
            assert session.cached >= had_kv
            assert choice == "auto" or reply.stop_reason == "tool_use"
            had_kv = session.prompt + reply.usage.output_tokens - 1
            messages.append({"role": "assistant", "content": reply.content})
            if number and session.turns == 1:
                # tools and the beginning of the system prompt, from another session
                assert session.cached >= 250


@pytest.mark.slow
def test_marked_kv_is_evicted_last(tmp_path):
    """Prompts that fill the cache twice over leave a marked one there, and evict another one."""
    cache = ("--gpu-kv-chunks", 40, "--host-kv-chunks", 0, "--max-model-len", 1024)
    with Server(tmp_path / "state", *cache) as server:
        client = anthropic.Anthropic(
            base_url=server.url, api_key="none", max_retries=0, timeout=120
        )

        def missing_of(system, **options):
            message = client.messages.create(
                model="demo",
                max_tokens=1,
                system=system,
                messages=[{"role": "user", "content": "Go on."}],
                **options,
            )
            return message.usage.cache_read_input_tokens

        marked, plain = turn_text(200, 1), turn_text(200, 2)
        assert missing_of(marked, **KEPT) < CHUNK and missing_of(plain) < CHUNK
        for start in range(3, 8):
            missing_of(turn_text(300, start))
        assert missing_of(marked, **KEPT) > 150 and missing_of(plain) < CHUNK


def count_tokens(client, session, messages):
    return client.messages.count_tokens(
        model="demo", system=session.system, messages=messages
    ).input_tokens


def turn_text(words, start):
    """A text of `words` words."""
    return " ".join(WORDS[(start + at * 4) % len(WORDS)] for at in range(words))
