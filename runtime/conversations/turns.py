"""Between the API and the history store: makes the prompt of a turn, and stores the turn.

    open_chat, open_completion -> OpenTurn: the whole prompt, stored ids spliced in
    OpenTurn.commit            -> on disk if it has a name, and among the recent turns; then the
                               reply's end is sent
    OpenTurn.close             -> after any end

The database works in its own thread, the tokenizer in others; all other code here runs on the event
loop's thread. One process has the histories (`TurnManager`); others that make prompts call it
(`Turns`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from ...scheduler.turns.conversations import common_prefix
from ...scheduler.types import Erasure, ErrorKind, RequestError
from ..messages import Forget, Fork, Keep
from ..text.tokenizer import Tokenizer
from .lines import Edit, first_turn, planned_edit
from .schema import Gone, Kind, Name, Opening, StoredConversation
from .sessions import Prompt, PromptWatch, SessionKey, Sessions
from .store import HistoryStore, Swept
from .transcript import (
    OTHERS,
    Message,
    RecentTurns,
    StoredTurn,
    Transcript,
    common_beginning,
    dialogue_keys,
    ends_with_completion,
    spliced,
    stored_tokens,
    tokens_inside,
    without_ids,
)

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Tell = Callable[[Fork | Keep], None]
Work = Callable[[], Awaitable[None]]
Erase = Callable[[Forget], asyncio.Future[Erasure]]
# after the first time that the database did not answer; then the reply ends with 503
COMMIT_PATIENCE_S = 10.0
COMMIT_RETRY_S = 0.5
EXPIRY_SECONDS = 60.0  # between two looks for expired conversations
CATCH_UP_SECONDS = 0.1  # between two readings of deletions by a server that is behind
FORGET_TOKENS = 100  # tokens that take as much memory as a message without any
# tokens of deleted conversations; above this no more are deleted until their KV is erased
MOST_UNERASED = 400_000
HUNG_SECONDS = 12.0  # longer than a statement may take (`databases.SETTINGS`)
WATCH_SECONDS = 1.0
# between two looks whether a full disk has room again, and after a failure of background work
RECOVERY_S = 1.0
COMPLAINT_S = 60.0  # least time between two log messages about the same background work
Stored = tuple[StoredConversation, StoredTurn | None]
"""A conversation or response and its last turn, as `HistoryStore.find` gives them."""


class Destination(NamedTuple):
    """The name under which a turn is stored, and the values that a new name gets
    (`HistoryStore.commit`)."""

    name: Name
    behind: Name | None = None
    about: dict[str, str | None] = {}  # noqa: RUF012 (never changed)


BEGINNINGS = ("branch:", "conversation:", "response:", "session:")
"""Of the loop's names, other than plain names of clients."""


def kv_name(name: Name, thread: str) -> str:
    """The loop's name for the conversation. It differs between owners; without keys it is the
    client's name, unless that begins as a name of another kind does."""
    plain = not name.owner and name.kind == "conversation"
    if plain and not thread.startswith(BEGINNINGS):
        return thread
    return f"{name.kind}:{name.owner}:{thread}"


def session_name(owner: str, session: str) -> str:
    """The loop's name for the KV of a session, which is not stored."""
    return f"session:{owner}:{session}"


