"""Contents of conversations: the load that `benchmarks.serving` puts on a server, without the
server."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.arrivals import Arrival
from pensieve.scripts.simulation.traces import Dialogue, SyntheticTokens


def fitting(dialogues: Sequence[Dialogue], max_context: int) -> list[Dialogue]:
    """Conversations, cut before the first turn that does not fit. A conversation whose first turn
    does not fit is dropped."""
    cut = []
    for dialogue in dialogues:
        turns = len(dialogue.turns)
        for index, turn in enumerate(dialogue.turns):
            if turn.history_tokens + turn.input_tokens + turn.output_tokens > max_context:
                turns = index
                break
        if turns:
            cut.append(
                dialogue._replace(turns=dialogue.turns[:turns], inputs=dialogue.inputs[:turns])
            )
    if not cut:
        raise SettingError("--max-context", f"no conversation fits into {max_context} tokens")
    return cut


def mean_turns(dialogues: Sequence[Dialogue]) -> float:
    return sum(len(dialogue.turns) for dialogue in dialogues) / len(dialogues)


class Words:
    """Token ids of the conversations, equal for equal `salt`. Runs with different salts share
    nothing.

    The ids of a trace's text are fixed; only the head before it differs.
    """

    def __init__(self, vocabulary: int, salt: str):
        self._vocabulary = vocabulary
        self._salt = salt

    def name(self, arrival: Arrival) -> str:
        """A conversation id."""
        return f"{self._salt}-{arrival.name}"

    def input(self, arrival: Arrival, turn: int) -> list[int]:
        """What is new in the prompt of this turn."""
        tokens: list[int] = []
        for place, piece in enumerate(arrival.dialogue.inputs[turn]):
            if isinstance(piece, array):
                tokens += piece
            else:
                tokens += self._synthetic(piece, arrival, f"{turn} {place}")
        return tokens

    def history(self, arrival: Arrival) -> list[int]:
        """The prompt of the first request: the log of the earlier turns, with made-up replies, and
        this turn's input."""
        log: list[int] = []
        for turn in range(arrival.turn + 1):
            lengths = arrival.dialogue.turns[turn]
            log = log[: lengths.history_tokens] + self.input(arrival, turn)
            reply = lengths.output_tokens if turn < arrival.turn else arrival.done
            log += self._synthetic(SyntheticTokens(reply), arrival, f"{turn} reply")
        return log

    def _synthetic(self, piece: SyntheticTokens, arrival: Arrival, place: str) -> list[int]:
        if piece.key is None:
            seed = f"{self.name(arrival)} {place}"
        else:
            seed = f"{self._salt} {piece.key} {arrival.number if piece.per_pass else ''}"
        drawn = array("I", random.Random(seed).randbytes(4 * piece.tokens))
        return [value % self._vocabulary for value in drawn]
