"""Shared by the twins of the bindings' classes; and memory, given by its address."""

from __future__ import annotations

import ctypes
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .bindings import check_call, load_bindings

real = load_bindings()
DataType = real.DataType
TORCH_TYPES = {
    DataType.FLOAT: torch.float32,
    DataType.HALF: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT32: torch.int32,
    DataType.INT64: torch.int64,
}
FLOATS = (DataType.FLOAT, DataType.HALF, DataType.BF16)
INDICES = (DataType.INT32, DataType.INT64)
STREAM = 77
ALIGNMENT = 64  # of torch's memory on the CPU; TensorRT's is 256, and torch's on a GPU 512


class Refused(Exception):
    """TensorRT's documentation forbids it."""


def allow(allowed: bool, reason: str) -> None:
    if not allowed:
        raise Refused(reason)


TWINS: dict[str, type] = {}


class Twin:
    """Stands for the class REAL of the bindings: public methods and attributes are checked against it."""

    REAL: ClassVar[type]

    def __init_subclass__(cls, stands_for: str) -> None:
        cls.REAL = getattr(real, stands_for)
        TWINS.setdefault(stands_for, cls)
        for name, member in list(vars(cls).items()):
            if name == "__init__" or (inspect.isfunction(member) and not name.startswith("_")):
                setattr(cls, name, _checked(member, name))
            elif isinstance(member, property) and not hasattr(cls.REAL, name):
                raise AttributeError(f"{stands_for} has no {name}")

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            check_call(self.REAL, name, (value,), {}, TWINS)
        object.__setattr__(self, name, value)


def _checked(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    made_by_user = name == "__init__"

    @functools.wraps(method)
    def call(self: Twin, *args: Any, **named: Any) -> Any:
        if not made_by_user or "(self: " in (self.REAL.__init__.__doc__ or ""):
            check_call(self.REAL, name, args, named, TWINS)
        return method(self, *args, **named)

    return call


def memory(address: int, size: int) -> Tensor:
    """Bytes, [size] uint8."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def values_at(address: int, dtype: DataType, shape: Sequence[int]) -> Tensor:
    kind = TORCH_TYPES[dtype]
    return memory(address, math.prod(shape) * kind.itemsize).view(kind).view(tuple(shape))


class Weights(Twin, stands_for="Weights"):
    def __init__(self, type: DataType, ptr: int, count: int):
        self._type, self._address, self._count = type, ptr, count