class OpenTurn:
    """A turn from its prompt to its commit. The code that opened it closes it in any case.

    messages   the whole dialogue; none for a plain completion
    prompt     token ids, the whole context
    text       the prompt's text as the client knows it, "" for a prompt of token ids
    inside     leading tokens that `text` stands for
    opening    the store's admission, None: the turn is not stored
    stored_tokens  leading tokens that had KV in a stored turn, under the salt `stored_salt`
    """

    def __init__(
        self,
        histories: Turns,
        owner: str,
        messages: Sequence[Message],
        prompt: array[int],
        text: str,
        inside: int,
        destinations: tuple[Destination, ...],
        opening: Opening | None,
        stored: Stored | None,
    ):
        """`stored`: the stored history that the prompt continues or was compared with."""
        self.messages = tuple(messages)
        self.prompt = prompt
        self.text = text
        self.inside = inside
        self.owner = owner
        self.destinations = destinations
        self.opening = opening
        self._histories = histories
        self._closed = opening is None
        self._session: str | None = None
        self.stored_tokens = 0
        self.stored_salt = b""
        if stored is not None:
            self.stored_tokens = stored_tokens(stored[1], prompt)
            self.stored_salt = stored[0].salt

    def in_session(self, session: str) -> None:
        """Assigns a turn without a name to one of the session's dialogues; an agent has several at
        a time. Turns with equal beginnings, up to the user's first message, belong to one
        dialogue."""
        begins = next(
            (at for at, message in enumerate(self.messages, 1) if message["role"] == "user"), None
        )
        dialogue = dialogue_keys(f"{self.owner}:{session}", self.messages[:begins])[-1]
        self._session = f"session:{dialogue.hex()}"

    @property
    def in_conversation(self) -> bool:
        """True if the turn is stored in a conversation that the client names."""
        return bool(self.destinations) and self.destinations[0].name.kind == "conversation"

    @property
    def conversation(self) -> str | None:
        """The loop's name for the conversation, or None."""
        if not self.destinations:
            return self._session
        name, _, about = self.destinations[0]
        return kv_name(name, about.get("thread") or name.id)

    async def commit(
        self,
        reply: Sequence[int],
        delivered: str,
        answer: Message | None,
        salt: bytes,
        body: str | None = None,
    ) -> None:
        """The turn ends with these tokens, of which the client gets the text `delivered`, in a chat
        as `answer`.

        `salt`: of its request; `body`: the response to store.

        With a name it is stored on return; nothing of the reply's end may be sent before. Raises
        RequestError: STORAGE_FULL if it cannot be written, UNAVAILABLE if the database does not
        answer, CONFLICT if another turn has gone on with the server's history meanwhile, or the
        conversation was deleted.
        """
        histories = self._histories
        inside = 0
        text = ""
        if histories.tokenizer is not None and self.inside == len(self.prompt):
            before = histories.tokenizer.context(self.prompt) if answer is None else ()
            inside, text = await asyncio.to_thread(
                tokens_inside, histories.tokenizer, reply, delivered, before
            )
        messages = (*self.messages, answer) if answer is not None else self.messages
        tokens = self.prompt + array("i", reply)
        whole = Transcript(messages, tokens, self.text + text, self.inside + inside)
        if self.destinations or answer is not None:
            place = TurnPlace(self.owner, self.destinations, self.opening)
            await histories.commit_turn(place, whole, salt, body, answer is not None)
            self._closed = True

    def close(self, reply: Sequence[int] = (), salt: bytes = b"") -> None:
        """Called when the loop has been told the end of its requests. `reply`, `salt`: of the first
        one, if there was one. Idempotent."""
        if not self._closed:
            assert self.opening is not None
            self._closed = True
            tokens = self.prompt + array("i", reply)
            self._histories.close_turn(self.opening.turn, tokens, salt)


class TurnPlace(NamedTuple):
    """Where a turn is stored. `owner`, `destinations`, `opening`: as in `OpenTurn`."""

    owner: str
    destinations: tuple[Destination, ...] = ()
    opening: Opening | None = None


class Beginning(NamedTuple):
    """What the histories have for a turn that begins.

    opening   the store's admission, None: the turn is not stored
    past      the turn with the longest common beginning
    stored    the stored history, if it was read
    """

    opening: Opening | None = None
    past: StoredTurn | None = None
    stored: Stored | None = None


