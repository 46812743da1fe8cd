"""Drafts of a reply's next tokens from the conversation's own tokens: prompt lookup
(docs/design/drafts.md)."""

from __future__ import annotations

from array import array

from ..types import Request, Tokens
from .conversations import common_prefix

LONGEST, SHORTEST = 6, 4  # tokens of a match; a longer match is preferred
MOST_DRAFTS = 8
# latest tokens in which matches are looked for: this bounds a row's time in a step, and its memory
SEARCHED = 8192
LEARNED = 1 / 8  # weight of each new proposal in the mean
FIRST_MEAN = 3.0  # before any proposal is settled: the first ones are drafted
_CODE = "utf-32-le", "surrogatepass"  # of one character for each token


class Drafts:
    """The drafts of one reply.

    A proposal is made where the latest tokens have occurred before: the tokens that followed there.
    It is open until one of its tokens has not come true, or all have. Proposals are made and
    settled whether a step checks them or not, so `_mean`, the mean number of tokens that come true,
    is always known.
    """

    def __init__(self) -> None:
        # the latest tokens as text, because `str.rfind` is fast; the count of all
        self._text = ""
        self._count = 0
        self._proposal = array("i")
        self._begin = 0  # position of the proposal's first token
        self._mean = FIRST_MEAN
        self.checked = 0  # the last step that checks drafts

    def next(self, tokens: Tokens, needed: int) -> array[int]:
        """Returns the tokens that the open proposal expects after `tokens`, MOST_DRAFTS at most.
        Returns none if no more than `needed` of them are expected to come true. `tokens` only ever
        grows."""
        came = self._settle(tokens)
        left = self._proposal[came:]
        return left if min(self._mean, len(left)) > needed else array("i")

    def _settle(self, tokens: Tokens) -> int:
        """Makes a new proposal if the open one is settled. Returns how many tokens of the open one
        have come true."""
        sampled = tokens[self._begin : self._begin + len(self._proposal)]
        came = common_prefix(sampled, self._proposal)
        if came == len(sampled) and came < len(self._proposal):
            return came
        if self._proposal:
            self._mean += LEARNED * (came - self._mean)
        new = tokens[max(self._count, len(tokens) - SEARCHED) :]
        self._text = (self._text + new.tobytes().decode(*_CODE))[-SEARCHED:]
        self._begin = self._count = len(tokens)
        self._proposal = array("i", propose(self._text).encode(*_CODE))
        return 0


def propose(text: str) -> str:
    """Returns what followed the latest earlier occurrence of the text's end, and would follow if
    that went on in the same way; "" if there is no earlier occurrence."""
    end = len(text) - 1
    if text.rfind(text[-SHORTEST:], 0, end) < 0 or len(text) <= SHORTEST:
        return ""
    for length in range(LONGEST, SHORTEST - 1, -1):
        at = text.rfind(text[-length:], 0, end)
        if at >= 0:
            return (text[at + length :][:MOST_DRAFTS] * MOST_DRAFTS)[:MOST_DRAFTS]
    return ""


def may_draft(request: Request) -> bool:
    """False if a draw depends on the tokens before it other than through the logits (grammar,
    bad words, penalties), or has more results than its token (log probabilities)."""
    sampling = request.sampling
    return not sampling.constrained and sampling.logprobs is None and not sampling.penalised
