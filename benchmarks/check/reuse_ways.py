"""The ways in which check.reuse gets a prompt's KV, and for models with states their states too:
the loop that asks, its pools, the work beside it, and what of a prompt each way computes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from pensieve.runtime.device.protocol import Device, ForwardPass
from pensieve.runtime.executor import Executor
from pensieve.scheduler.config import SchedulerConfig, StateConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.kv.chunk import NO_SLOT, Chunk
from pensieve.scheduler.types import (
    HOST,
    MOST_LOGPROBS,
    ChunkKey,
    InvariantError,
    Sampling,
    Usage,
)

from ..loop import Loop, LoopAnswer, Pools

WAYS_OF_RANKS = ("cold", "gpu", "host", "partly", "recomputed", "suspended")
WAYS = (*WAYS_OF_RANKS, "fetched")
WAYS_OF_STATES = (
    *("cold", "gpu", "host", "recomputed", "leading", "inner", "suspended"),
    *("alone", "alone-gpu", "alone-host", "alone-half", "alone-disk", "alone-fetched"),
)
ALONE = "alone"
DISK = "alone-disk"  # only of one rank, as the next one
FETCHED = "alone-fetched"
SCORED = Sampling(logprobs=MOST_LOGPROBS)
ROWS = 8  # rows that generate beside the prompt
SEATS = 2 * ROWS
SHORT_REPLY = 4
FETCHES = 5  # tries
LOAD_S = 2e-5  # assumed cost of loading a chunk; recomputing costs as much at a chosen context


class ReusePools(Pools):
    """`tokens`: the longest prompt's. Prompts run in turn are never found in the tier where they
    were. `states`: of a model that has them."""

    def __init__(self, tokens: int, size: int, states: StateConfig | None = None):
        self.size = size
        self.states = states
        self.tokens = tokens
        # full chunks: with its first token a row has room for others while the prompt is computed
        self.row_prompt = max(size, tokens // 8 // size * size)
        self.row_reply = 3 * size
        self.long_reply = 2 * size
        self.longest = tokens + self.long_reply
        self.seats = SEATS
        self.batch = 1024
        self.prompt = self.chunks(tokens + self.long_reply) + 1
        self.rows = ROWS * (self.chunks(self.row_prompt + self.row_reply) + 1)
        self.gpu = 3 * self.prompt + self.rows
        # these evict all else from the GPU, even the first of themselves
        self.histories = self.gpu // (tokens // size) + 3
        self.host = (self.histories + 3) * (self.prompt + self.state_chunks(tokens)) + self.rows
        self.host += ROWS * self.state_chunks(self.row_prompt)
        left = tokens // size + (0 if states is None else states.chunks)  # by each other prompt
        self.flood = -(-(self.gpu + self.host) // left) + 1
        # Beside prompt and rows with their first tokens there is room for one short history and its
        # turn. While the prompt is answered each row grows by two chunks, which do not fit: one
        # request must be suspended.
        self.short_history = 4 * size
        begun = ROWS * self.chunks(self.row_prompt + 1)
        self.tight = self.chunks(tokens) + begun + self.chunks(self.short_history) + 4

        # of a prompt: what is dropped of it, and where it was cut before
        self.part = tokens // 3
        self.hole = 2 * tokens // 3 // size * size

    def config(self) -> SchedulerConfig:
        return replace(super().config(), states=self.states)

    def chunks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def state_chunks(self, tokens: int) -> int:
        """Of the states that a prompt of so many tokens and the next turn leave on HOST."""
        if self.states is None:
            return 0
        return self.states.chunks * (tokens // self.states.spacing + 4)

    def state_before(self, tokens: int) -> int:
        """Where the last state that is kept before so many tokens ends."""
        assert self.states is not None
        return tokens // self.states.multiple * self.states.multiple


class Asker(Loop):
    """A loop for prompts one at a time; `tend` is called in each pass to keep other work going."""

    def __init__(
        self,
        device: Device,
        engine: ForwardPass,
        config: SchedulerConfig,
        loads_from: int,
        seed: int,
        make_executor: Callable[[Device, ForwardPass, SchedulerConfig], Executor] = Executor,
    ):
        """Chunks whose context ends below `loads_from` tokens are recomputed rather than loaded."""
        attention = tuple(
            (tokens, LOAD_S * tokens / loads_from) for tokens in (1, config.max_model_len)
        )
        cost = CostProfile(
            config.chunk_tokens, 0.0, attention, 0.0, chunk_bytes=1, link_bytes_per_s=1 / LOAD_S
        )
        super().__init__(device, engine, config, cost, seed, make_executor)
        self.tend: Callable[[], None] = lambda: None  # called once a pass

    def step(self) -> bool:
        self.tend()
        return super().step()

    def ask(self, prompt: array[int], tokens: int) -> LoopAnswer:
        answer = self.begin(prompt, tokens)
        self.run_until(lambda: answer.done)
        return answer

    def begin(self, prompt: array[int], tokens: int) -> LoopAnswer:
        """Runs the prompt with log probabilities. It has the lowest priority: if a row must be
        suspended, it is this one."""
        return self.add(prompt, tokens, SCORED, priority=1)

    def ask_and_be_suspended(self, prompt: array[int], tokens: int) -> LoopAnswer:
        """InvariantError if no row is suspended between the reply's first token and its last."""
        answer = self.begin(prompt, tokens)
        self.run_until(lambda: bool(answer.tokens))
        before = self.scheduler.stats().suspensions
        self.run_until(lambda: answer.done)
        if self.scheduler.stats().suspensions == before:
            raise InvariantError("a reply was to be suspended, and was not")
        return answer

    def chunks_of(self, prompt: array[int], first: int, end: int) -> list[Chunk]:
        """The full chunks of the prompt's positions [first, end), which no row holds.
        InvariantError if one is in no tier."""
        keys: list[ChunkKey] = []
        self.scheduler._chunk_keys.extend(keys, 0, b"", prompt, end)
        chunks = [
            self.scheduler._store.find(key) for key in keys[first // self.config.chunk_tokens :]
        ]
        there = [chunk for chunk in chunks if chunk is not None and not chunk.users]
        if len(there) < len(chunks):
            raise InvariantError(f"of {len(chunks)} chunks only {len(there)} are idle in a tier")
        return there

    def lose(self, chunks: Iterable[Chunk]) -> None:
        """The chunks leave every tier."""
        for chunk in chunks:
            self.scheduler._store.drop(chunk)

    def leave_gpu(self, chunks: Iterable[Chunk]) -> None:
        """The chunks stay on HOST only. InvariantError if one is not there."""
        for chunk in chunks:
            if chunk.slots[HOST] == NO_SLOT:
                raise InvariantError(f"{chunk} was not copied to HOST")
            self.scheduler._store.release_gpu(chunk)

    def settle(self) -> None:
        """Runs until everything is written to lower tiers."""
        lower = self.scheduler.lower
        self.drain()
        self.run_until(lambda: not (lower.unfinished or lower.busy))

    def end(self) -> None:
        """Finishes all requests. InvariantError if no chunk was copied meanwhile."""
        self.tend = lambda: None
        self.drain()
        self.scheduler.check()
        stats = self.scheduler.stats()
        if not (stats.swapped_in and stats.swapped_out):
            raise InvariantError(f"chunks were to be copied all the time, but {stats}")


class Others:
    """Rows that generate and histories that run in turn, for ever; set as an `Asker`'s `tend`."""

    def __init__(self, asker: Asker, sizes: ReusePools, history: int):
        self._asker = asker
        self._sizes = sizes
        self._histories = [asker.random_ids(history) for _ in range(sizes.histories)]
        self._rows: list[LoopAnswer] = []
        self._turn: LoopAnswer | None = None
        self.turns = 0
        self.renew = True
        """True if rows that have ended are replaced."""

    def __call__(self) -> None:
        asker, sizes = self._asker, self._sizes
        self._rows = [row for row in self._rows if not row.done]
        while self.renew and len(self._rows) < ROWS:
            self._rows.append(asker.add(asker.random_ids(sizes.row_prompt), sizes.row_reply))
        if self._turn is None or self._turn.done:
            history = self._histories[self.turns % len(self._histories)]
            # New tokens fill a chunk that is copied out.
            self._turn = asker.add(history + asker.random_ids(sizes.size), 1)
            self.turns += 1

    def turn(self, count: int) -> None:
        end = self.turns + count
        self._asker.run_until(lambda: self.turns >= end)

    def all_rows(self) -> None:
        """Runs until `ROWS` new rows generate."""
        self.renew = False
        self._asker.run_until(lambda: not self._rows)
        self.renew = True
        self._asker.run_until(
            lambda: len(self._rows) == ROWS and all(row.tokens for row in self._rows)
        )
        self.renew = False


# The ways.


Told = Callable[[str, int, LoopAnswer], None]
"""Takes each answer: its way, its prompt's number."""


Ask = Callable[[Asker, ReusePools, "Sequence[array[int]]", Told], None]


def check_reuse(way: str, answer: LoopAnswer, prompt: array[int], size: int) -> None:
    """InvariantError if the prompt's KV has other sources than in this way."""
    usage = answer.usage
    full = len(prompt) // size * size
    assert usage is not None  # with the first token
    right = {
        "cold": usage.new == len(prompt),
        "gpu": usage.gpu == full,
        "host": usage.host == full,
        "partly": usage.host > 0 and usage.recomputed > 0 and usage.host + usage.recomputed == full,
        "recomputed": usage.recomputed == full,
        "suspended": usage.new == len(prompt),
        "fetched": usage.shared == full,
    }
    if not right[way]:
        raise InvariantError(
            f"a prompt of {len(prompt)} tokens was to be found in the way {way!r}, but had {usage}"
        )


def check_states(way: str, answer: LoopAnswer, prompt: array[int], sizes: ReusePools) -> None:
    """Does what `check_reuse` does for a model with states. The prompt's last state is the last one
    that lacks its last token: behind it KV is there, but all is computed."""
    count = len(prompt)
    full = count // sizes.size * sizes.size
    state = sizes.state_before(count - 1)
    hole = sizes.hole
    first = sizes.state_before(sizes.part)
    sources = {
        "gpu": {"gpu": state},
        "host": {"host": state},
        "recomputed": {},
        "leading": {"host": state - hole},
        "inner": {"host": state - (hole - first)},
        "alone-gpu": {"gpu": state},
        "alone-host": {"host": state},
        "alone-half": {"gpu": state - hole, "host": hole},
        "alone-disk": {"disk": state},
        "alone-fetched": {"shared": state},
    }
    right = Usage(new=count)
    if way in sources:
        there = sources[way]
        right = Usage(**there, recomputed=full - sum(there.values()), new=count - full)
    if answer.usage != right:
        raise InvariantError(
            f"a prompt of {count} tokens was to be {way!r}: {right}, but had {answer.usage}"
        )


def ask_again(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """Runs the prompts cold, on the GPU, on HOST; and at the end dropped by many other prompts."""
    asker.tend = others = Others(asker, sizes, sizes.tokens)
    others.turn(sizes.histories + 1)
    for number, prompt in enumerate(prompts):
        tell("cold", number, asker.ask(prompt, sizes.long_reply))
        tell("gpu", number, asker.ask(prompt, SHORT_REPLY))
        others.turn(sizes.histories)
        tell("host", number, asker.ask(prompt, SHORT_REPLY))
    flood = [asker.add(asker.random_ids(sizes.tokens), 1) for _ in range(sizes.flood)]
    asker.run_until(lambda: all(answer.done for answer in flood))
    for number, prompt in enumerate(prompts):
        tell("recomputed", number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_partly(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """On HOST, with a leading half that is faster recomputed than loaded: the spans of a prompt are
    disjoint."""
    asker.tend = others = Others(asker, sizes, sizes.tokens)
    others.turn(sizes.histories + 1)
    for number, prompt in enumerate(prompts):
        asker.ask(prompt, 1)
        others.turn(sizes.histories)
        tell("partly", number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_holes(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """For models with states, on HOST: without the KV of a leading part, and without some behind a
    state. That was kept when the prompt was as short as this."""
    asker.tend = others = Others(asker, sizes, sizes.tokens)
    others.turn(sizes.histories + 1)
    for number, prompt in enumerate(prompts):
        asker.ask(prompt[: sizes.part], 1)
        asker.ask(prompt, 1)
        others.turn(sizes.histories)
        # the state is not where the hole begins
        first = sizes.state_before(sizes.part) + sizes.size
        asker.lose(asker.chunks_of(prompt, first, sizes.hole))
        tell("inner", number, asker.ask(prompt, SHORT_REPLY))
        others.turn(sizes.histories)
        asker.lose(asker.chunks_of(prompt, 0, sizes.hole))
        tell("leading", number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_alone(asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told) -> None:
    """For models with states: nothing else runs, so every step has the same shape whichever way KV
    and states took."""
    for number, prompt in enumerate(prompts):
        tell("alone", number, asker.ask(prompt, SHORT_REPLY))
        tell("alone-gpu", number, asker.ask(prompt, SHORT_REPLY))
        full = len(prompt) // sizes.size * sizes.size
        for way, end in (("alone-host", full), ("alone-half", sizes.hole)):
            asker.drain()
            asker.leave_gpu(asker.chunks_of(prompt, 0, end))
            tell(way, number, asker.ask(prompt, SHORT_REPLY))
    asker.end()


def ask_after_restart(
    make_asker: Callable[[], Asker], prompts: Sequence[array[int]], tell: Told
) -> None:
    """Alone, from DISK, by a loop that begins after another one has ended."""
    with closing(make_asker()) as writer:
        for prompt in prompts:
            writer.ask(prompt, 1)
        writer.settle()
    with closing(make_asker()) as reader:
        for number, prompt in enumerate(prompts):
            tell(DISK, number, reader.ask(prompt, SHORT_REPLY))


def ask_suspended(
    asker: Asker, sizes: ReusePools, prompts: Sequence[array[int]], tell: Told
) -> None:
    """The GPU holds the prompt and the rows at their start. As the rows grow, the prompt must leave
    until they end."""
    asker.tend = others = Others(asker, sizes, sizes.short_history)
    for number, prompt in enumerate(prompts):
        others.all_rows()
        tell("suspended", number, asker.ask_and_be_suspended(prompt, sizes.long_reply))
    asker.end()


def ask_fetched(
    make_asker: Callable[[], Asker], prompts: Sequence[array[int]], tell: Told, way: str
) -> None:
    """Alone, from the store, by a loop of its own for each prompt. A store that answers too late is
    asked again: a busy machine may delay it."""
    with closing(make_asker()) as writer:
        for prompt in prompts:
            writer.ask(prompt, 1)
    for number, prompt in enumerate(prompts):
        for _ in range(FETCHES):
            with closing(make_asker()) as reader:
                answer = reader.ask(prompt, SHORT_REPLY)
            if answer.usage is not None and answer.usage.shared:
                break
        tell(way, number, answer)