class Turns(ABC):
    """Opens turns. A subclass has the histories, or calls the process that has them. A turn that
    it has begun is closed (`close_turn`) in any case."""

    def __init__(self, tokenizer: Tokenizer | None):
        self.tokenizer = tokenizer

    # -- of the histories

    @abstractmethod
    async def begin_chat(
        self,
        owner: str,
        names: Sequence[Name],
        conversation: Name | None,
        messages: Sequence[Message],
    ) -> Beginning:
        """A turn of this dialogue, which is stored under `names`. RequestError (TOO_MANY), before
        anything is computed, if a new history is beyond its owner's quota."""

    @abstractmethod
    async def begin_completion(self, name: Name) -> Beginning:
        """A plain completion that is stored under this name. RequestError as `begin_chat`."""

    @abstractmethod
    async def go_on(self, name: Name) -> Beginning:
        """The one turn with the server's history. RequestError: NOT_FOUND, and CONFLICT if there
        is another, on any server."""

    @abstractmethod
    async def check_quota(self, name: Name) -> None:
        """RequestError as `begin_chat`."""

    @abstractmethod
    async def find(self, name: Name) -> Stored:
        """RequestError (NOT_FOUND)."""

    @abstractmethod
    async def get(self, name: Name) -> StoredConversation:
        """RequestError (NOT_FOUND)."""

    @abstractmethod
    async def commit_turn(
        self, place: TurnPlace, whole: Transcript, salt: bytes, body: str | None, is_chat: bool
    ) -> None:
        """Raises RequestError as `OpenTurn.commit`."""

    @abstractmethod
    def close_turn(self, turn: bytes, tokens: array[int], salt: bytes) -> None:
        """An open turn (`Opening.turn`) ends without a commit. `tokens`, `salt`: of its request, as
        far as it has come."""

    # -- of the sessions

    @abstractmethod
    def open_session(self, key: SessionKey, kv_name: str, held: ExitStack) -> None:
        """As `Sessions.open`."""

    @abstractmethod
    def say_once(self, key: SessionKey, message: str) -> None:
        """As `Sessions.say_once`."""

    @abstractmethod
    def watch_prompt(self, key: SessionKey, kv_name: str, prompt: Prompt) -> None:
        """As `PromptWatch.see`."""

    # -- turns

    async def open_chat(
        self,
        owner: str,
        conversation: str | None,
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        *,
        server_history: bool = False,
    ) -> OpenTurn:
        """`render` gives the prompt's text. With `server_history` the messages are new ones behind
        the stored.

        RequestError: NOT_FOUND if there is no such conversation to go on with, CONFLICT if such a
        turn is in flight already or the history ends with a completion.
        """
        name = Name(owner, conversation) if conversation is not None else None
        names = (name,) if name is not None else ()
        if name is None or not server_history:
            beginning = await self.begin_chat(owner, names, name, messages)
        else:
            beginning = await self.go_on(name)
        with self._closed_on_error(beginning):
            past = beginning.past
            if name is not None and server_history:
                if past is not None and ends_with_completion(past):
                    reason = (
                        f"conversation {conversation!r} ends with a plain completion, which a chat "
                        "would leave out"
                    )
                    cure = "continue it with /v1/completions, or send all messages"
                    raise RequestError(ErrorKind.CONFLICT, f"{reason}: {cure}", "conversation")
                messages = (*(past.transcript().messages if past is not None else ()), *messages)
            destinations = tuple(map(Destination, names))
            return await self._chat_turn(owner, messages, past, render, destinations, beginning)

    async def open_response(
        self,
        owner: str,
        *,
        previous: str | None,
        conversation: str | None,
        instructions: Sequence[Message],
        messages: Sequence[Message],
        render: Callable[[Sequence[Message]], str],
        stored_as: str | None,
    ) -> OpenTurn:
        """A turn behind the stored response `previous`, or in a conversation that exists; stored as
        a response too.

        `instructions` go in front of the dialogue and are not remembered. RequestError: as
        `open_chat`.
        """

        def with_instructions(dialogue: Sequence[Message]) -> str:
            return render([*instructions, *dialogue])

        snapshot = Name(owner, stored_as, "response") if stored_as is not None else None
        if conversation is not None:
            if snapshot is not None:
                await self.check_quota(snapshot)
            turn = await self.open_chat(
                owner, conversation, messages, with_instructions, server_history=True
            )
            if snapshot is not None:
                turn.destinations += (Destination(snapshot, behind=Name(owner, conversation)),)
            return turn
        before, past, stored = None, None, None
        if previous is not None:
            before, past = stored = await self.find(Name(owner, previous, "response"))
        dialogue = (*(past.transcript().messages if past is not None else ()), *messages)
        destinations: tuple[Destination, ...] = ()
        if snapshot is not None:
            thread = before.thread if before is not None else snapshot.id
            behind = Name(owner, previous, "response") if previous is not None else None
            destinations = (Destination(snapshot, behind, {"parent": previous, "thread": thread}),)
        names = [destination.name for destination in destinations]
        looked_up = () if past is not None else dialogue
        beginning = await self.begin_chat(owner, names, None, looked_up)
        with self._closed_on_error(beginning):
            if past is None:
                past = beginning.past
            beginning = beginning._replace(stored=stored)
            return await self._chat_turn(
                owner, dialogue, past, with_instructions, destinations, beginning
            )

    async def open_completion(
        self,
        owner: str,
        conversation: str | None,
        prompt: str | array[int],
        *,
        server_history: bool = False,
    ) -> OpenTurn:
        """`prompt`: text, or token ids; with `server_history` it goes on behind the stored log.

        Raises as `open_chat`.
        """
        name = Name(owner, conversation) if conversation is not None else None
        if name is not None and server_history:
            return await self._continue_log(name, prompt)
        beginning = await self.begin_completion(name) if name is not None else Beginning()
        with self._closed_on_error(beginning):
            text = ""
            inside = 0
            if isinstance(prompt, str):
                text = prompt
                prompt = await asyncio.to_thread(self._encoded, text, beginning.past)
                inside = len(prompt)
            destinations = (Destination(name),) if name is not None else ()
            stored_text = (), prompt, text, inside
            return OpenTurn(
                self, owner, *stored_text, destinations, beginning.opening, beginning.stored
            )

    async def _continue_log(self, name: Name, prompt: str | array[int]) -> OpenTurn:
        beginning = await self.go_on(name)
        with self._closed_on_error(beginning):
            past = beginning.past
            before = past.transcript() if past is not None else Transcript((), array("i"), "", 0)
            if before.inside == OTHERS:
                raise RequestError(
                    ErrorKind.CONFLICT,
                    f"conversation {name.id!r} holds tokens of another tokenizer",
                    "conversation",
                )
            if past is not None and past.messages and not past.tokens:
                raise RequestError(
                    ErrorKind.CONFLICT,
                    f"conversation {name.id!r} ends with items that no turn has computed yet, "
                    "which a completion would leave out: continue it with a chat or a response",
                    "conversation",
                )
            if isinstance(prompt, str):
                assert self.tokenizer is not None
                prompt = await asyncio.to_thread(
                    _encoded_behind, self.tokenizer, before.tokens, prompt
                )
            whole = before.tokens + prompt
            destinations = (Destination(name),)
            stored_text = (before.messages, whole, before.text, before.inside)
            return OpenTurn(
                self, name.owner, *stored_text, destinations, beginning.opening, beginning.stored
            )

    async def _chat_turn(
        self,
        owner: str,
        messages: Sequence[Message],
        past: StoredTurn | None,
        render: Callable[[Sequence[Message]], str],
        destinations: tuple[Destination, ...],
        beginning: Beginning,
    ) -> OpenTurn:
        text, ids = await asyncio.to_thread(self._prompt, messages, past, render)
        opening, _, stored = beginning
        return OpenTurn(self, owner, messages, ids, text, len(ids), destinations, opening, stored)

    def _prompt(
        self,
        messages: Sequence[Message],
        past: StoredTurn | None,
        render: Callable[[Sequence[Message]], str],
    ) -> tuple[str, array[int]]:
        assert self.tokenizer is not None
        text = render(without_ids(messages))
        ids = spliced(self.tokenizer, text, past)
        return text, self.tokenizer.encode_rendered(text) if ids is None else ids

    def _encoded(self, text: str, past: StoredTurn | None) -> array[int]:
        assert self.tokenizer is not None
        ids = spliced(self.tokenizer, text, past)
        return self.tokenizer.encode(text) if ids is None else ids

    @contextlib.contextmanager
    def _closed_on_error(self, beginning: Beginning) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if beginning.opening is not None:
                self.close_turn(beginning.opening.turn, array("i"), b"")
            raise


