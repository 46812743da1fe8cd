"""Carries a checkpoint's tokenizer into the engine; makes tokenizer.json where only GPT-2 style files exist (OPT)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from .checkpoint import read_json
from .manifest import TOKENIZER_FILES

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


def copy_tokenizer(checkpoint: Path, engine: Path, opt: bool) -> bool:
    """Copies what there is. False: neither tokenizer.json nor vocab.json and merges.txt, so token ids only."""
    for name in TOKENIZER_FILES:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, engine / name)
    if (checkpoint / "tokenizer.json").exists():
        return True
    if not ((checkpoint / "vocab.json").exists() and (checkpoint / "merges.txt").exists()):
        return False
    byte_level_tokenizer(checkpoint, opt).save(str(engine / "tokenizer.json"))
    return True


def byte_level_tokenizer(checkpoint: Path, opt: bool) -> Tokenizer:
    """A byte-level BPE tokenizer from vocab.json and merges.txt. OPT's begins every text with </s>."""
    tokenizer = Tokenizer(models.BPE.from_file(str(checkpoint / "vocab.json"), str(checkpoint / "merges.txt")))
    settings = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True} if opt else {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (checkpoint / name).exists():
            settings |= {key: value for key, value in read_json(checkpoint / name).items() if value is not None}
    texts = {role: _text(settings[role]) for role in SPECIAL_ROLES if role in settings}
    known = [text for text in dict.fromkeys(texts.values()) if tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in known])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()
    bos = texts.get("bos_token")
    if settings.get("add_bos_token", False) and bos in known:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _text(token: str | dict[str, Any]) -> str:
    """Configuration files hold a special token as text, or as an object around it."""
    return token["content"] if isinstance(token, dict) else token
