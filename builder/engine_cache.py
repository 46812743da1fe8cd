"""The user's cache of engines: a checkpoint is built at its first use, and later uses find its
engine.

    engines/KEY/NAME     the engine; KEY is a digest of the checkpoint's content and of its build
                         settings, NAME that of the model: a snapshot of the Hub has its
                         repository's, because each commit has a directory of its own
    engines/PLACE.json   for one checkpoint's path, its NAME and one set of build settings: its
                         state when its engine was built

A start reads the checkpoint's small files, and only sizes and times of the weights' files. If these
differ from PLACE.json, the weights are read: equal content keeps the same engine, which
`build_engine` then verifies. A build removes the engines of content that the checkpoint no longer
has, and of deleted checkpoints with the same name and settings, such as an earlier snapshot of the
Hub; engines that another checkpoint uses stay.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..scheduler.types import SettingError
from .build import build_engine, check_settings, read_config, target_of
from .checkpoints.gguf_file import gguf_parts, is_gguf, model_name
from .checkpoints.hugging_face import INDEX, weight_files
from .checkpoints.tensorrt_llm import is_legacy, legacy_weight_files
from .inductor.lock import locked
from .manifest import MANIFEST, TOKENIZER_FILES, Manifest, files_digest, versions
from .model_names import CONFIG, check_local
from .progress import Progress
from .small_model import user_cache
from .weights import PIECE, Advance

SMALL_FILES = (*TOKENIZER_FILES, CONFIG, INDEX, "vocab.json", "merges.txt", "added_tokens.json")
DTYPE_NAMES = {"auto": None, "half": "float16", "float": "float32"}  # vLLM's name: ours
SETTINGS = {  # the argument of `build_engine`: the caller's name for it
    "--checkpoint": "PATH",
    "--output": "XDG_CACHE_HOME",
    "--weights": "--quantization",
    "--tensor-parallel": "--tensor-parallel-size",
}

Times = dict[str, list[int]]
"""Sizes and times of files, by path."""

log = logging.getLogger("pensieve")


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """Arguments of `build_engine`."""

    backend: str
    dtype: str
    tensor_parallel: int
    device: str
    weights: str


def engine_for(
    path: str | Path,
    *,
    name: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    tensor_parallel: int | None = None,
    device: str = "cpu",
    backend: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Returns an engine's directory: `path` itself, or the engine of the checkpoint at `path`, a
    directory or a GGUF file. That engine is built first unless the cache has it.

    name             the model's, of which the last part becomes the engine's; None: that of `path`
    dtype            one of DTYPES, or vLLM's name for it; None or "auto": the checkpoint's own
    quantization     "fp8" rounds a checkpoint's weights; None, or the method in which they are
                     stored, keeps them
    tensor_parallel  ranks; None: 1
    backend          None: "reference", which needs no compiler and no time
    progress         gets the progress; None: a bar on a terminal, else lines in the log

    An engine has fixed settings: a given one must agree with them. Of several processes that need
    the same engine, one builds it and the others wait. SettingError names "PATH", "XDG_CACHE_HOME",
    or the option of `pensieve serve` at fault.
    """
    check_local(str(path))
    directory = Path(os.path.abspath(path))
    dtype = DTYPE_NAMES.get(dtype, dtype) if dtype is not None else None
    if (directory / MANIFEST).exists():
        _check_engine(directory, dtype, quantization, tensor_parallel, backend)
        return Path(path)
    with _settings_renamed():
        ranks = 1 if tensor_parallel is None else tensor_parallel
        config, _, dtype = read_config(directory, dtype, ranks)
        settings = BuildSettings(
            backend or "reference", dtype, ranks, device, _weights(quantization, config)
        )
        name = name or model_name(directory)
        shown = progress or Progress(name)
        try:
            return _Place(directory, name, settings).engine(shown)
        except OSError as error:
            if error.errno is None:
                raise  # not a system error: a library that cannot be loaded
            raise SettingError(
                "--output", f"{cache_directory()} cannot keep the engine: {error}"
            ) from error
        finally:
            shown.close()


def cache_directory() -> Path:
    """The directory of this user's engines."""
    return user_cache() / "engines"


