"""Makes the tokenizer files of a Hugging Face checkpoint, and its generation_config.json, from the
metadata of a GGUF file.

A GGUF file has a tokenizer's vocabulary, but of its rules no more than names:
`tokenizer.ggml.model` is the kind of the tokenizer, and `tokenizer.ggml.pre` the way in which one
of the kind "gpt2" splits a text before it merges bytes. The table below knows the rules.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ...scheduler.types import RequestError, Sampling
from .architectures import refusal

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
BYTE_LEVEL = "gpt2"
SENTENCEPIECE = "llama"
WITHOUT_TOKENIZER = (None, "none", "no_vocab")
GENERATION = "generation_config.json"
SPACE = "\u2581"  # stands for a space in sentencepiece's tokens
CURE = "take the model's original checkpoint, in safetensors"

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""The sampling that a file recommends, and the fields of generation_config.json. What else
llama.cpp knows (mirostat, XTC) has no counterpart here."""

# The ids that llama.cpp takes for a sentencepiece tokenizer whose file has none.
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

# Files name one end of text; chat models have more tokens that end a reply.
ENDS_OF_REPLIES = frozenset(
    (
        "</s>",
        "<end_of_turn>",
        "<eos>",
        "<|call|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    )
)


class TokenType(IntEnum):
    """The numbers in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


log = logging.getLogger("pensieve")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level tokenizer splits a text.

    patterns      each splits the pieces of the one before: a match is a piece, and so is the text
                  between two matches
    nfc           the text is brought into Unicode's composed form first
    whole_pieces  a piece that is a token as a whole becomes that token, also where the merges do
                  not lead to it
    adds_bos      each text begins with the BOS token, if there is one and unless the file tells
                  otherwise
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_pieces: bool = False
    adds_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_ENDINGS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDINGS}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDINGS}"
GPT4O = (
    rf"{_CAPITALISED}{_CONTRACTIONS}?|{_CAPITALS}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_CASED_ENDINGS}"
)
TEKKEN = rf"{_CAPITALISED}|{_CAPITALS}|\p{{N}}|{_CASED_ENDINGS}"
DIGIT = r"\p{N}"

_GPT2 = Splitting((GPT2,))
_DIGITS_GPT2 = Splitting((DIGIT, GPT2))
_LLAMA3 = Splitting((LLAMA3,), whole_pieces=True, adds_bos=True)
_QWEN2 = Splitting((QWEN2,), nfc=True)

# By the value of `tokenizer.ggml.pre`. Equal ids on 3,000 texts each: of the models' own
# tokenizer.json for command-r, deepseek-v3, gpt-4o (gpt-oss), llama-bpe (Llama 3), qwen2 (Qwen 2.5
# and 3) and tekken (Mistral Nemo); of llama.cpp for the rest. llama.cpp itself differs from the
# models' own in that it composes no characters (`nfc`) and in some marks (gpt-4o, tekken).
SPLITTINGS = {
    "command-r": Splitting((DIGIT, GPT2), nfc=True),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT)),
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": Splitting(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon3": _LLAMA3,
    "gpt-2": _GPT2,
    "gpt-4o": Splitting((GPT4O,), whole_pieces=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mellum": _GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "qwen2": _QWEN2,
    "refact": _DIGITS_GPT2,
    "smaug-bpe": Splitting((LLAMA3,)),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "tekken": Splitting((TEKKEN,), whole_pieces=True, adds_bos=True),
    "trillion": _GPT2,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file, and the ids of those with a role.

    texts    by id
    types    by id
    roles    ids by the names in GGUF: "bos", "eos", "eot", ...
    """

    texts: Sequence[str]
    types: Sequence[int]
    roles: Mapping[str, int]

    @property
    def ids(self) -> dict[str, int]:
        """Ids by text. Files fill the table up to the number of the model's outputs: tokens
        without a text of their own are left out."""
        return {
            text: at
            for at, (text, kind) in enumerate(zip(self.texts, self.types, strict=True))
            if kind != TokenType.UNUSED or text != f"[PAD{at}]"
        }

    @property
    def uncut(self) -> list[AddedToken]:
        """The tokens that a text is searched for before it is split, in the order of their ids.
        Control tokens are special, and so are the tokens that begin and end texts."""
        framing = {self.roles[role] for role in ("bos", "eos", "eot", "eom") if role in self.roles}
        special = [
            kind in (TokenType.CONTROL, TokenType.UNKNOWN) or at in framing
            for at, kind in enumerate(self.types)
        ]
        return [
            AddedToken(text, special=special[at], normalized=False)
            for at, text in enumerate(self.texts)
            if special[at] or self.types[at] == TokenType.USER_DEFINED
        ]

    def ends(self) -> list[int]:
        """The ids of the tokens that end a reply."""
        ends = {self.roles[role] for role in ("eos", "eot", "eom") if role in self.roles}
        return sorted(
            ends
            | {
                at
                for at, text in enumerate(self.texts)
                if text in ENDS_OF_REPLIES and self.types[at] == TokenType.CONTROL
            }
        )


def tokenizer_files(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of Hugging Face's files by name: tokenizer.json, tokenizer_config.json (roles of
    tokens, chat templates), and generation_config.json (sampling, ends of replies).

    `fields`: a GGUF file's metadata by key. A file without a tokenizer has at most the sampling.
    SettingError names a kind of tokenizer that is not supported, or the field that is wrong.
    """
    sampling = _sampling(fields)
    kind = fields.get(f"{PREFIX}model")
    if kind in WITHOUT_TOKENIZER:
        return {GENERATION: json.dumps(sampling)} if sampling else {}
    if kind == BYTE_LEVEL:
        splitting = _splitting(fields.get(f"{PREFIX}pre"))
        vocabulary = _vocabulary(fields, {})
        tokenizer = _byte_level(vocabulary, _merges(fields), splitting)
        adds_bos = splitting.adds_bos and "bos" in vocabulary.roles
    elif kind == SENTENCEPIECE:
        vocabulary = _vocabulary(fields, SENTENCEPIECE_IDS)
        tokenizer = _sentencepiece(vocabulary, fields)
        adds_bos = True
    else:
        raise refusal(
            f"tokenizers of the kind {kind!r} ({PREFIX}model) are not supported, only "
            f"{BYTE_LEVEL!r} and {SENTENCEPIECE!r}; {CURE}"
        )
    tokenizer.add_tokens(vocabulary.uncut)
    framing = {
        "add_bos_token": bool(fields.get(f"{PREFIX}add_bos_token", adds_bos)),
        "add_eos_token": bool(fields.get(f"{PREFIX}add_eos_token", False)),
    }
    tokenizer.post_processor = _framing(vocabulary, **framing)
    roles = {
        name: vocabulary.texts[vocabulary.roles[role]]
        for role, name in ROLES.items()
        if role in vocabulary.roles
    }
    config = {
        **roles,
        **framing,
        **_chat_templates(fields),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    }
    ends = vocabulary.ends()
    if generation := sampling | ({"eos_token_id": ends} if ends else {}):
        files[GENERATION] = json.dumps(generation)
    return files


def _sampling(fields: Mapping[str, Any]) -> dict[str, float]:
    """The sampling that requests may have; the log names the values that none may have."""
    sampling = {}
    for key, name in SAMPLING.items():
        if key not in fields:
            continue
        number = _sampling_number(name, fields[key])
        if number is None:
            log.warning(
                "the file's %s is %r, which no request may have: it is left out", key, fields[key]
            )
        else:
            sampling[name] = number
    return sampling


def _sampling_number(name: str, value: Any) -> float | None:
    """The number of our setting; None: there is none. In llama.cpp a temperature below 0 is greedy
    too, and a `top_k` below 0 is off."""
    if type(value) not in (int, float):
        return None
    if name == "top_k":
        if not float(value).is_integer():
            return None
        value = int(value)
    elif type(value) is float:
        # the shortest number of the same value in float32, the file's type: 0.95 instead of
        # 0.949999988
        value = float(str(np.float32(value)))
    if name in ("temperature", "top_k"):
        value = max(value, 0)
    try:
        Sampling(**{name: value})
    except RequestError:
        return None
    number: float = value
    return number


def _splitting(name: str | None) -> Splitting:
    if name is None:
        raise refusal(
            f"the file does not name its pre-tokenizer ({PREFIX}pre), as files of before May 2024; "
            f"convert the model with a newer llama.cpp, or {CURE}"
        )
    if name not in SPLITTINGS:
        raise refusal(
            f"the pre-tokenizer {name!r} ({PREFIX}pre) is not supported, only "
            f"{', '.join(SPLITTINGS)}; {CURE}"
        )
    return SPLITTINGS[name]


def _vocabulary(fields: Mapping[str, Any], default_ids: Mapping[str, int]) -> Vocabulary:
    texts = list(_list(fields, "tokens"))
    types = fields.get(f"{PREFIX}token_type")
    types = [TokenType.NORMAL] * len(texts) if types is None else types
    if len(types) != len(texts):
        raise refusal(
            f"{PREFIX}token_type has {len(types)} entries for {len(texts)} tokens; the file is "
            "damaged"
        )
    roles = dict(default_ids)
    for role in (*ROLES, "eot", "eom"):
        if (token := fields.get(f"{PREFIX}{role}_token_id")) is not None:
            roles[role] = token
    for role, token in roles.items():
        if not 0 <= token < len(texts):
            raise refusal(f"{PREFIX}{role}_token_id is {token}, but there are {len(texts)} tokens")
    texts = _without_space_signs(texts, types)
    if len(set(texts)) < len(texts):
        twice = next(text for text, count in Counter(texts).items() if count > 1)
        raise refusal(f"{PREFIX}tokens has {twice!r} twice; convert the model again")
    return Vocabulary(texts, types, roles)


def _without_space_signs(texts: Sequence[str], types: Sequence[int]) -> list[str]:
    """User-defined tokens are found in the text as it was sent, where spaces are spaces. Newer
    files have them in this form already."""
    return [
        text.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else text
        for text, kind in zip(texts, types, strict=True)
    ]


def _list(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    values: Sequence[Any] | None = fields.get(f"{PREFIX}{name}")
    if values is None:
        raise refusal(f"the file has a tokenizer, but no {PREFIX}{name}; it is damaged")
    return values


def _merges(fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each entry is two tokens with a space between them. The first character belongs to the
    first token, even if it is a space."""
    merges = []
    for entry in _list(fields, "merges"):
        space = entry.find(" ", 1)
        if space < 0:
            raise refusal(f"{PREFIX}merges has an entry without two tokens: {entry!r}")
        merges.append((entry[:space], entry[space + 1 :]))
    return merges


def _byte_level(
    vocabulary: Vocabulary, merges: list[tuple[str, str]], splitting: Splitting
) -> Tokenizer:
    tokenizer = Tokenizer(
        _model(vocabulary, merges, ignore_merges=splitting.whole_pieces, byte_fallback=False)
    )
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary, fields: Mapping[str, Any]) -> Tokenizer:
    """A space is a character of the tokens, and a character without a token becomes the tokens of
    its bytes. By default each text begins with a space, which is removed again on decoding."""
    scores = _list(fields, "scores")
    if len(scores) != len(vocabulary.texts):
        raise refusal(
            f"{PREFIX}scores has {len(scores)} entries for {len(vocabulary.texts)} tokens; the "
            "file is damaged"
        )
    unknown = vocabulary.texts[vocabulary.roles["unknown"]]
    tokenizer = Tokenizer(
        _model(
            vocabulary,
            _merges_by_score(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_sign = normalizers.Replace(" ", SPACE)
    from_tokens = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get(f"{PREFIX}add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_sign])
        tokenizer.decoder = decoders.Sequence([*from_tokens, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = to_sign
        tokenizer.decoder = decoders.Sequence(from_tokens)
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece merges the pair whose text has the best score. So every way to divide a token
    into two tokens is a merge, ordered by the token's score: the order of transformers, for which
    a longer first token goes before in a tie."""
    mergeable = {
        text: at
        for at, text in enumerate(vocabulary.texts)
        if vocabulary.types[at] in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = []
    for text, at in mergeable.items():
        pairs = (
            (text[:middle], text[middle:])
            for middle in range(1, len(text))
            if text[:middle] in mergeable and text[middle:] in mergeable
        )
        merges += [
            (-scores[at], -len(first), -len(second), first, second) for first, second in pairs
        ]
    merges.sort(key=lambda merge: merge[:3])
    return [(first, second) for *_, first, second in merges]


def _model(vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **settings)
    except Exception as error:  # the library raises this class for merges without a token
        raise refusal(f"{PREFIX}merges does not fit {PREFIX}tokens: {error}") from error


def _framing(
    vocabulary: Vocabulary, add_bos_token: bool, add_eos_token: bool
) -> processors.PostProcessor:
    """Adds the tokens around a text of which the file tells."""
    begin = _framing_token(vocabulary, "bos") if add_bos_token else []
    end = _framing_token(vocabulary, "eos") if add_eos_token else []
    if not (begin or end):
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=[(text, vocabulary.texts.index(text)) for text in {*begin, *end}],
    )


def _framing_token(vocabulary: Vocabulary, role: str) -> list[str]:
    if role not in vocabulary.roles:
        raise refusal(
            f"each text has a {role.upper()} token, but the file has no {PREFIX}{role}_token_id; "
            "convert the model again"
        )
    return [vocabulary.texts[vocabulary.roles[role]]]


def _chat_templates(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template in the form of tokenizer_config.json: its source, or a list if there are
    several."""
    named = {
        key.removeprefix(f"{TEMPLATE}."): source
        for key, source in fields.items()
        if key.startswith(f"{TEMPLATE}.")
    }
    default = fields.get(TEMPLATE)
    if not named:
        return {} if default is None else {"chat_template": default}
    sources = named if default is None else {"default": default, **named}
    return {
        "chat_template": [{"name": name, "template": source} for name, source in sources.items()]
    }
