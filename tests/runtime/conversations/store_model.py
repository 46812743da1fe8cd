"""A model of `HistoryStore` of dictionaries and lists: its rules without a database, and nothing
that makes it fast."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from pensieve.runtime.conversations.lines import Edit
from pensieve.runtime.conversations.schema import Gone, Name
from pensieve.runtime.conversations.transcript import Transcript, title_of
from pensieve.scheduler.turns.conversations import common_prefix
from pensieve.scheduler.types import ErrorKind, RequestError


@dataclass(frozen=True)
class ModelTurn:
    parent: int | None
    whole: Transcript
    id: bytes | None
    kind: Literal["chat", "completion", "edit"]


@dataclass(frozen=True)
class ModelConversation:
    """`number` is never used again."""

    number: int
    created: float
    active: float
    ttl: float | None = None
    history_ttl: float | None = None
    pinned_until: float = 0.0
    parent: str | None = None
    thread: str = ""
    body: str | None = None
    tokens: int = 0
    salt: bytes = b""
    title: str | None = None
    head: int | None = None


class ModelOpening(NamedTuple):
    turn: bytes
    alone: bool
    seen: dict[Name, ModelConversation]


@dataclass
class State:
    conversations: dict[Name, ModelConversation] = field(default_factory=dict)
    turns: dict[int, ModelTurn] = field(default_factory=dict)
    # turn, conversation, alone
    open_turns: list[tuple[bytes, int, bool]] = field(default_factory=list)
    expired: list[Gone] = field(default_factory=list)

    def copy(self) -> State:
        return State(
            self.conversations.copy(),
            self.turns.copy(),
            self.open_turns.copy(),
            self.expired.copy(),
        )


class StoreModel:
    """Its methods are those of the store. Expired conversations are gone at once."""

    def __init__(self, history_ttl: float | None, quota: int | None, most_branches: int):
        self.history_ttl = history_ttl
        self._quota = quota
        self._most_branches = most_branches
        self._last = 0
        self.state = State()

    def do(self, now: float, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """All of a call, or nothing of it."""
        before = self.state.copy()
        for name, conversation in list(self.state.conversations.items()):
            if not self._is_live(conversation, now) and name in self.state.conversations:
                self.state.expired.append(self._remove(name))
        try:
            return call(*args, **options)
        except RequestError:
            self.state = before
            raise

    # -- reading

    def find(self, name: Name, now: float) -> tuple[ModelConversation, Transcript | None] | None:
        conversation = self.state.conversations.get(name)
        if conversation is None:
            return None
        return conversation, self.state.turns[
            conversation.head
        ].whole if conversation.head is not None else None

    def get(self, name: Name, now: float) -> ModelConversation:
        if name not in self.state.conversations:
            raise RequestError(ErrorKind.NOT_FOUND, "unknown")
        return self.state.conversations[name]

    def page(
        self, owner: str, limit: int, after: str | None, ascending: bool, now: float
    ) -> tuple[list[str], bool]:
        if after is not None:
            self.get(Name(owner, after), now)
        listed = [
            name
            for name in self.state.conversations
            if name.owner == owner and name.kind == "conversation"
        ]
        listed.sort(key=lambda name: self.state.conversations[name].number, reverse=not ascending)
        ids = [name.id for name in listed]
        rest = ids[ids.index(after) + 1 :] if after is not None else ids
        return rest[:limit], len(rest) > limit

    def committed(self, turn: bytes) -> bool:
        return any(self.state.turns[number].id == turn for number in self.used_turns())

    # -- writing

    def create(self, name: Name, now: float) -> ModelConversation:
        self._need_free(name)
        return self._insert(name, now)

    def fork(self, name: Name, new_id: str, now: float) -> ModelConversation:
        source = self.get(name, now)
        new = name._replace(id=new_id)
        self._need_free(new)
        fork = self._insert(new, now, parent=name.id, body=source.body)
        copied = replace(
            fork, head=source.head, tokens=source.tokens, salt=source.salt, title=source.title
        )
        self.state.conversations[new] = copied
        return copied

    def change(self, name: Name, now: float, **values: float | str | None) -> ModelConversation:
        changed = replace(self.get(name, now), **values)  # type: ignore[arg-type]
        self.state.conversations[name] = changed
        for branch in self.branches(name):
            self.state.conversations[branch] = replace(
                self.state.conversations[branch],
                ttl=changed.ttl,
                history_ttl=changed.history_ttl,
                pinned_until=changed.pinned_until,
                body=changed.body,
            )
        return changed

    def edit(self, name: Name, now: float, change: Edit) -> ModelConversation:
        conversation = self.get(name, now)
        if self._held_by_another(conversation.number, b""):
            raise RequestError(ErrorKind.CONFLICT, "in flight")
        line = self.line(conversation.head)
        turns = self.state.turns
        if line and turns[line[0]].kind == "completion":
            raise RequestError(ErrorKind.CONFLICT, "a completion")
        messages = tuple(change(turns[line[0]].whole.messages if line else ()))
        parent: int | None = None
        before = Transcript((), array("i"), "", 0)
        for turn in reversed(line):
            whole = turns[turn].whole
            adds = self._message_count(turns[turn].parent) < len(whole.messages)
            if whole.messages == messages[: len(whole.messages)] and (adds or turn == line[0]):
                parent = turn
                before = whole
        head = parent
        if messages != before.messages:
            self._last += 1
            head = self._last
            turns[head] = ModelTurn(parent, replace(before, messages=messages), None, "edit")
        whole = replace(before, messages=messages)
        edited = replace(
            conversation,
            head=head,
            tokens=len(whole.tokens),
            active=now,
            title=title_of(whole),
        )
        self.state.conversations[name] = edited
        if line and parent != line[0]:
            gone = self._gone(name, conversation)
            kept = min(gone.shared, common_prefix(gone.tokens, whole.tokens))
            gone = gone._replace(kept=kept)
            self.state.expired += [gone] if gone.shared < len(gone.tokens) else []
        return edited

    def delete(self, name: Name, now: float) -> Gone:
        self.get(name, now)
        return self._remove(name)

    def admit(self, names: Sequence[Name], now: float, turn: bytes, alone: bool) -> ModelOpening:
        seen = {}
        for name in names:
            conversation = self.state.conversations.get(name)
            if conversation is None:
                if alone:
                    raise RequestError(ErrorKind.NOT_FOUND, "unknown")
                self._need_room(name.owner)
                continue
            if alone and self._held_by_another(conversation.number, turn):
                raise RequestError(ErrorKind.CONFLICT, "in flight")
            seen[name] = conversation
            self.state.open_turns.append((turn, conversation.number, alone))
        return ModelOpening(turn, alone, seen)

    def release(self, turn: bytes) -> None:
        self.state.open_turns = [one for one in self.state.open_turns if one[0] != turn]

    def commit(
        self,
        name: Name,
        whole: Transcript,
        now: float,
        salt: bytes,
        behind: Name | None,
        opening: ModelOpening | None,
        kind: Literal["chat", "completion"],
        **about: str | None,
    ) -> str:
        """Returns the kind of the conversation with the turn."""
        conversations = self.state.conversations
        conversation = conversations.get(name)
        before = conversations.get(behind) if behind is not None else None
        kept = (
            conversation is None or opening is None or self._unchanged(name, conversation, opening)
        )
        if opening is not None:
            if opening.alone and (
                conversation is None or not kept or opening.seen[name].number != conversation.number
            ):
                raise RequestError(ErrorKind.CONFLICT, "too late")
            self.release(opening.turn)
        if conversation is None:
            conversation = self._insert(name, now, **about)
        branches = self.branches(name)
        parent = self._nearest(
            [(before or conversation).head, *(conversations[branch].head for branch in branches)],
            whole,
        )
        place = name
        if not kept:
            assert opening is not None
            place = Name(name.owner, opening.turn.hex(), "branch")
            new_branch = self._insert(place, now, parent=name.id, thread=conversation.thread)
            conversations[place] = replace(new_branch, history_ttl=conversation.history_ttl)
        self._last += 1
        self.state.turns[self._last] = ModelTurn(
            parent, whole, opening.turn if opening is not None else None, kind
        )
        conversations[place] = replace(
            conversations[place],
            head=self._last,
            tokens=len(whole.tokens),
            active=now,
            salt=salt,
            title=title_of(whole),
        )
        for branch in [branch for branch in branches if conversations[branch].head == parent]:
            del conversations[branch]
        while len(oldest := self.branches(name)) > self._most_branches:
            self.state.expired.append(self._remove(oldest[0]))
        return place.kind

    # -- within

    def _is_live(self, conversation: ModelConversation, now: float) -> bool:
        ttl = conversation.history_ttl if conversation.history_ttl is not None else self.history_ttl
        held = any(number == conversation.number for _, number, _ in self.state.open_turns)
        return held or ttl is None or conversation.active + ttl > now

    def _unchanged(
        self, name: Name, conversation: ModelConversation, opening: ModelOpening
    ) -> bool:
        seen = opening.seen.get(name)
        same = conversation.head is None
        if seen is not None and seen.number == conversation.number:
            same = (seen.head, seen.active) == (conversation.head, conversation.active)
        return same and not self._held_by_another(conversation.number, opening.turn)

    def _held_by_another(self, conversation: int, turn: bytes) -> bool:
        return any(
            number == conversation and alone and held != turn
            for held, number, alone in self.state.open_turns
        )

    def _need_free(self, name: Name) -> None:
        if name in self.state.conversations:
            raise RequestError(ErrorKind.CONFLICT, "taken")
        self._need_room(name.owner)

    def _need_room(self, owner: str) -> None:
        if self._quota is not None and self.count(owner) >= self._quota:
            raise RequestError(ErrorKind.TOO_MANY, "too many")

    def count(self, owner: str) -> int:
        return sum(
            1 for name in self.state.conversations if name.owner == owner and name.kind != "branch"
        )

    def _insert(
        self,
        name: Name,
        now: float,
        parent: str | None = None,
        thread: str | None = None,
        body: str | None = None,
    ) -> ModelConversation:
        self._last += 1
        conversation = ModelConversation(
            self._last, now, now, parent=parent, thread=thread or name.id, body=body
        )
        self.state.conversations[name] = conversation
        return conversation

    def branches(self, name: Name) -> list[Name]:
        """The oldest first."""
        branches = [
            other
            for other, branch in self.state.conversations.items()
            if (other.owner, other.kind, branch.parent, name.kind)
            == (name.owner, "branch", name.id, "conversation")
        ]
        return sorted(branches, key=lambda other: self.state.conversations[other].number)

    def line(self, head: int | None) -> list[int]:
        """From the head to the first turn."""
        line = []
        while head is not None:
            line.append(head)
            head = self.state.turns[head].parent
        return line

    def used_turns(self) -> set[int]:
        return {
            turn
            for conversation in self.state.conversations.values()
            for turn in self.line(conversation.head)
        }

    def _message_count(self, turn: int | None) -> int:
        return len(self.state.turns[turn].whole.messages) if turn is not None else 0

    def _kept(self, turn: int) -> int:
        """Tokens that it shares with the turn before it."""
        parent = self.state.turns[turn].parent
        if parent is None:
            return 0
        return common_prefix(
            self.state.turns[parent].whole.tokens, self.state.turns[turn].whole.tokens
        )

    def _nearest(self, heads: Sequence[int | None], whole: Transcript) -> int | None:
        best = None
        longest = (-1, -1)
        for head in heads:
            line = self.line(head)
            equal = (
                common_prefix(self.state.turns[line[0]].whole.tokens, whole.tokens) if line else 0
            )
            for turn in line:
                messages = self.state.turns[turn].whole.messages
                log = len(self.state.turns[turn].whole.tokens)
                if messages == whole.messages[: len(messages)] and (whole.messages or log <= equal):
                    if (len(messages), log) > longest:
                        best = turn
                        longest = (len(messages), log)
                    break
                equal = min(equal, self._kept(turn))
        return best

    def _remove(self, name: Name) -> Gone:
        self.state.expired += [self._remove(branch) for branch in self.branches(name)]
        gone = self.state.conversations.pop(name)
        self.state.open_turns = [one for one in self.state.open_turns if one[1] != gone.number]
        return self._gone(name, gone)

    def _gone(self, name: Name, gone: ModelConversation) -> Gone:
        """What ends with the head that it had."""
        line = self.line(gone.head)
        used = self.used_turns()
        own = [turn for turn in line if turn not in used]
        tokens = self.state.turns[line[0]].whole.tokens if line else array("i")
        alone = own == line
        shared = 0 if alone else min((self._kept(turn) for turn in own), default=len(tokens))
        told = name.kind == "conversation" or (name.kind == "response" and alone)
        return Gone(name, gone.thread if told or not line else None, tokens, shared, gone.salt)
