"""A byte-level BPE tokenizer with merges, and replies in ids that tokenising their text would not
give."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

MERGES = [
    "h e",
    "l l",
    "he ll",
    "hell o",
    "Ġ w",
    "Ġw o",
    "r l",
    "rl d",
    "Ġwo rld",
    "a a",
    "aa aa",
    "b c",
    ". Ċ",
    "Ċ Ċ",
]
SPECIAL = ("<|end|>", "<|turn|>", "<|done|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls %}"
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | "
    "tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}{{ '<|done|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
PLAIN_TEMPLATE = (  # no special token behind a reply
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TRIMMING_TEMPLATE = TEMPLATE.replace("message.content", "message.content | trim")


def merging_tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split()) for merge in MERGES]
    vocabulary = {
        sign: at for at, sign in enumerate([*alphabet, *("".join(pair) for pair in pairs)])
    }
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def spaced_tokenizer() -> tokenizers.Tokenizer:
    """Does what sentencepiece does: a space in front of every text, which decoding takes away
    again."""
    signs = ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz:!", "ab", "▁a"]
    vocabulary = {sign: at for at, sign in enumerate(["<unk>", *signs])}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("a", "b"), ("▁", "a")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    return tokenizer


def save_merging(directory: Path, template: str = TEMPLATE) -> Path:
    """A tokenizer directory as an engine has it."""
    merging_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def byte_by_byte(text: str) -> list[int]:
    """One token for each byte: never the tokenizer's own result for a text with merges."""
    tokenizer = merging_tokenizer()
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return [tokenizer.token_to_id(sign) for piece, _ in pieces for sign in piece]
