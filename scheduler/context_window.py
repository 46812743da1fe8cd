"""Context overflow (docs/design/overflow.md): the positions that a position sees once a
conversation exceeds the model's length.

Positions increase without limit, and the visible window moves in steps. With a context of W = 8
tokens and a step of 4:

    position     0 1 2 3 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16 ...
    sees from    0               | 4         | 8           | 12

The KV of a position depends on everything up to it, but attention reads only the window. So kept KV
stays valid. It cannot be recomputed alone: position 4, for example, saw position 0. A conversation
that has lost too much of it begins a new context at a *context start*: nothing before it exists,
and position p sees from max(context start, start(p)) on. A context starts where a window starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from .types import ErrorKind, Request, RequestError

LONGEST_LOG = 2**20
"""The longest prompt, in tokens, that may outgrow the context. Only the window is computed, but all
of the prompt is hashed: for this length in about eighty steps."""

KEEP, RECOMPUTE = OVERFLOW_MODES = ("keep", "recompute")
"""keep         kept KV stays valid: positions continue, which rotary embeddings allow. Most models
                lose quality when their first token leaves the window
recompute       each window is a context of its own, and the model counts positions from its start:
                all of it is recomputed
"""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """length   W, the most tokens that a position sees, itself included
    step        tokens dropped at once when the window is full: whole chunks, fewer than `length`
    mode        one of OVERFLOW_MODES
    """

    length: int
    step: int
    mode: str

    def start(self, position: int, context_start: int = 0) -> int:
        """The first position that `position` sees."""
        if position < context_start + self.length:
            return context_start
        return self.step * (1 + (position - self.length) // self.step)

    def end(self, start: int) -> int:
        """The first position that no longer sees `start`."""
        return start + self.length

    def context_starts(self, last: int, lowest: int = 0) -> range:
        """The possible context starts of a context whose last position is `last`, in the order in
        which they are tried."""
        highest = self.start(last)
        return range(highest if self.mode == RECOMPUTE else lowest, highest + 1, self.step)

    def reach(self, last: int, context_start: int, first_missing: Callable[[int], int]) -> int:
        """Returns the window start from which KV is needed to compute everything missing that
        `last` sees.

        `first_missing(p)`: the first position from p on whose KV must be computed.
        """
        start = self.start(last, context_start)
        while (earlier := self.start(first_missing(start), context_start)) < start:
            start = earlier
        return start

    def zero(self, start: int) -> int:
        """The position that the model counts as 0 in the window that begins at `start`."""
        return 0 if self.mode == KEEP else start

    @property
    def digest(self) -> bytes:
        """A digest of the window settings; KV computed under other settings gets other keys."""
        return hashlib.sha256(f"{self.length} {self.step} {self.mode}".encode()).digest()


def check_length(request: Request, limit: int, windows: ContextWindow | None) -> None:
    """Raises RequestError (INVALID) if the context would outgrow the model's length and its request
    does not allow it."""
    prompt = len(request.prompt)
    if request.truncate and windows is not None:
        if prompt > (most := max(LONGEST_LOG, limit)):
            message = (
                f"the prompt has {prompt} tokens; one that outgrows the context may have {most}"
            )
            raise RequestError(ErrorKind.INVALID, message, "prompt")
        if request.max_tokens > limit:
            message = (
                f"max_tokens is {request.max_tokens}, more than this model's context of {limit} "
                "tokens"
            )
            raise RequestError(ErrorKind.INVALID, message, "max_tokens")
        if request.prompt_logprobs is not None and prompt > limit:
            message = (
                f"prompt_logprobs: the prompt has {prompt} tokens, of which the model sees {limit} "
                "at most"
            )
            raise RequestError(ErrorKind.INVALID, message, "prompt_logprobs")
        return
    if prompt >= limit:
        raise RequestError(
            ErrorKind.INVALID,
            f"the prompt has {prompt} tokens; this model's context is {limit} tokens",
            "prompt",
        )
    if prompt + request.max_tokens > limit:
        raise RequestError(
            ErrorKind.INVALID,
            f"the prompt has {prompt} tokens and max_tokens is {request.max_tokens}, "
            f"together more than this model's context of {limit} tokens",
            "max_tokens",
        )
