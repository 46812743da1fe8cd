"""Replies that follow a grammar: what may come next, token by token, by llguidance.

A grammar travels as one text (`Sampling.grammar`) and is compiled twice: in the HTTP process, which refuses what does
not compile, and beside the executor, where each row has a matcher of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance

from ..scheduler.types import RequestError

log = logging.getLogger(__name__)

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
    return lark_grammar("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def lark_json(schema: dict[str, Any]) -> str:
    """JSON that this schema validates, as a term of a Lark grammar."""
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"


class Grammars:
    """Compiles grammars for one tokenizer. Any thread."""

    def __init__(self, tokenizer: str | Path, vocab_size: int, stop_ids: Sequence[int]):
        """`tokenizer`: the engine's tokenizer directory. A reply that is complete ends with one of `stop_ids`.

        Takes most of a second for a large vocabulary. Raises ValueError if tokens of such a tokenizer are not bytes.
        """
        self.vocab_size = vocab_size
        path = str(Path(tokenizer) / "tokenizer.json")
        self._tokenizer = llguidance.LLTokenizer(path, n_vocab=vocab_size, eos_token=list(stop_ids) or None)

    def check(self, grammar: str, param: str) -> None:
        """Raises RequestError (400) that says why the grammar does not compile."""
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            raise RequestError(400, f"{param} cannot be followed: {messages[0]}", param)

    def matcher(self, grammar: str, reply: Sequence[int]) -> llguidance.LLMatcher:
        """Behind the tokens of a reply so far."""
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        matcher.consume_tokens(list(reply))
        return matcher


def open_grammars(tokenizer: str, vocab_size: int, stop_ids: Sequence[int]) -> Grammars | None:
    """As `Grammars`; None if the engine has no tokenizer (""), or one whose tokens are not bytes (said in the log)."""
    if not tokenizer:
        return None
    try:
        return Grammars(tokenizer, vocab_size, stop_ids)
    except ValueError as error:
        log.warning("replies cannot follow a grammar or JSON schema with this tokenizer: %s", error)
        return None
