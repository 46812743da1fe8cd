"""Opens GGUF files, llama.cpp's format: their metadata as plain values, and their tensors, which
are read when they are used.

The package `gguf` describes and dequantises the types of tensors. The metadata is read here: its
reader needs 2.4 s for a vocabulary of 49,152 tokens, and this one 0.2 s.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .architectures import refusal
from .hugging_face import INDEX, LFS_POINTER, SINGLE

if TYPE_CHECKING:  # the package is imported where a file is opened: it takes 0.1 s
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
OF_IMAGES = "mmproj"
"""The beginning of the names of files with the part of a model that takes images."""

ALIGNMENT = 32  # bytes, of a file that sets none
MOST_DIMENSIONS = 4
MOST_NESTED = 8  # arrays in each other
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""The numbers of the types of metadata, and what `struct` calls them."""

LENGTH = struct.Struct("<Q")  # of a string


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    shape   as in torch: the outputs of a projection come before its inputs
    stored  uint8, like `shape`, but the last dimension has the bytes of a row
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    stored: np.ndarray[Any, np.dtype[np.uint8]]

    def values(self, rows: Any = slice(None)) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The dequantised values of some rows: `rows` indexes all dimensions but the last."""
        from gguf import dequantize

        return dequantize(np.ascontiguousarray(self.stored[rows]), self.kind)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model: one file, or the parts of a split one.

    path    the file, or the first part
    fields  the metadata by key; arrays are lists
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint at `path` can only be a GGUF file: it is a file, or is named like one,
    or is a folder that has such files and no weights of Hugging Face's format."""
    if not path.is_dir():
        return path.exists() or path.suffix == ".gguf"
    return any(path.glob("*.gguf")) and not any((path / name).exists() for name in (SINGLE, INDEX))


def gguf_parts(path: Path) -> list[Path]:
    """The files of the model at `path`: a file, any part of a split one, or a folder with one
    model.

    SettingError if a part is missing, or if the folder has several models.
    """
    if path.is_dir():
        path = _only_model(path)
    split = PART.fullmatch(path.name)
    if split is None:
        return [path]
    count = int(split["count"])
    parts = [
        path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise refusal(f"{path.parent} lacks parts of a split model: {', '.join(missing)}")
    return parts


def _only_model(folder: Path) -> Path:
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith(OF_IMAGES))
    models: dict[str, Path] = {}
    for file in files:
        split = PART.fullmatch(file.name)
        models.setdefault(f"{split['stem']}-of-{split['count']}" if split else file.name, file)
    if not models:
        raise refusal(f"{folder} has no GGUF file of a model")
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise refusal(f"{folder} has several GGUF files; name one of them: {names}")
    return next(iter(models.values()))


def model_name(path: Path) -> str:
    """The name of the model at `path`: a file's without its end, or the folder's."""
    if path.is_dir():
        return path.name
    split = PART.fullmatch(path.name)
    return split["stem"] if split else path.stem


def open_gguf(path: Path) -> GgufFile:
    """Opens the model at `path`, as `gguf_parts` finds it. Raises SettingError if a file is cut
    off, or is no such file."""
    check_start(path)
    parts = gguf_parts(path)
    fields, tensors = _open_part(parts[0])
    count = fields.get("split.count", 1)
    if count != len(parts):
        raise refusal(
            f"{parts[0]} is one of {count} parts of a split model, whose names must end with "
            f"-00001-of-{count:05}.gguf and so on"
        )
    for part in parts[1:]:
        tensors |= _open_part(part)[1]
    return GgufFile(parts[0], fields, tensors)


def check_start(path: Path) -> None:
    """SettingError if the model at `path` is no GGUF file. Reads no more than its first bytes."""
    for part in gguf_parts(path):
        try:
            with part.open("rb") as file:
                start = file.read(len(MAGIC))
        except OSError as error:
            raise refusal(f"{part} cannot be read: {error}") from None
        if start == LFS_POINTER[: len(MAGIC)]:
            raise refusal(f"{part} is a pointer of Git LFS; `git lfs pull` gets the weights")
        if start != MAGIC:
            raise refusal(
                f"{part} is no GGUF file (it does not begin with {MAGIC.decode()}); name one, or "
                "the directory of an engine or a checkpoint"
            )


