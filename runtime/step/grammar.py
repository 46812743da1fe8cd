"""Replies that follow a grammar: llguidance gives the allowed tokens at each position.

A grammar is passed as one text (`Sampling.grammar`) and is compiled twice: in the HTTP process,
which refuses grammars that do not compile (`grammar_check`), and next to the executor, where each
row has its own matcher. There it is compiled before its request joins the queue, so no step waits.
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
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

log = logging.getLogger(__name__)

MOST_EBNF = 8192  # characters: the worst of this length take 50 ms
# grammars kept beside those of open requests, 0.2 to 5 MB each, 20 MB for the longest
MOST_COMPILED = 64
COMPILERS = 2  # threads
STACK_BYTES = 256 * 1024**2  # address space; memory is taken only when used

JSON_STYLE: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
    "coerce_one_of": True,
}
"""JSON with the spacing of Python and chat templates. With free white space a model could generate
it without end. Keywords that llguidance cannot enforce are left out, and `oneOf` is `anyOf` where
its options may overlap: the reply is JSON of a wider schema. `grammar_check` names them."""


def json_grammar(schema: dict[str, Any]) -> str:
    """A grammar of the JSON that this schema validates."""
    # as text: the library refuses Python's integers above 64 bits
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE)


def regex_grammar(pattern: str) -> str:
    """A grammar of the text that the regular expression matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def lark_grammar(source: str) -> str:
    """A context-free grammar in llguidance's dialect of Lark."""
    return llguidance.LLMatcher.grammar_from_lark(source)


def written_grammar(source: str) -> str:
    """A context-free grammar in llguidance's dialect of Lark, or in EBNF (`root ::= ...`) as
    xgrammar and llama.cpp read it. ValueError if this EBNF is wrong."""
    if "::=" not in source or is_lark_syntax(source):
        return lark_grammar(source)
    if len(source) > MOST_EBNF:
        raise ValueError(f"it has {len(source)} characters, {MOST_EBNF} are allowed")
    try:
        return lark_grammar(gbnf_to_lark(source))
    except Exception as error:  # it raises several kinds
        raise ValueError(str(error)) from error


def choice_grammar(choices: Sequence[str]) -> str:
    """A grammar of exactly these texts."""
    texts = (
        json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices
    )
    # Lark strings may not contain an unescaped DEL
    return lark_grammar("start: " + " | ".join(texts))


def lark_json(schema: dict[str, Any]) -> str:
    """A term of a Lark grammar for the JSON that this schema validates."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


class Grammars:
    """Compiles grammars for one tokenizer. May be called by any thread.

    The compiler is recursive, and a chain of some thousand rules overflows a stack of the usual
    size, which ends the process. So it runs in threads whose stacks are large enough for the
    longest grammar.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int, stop_ids: Sequence[int]):
        """`tokenizer`: the engine's tokenizer directory. A complete reply ends with one of
        `stop_ids`.

        Takes most of a second for a large vocabulary. Raises ValueError if this tokenizer's tokens
        are not bytes.
        """
        self.vocab_size = vocab_size
        self._tokenizer = self.open_tokenizer(tokenizer, vocab_size, stop_ids)
        self._compilers = _deep_threads(COMPILERS)
        # the latest used is the last
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @staticmethod
    def open_tokenizer(
        tokenizer: str | Path, vocab_size: int, stop_ids: Sequence[int]
    ) -> llguidance.LLTokenizer:
        """Raises ValueError if this tokenizer's tokens are not bytes."""
        path = str(Path(tokenizer) / "tokenizer.json")
        return llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=list(stop_ids) or None)

    def begin(self, grammar: str) -> Future[llguidance.LLMatcher]:
        """Begins to compile the grammar in another thread, unless it is already compiled. Its users
        take copies."""
        if (compiled := self._find(grammar)) is None:
            return self._compilers.submit(self._compile_and_keep, grammar)
        done: Future[llguidance.LLMatcher] = Future()
        done.set_result(compiled)
        return done

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Returns a matcher at the beginning of a reply. First compiles a grammar that is not, or
        no longer, compiled."""
        return self.begin(grammar).result().deep_copy()

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
    matcher.compute_bitmask()  # the compiler does much of its work only here
    return matcher


def _deep_threads(count: int) -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(count, "grammars")
    all_there = threading.Barrier(count)
    before = threading.stack_size(STACK_BYTES)
    try:
        for started in [threads.submit(all_there.wait) for _ in range(count)]:
            started.result()
    except BaseException:
        # running threads would wait for ever for the one that could not be started
        all_there.abort()
        raise
    finally:
        threading.stack_size(before)
    return threads


def open_grammars(tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> Grammars | None:
    """Makes `Grammars`. Returns None if the engine has no tokenizer (""), or one whose tokens are
    not bytes (this is logged)."""
    if not tokenizer:
        return None
    try:
        return Grammars(tokenizer, vocab_size, stop_ids)
    except ValueError as error:
        log.warning("replies cannot follow a grammar or JSON schema with this tokenizer: %s", error)
        return None
