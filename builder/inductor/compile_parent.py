"""Compiles an engine in a separate process, because the compiler may crash, or its result when it
is loaded."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...scheduler.types import SettingError
from ..manifest import Compiled, Manifest, Parity

SHOWN = 400  # characters of the compiler's last output in an error


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that will be used, or None if it is missing."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compile_apart(
    directory: Path, say: Callable[[str], None], options: Sequence[str] = ()
) -> Compiled:
    """Adds the compiled file to the unfinished engine at `directory`, which has its manifest and
    weights.

    `say` gets the stages. SettingError if it cannot be compiled, crashes when it is loaded, or
    differs from the reference.
    """
    backend = Manifest.read(directory).backend
    command = [
        sys.executable,
        "-P",  # nothing of the current directory
        "-m",
        f"pensieve.builder.{backend}.compile",
        str(directory),
        *options,
    ]
    last: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        # for its input too: the input ends with this process, and that ends the child
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    last = json.loads(line)
                    if "stage" in last:
                        say(last["stage"])
            except BaseException:
                process.kill()
                raise
        if process.returncode == 0 and "compiled" in last:
            return Compiled(parity=Parity(**last["compiled"].pop("parity")), **last["compiled"])
        if process.returncode == 0 and "refused" in last:
            raise SettingError("--backend", last["refused"])
        errors.seek(0)
        raise SettingError(
            "--backend", _reason(process.returncode, directory, errors.read().strip())
        )


def _reason(status: int, directory: Path, output: str) -> str:
    manifest = Manifest.read(directory)
    loaded = (directory / manifest.package).exists()
    if status < 0 and loaded and manifest.backend == "inductor":
        return (
            f"the compiled engine crashes when it is loaded ({signal.Signals(-status).name}): the "
            "C++ compiler "
            f"{cpp_compiler()} probably links its runtime statically; set CXX to another one, such "
            "as your system's "
            "g++, or use --backend reference"
        )
    how = f"was killed ({signal.Signals(-status).name})" if status < 0 else "failed"
    what = "trying the compiled engine" if loaded else "compiling"
    return f"{what} {how}; its last words: {output[-SHOWN:] or 'none'}"
