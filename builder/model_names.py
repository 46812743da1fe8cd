"""Finds the model that a user names: a directory or a file of this machine, a repository of the
Hugging Face Hub, or the small model. Imports nothing that takes long."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ..scheduler.types import SettingError
from .manifest import MANIFEST
from .small_model import SMALL_MODEL, small_model

CONFIG = "config.json"
GGUF = ".gguf"
GGUF_STARTS = (b"GGUF", b"vers")  # or a pointer of Git LFS, which the reader explains
PART = re.compile(r"-\d{5}-of-\d{5}$")  # the end of the name of one of several GGUF files
HUB = "hf://"
REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::([\w./-]+))?", re.ASCII)
FILE_ENDINGS = (GGUF, ".safetensors", ".bin", ".json")


class Repository(NamedTuple):
    """A repository of the Hub. `tag`: the name of a quantisation of GGUF files, or a revision."""

    name: str
    tag: str | None


class Model(NamedTuple):
    """A model on this machine.

    path    an engine, a checkpoint's directory, or a GGUF file (the first of a split one)
    name    for clients: ORG/NAME of the Hub, or the name of the directory or file
    origin  what stays the same from start to start: the absolute path, or the name that was typed
    """

    path: Path
    name: str
    origin: str


def find_model(text: str, say: Callable[[str], None]) -> Model:
    """Returns the model that `text` names; it is downloaded first if this machine has not got it.
    `say` gets what is downloaded, and where to.

    SettingError names "PATH".
    """
    check_name(text)
    if Path(text).exists():
        return _local(Path(text))
    if text == SMALL_MODEL:
        return find_small_model(say)
    from .hub import download  # and huggingface_hub, which no other name needs

    repository = _repository(text)
    assert repository is not None
    return Model(download(*repository, say), repository.name, HUB + text.removeprefix(HUB))


def find_small_model(say: Callable[[str], None]) -> Model:
    """Like `find_model` of its name, but also where a path has that name."""
    return _local(small_model(say))


def check_name(text: str) -> None:
    """SettingError names "PATH" if it is neither a model of this machine nor the name of one that
    can be downloaded. Does not use the network."""
    with _system_errors_named(text):
        exists = Path(text).exists()
    if exists:
        check_local(text)
    elif text != SMALL_MODEL and _repository(text) is None:
        raise _missing(text)


def check_local(text: str) -> None:
    """SettingError names "PATH" if no engine and no checkpoint is there, or if it cannot be
    read."""
    path = Path(text)
    with _system_errors_named(text):
        if path.is_dir():
            names = (MANIFEST, CONFIG)
            if not any((path / name).exists() for name in names) and not any(path.glob("*" + GGUF)):
                raise SettingError(
                    "PATH",
                    f"{text} is no engine (it has no {MANIFEST}) and no checkpoint (it has neither "
                    f"{CONFIG} nor a GGUF file)",
                )
        elif not path.exists():
            raise _missing(text)
        elif not _is_gguf(path):
            raise SettingError(
                "PATH",
                f"{text} is a file, and no GGUF file (it does not begin with GGUF); name one, or "
                "the directory of an engine or a checkpoint",
            )


@contextmanager
def _system_errors_named(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError("PATH", f"{text} cannot be read: {error.strerror}") from error


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) in GGUF_STARTS


def _local(path: Path) -> Model:
    path = Path(os.path.abspath(path))
    real = path.resolve()
    if path.is_file():
        return Model(path, PART.sub("", path.stem), str(real))
    # an engine keeps the name of its own directory, wherever links to it are
    return Model(path, real.name if (path / MANIFEST).exists() else path.name, str(real))


def _repository(text: str) -> Repository | None:
    """The repository that the text names, or None if it is no such name."""
    match = REPOSITORY.fullmatch(text.removeprefix(HUB))
    if match is None or (not text.startswith(HUB) and text.endswith(FILE_ENDINGS)):
        return None
    return Repository(match[1], match[2])


def _missing(text: str) -> SettingError:
    hint = ""
    if "://" in text or re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        hint = "; a model of the Hugging Face Hub is named as ORG/NAME"
    return SettingError("PATH", f"{text} does not exist{hint}")