class _Place:
    """One checkpoint's path with one set of build settings."""

    def __init__(self, checkpoint: Path, name: str, settings: BuildSettings):
        self._checkpoint = checkpoint
        self._settings = settings
        self._cache = cache_directory()
        self._name = Path(name).name
        self._record = self._record_of(str(checkpoint))
        self._weights = _weight_files(checkpoint)

    def engine(self, progress: Progress) -> Path:
        if (engine := self._unchanged()) is not None:
            return engine
        self._cache.mkdir(parents=True, exist_ok=True)
        with locked(
            self._record.with_suffix(".lock"),
            lambda: progress.say("waiting for another start to build it"),
        ):
            return self._unchanged() or self._build(progress)

    def _unchanged(self) -> Path | None:
        """Returns the engine if neither it nor the checkpoint nor the program has changed since it
        was recorded, else None."""
        record = _read(self._record)
        if "engine" not in record:
            return None
        engine = self._cache / record["engine"] / self._name
        try:
            same = (
                record["program"] == _program_digest()
                and record["small"] == self._small_digest()
                and record["times"] == _times(self._weights)
                and record["engine_times"] == _times(map(Path, record["engine_times"]))
            )
        except FileNotFoundError:
            return None
        return engine if same else None

    def _build(self, progress: Progress) -> Path:
        how = self._settings
        check_settings(how.backend, how.tensor_parallel, how.device, None, how.weights)
        replaced = self._replaced_records()
        previous = [_read(record) for record in (self._record, *replaced)]
        small = self._small_digest()
        times = _times(self._weights)
        unchanged = [about for about in previous if about.get("times") == times]
        if unchanged:
            weights = unchanged[0]["weights"]
        else:
            progress.say("reading the checkpoint")
            weights = _content_digest(self._weights, progress.advance)
        key = _digest([small, weights, asdict(how), target_of(how.backend, how.device)])
        engine = self._cache / key / self._name
        # Written before the build, because it outlives a killed process: the next build learns from
        # it which engines it may remove.
        earlier = {one for about in previous for one in about.get("engines", [])} - {key}
        engines = [*sorted(earlier), key]
        _write(
            self._record, previous[0] | {"checkpoint": str(self._checkpoint), "engines": engines}
        )
        # Before records had names, an engine had that of its checkpoint's directory.
        before = engine.with_name(model_name(self._checkpoint))
        if self._unnamed_record() in replaced and before.exists() and not engine.exists():
            before.rename(engine)
        built = build_engine(
            self._checkpoint, engine, say=progress.say, advance=progress.advance, **asdict(how)
        )
        if (self._small_digest(), _times(self._weights)) != (small, times):
            raise SettingError(
                "--checkpoint", f"{self._checkpoint} changed while it was built; start again"
            )
        log.info("%s the engine of %s in %s", built.outcome, self._checkpoint, engine)
        record = {
            "checkpoint": str(self._checkpoint),
            "engines": [key],
            "engine": key,
            "engine_times": _times(file for file in engine.iterdir() if file.is_file()),
            "program": _program_digest(),
            "small": small,
            "times": times,
            "weights": weights,
        }
        _write(self._record, record)
        for old in replaced:
            old.unlink(missing_ok=True)
        self._remove(engines[:-1])
        return engine

    def _record_of(self, checkpoint: str) -> Path:
        """The record of a checkpoint with this one's name and settings."""
        return self._cache / f"{_digest([checkpoint, self._name, asdict(self._settings)])}.json"

    def _unnamed_record(self) -> Path:
        """This checkpoint's record of a version whose records had no names."""
        return self._cache / f"{_digest([str(self._checkpoint), asdict(self._settings)])}.json"

    def _replaced_records(self) -> list[Path]:
        """The records whose engines this place no longer needs: of checkpoints with its name and
        settings that do not exist any more, as a snapshot of the Hub, and the one without a
        name."""
        gone = [
            record
            for record, about in self._records().items()
            if not Path(about["checkpoint"]).exists()
            and record == self._record_of(about["checkpoint"])
        ]
        unnamed = self._unnamed_record()
        return [*gone, unnamed] if unnamed.exists() else gone

    def _records(self) -> dict[Path, dict[str, Any]]:
        """All records that can be read."""
        records = {record: _read(record) for record in self._cache.glob("*.json")}
        return {record: about for record, about in records.items() if about}

    def _remove(self, engines: list[str]) -> None:
        """Removes engines that no other checkpoint has."""
        kept = {
            one
            for about in self._records().values()
            if Path(about["checkpoint"]).exists()
            for one in about["engines"]
        }
        for engine in engines:
            if engine not in kept:
                shutil.rmtree(self._cache / engine, ignore_errors=True)

    def _small_digest(self) -> str:
        files = [self._checkpoint / name for name in SMALL_FILES]
        return files_digest([file for file in files if file.exists()])


