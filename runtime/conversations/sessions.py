"""The sessions that clients name: the loop's names of their KV, their explicit end, and the log
line that says that the beginning of a prompt has changed. Nothing is stored."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import Erasure, ErrorKind, RequestError
from ..messages import Forget
from .transcript import CHARACTERS_PER_ID, Message, characters, common_messages

log = logging.getLogger(__name__)

MOST_DIALOGUES = 100_000  # names of KV, of all sessions together
MOST_TOKENS = 4_000_000  # of the prompts that later ones are compared with
PROMPTS_PER_SESSION = 8  # an agent and its helpers

SessionKey = tuple[str, str]
"""The owner and the client's name."""


class Prompt(NamedTuple):
    """The latest prompt of a dialogue."""

    ids: array[int]
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]

    @property
    def weight(self) -> int:
        """Its memory in token ids, about: a template may leave out much of what it gets."""
        texts = characters(self.messages) + characters(self.tools)
        return len(self.ids) + texts // CHARACTERS_PER_ID


@dataclass
class Watched:
    """`prompts`, and their weights: by the loop's name of their KV, the latest last; none once a
    change was logged."""

    prompts: OrderedDict[str, Prompt] = field(default_factory=OrderedDict)
    weights: dict[str, int] = field(default_factory=dict)
    changed: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.weights.values())

    def add(self, kv_name: str, prompt: Prompt) -> None:
        self.prompts[kv_name] = prompt
        self.weights[kv_name] = prompt.weight
        if len(self.prompts) > PROMPTS_PER_SESSION:
            name, _ = self.prompts.popitem(last=False)
            del self.weights[name]

    def pop(self, kv_name: str) -> Prompt | None:
        self.weights.pop(kv_name, None)
        return self.prompts.pop(kv_name, None)


class Sessions:
    """The sessions since the start of this server. With more than MOST_DIALOGUES dialogues the
    owner of most of them loses the names of its sessions that were idle longest; their KV expires
    as usual.

    `forget` sends the message to the loop; its result is as `EngineClient.forget`'s.
    """

    def __init__(self, forget: Callable[[Forget], asyncio.Future[Erasure]]):
        self._forget = forget
        # by the owner, then by the client's name: those idle longest come first
        self._dialogues: dict[str, OrderedDict[str, dict[str, None]]] = {}
        self._counts: Counter[str] = Counter()  # dialogues of each owner
        self._open: Counter[str] = Counter()  # requests in flight, by the name of their KV
        self._ended: set[str] = set()  # those whose session was ended meanwhile
        self._logged: OrderedDict[SessionKey, None] = OrderedDict()

    def open(self, key: SessionKey, kv_name: str, held: ExitStack) -> None:
        """A request of the session begins. It ends when `held` is closed."""
        owner, name = key
        sessions = self._dialogues.setdefault(owner, OrderedDict())
        dialogues = sessions.setdefault(name, {})
        sessions.move_to_end(name)
        self._counts[owner] += kv_name not in dialogues
        dialogues[kv_name] = None
        self._ended.discard(kv_name)
        self._open[kv_name] += 1
        held.callback(self._close, kv_name)
        while self._counts.total() > MOST_DIALOGUES:
            ((largest, _),) = self._counts.most_common(1)
            _, gone = self._dialogues[largest].popitem(last=False)
            self._counts[largest] -= len(gone)

    def _close(self, kv_name: str) -> None:
        self._open[kv_name] -= 1
        if not self._open[kv_name]:
            del self._open[kv_name]
            if kv_name in self._ended:
                self._ended.remove(kv_name)
                self._forget(_whole(kv_name))

    async def end(self, key: SessionKey) -> None:
        """Drops the KV of all dialogues of the session, on every tier, unless another session or
        conversation claims it. Requests in flight go on; their KV is dropped at their end.

        RequestError: NOT_FOUND, and INTERNAL if a tier refused to erase some of the KV.
        """
        owner, name = key
        dialogues = self._dialogues.get(owner, OrderedDict()).pop(name, None)
        if dialogues is None:
            raise RequestError(ErrorKind.NOT_FOUND, f"there is no session {name!r}", "session")
        self._counts[owner] -= len(dialogues)
        self._ended |= dialogues.keys() & self._open.keys()
        erased = await asyncio.gather(*[self._forget(_whole(kv_name)) for kv_name in dialogues])
        if any(erasure is not Erasure.WHOLLY for erasure in erased):
            what = f"the session {name!r} is ended, but some of its KV may still be on the server's"
            where = "disk or in the store that servers share: it could not be erased"
            raise RequestError(ErrorKind.INTERNAL, f"{what} {where}")

    def say_once(self, key: SessionKey, message: str) -> None:
        """Logs the message if it was not logged for this session before."""
        if key not in self._logged:
            log.info(message, key[1])
        self._logged[key] = None
        self._logged.move_to_end(key)
        if len(self._logged) > MOST_DIALOGUES:
            self._logged.popitem(last=False)


def _whole(kv_name: str) -> Forget:
    """The loop has the log."""
    return Forget(kv_name, array("i"), 0, b"")


class PromptWatch:
    """Logs, once a session, that a prompt changed what the dialogue's last prompt already had: the
    KV behind that place is of no use. It logs places, but no text."""

    def __init__(self, most_tokens: int = MOST_TOKENS):
        self._most_tokens = most_tokens
        self._tokens = 0
        self._sessions: OrderedDict[SessionKey, Watched] = OrderedDict()

    def see(self, key: SessionKey, kv_name: str, prompt: Prompt) -> None:
        """`key`: the session, or the owner and the conversation."""
        watched = self._sessions.setdefault(key, Watched())
        self._sessions.move_to_end(key)
        if watched.changed:
            return
        self._tokens -= watched.tokens
        before = watched.pop(kv_name) or _same_dialogue(watched, prompt)
        change = _change(before, prompt) if before is not None else None
        if change is None:
            watched.add(kv_name, prompt)
        else:
            log.warning("the prompt of session %r changed %s (said once)", key[1], change)
            watched.changed = True
            watched.prompts.clear()
            watched.weights.clear()
        self._tokens += watched.tokens
        while self._tokens > self._most_tokens or len(self._sessions) > MOST_DIALOGUES:
            _, gone = self._sessions.popitem(last=False)
            self._tokens -= gone.tokens

    def forget(self, key: SessionKey) -> None:
        """The session or conversation is deleted, or edited by its client."""
        gone = self._sessions.pop(key, None)
        self._tokens -= gone.tokens if gone is not None else 0


def _same_dialogue(watched: Watched, prompt: Prompt) -> Prompt | None:
    """The prompt of a dialogue whose beginning was another: its last message is still there."""
    for past in reversed(watched.prompts.values()):
        place = len(past.messages) - 1
        if place < len(prompt.messages) - 1 and common_messages(
            past.messages[place:], prompt.messages[place:]
        ):
            return past
    return None


def _change(before: Prompt, prompt: Prompt) -> str | None:
    """Where the prompt differs from the one before; None: it only goes on."""
    place = common_prefix(before.ids, prompt.ids)
    if place == len(before.ids):
        return None
    token = f"at token {place:,} of {len(before.ids):,}"
    if before.tools != prompt.tools:
        return f"{token}: its tools are others"
    equal = common_messages(before.messages, prompt.messages)
    if equal == len(before.messages):
        return None  # the chat template shows the same messages in another way
    if equal == len(prompt.messages):
        return f"{token}: it ends after message {equal}"
    return f"{token}, in message {equal + 1} ({prompt.messages[equal]['role']})"
