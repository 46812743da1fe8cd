"""Replies that follow a grammar: what may come next, token by token, by llguidance.

A grammar travels as one text (`Sampling.grammar`) and is compiled twice: for the HTTP process, which refuses what does
not compile (`grammar_check`), and beside the executor, where each row has a matcher of its own; there before its
request joins the queue, so that no step waits.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llguidance

log = logging.getLogger(__name__)

MOST_COMPILED = 64  # compiled grammars that are kept, 0.2 to 5 MB each, 20 for the longest
COMPILERS = 2  # threads
STACK_BYTES = 256 * 1024**2  # address space, of which no memory is taken before it is used

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python and chat templates write it. Free white space would let a model write it for ever."""


def json_grammar(schema: dict[str, Any]) -> str:
    """JSON that this schema validates."""
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)


def regex_grammar(pattern: str) -> str:
    """Text that the regular expression matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def lark_grammar(source: str) -> str:
    """Text of a context-free grammar in llguidance's dialect of Lark."""
    return llguidance.LLMatcher.grammar_from_lark(source)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of these texts."""
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return lark_grammar("start: " + " | ".join(texts))  # whose strings may not hold a DEL as it is


def lark_json(schema: dict[str, Any]) -> str:
    """JSON that this schema validates, as a term of a Lark grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


class Grammars:
    """Compiles grammars for one tokenizer. Any thread.

    The compiler calls itself for every rule that a rule refers to, and a chain of some thousand ends a process whose
    stack is as small as usual. Threads of its own have one that is large enough for the longest grammar.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int, stop_ids: Sequence[int]):
        """`tokenizer`: the engine's tokenizer directory. A reply that is complete ends with one of `stop_ids`.

        Takes most of a second for a large vocabulary. Raises ValueError if tokens of such a tokenizer are not bytes.
        """
        self.vocab_size = vocab_size
        self._tokenizer = self.open_tokenizer(tokenizer, vocab_size, stop_ids)
        self._compilers = _deep_threads(COMPILERS)
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()  # the latest used is the last
        self._lock = threading.Lock()

    @staticmethod
    def open_tokenizer(tokenizer: str | Path, vocab_size: int, stop_ids: Sequence[int]) -> llguidance.LLTokenizer:
        """Raises ValueError."""
        path = str(Path(tokenizer) / "tokenizer.json")
        return llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=list(stop_ids) or None)

    def begin(self, grammar: str) -> Future[llguidance.LLMatcher] | None:
        """Compiles it elsewhere, for `matcher` to find; None if it is there."""
        return None if self._find(grammar) else self._compilers.submit(self._compile_and_keep, grammar)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At the beginning of a reply. Compiles first what is not there (any more)."""
        compiled = self._find(grammar) or self._compilers.submit(self._compile_and_keep, grammar).result()
        return compiled.deep_copy()  # 0.1 ms

    def _find(self, grammar: str) -> llguidance.LLMatcher | None:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
            return self._compiled.get(grammar)

    def _compile_and_keep(self, grammar: str) -> llguidance.LLMatcher:
        matcher = compile_grammar(self._tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    matcher.compute_bitmask()  # much is worked out only here
    return matcher


def _deep_threads(count: int) -> ThreadPoolExecutor:
    threads, all_there = ThreadPoolExecutor(count, "grammars"), threading.Barrier(count)
    before = threading.stack_size(STACK_BYTES)
    try:
        for started in [threads.submit(all_there.wait) for _ in range(count)]:
            started.result()
    except BaseException:
        all_there.abort()  # those that run would wait for ever for one that could not be started
        raise
    finally:
        threading.stack_size(before)
    return threads


def open_grammars(tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> Grammars | None:
    """As `Grammars`; None if the engine has no tokenizer (""), or one whose tokens are not bytes (said in the log)."""
    if not tokenizer:
        return None
    try:
        return Grammars(tokenizer, vocab_size, stop_ids)
    except ValueError as error:
        log.warning("replies cannot follow a grammar or JSON schema with this tokenizer: %s", error)
        return None