def _weight_files(checkpoint: Path) -> list[Path]:
    if is_gguf(checkpoint):
        return gguf_parts(checkpoint)
    return legacy_weight_files(checkpoint) if is_legacy(checkpoint) else weight_files(checkpoint)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _program_digest() -> str:
    """A digest of all that may change the engine of a checkpoint; `build_engine` then checks
    whether it does."""
    room = Path(__file__).parent
    code = [*room.rglob("*.py"), *(room.parent / "plugins").rglob("*.py")]
    return _digest([files_digest(sorted(code)), versions()])


def _times(files: Iterable[Path]) -> Times:
    """FileNotFoundError if one is missing. Includes the change time, which the system keeps: a
    change that restores size and modification time is noticed."""
    states = {str(file): file.stat() for file in files}
    return {
        path: [state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        for path, state in sorted(states.items())
    }


def _content_digest(files: Iterable[Path], advance: Advance) -> str:
    """SHA-256 over names and the SHA-256 of each piece of the files, which all processors hash at
    once."""
    sizes = {file: file.stat().st_size for file in files}
    pieces = [(file, start) for file, size in sizes.items() for start in range(0, size, PIECE)]
    digest = hashlib.sha256()
    done = 0
    total = sum(sizes.values())
    with ThreadPoolExecutor() as pool:
        for (file, start), piece in zip(pieces, pool.map(_piece_digest, pieces), strict=True):
            digest.update(f"{file.name} {sizes[file]} {start}\n".encode() + piece)
            done += min(PIECE, sizes[file] - start)
            advance(done, total)
    return digest.hexdigest()


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    try:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(PIECE)).digest()
    except OSError as error:
        raise SettingError("--checkpoint", f"{path} cannot be read: {error}") from error


def _read(record: Path) -> dict[str, Any]:
    """The record, or an empty one if it cannot be read."""
    try:
        value = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(record: Path, value: dict[str, Any]) -> None:
    aside = record.with_suffix(f".{secrets.token_hex(4)}.new")
    aside.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    aside.replace(record)


def _weights(quantization: str | None, config: dict[str, Any]) -> str:
    """The `weights` argument of `build_engine` for vLLM's option."""
    own = (config.get("quantization_config") or {}).get("quant_method")
    if quantization is None or quantization == own:
        return "same"
    if quantization == "fp8" and own is None:
        return "fp8"
    possible = "fp8" if own is None else f"{own}, which the checkpoint's weights have already"
    raise SettingError(
        "--quantization", f"{quantization!r} is not possible here; possible is {possible}"
    )


def _check_engine(
    directory: Path,
    dtype: str | None,
    quantization: str | None,
    tensor_parallel: int | None,
    backend: str | None,
) -> None:
    manifest = Manifest.read(directory)
    in_int4 = manifest.int4 != 0
    methods = {"awq": in_int4, "gptq": in_int4, "compressed-tensors": in_int4 or manifest.fp8}
    built = {
        "--dtype": (dtype, manifest.dtype),
        "--tensor-parallel-size": (tensor_parallel, manifest.tensor_parallel),
        "--backend": (backend, manifest.backend),
        "--quantization": (quantization and True, methods.get(quantization or "", manifest.fp8)),
    }
    for setting, (wanted, there) in built.items():
        if wanted not in (None, there):
            weights = "weights in int4" if in_int4 else "weights in fp8" if manifest.fp8 else "none"
            actual = weights if setting == "--quantization" else there
            raise SettingError(
                setting, f"the engine {directory} was built with {actual}; leave the option out"
            )


@contextmanager
def _settings_renamed() -> Iterator[None]:
    """Replaces setting names in SettingErrors of `build_engine` by the names that the caller
    used."""
    try:
        yield
    except SettingError as error:
        message = str(error).removeprefix(f"{error.setting}: ")
        raise SettingError(SETTINGS.get(error.setting, error.setting), message) from error
