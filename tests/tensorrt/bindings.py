"""NVIDIA's Python bindings of TensorRT without TensorRT, and the signatures in them.

The bindings can be imported if three libraries exist that export nine C functions. Here these return null, so no object
can be made; but classes, enumerations and signatures, which are in the docstrings, are the real ones.
"""

from __future__ import annotations

import collections.abc
import ctypes
import functools
import importlib.util
import inspect
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

FUNCTIONS = {
    "libnvinfer.so.11": (
        "createInferBuilder_INTERNAL",
        "createInferRefitter_INTERNAL",
        "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry",
        "getPluginRegistry",
    ),
    "libnvinfer_plugin.so.11": ("initLibNvInferPlugins",),
    "libnvonnxparser.so.11": (
        "createNvOnnxParserRefitter_INTERNAL",
        "createNvOnnxParser_INTERNAL",
        "getNvOnnxParserVersion",
    ),
}


@functools.cache
def load_bindings() -> ModuleType:
    """`tensorrt_bindings`. Skips the test where they, or gcc, are not installed."""
    if importlib.util.find_spec("tensorrt_bindings") is None or shutil.which("gcc") is None:
        pytest.skip("needs tensorrt-cu13-bindings and gcc", allow_module_level=True)
    with tempfile.TemporaryDirectory() as directory:
        for library, functions in FUNCTIONS.items():
            path = Path(directory) / library
            source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions)
            command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-x", "c", "-", "-o", str(path)]
            subprocess.run(command, input=source.encode(), check=True)
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)  # found by its name from here on
    import tensorrt_bindings

    return tensorrt_bindings


class Parameter(NamedTuple):
    name: str
    type: str
    optional: bool


@functools.cache
def signatures(cls: type, name: str) -> list[list[Parameter]]:
    """All overloads of a method, or of the setter of a property, without self."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, property):
        if member.fset is None:
            raise AttributeError(f"{cls.__name__}.{name} cannot be set")
        text, pattern = member.fset.__doc__, r"^\((.*)\) -> "
    else:
        text, pattern = getattr(cls, name).__doc__, rf"^(?:\d+\. )?{name}\((self: .*)\) -> "
    found = [_parameters(parameters) for parameters in re.findall(pattern, text or "", re.MULTILINE)]
    if not found:
        raise AttributeError(f"the docstring of {cls.__name__}.{name} has no signature")
    return [parameters[1:] for parameters in found]


def _parameters(text: str) -> list[Parameter]:
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text + ","):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parsed = [re.fullmatch(r"(\w+): (.*?)( = .*)?", part) for part in parts]
    return [Parameter(match[1], match[2], match[3] is not None) for match in parsed if match is not None]


def bind(overload: list[Parameter], args: tuple[Any, ...], named: dict[str, Any]) -> dict[Parameter, Any] | None:
    """Each parameter's argument, or None: this overload cannot be called so."""
    if len(args) > len(overload):
        return None
    bound = dict(zip(overload, args, strict=False))
    by_name = {parameter.name: parameter for parameter in overload[len(args) :]}
    if not named.keys() <= by_name.keys():
        return None
    bound |= {by_name[name]: value for name, value in named.items()}
    return bound if all(parameter in bound or parameter.optional for parameter in overload) else None


PLAIN = {
    "str": str,
    "bool": bool,
    "tuple": tuple,
    "list": list,
    "object": object,
    "typing.SupportsInt": int,
    "collections.abc.Callable": collections.abc.Callable,
    "typing_extensions.Buffer": (bytes, bytearray, memoryview),
    "collections.abc.Buffer": (bytes, bytearray, memoryview),  # its name from Python 3.12 on
}


def fits(value: Any, type_name: str, classes: dict[str, type]) -> bool:
    """Returns whether pybind11 would accept the value; `classes` replace those of the bindings."""
    if type_name in PLAIN:
        return isinstance(value, PLAIN[type_name]) and not (type_name == "typing.SupportsInt" and value is True)
    if item := re.fullmatch(r"collections\.abc\.Sequence\[(.*)\]", type_name):
        return isinstance(value, list | tuple) and all(fits(one, item[1], classes) for one in value)
    name = type_name.rsplit(".", 1)[-1]
    if name == "Dims":  # from any sequence of numbers
        return isinstance(value, tuple | list) and all(isinstance(one, int) for one in value) and len(value) <= 8
    cls = classes.get(name) or getattr(load_bindings(), name)
    return isinstance(value, cls)


class Mismatch(TypeError):
    """A call that the bindings would not take."""


def check_call(cls: type, name: str, args: tuple[Any, ...], named: dict[str, Any], classes: dict[str, type]) -> None:
    overloads = signatures(cls, name)
    for overload in overloads:
        bound = bind(overload, args, named)
        if bound is not None and all(fits(value, parameter.type, classes) for parameter, value in bound.items()):
            return
    asked = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in named.items())])
    known = " or ".join(", ".join(f"{p.name}: {p.type}" for p in overload) for overload in overloads)
    raise Mismatch(f"{cls.__name__}.{name}({asked}), but it takes ({known})")
