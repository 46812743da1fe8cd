"""The grammar matchers of requests. They give the tokens that each reply may continue with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from ...scheduler.plan import StepPlan
from ...scheduler.types import RequestId, RowId
from .grammar import Grammars
from .sampling_inputs import Mask

log = logging.getLogger(__name__)

MOST_KEPT = 512  # matchers, with those of rows: 0.2 to 5 MB each, 20 MB for the longest


class GrammarMatchers:
    """Called in the order of steps. A request's matcher stands after its applied tokens and is kept
    until the request has ended. So no step waits for a long reply to be matched again when a
    suspended request resumes."""

    def __init__(self, grammars: Grammars):
        self._grammars = grammars
        self._words = -(-grammars.vocab_size // 32)
        self._matchers: dict[RequestId, LLMatcher] = {}

    def begin(self, grammar: str) -> Future[LLMatcher]:
        """See `Grammars`."""
        return self._grammars.begin(grammar)

    def keep(self, request: RequestId, compiled: LLMatcher) -> None:
        """Makes the request's matcher, unless there are many: its grammar may be forgotten by the
        time it joins."""
        if len(self._matchers) < MOST_KEPT:
            self._matchers[request] = compiled.deep_copy()  # 0.1 ms

    def mask(self, plan: StepPlan) -> Mask | None:
        """Takes the plan's joins. Returns the tokens allowed for its samples, or None if no row has
        a grammar."""
        for request in plan.ended:
            self._matchers.pop(request, None)
        for join in plan.joins:
            request = join.row.request
            grammar = join.sampling.grammar
            if grammar is not None and request not in self._matchers:
                self._matchers[request] = self._grammars.matcher(grammar)
        if not self._matchers:
            return None
        matchers = self._matchers
        rows = [
            (at, matchers[row.request])
            for at, row in enumerate(plan.samples)
            if row.request in matchers
        ]
        if not rows:
            return None
        bits = np.zeros((len(rows), self._words), np.int32)
        for (_, matcher), row_bits in zip(rows, bits, strict=True):
            matcher.unsafe_compute_mask_ptr(row_bits.ctypes.data, row_bits.nbytes)
        return Mask(np.array([at for at, _ in rows]), bits)

    def advance(self, samples: Sequence[RowId], tokens: Sequence[int]) -> tuple[RowId, ...]:
        """Advances the matchers by a step's tokens. Returns the rows whose matchers have failed at
        this token or at its mask: the token may not follow the grammar, and none can be drawn after
        it.

        A matcher fails at its own limits: for some grammars the number of states grows with the
        text.
        """
        if not self._matchers:
            return ()
        failed = []
        for row, token in zip(samples, tokens, strict=True):
            matcher = self._matchers.get(row.request)
            if matcher is None:
                continue
            # its result is not enough: a failed matcher accepts an end of text
            matcher.consume_token(token)
            if matcher.is_error():
                failed.append(row)
                # The matcher's own message is not logged, because it quotes the grammar and the
                # reply.
                log.warning("request %d ends: the matcher of its grammar has failed", row.request)
        return tuple(failed)
