"""Copies a checkpoint's tokenizer into the engine. Makes tokenizer.json if only GPT-2 style files
exist (OPT)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ..manifest import TOKENIZER_FILES
from .architectures import refusal
from .hugging_face import read_json

GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
ROLES = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def copy_tokenizer(checkpoint: Path, engine: Path, opt: bool) -> bool:
    """Copies the existing files. Returns False if neither tokenizer.json nor vocab.json and
    merges.txt exist: token ids only.

    SettingError names the file of the checkpoint that cannot be read.
    """
    for name in TOKENIZER_FILES:
        if (content := _content(checkpoint / name)) is not None:
            (engine / name).parent.mkdir(exist_ok=True)
            (engine / name).write_bytes(content)
    if (checkpoint / "tokenizer.json").exists():
        _add_configured_tokens(checkpoint, engine)
        return True
    if not ((checkpoint / "vocab.json").exists() and (checkpoint / "merges.txt").exists()):
        return False
    byte_level_tokenizer(checkpoint, opt).save(str(engine / "tokenizer.json"))
    return True


def _content(path: Path) -> bytes | None:
    """The file's bytes, or None if it does not exist."""
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error}") from None


def byte_level_tokenizer(checkpoint: Path, opt: bool) -> Tokenizer:
    """GPT-2's byte-level BPE tokenizer from vocab.json and merges.txt. OPT's begins every text with
    </s>.

    SettingError if the checkpoint's tokenizer is another one, or has tokens outside the vocabulary.
    """
    vocabulary = checkpoint / "vocab.json"
    merges = checkpoint / "merges.txt"
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the library raises this class for files that it cannot parse
        raise refusal(f"{vocabulary} and {merges} cannot be read: {error}") from error
    settings: dict[str, Any] = (
        {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True}
        if opt
        else {}
    )
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (checkpoint / name).exists():
            settings |= {
                key: value
                for key, value in read_json(checkpoint / name).items()
                if value is not None
            }
    texts = {role: _text(settings[role]) for role in SPECIAL_ROLES if role in settings}
    special = [
        text for text in dict.fromkeys(texts.values()) if tokenizer.token_to_id(text) is not None
    ]
    _check_is_gpt2s(checkpoint, settings, special)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(settings.get("add_prefix_space", False))
    )
    tokenizer.decoder = decoders.ByteLevel()
    bos = texts.get("bos_token")
    if settings.get("add_bos_token", False) and bos in special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _check_is_gpt2s(checkpoint: Path, settings: dict[str, Any], special: Collection[str]) -> None:
    """special: the tokens that the new tokenizer does not split."""
    kind = settings.get("tokenizer_class", GPT2[0])
    added = [
        *settings.get("added_tokens_decoder", {}).values(),
        *settings.get("additional_special_tokens", ()),
    ]
    if (checkpoint / "added_tokens.json").exists():
        added += read_json(checkpoint / "added_tokens.json")
    others = sorted({_text(token) for token in added} - set(special))
    if kind in GPT2 and not others:
        return
    what = f"its added tokens {', '.join(others)}" if kind in GPT2 else f"a {kind}"
    raise refusal(
        f"{checkpoint} has no tokenizer.json, and {what} cannot be made from vocab.json and "
        "merges.txt alone; load it "
        "with transformers' AutoTokenizer and save it there with save_pretrained, which writes "
        "tokenizer.json"
    )


def _add_configured_tokens(checkpoint: Path, engine: Path) -> None:
    """Adds tokens that only the settings describe to tokenizer.json, as transformers does, and
    tokens of its vocabulary that have a role in the settings. If both describe a token, the
    settings count. SettingError if a token gets another id than its own, or a file cannot be
    read."""
    path = checkpoint / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    older = checkpoint / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and older.exists():
        settings |= read_json(older)
    added = settings.get("added_tokens_decoder") or {}
    try:
        roles = _tokens_with_roles(settings)
        special = {token.content for token in roles}
        described = sorted(
            (
                int(at),
                AddedToken(**token | ({"special": True} if token["content"] in special else {})),
            )
            for at, token in added.items()
        )
        tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    except Exception as error:  # the library raises this class for a file that it cannot parse
        also = f", or the tokens in {path.name}," if settings else ""
        raise refusal(f"{checkpoint / 'tokenizer.json'}{also} cannot be read: {error}") from error
    present = tokenizer.get_added_tokens_decoder()
    missing = {at: token for at, token in described if repr(token) != repr(present.get(at))}
    whole = {token.content for token in (*present.values(), *missing.values())}
    uncut = tokenizer.get_vocab().keys() - whole
    roles = [token for token in roles if token.content in uncut]
    if not (missing or roles):
        return
    tokenizer.add_tokens([*missing.values(), *roles])
    for at, token in missing.items():
        if (got := tokenizer.token_to_id(token.content)) != at:
            raise refusal(
                f"{token.content!r} has id {at} in tokenizer_config.json, but {got} in "
                "tokenizer.json"
            )
    tokenizer.save(str(engine / "tokenizer.json"))


def _tokens_with_roles(settings: dict[str, Any]) -> list[AddedToken]:
    """The tokens in the settings that transformers recognises: those of its own roles, and objects
    that describe a token."""
    role_tokens = [
        value
        for key, value in settings.items()
        if key.endswith("_token")  # add_bos_token is not a token
        and (isinstance(value, str) or key in ROLES or _describes_token(value))
    ]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        several = settings.get(key) or ()
        role_tokens += several.values() if isinstance(several, dict) else several
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    tokens = [{"content": token} if isinstance(token, str) else token for token in role_tokens]
    return [
        AddedToken(
            token["content"], special=True, **{flag: token[flag] for flag in flags if flag in token}
        )
        for token in tokens
        if isinstance(token, dict) and isinstance(token.get("content"), str)
    ]


def _describes_token(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type") == "AddedToken"


def _text(token: str | dict[str, Any]) -> str:
    """Configuration files contain a special token as text, or as an object with its text."""
    return token["content"] if isinstance(token, dict) else token
