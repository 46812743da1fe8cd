"""Real conversations, and their token ids as the model's own chat template writes them.

A file has one conversation a line, `messages: [{role, content}]`, gzipped. A tool's result counts
as the user's, and messages of one role that follow each other are joined: every chat template takes
such conversations.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.traces import message_text, parse_json, read_lines

from ...demo_model.chats import Chat

CHATS, SERVICE, AGENTS = "mtbench101", "tau_airline", "miniswe"
KINDS = (CHATS, SERVICE, AGENTS)
"""Short chats; service agents with one long system prompt; coding agents with long tool results."""

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "user"}


class RecordedChat(NamedTuple):
    """A system message or none, then messages of the user and the assistant in turn."""

    name: str
    messages: Chat

    @property
    def users(self) -> Chat:
        """Messages of the user."""
        return [message for message in self.messages if message["role"] == "user"]

    @property
    def system(self) -> Chat:
        return [message for message in self.messages if message["role"] == "system"]


def read_conversations(data: Path, kind: str, count: int) -> list[RecordedChat]:
    """The first `count` conversations of a kind. SettingError if its file is missing or wrong."""
    path = data / f"{kind}_text.jsonl.gz"
    if not path.is_file():
        raise SettingError("--data", f"there is no file {path}")
    conversations = []
    for number, (where, line) in enumerate(islice(read_lines(path), count)):
        spoken = parse_json(line, where)
        if not isinstance(spoken, dict) or not isinstance(spoken.get("messages"), list):
            raise SettingError("--data", f"{where}: needs an object with messages")
        conversations.append(RecordedChat(f"{kind}-{number}", _joined(spoken["messages"], where)))
    return conversations


def _joined(messages: Sequence[object], where: str) -> Chat:
    chat: Chat = []
    for message in messages:
        text = message_text(message, where).strip()
        role = ROLES.get(message["role"])  # type: ignore[index]  # `message_text` checks it
        if role is None or not text:
            continue
        if chat and chat[-1]["role"] == role:
            chat[-1]["content"] += "\n\n" + text
        else:
            chat.append({"role": role, "content": text})
    return chat


def mixed(data: Path, count: int) -> list[RecordedChat]:
    """Three short chats for each conversation with a service agent."""
    services = max(1, count // 4)
    return [
        *read_conversations(data, CHATS, count - services),
        *read_conversations(data, SERVICE, services),
    ]


class ReplyTokens(NamedTuple):
    """A conversation's token ids; `is_reply` tells of each whether it belongs to an assistant's
    message."""

    tokens: list[int]
    is_reply: list[bool]


class ChatText:
    """Token ids of conversations."""

    def __init__(self, tokenizer: Tokenizer):
        """SettingError if the model has no chat template."""
        if not tokenizer.has_template:
            raise SettingError("--checkpoint", "the model has no chat template")
        self.tokenizer = tokenizer

    def prompt(self, messages: Chat) -> array[int]:
        """The conversation up to the beginning of the assistant's next message."""
        return self.tokenizer.encode_rendered(self.tokenizer.render_chat(messages))

    def text(self, reply: Sequence[int]) -> str:
        return self.tokenizer.decode(reply)

    def replies(self, messages: Chat) -> ReplyTokens:
        """The marks around a message belong to no reply. A message counts as no reply if its text
        changes the tokens before it, which a tokenizer can do."""
        rendered = self.tokenizer.render_chat(messages, add_generation_prompt=False)
        tokens = self.tokenizer.encode_rendered(rendered)
        is_reply = [False] * len(tokens)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.prompt(messages[:place])
                until = self.until(messages[: place + 1])
                if tokens[: len(before)] == before and tokens[: len(until)] == until:
                    is_reply[len(before) : len(until)] = [True] * (len(until) - len(before))
        return ReplyTokens(list(tokens), is_reply)

    def until(self, messages: Chat) -> array[int]:
        """The conversation up to the end of its last message's text."""
        text = self.tokenizer.render_chat(messages, False, continue_final_message=True)
        return self.tokenizer.encode_rendered(text)