class TurnManager(Turns):
    """The histories, and the turns over them. `tell` sends a message to the loop, `forget` one that
    is answered (as `EngineClient`'s do)."""

    def __init__(self, store: HistoryStore, tell: Tell, forget: Erase, tokenizer: Tokenizer | None):
        super().__init__(tokenizer)
        self._open: dict[bytes, Sequence[Name]] = {}  # turns that the store keeps open
        self._deleted: dict[bytes, Gone] = {}  # those whose conversation was deleted meanwhile
        self._store = store
        self._tell = tell
        self._erase = forget
        self.sessions = Sessions(forget)
        self.prompts = PromptWatch()
        store.use_tokenizer(tokenizer.digest() if tokenizer is not None else b"")
        self.kind = store.kind
        self._faults: dict[str, str] = {}  # of background work, by its name
        # tombstones of a shared store: told to the loop, and erased there
        self._handed = self._erased = 0
        self._erasing: list[asyncio.Future[Erasure]] = []
        self._unerased = 0  # tokens that the loop has been told to erase
        self._tasks: list[asyncio.Task[None]] = []
        if store.shared:
            store.register()
            self._handed = self._erased = store.seen
            self._repeat("renewal of leases", self._until_renewal, self._keep_in_step)
            self._repeat("watch over the database", lambda: WATCH_SECONDS, self._watch)
        self._repeat("recovery of the histories", lambda: RECOVERY_S, self._recover)
        self._recent = RecentTurns()
        self._thread = ThreadPoolExecutor(1, "histories")

    async def run(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Runs a method of the store in its thread. Conversations that have expired by then are
        removed from the loop too.

        A call waits for the ones before it as long as they take: only a database that does not
        answer is an error."""

        def work_and_look() -> tuple[Result, list[Gone], int]:
            return work(*args, **kwargs), self._store.take_expired(), self._store.seen

        result, expired, seen = await asyncio.get_running_loop().run_in_executor(
            self._thread, work_and_look
        )
        for gone in expired:
            self._forget(gone)
        self._handed = max(self._handed, seen)
        return result

    # -- in the background

    @property
    def fault(self) -> str | None:
        """What is wrong with the histories, for users; None: they are read and written."""
        fault = self._store.fault  # another thread may end it at any time
        if fault is not None:
            return fault.message
        return next(iter(self._faults.values()), None)

    def _repeat(self, name: str, seconds: Callable[[], float], work: Work) -> None:
        """Begins background work, which waits `seconds()` before each time, after a failure at most
        RECOVERY_S. Errors of the database do not end it: they are a `fault` until it succeeds, and
        are logged once a minute. Another error is a mistake of this program. It ends the work, and
        stays a fault."""
        task = asyncio.create_task(self._repeated(name, seconds, work))
        task.add_done_callback(partial(self._ended, name))
        self._tasks.append(task)

    async def _repeated(self, name: str, seconds: Callable[[], float], work: Work) -> None:
        clock = asyncio.get_running_loop().time
        silent_until = 0.0
        logged = False  # the latest error is in the log
        while True:
            pause = min(seconds(), RECOVERY_S) if name in self._faults else seconds()
            await asyncio.sleep(pause)
            try:
                await work()
            except (RequestError, self._store.errors) as error:
                is_request_error = isinstance(error, RequestError)
                self._faults[name] = (
                    str(error) if is_request_error else f"{name}: the database refuses it"
                )
                if clock() >= silent_until:
                    silent_until = clock() + COMPLAINT_S
                    logged = True
                    log.error("%s: %s", name, error, exc_info=None if is_request_error else error)
            else:
                self._faults.pop(name, None)
                if logged:
                    logged = False
                    log.warning("%s: it works again", name)

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults[name] = f"{name}: ended by a mistake of this program; restart the server"
            log.critical("%s", self._faults[name], exc_info=error)

    async def _recover(self) -> None:
        """While nothing can be written, turns are refused before they are computed."""
        if self._store.fault is not None:
            await self.run(self._store.recover)

    async def _watch(self) -> None:
        """Ends a statement that a database neither answers nor refuses by closing the
        connection."""
        if self._store.waiting() > HUNG_SECONDS:
            self._store.interrupt()

    async def _keep_in_step(self) -> None:
        """Renews this server's leases and learns of deletions on the other servers."""
        # KV that the disk could not erase is erased after the next start: its tombstone stays until
        # then.
        self._erasing = [
            one
            for one in self._erasing
            if not one.done() or one.cancelled() or one.result() is Erasure.REFUSED
        ]
        if not self._erasing and not self._deleted:
            self._erased = self._handed
        read = self._unerased <= MOST_UNERASED
        await self.run(self._store.keep_in_step, list(self._open), self._erased, read)

    def _until_renewal(self) -> float:
        reads_on = self._store.behind and self._unerased <= MOST_UNERASED
        return CATCH_UP_SECONDS if reads_on else self._store.lease / 3

    def expire_in_background(self) -> None:
        """Deletes expired conversations from now on. Called on the event loop. The first time comes
        after EXPIRY_SECONDS: a machine that starts with a clock that is ahead may have been
        corrected by then."""
        self._repeat("expiry", lambda: EXPIRY_SECONDS, self._sweep)

    async def _sweep(self) -> None:
        """Deletes what has expired, a few conversations at a time. Turns come between: after each
        piece the database is free for as long as the piece took."""
        clock = asyncio.get_running_loop().time
        conversations, more = 0, True
        while more:
            began = clock()
            swept = await self.run(self._store.expire, self.now())
            conversations += swept.conversations
            more = swept.more
            await asyncio.sleep(clock() - began)
            while self._unerased > MOST_UNERASED:
                await asyncio.sleep(CATCH_UP_SECONDS)
        if conversations:
            log.info("deleted %d expired conversations, branches and responses", conversations)

    async def expire_some(self) -> Swept:
        """Deletes some of the expired conversations. If the database refuses, a later call does
        it."""
        try:
            return await self.run(self._store.expire, self.now())
        except RequestError as error:
            log.warning("expired conversations cannot be deleted now: %s", error.message)
            return Swept(0, more=False)

    def now(self) -> float:
        """The time that conversations are stored with."""
        return self._store.now()

    async def close(self) -> None:
        """Called after the last commit."""
        await self.run(self._store.close)  # behind a statement that may have to be ended
        for task in self._tasks:
            task.cancel()
        self._thread.shutdown()

    # -- turns

    async def _past(
        self, owner: str, name: Name | None, messages: Sequence[Message]
    ) -> tuple[StoredTurn | None, Stored | None]:
        """Returns the turn with the longest common beginning, and the stored history if the disk
        was asked. The disk is asked only for replies that the recent turns do not contain."""
        recent = self._recent.find(dialogue_keys(owner, messages))
        covered = _message_count(recent)
        if name is None or all(message["role"] != "assistant" for message in messages[covered:]):
            return recent, None
        stored = await self.run(self._store.find, name, self.now())
        match = common_beginning(stored[1], messages) if stored is not None else None
        return (match if _message_count(match) > covered else recent), stored

    async def begin_chat(
        self,
        owner: str,
        names: Sequence[Name],
        conversation: Name | None,
        messages: Sequence[Message],
    ) -> Beginning:
        """Keeps the existing histories from expiring while the turn is open."""
        opening = await self._open_turn(self._store.admit, names) if names else None
        with self._released_on_error(opening):
            past, stored = await self._past(owner, conversation, messages)
        return Beginning(opening, past, stored)

    async def begin_completion(self, name: Name) -> Beginning:
        opening = await self._open_turn(self._store.admit, [name])
        with self._released_on_error(opening):
            stored = await self.run(self._store.find, name, self.now())
        return Beginning(opening, stored[1] if stored is not None else None, stored)

    async def go_on(self, name: Name) -> Beginning:
        def admit_and_find(names: Sequence[Name], now: float, turn: bytes) -> Opening:
            with self._store.transaction(durable=False):
                opening = self._store.admit(names, now, turn, alone=True)
                read.append(self._store.find(name, now))
            return opening

        read: list[Stored | None] = []
        opening = await self._open_turn(admit_and_find, [name])
        (stored,) = read
        assert stored is not None
        return Beginning(opening, stored[1], stored)

    async def check_quota(self, name: Name) -> None:
        await self.run(self._store.admit, [name], self.now())

    async def _open_turn(
        self, admit: Callable[[Sequence[Name], float, bytes], Opening], names: Sequence[Name]
    ) -> Opening:
        turn = uuid.uuid4().bytes
        self._open[turn] = names
        try:
            return await self.run(admit, names, self.now(), turn)
        except BaseException:
            self._release(turn)
            raise

    @contextlib.contextmanager
    def _released_on_error(self, opening: Opening | None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if opening is not None:
                self._release(opening.turn)
            raise

    def _release(self, turn: bytes) -> None:
        """Releases the turn if it is not committed; a commit releases it."""

        def release() -> None:
            with contextlib.suppress(RequestError):  # a shared database ends its lease in seconds
                self._store.release(turn)

        if self._open.pop(turn, None) is not None:
            self._deleted.pop(turn, None)
            with contextlib.suppress(RuntimeError):  # the store is closed: its server ends
                self._thread.submit(release).add_done_callback(Future.result)  # a fault is logged

    async def find(self, name: Name) -> Stored:
        stored = await self.run(self._store.find, name, self.now())
        if stored is None:
            raise RequestError(
                ErrorKind.NOT_FOUND, f"there is no {name.kind} {name.id!r}", PARAMETERS[name.kind]
            )
        return stored

    async def commit_turn(
        self, place: TurnPlace, whole: Transcript, salt: bytes, body: str | None, is_chat: bool
    ) -> None:
        if place.destinations:
            await self.store_turn(place.destinations, place.opening, whole, salt, body)
        if is_chat:
            self.remember(place.owner, whole)

    def close_turn(self, turn: bytes, tokens: array[int], salt: bytes) -> None:
        self.erase_if_deleted(turn, tokens, salt)
        self._release(turn)

    async def store_turn(
        self,
        destinations: Sequence[Destination],
        opening: Opening | None,
        whole: Transcript,
        salt: bytes,
        body: str | None,
    ) -> None:
        """All of them or none. While the database does not answer it is asked again: once at least,
        and for COMMIT_PATIENCE_S.

        Raises RequestError as `OpenTurn.commit`."""
        now = self.now()

        def commit() -> list[StoredConversation]:
            with self._store.transaction():
                if opening is not None and self._store.committed(opening.turn):
                    return []
                first, *others = destinations
                stored = [self._commit(first, whole, now, salt, body, opening)]
                return stored + [
                    self._commit(destination, whole, now, salt, body, None)
                    for destination in others
                ]

        for stored in await self._until_answered(commit):
            if stored.kind != "branch" and (stored.ttl is not None or stored.pinned_until > now):
                self._keep(stored, now)
        if opening is not None:
            self._open.pop(opening.turn, None)
            self._deleted.pop(opening.turn, None)  # the turn has made the conversation anew
        names = {destination.name for destination in destinations}
        for turn, gone in self._deleted.items():
            if gone.name in names:  # the name stands for another conversation now
                self._deleted[turn] = gone._replace(thread=None)

    async def _until_answered(self, work: Callable[[], Result]) -> Result:
        clock = asyncio.get_running_loop().time
        until: float | None = None
        while True:
            try:
                return await self.run(work)
            except RequestError as error:
                if error.kind != ErrorKind.UNAVAILABLE or (until is not None and clock() >= until):
                    raise
                if until is None:  # the time in the queue before does not count
                    until = clock() + COMMIT_PATIENCE_S
            await asyncio.sleep(COMMIT_RETRY_S)

    def _commit(
        self,
        destination: Destination,
        whole: Transcript,
        now: float,
        salt: bytes,
        body: str | None,
        opening: Opening | None,
    ) -> StoredConversation:
        about = destination.about
        if destination.name.kind == "response":
            about = about | {"body": body}
        return self._store.commit(
            destination.name, whole, now, salt, destination.behind, opening, **about
        )

    def remember(self, owner: str, whole: Transcript) -> None:
        """Remembers the dialogue for clients that will send all of it again."""
        keys = dialogue_keys(owner, whole.messages)
        past = self._recent.find(keys[:-1])
        self._recent.add(keys, StoredTurn.behind(past, whole))

    # -- sessions

    def open_session(self, key: SessionKey, kv_name: str, held: ExitStack) -> None:
        self.sessions.open(key, kv_name, held)

    def say_once(self, key: SessionKey, message: str) -> None:
        self.sessions.say_once(key, message)

    def watch_prompt(self, key: SessionKey, kv_name: str, prompt: Prompt) -> None:
        self.prompts.see(key, kv_name, prompt)

    # -- conversations

    async def get(self, name: Name) -> StoredConversation:
        return await self.run(self._store.get, name, self.now())

    async def load(self, name: Name) -> tuple[StoredConversation, Transcript]:
        """The conversation with all of its history. RequestError (NOT_FOUND)."""
        conversation, past = await self.find(name)
        return conversation, past.transcript() if past is not None else Transcript(
            (), array("i"), "", 0
        )

    async def in_flight(self, name: Name) -> bool:
        """True if a turn of the conversation is open, on any server."""
        return await self.run(self._store.in_flight, name, self.now())

    async def page(
        self, owner: str, limit: int, after: str | None, ascending: bool
    ) -> tuple[list[StoredConversation], bool]:
        return await self.run(self._store.page, owner, limit, after, ascending, self.now())

    async def create(
        self, name: Name, messages: Sequence[Message] = (), metadata: str | None = None
    ) -> StoredConversation:
        """`metadata`: JSON. RequestError as `HistoryStore.create`. Turns are stored while the
        messages are encoded."""
        first = await asyncio.to_thread(first_turn, messages) if messages else None
        return await self.run(self._store.create, name, self.now(), first, metadata)

    async def edit(self, name: Name, change: Edit) -> StoredConversation:
        """As `HistoryStore.edit`, but turns are stored while the edit is computed. If one of them,
        or another edit, changes this conversation, it is computed again, and turns wait.
        `change` is called in another thread, once or twice."""
        conversation, line = await self.run(self._store.begin_edit, name, self.now())
        planned = await asyncio.to_thread(planned_edit, conversation, line, change)
        edited = await self.run(self._store.finish_edit, self.now(), planned)
        if edited is None:
            edited = await self.run(self._store.edit, name, self.now(), change)
        self.prompts.forget((name.owner, name.id))
        return edited

    async def fork(self, name: Name, new_id: str) -> StoredConversation:
        """Copies the history at once, and the claims on its KV if the loop has them."""
        fork = await self.run(self._store.fork, name, new_id, self.now())
        self._tell(Fork(kv_name(name, name.id), kv_name(name, new_id)))
        return fork

    async def change(self, name: Name, **values: Any) -> StoredConversation:
        """Sets `ttl`, `history_ttl`, `pinned_until` or `body`."""
        now = self.now()
        changed = await self.run(self._store.change, name, now, **values)
        self._keep(changed, now)
        return changed

    async def delete(self, name: Name) -> None:
        """On return it cannot be read any more, nor can its own KV on disk. The KV claims of a
        response belong to its whole line: they end with the line's last response, or with their
        TTL; until then their KV stays.

        RequestError: NOT_FOUND, and INTERNAL if it is deleted, but a tier refused to erase some
        of its KV.
        """
        self.prompts.forget((name.owner, name.id))
        while await self.run(self._store.delete_branches, name, self.now()):
            pass
        erasure = await self._forget(await self.run(self._store.delete, name, self.now()))
        if erasure is not Erasure.WHOLLY:
            what = (
                f"the {name.kind} {name.id!r} is deleted, but some of its KV may still be on the "
                "server's disk or in the store that servers share"
            )
            raise RequestError(ErrorKind.INTERNAL, f"{what}: it could not be erased")

    def erase_if_deleted(self, turn: bytes, tokens: array[int], salt: bytes) -> None:
        """At the end of an open turn whose conversation was deleted after it began: its KV, which
        it has kept or computed since, is erased too. Without `tokens` the conversation ends
        again, as at its deletion."""
        if (gone := self._deleted.pop(turn, None)) is not None:
            if tokens:
                shared = min(gone.shared, common_prefix(gone.tokens, tokens))
                kept = min(gone.kept, shared)
                self._erase_kv(Gone(gone.name, gone.thread, tokens, shared, salt, kept))
            elif gone.thread is not None:
                self._erase_kv(gone)

    def _forget(self, gone: Gone) -> Awaitable[Erasure]:
        """Whether its KV is erased, when that is known. KV that open turns use stays until their
        ends."""
        self._deleted |= {turn: gone for turn, names in self._open.items() if gone.name in names}
        return self._erase_kv(gone)

    def _erase_kv(self, gone: Gone) -> Awaitable[Erasure]:
        kv_id = kv_name(gone.name, gone.thread) if gone.thread is not None else None
        erasing = asyncio.ensure_future(
            self._erase(Forget(kv_id, gone.tokens, gone.shared, gone.salt, gone.kept))
        )
        size = len(gone.tokens) + FORGET_TOKENS

        def erased(_: object) -> None:
            self._unerased -= size

        self._unerased += size
        erasing.add_done_callback(erased)
        if self._store.shared:
            self._erasing.append(erasing)
        return erasing

    def _keep(self, conversation: StoredConversation, now: float) -> None:
        name = Name(conversation.owner, conversation.id, conversation.kind)
        pinned = max(0.0, conversation.pinned_until - now)
        self._tell(Keep(kv_name(name, conversation.thread), conversation.ttl, pinned))


PARAMETERS: dict[Kind, str] = {"conversation": "conversation", "response": "previous_response_id"}


def _encoded_behind(tokenizer: Tokenizer, log: array[int], text: str) -> array[int]:
    if not log:
        return tokenizer.encode(text)
    ids = tokenizer.encode_behind(log, text)
    return tokenizer.encode_rendered(text) if ids is None else ids


def _message_count(turn: StoredTurn | None) -> int:
    return sum(len(past.messages) for past in turn.lineage()) if turn is not None else 0
