"""Context overflow (docs/design/overflow.md): what a position sees once a conversation has outgrown the model's length.

Positions run on for ever, and what they see moves on in steps. With a context of W = 8 tokens and a step of 4:

    position     0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 ...
    sees from    0               | 4         | 8           | 12

So the KV of a position depends on everything up to it, but reads only what it sees; KV that is kept stays valid as it
is. It cannot be computed again by itself: position 4, say, saw 0. A conversation that has lost too much of it begins a
new context at a *context start*: nothing before it exists, and position p sees from max(context start, start(p)) on. A
context starts where a window starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from .types import Request, RequestError

LONGEST_LOG = 2**20
"""Tokens of a prompt that may outgrow the context. No more of it is computed than of any other, but all of it is looked
through, while every other request waits: so many take a third of a second."""

KEEP, RECOMPUTE, RESTART = OVERFLOW_MODES = ("keep", "recompute", "restart-positions")
"""keep         kept KV stays valid: positions run on, which rotary embeddings do not mind
recompute       each window is a context of its own and the model counts positions from it: all of it is computed anew
restart-positions
                KV is kept, yet the model counts positions from each window's start: wrong, and here to show how much
"""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """length   W, the most tokens that a position sees, itself included
    step        tokens that go at once when the window is full: whole chunks, fewer than `length`
    mode        one of OVERFLOW_MODES
    """

    length: int
    step: int
    mode: str = KEEP

    def start(self, position: int, context_start: int = 0) -> int:
        """The first position that this one sees."""
        if position < context_start + self.length:
            return context_start
        return self.step * (1 + (position - self.length) // self.step)

    def end(self, start: int) -> int:
        """The first position that sees less than `start` on."""
        return start + self.length

    def context_starts(self, last: int, lowest: int = 0) -> range:
        """Where a context whose last position is `last` may begin, in the order in which starts are tried."""
        highest = self.start(last)
        return range(highest if self.mode == RECOMPUTE else lowest, highest + 1, self.step)

    def reach(self, last: int, context_start: int, first_missing: Callable[[int], int]) -> int:
        """From where on KV is needed to compute all that is missing of what `last` sees: the start of a window.

        `first_missing(p)`: the first position from p on whose KV must be computed.
        """
        start = self.start(last, context_start)
        while (earlier := self.start(first_missing(start), context_start)) < start:
            start = earlier
        return start

    def zero(self, start: int) -> int:
        """The position that the model counts as 0 while the window begins at `start`."""
        return 0 if self.mode == KEEP else start

    @property
    def digest(self) -> bytes:
        """Tells apart KV that was computed under other windows."""
        return hashlib.sha256(f"{self.length} {self.step} {self.mode}".encode()).digest()


def check_length(request: Request, limit: int, windows: ContextWindow | None) -> None:
    """RequestError (400) if the context would outgrow the model's and may not."""
    prompt = len(request.prompt)
    if request.truncate and windows is not None:
        if prompt > (most := max(LONGEST_LOG, limit)):
            message = f"the prompt has {prompt} tokens; one that outgrows the context may have {most}"
            raise RequestError(400, message, "prompt")
        if request.max_tokens > limit:
            message = f"max_tokens is {request.max_tokens}, more than this model's context of {limit} tokens"
            raise RequestError(400, message, "max_tokens")
        if request.prompt_logprobs is not None and prompt > limit:
            message = f"prompt_logprobs: the prompt has {prompt} tokens, of which the model sees {limit} at most"
            raise RequestError(400, message, "prompt_logprobs")
        return
    if prompt >= limit:
        raise RequestError(400, f"the prompt has {prompt} tokens; this model's context is {limit} tokens", "prompt")
    if prompt + request.max_tokens > limit:
        raise RequestError(
            400,
            f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}, "
            f"together more than this model's context of {limit} tokens",
            "max_tokens",
        )
