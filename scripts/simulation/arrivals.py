"""Arrivals of conversations: when each one comes, and where in its life it is then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from typing import NamedTuple

from .traces import Dialogue


class Arrival(NamedTuple):
    """A conversation that starts during the run, or is already in progress at the run's start.

    at       seconds after the run's start at which its first request is sent
    number   of the pass over the workload: a conversation is played once in each
    turn     of the first request; earlier turns are history
    done     tokens of that turn's reply that are history too
    think_s  seconds from `at` to the turn after it; None: as that turn says, from the reply's end
    """

    at: float
    dialogue: Dialogue
    number: int = 0
    turn: int = 0
    done: int = 0
    think_s: float | None = None

    @property
    def name(self) -> str:
        """Its own in a run, and that of the same conversation in runs of the same seed."""
        return f"{self.number}-{self.dialogue.name}"


def plan_arrivals(
    dialogues: Sequence[Dialogue],
    *,
    rate: float,
    seconds: float,
    seconds_per_token: float,
    seed: int,
    ramp_s: float = 0.0,
    from_empty: bool = False,
    send_histories: bool = False,
) -> list[Arrival]:
    """All arrivals of a run of `seconds`, in order of `at`; `rate` is conversations per second.

    At a higher rate the same conversations of a seed come closer together, and more of them come.

    Conversations start as a Poisson process that has been running for ever: conversations that are
    still open at the run's start are joined in the middle, with `seconds_per_token` as the assumed
    time of replies. Each of these sends its whole history at
    once, so the server starts with many prompts that it would normally have in its cache. With
    `ramp_s` conversations, old and new, join at random times in these seconds, wherever they are
    then: the load grows evenly to `rate`, and stays there. With `send_histories` those whose user
    thinks at that time do not wait for the next turn: they send their history for one token, and
    think for the time that is left. So the server soon has the histories that it would normally
    have, also where users think for long. With `from_empty` no conversation is open at the start:
    the load grows during a conversation's lifetime.
    """
    horizon = max(lifetime(dialogue, seconds_per_token) for dialogue in dialogues)
    open_s = 0.0 if from_empty else horizon
    before = (-ago for ago in _poisson(rate, open_s, Random(f"{seed} before")))
    after = _poisson(rate, seconds, Random(f"{seed} after"))
    order = _Order(dialogues, seed)
    arrivals = []
    for index, start in (*zip(count(-1, -1), before), *zip(count(), after)):
        number, dialogue = order.at(index)
        entry = ramp_s * Random(f"{seed} {index}").random()
        arrival = join(dialogue, number, start - entry, seconds_per_token, send_histories)
        if arrival is not None:
            arrivals.append(arrival._replace(at=arrival.at + entry))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _poisson(rate: float, seconds: float, draw: Random) -> Iterator[float]:
    """Times in these seconds; those of another rate have the same proportions."""
    at = 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        yield at


class _Order:
    """Conversations by their place before or after the run's start; each pass has its own order."""

    def __init__(self, dialogues: Sequence[Dialogue], seed: int):
        self._dialogues = dialogues
        self._seed = seed
        self._passes: dict[int, list[Dialogue]] = {}

    def at(self, index: int) -> tuple[int, Dialogue]:
        """(pass, conversation). Pass 0 has the run's start in its middle."""
        size = len(self._dialogues)
        number, place = divmod(index + size // 2, size)
        if number not in self._passes:
            draw = Random(f"{self._seed} pass {number}")
            self._passes[number] = draw.sample(self._dialogues, size)
        return number, self._passes[number][place]


def lifetime(dialogue: Dialogue, seconds_per_token: float) -> float:
    """Seconds from the first request to the end of the last reply."""
    thought = sum(turn.think_s for turn in dialogue.turns[1:])
    return thought + seconds_per_token * sum(turn.output_tokens for turn in dialogue.turns)


def join(
    dialogue: Dialogue,
    number: int,
    start: float,
    seconds_per_token: float,
    send_history: bool = False,
) -> Arrival | None:
    """The state at time 0 of a conversation that began at `start`; None if it is over. A later
    start means its beginning. `send_history`: if its user thinks at time 0, the first request is
    the turn before with all of its reply but the last token, and `think_s` is the think time that
    is left."""
    now = start
    for index, turn in enumerate(dialogue.turns):
        now += turn.think_s if index else 0.0
        if now >= 0 and index and send_history:
            done = dialogue.turns[index - 1].output_tokens - 1
            return Arrival(0.0, dialogue, number, index - 1, done, think_s=now)
        if now >= 0:
            return Arrival(now, dialogue, number, index)
        reply = seconds_per_token * turn.output_tokens
        if now + reply > 0:
            return Arrival(
                0.0,
                dialogue,
                number,
                index,
                min(int(-now / seconds_per_token), turn.output_tokens - 1),
            )
        now += reply
    return None