def _open_part(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """The metadata and tensors of one file."""
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC) + 4)
            version = int.from_bytes(start[len(MAGIC) :], "little")
            if version not in VERSIONS:
                raise refusal(
                    f"{path} is a GGUF file of version {version}, or its numbers are big-endian; "
                    f"known are versions {' and '.join(map(str, VERSIONS))}, little-endian"
                )
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise refusal(f"{path} cannot be read: {error}") from None
    header = _Header(path, data, len(start))
    try:
        return header.fields_and_tensors()
    except (struct.error, EOFError):
        raise _cut_off(path, f"its metadata goes beyond its {len(data)} bytes") from None
    except UnicodeDecodeError as error:
        raise refusal(f"{path} has metadata that is not UTF-8: {error}") from None


def _cut_off(path: Path, why: str) -> Exception:
    return refusal(f"{path} is cut off: {why}; repeat its download")


class _Header:
    """Reads a file from its start. Raises EOFError or struct.error at the file's end."""

    def __init__(self, path: Path, data: mmap.mmap, at: int):
        self._path = path
        self._data = data
        self._at = at

    def fields_and_tensors(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        tensor_count = self._scalar("Q")
        field_count = self._scalar("Q")
        fields = {}
        for _ in range(field_count):
            key = self._string()
            fields[key] = self._value(self._scalar("I"))
        places = [self._tensor_place() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise refusal(
                f"{self._path} has general.alignment {alignment!r}, which must be a number of bytes"
            )
        start = -(-self._at // alignment) * alignment
        tensors = {
            name: self._tensor(name, shape, kind, start + offset)
            for name, shape, kind, offset in places
        }
        return fields, tensors

    def _tensor_place(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, its shape, the number of its type, and where it begins behind the
        header."""
        name = self._string()
        count = self._scalar("I")
        if not 1 <= count <= MOST_DIMENSIONS:
            raise refusal(
                f"{self._path}: tensor {name} has {count} dimensions; possible are 1 to "
                f"{MOST_DIMENSIONS}"
            )
        dimensions = self._scalars("Q", count)
        if 0 in dimensions:
            raise refusal(f"{self._path}: tensor {name} has a dimension of size 0")
        kind = self._scalar("I")
        return name, dimensions[::-1], kind, self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        try:
            stored_as = GGMLQuantizationType(kind)
            stored_shape = quant_shape_to_byte_shape(shape, stored_as)
        except ValueError as error:
            sizes = "x".join(map(str, shape))
            raise refusal(
                f"{self._path}: tensor {name} ({sizes}, type {kind}) cannot be read: {error}"
            ) from None
        size = math.prod(stored_shape)
        if start + size > len(self._data):
            raise _cut_off(
                self._path,
                f"tensor {name} ends at byte {start + size}, and the file has {len(self._data)}",
            )
        stored = np.frombuffer(self._data, np.uint8, size, start).reshape(stored_shape)
        return GgufTensor(name, stored_as, shape, stored)

    def _value(self, kind: int, nested: int = 0) -> Any:
        """`nested`: in how many arrays the value is."""
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            if nested >= MOST_NESTED:
                raise refusal(f"{self._path} has arrays in more than {MOST_NESTED} arrays")
            of = self._scalar("I")
            return self._array(of, self._scalar("Q"), nested + 1)
        if kind not in SCALARS:
            raise refusal(f"{self._path} has metadata of an unknown type, {kind}")
        return self._scalar(SCALARS[kind])

    def _array(self, kind: int, count: int, nested: int) -> list[Any]:
        if kind in SCALARS:
            return list(self._scalars(SCALARS[kind], count))
        if kind == STRING:
            return [self._string() for _ in range(count)]
        return [self._value(kind, nested) for _ in range(count)]

    def _string(self) -> str:
        start = self._at + 8
        end = start + LENGTH.unpack_from(self._data, self._at)[0]
        if end > len(self._data):
            raise EOFError
        self._at = end
        return str(self._data[start:end], "utf-8")

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values
