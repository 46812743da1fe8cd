"""Weights of an engine: one safetensors file under Decoder's parameter names, and the digest of its
content."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

# bytes that one thread hashes at a time; at 1.7 GB/s for each of 16 processors, 25 GB take a second
PIECE = 2**24
AHEAD = 64  # most pieces waiting for their hash, which limits the tensors in memory

STORED_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int32: "I32",
}


Advance = Callable[[int, int], None]
"""Called with the number of bytes done and of all bytes."""


class Stored(NamedTuple):
    """The dtype and shape in which a tensor is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over the SHA-256 of each piece: name, dtype, shape, place and bytes, in the order of
    names and places.

    Pieces are hashed by all processors at once. Tensors are on the CPU and are read one after the
    other.
    """
    digest = hashlib.sha256()
    hashing: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor() as pool:
        for label, piece in _pieces(weights):
            hashing.append(pool.submit(_piece_digest, label, piece))
            if len(hashing) > AHEAD:
                digest.update(hashing.popleft().result())
        for waiting in hashing:
            digest.update(waiting.result())
    return digest.hexdigest()


def _pieces(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, memoryview]]:
    for name in sorted(weights):
        tensor = weights[name]
        content = _bytes(tensor)
        for start in range(0, len(content), PIECE):
            yield (
                f"{name} {tensor.dtype} {list(tensor.shape)} {start}\n",
                content[start : start + PIECE],
            )


def _piece_digest(label: str, piece: memoryview) -> bytes:
    digest = hashlib.sha256(label.encode())
    digest.update(piece)
    return digest.digest()


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


class _Watched(Mapping[str, Tensor]):
    """Weights; `took` is called with the bytes of each tensor that is read."""

    def __init__(self, weights: Mapping[str, Tensor], took: Callable[[int], None]):
        self._weights = weights
        self._took = took

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        self._took(tensor.nbytes)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def watched(ranks: Sequence[Mapping[str, Tensor]], total: int, advance: Advance) -> list[_Watched]:
    """The ranks' weights; `advance` is called with the bytes of all of them that were read."""
    done = 0

    def took(size: int) -> None:
        nonlocal done
        done += size
        advance(done, total)

    return [_Watched(each, took) for each in ranks]


def save_weights(weights: Mapping[str, Tensor], stored: Mapping[str, Stored], path: Path) -> None:
    """Writes a safetensors file. Tensors are read one after the other and stored in the form of
    `stored`."""
    header = {}
    end = 0
    for name, kind in stored.items():
        start = end
        end = end + kind.nbytes
        header[name] = {
            "dtype": STORED_DTYPES[kind.dtype],
            "shape": kind.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header).encode()
    # with the leading eight bytes, tensors begin at a multiple of 64
    text += b" " * (-len(text) % 64 + 56)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in stored:
            file.write(_bytes(weights[name]))


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors on the CPU, mapped from the file: pages are read at first use, and dropped when
    memory is short.

    OSError, SafetensorError.
    """
    path.open("rb").close()  # safetensors reports every file that it cannot open as missing
    return load_file(path)
