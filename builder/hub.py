"""Downloads a model from the Hugging Face Hub: only the files that an engine is built from.

huggingface_hub does the work, with its cache, its progress bars and its settings: HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE, HF_HOME. Files that its cache has are not downloaded again. If the Hub
cannot be reached, or does not answer in HF_HUB_ETAG_TIMEOUT seconds (10), the cache's latest state
of the repository counts.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    errors,
    get_cached_repo_tree,
    get_session,
    snapshot_download,
)

from ..scheduler.types import SettingError
from .manifest import TOKENIZER_FILES

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_FILES = (
    *TOKENIZER_FILES,
    CONFIG,
    INDEX,
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
ALWAYS_THERE = ".gitattributes"  # without a file to download, huggingface_hub warns
QUANTISATION = re.compile(
    r"(UD-)?(I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|FP?16|FP?32)", re.ASCII | re.IGNORECASE
)
PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
NO_MODELS = ("mmproj", "imatrix")  # the beginnings of the names of other GGUF files
NETWORK_ERROR: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of its HTTP library
MIB = 2**20

Say = Callable[[str], None]


def download(name: str, tag: str | None, say: Say) -> Path:
    """Returns the directory of the checkpoint ORG/NAME in the cache of huggingface_hub, or its GGUF
    file.

    A tag that is the name of a quantisation (Q4_K_M, BF16) chooses among the GGUF files of the
    repository, if it has any; every other tag is a revision. SettingError names "PATH".
    """
    try:
        if tag is not None and QUANTISATION.fullmatch(tag):
            snapshot = _Snapshot(name, None, say)
            if snapshot.gguf_files:
                return snapshot.gguf(tag)
        return _Snapshot(name, tag, say).model()
    except errors.HfHubHTTPError as error:
        raise _refusal(name, tag, error) from error
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(name, error) from error
    except (OSError, errors.XetDownloadError, NETWORK_ERROR) as error:
        raise SettingError(
            "PATH", f"{name} cannot be downloaded: {error}; the next start downloads the rest"
        ) from error
    except errors.HFValidationError as error:
        raise SettingError("PATH", f"{name} is no name of the Hugging Face Hub: {error}") from error


class _Snapshot:
    """One revision of a repository, of which the small files are in the cache."""

    def __init__(self, name: str, revision: str | None, say: Say):
        self._name = name
        self._say = say
        self._folder = self._small_files(revision)
        self._sizes = self._listing()

    def _small_files(self, revision: str | None) -> Path:
        """Returns the snapshot's folder. If the Hub does not answer, the cache's state counts."""
        patterns = [ALWAYS_THERE, *SMALL_FILES]
        if constants.HF_HUB_OFFLINE:
            return _in_cache(self._name, revision, patterns)
        self._say(
            f"asking {constants.ENDPOINT} for the state of {self._name} (HF_HUB_OFFLINE=1 asks "
            "nothing)"
        )
        try:
            return _in_cache(self._name, revision, patterns)
        except errors.HfHubHTTPError:
            raise  # an answer
        except NETWORK_ERROR as unreachable:
            try:
                return _in_cache(self._name, revision, patterns, only=True)
            except errors.LocalEntryNotFoundError as error:
                raise error from unreachable

    def _listing(self) -> dict[str, int]:
        """The repository's files with their sizes."""
        try:
            files = get_cached_repo_tree(self._name, revision=self._folder.name)
            return {file.path: file.size for file in files}
        except errors.CachedRepoTreeNotFoundError:
            # there is no network, and an older huggingface_hub made the cache: what is in it
            paths = (path for path in self._folder.rglob("*") if path.is_file())
            return {str(path.relative_to(self._folder)): path.stat().st_size for path in paths}

    @property
    def gguf_files(self) -> list[str]:
        return sorted(
            path
            for path in self._sizes
            if path.endswith(".gguf") and not path.rpartition("/")[2].startswith(NO_MODELS)
        )

    def model(self) -> Path:
        """Downloads the safetensors, or without any the only GGUF file."""
        if CONFIG in self._sizes and (weights := self._safetensors()):
            self._complete(weights)
            return self._folder
        if self.gguf_files:
            return self.gguf(None)
        raise SettingError(
            "PATH",
            f"{self._name} has neither {CONFIG} with {WEIGHTS} (or {INDEX}) nor GGUF files; it "
            f"has {_listed(self._sizes)}",
        )

    def gguf(self, quantisation: str | None) -> Path:
        """Downloads the only GGUF file of that name, with all parts of a split one. Returns the
        first part."""
        groups: dict[str, list[str]] = {}
        for path in self.gguf_files:
            if quantisation is None or _names(path, quantisation):
                groups.setdefault(PART.sub("", path), []).append(path)
        if len(groups) != 1:
            several = "several GGUF files" if groups else "no GGUF file"
            of = "" if quantisation is None else f" of {quantisation}"
            there = groups or dict.fromkeys(PART.sub("", path) for path in self.gguf_files)
            raise SettingError(
                "PATH",
                f"{self._name} has {several}{of}: {_listed(there)}; name one by its quantisation, "
                f"as {self._name}:Q4_K_M",
            )
        ((_, paths),) = groups.items()
        split = PART.search(paths[0])
        if split is not None and len(paths) != int(split[2]):
            raise SettingError(
                "PATH", f"{self._name} has only {len(paths)} of {int(split[2])} parts: {paths[0]}"
            )
        self._complete(paths)
        return self._folder / paths[0]

    def _safetensors(self) -> list[str]:
        if WEIGHTS in self._sizes:
            return [WEIGHTS]
        if INDEX not in self._sizes:
            return []
        try:
            index = json.loads((self._folder / INDEX).read_text("utf-8"))
            named = set(index["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingError("PATH", f"{self._name}: {INDEX} cannot be read: {error}") from error
        if missing := named - self._sizes.keys():
            names = _listed(sorted(map(str, missing)))
            raise SettingError(
                "PATH", f"{self._name}: its index names {names}, which it does not have"
            )
        return sorted(named)

    def _complete(self, paths: Sequence[str]) -> None:
        missing = [path for path in paths if not (self._folder / path).exists()]
        if not missing:
            return
        size = sum(self._sizes.get(path, 0) for path in missing) / MIB
        self._say(
            f"downloading {self._name} from {constants.ENDPOINT}: {_listed(missing)} "
            f"({size:,.0f} MiB)"
        )
        _in_cache(self._name, self._folder.name, [glob.escape(path) for path in missing])
        self._say(f"downloaded {self._name} into {self._folder}")


def _in_cache(
    name: str, revision: str | None, patterns: Sequence[str], *, only: bool = False
) -> Path:
    """Downloads what the cache lacks, unless it is `only` looked up."""
    # The client is the program's too, whose own requests may take longer.
    hooks = get_session().event_hooks["request"]
    hooks.append(_limit_wait)
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), local_files_only=only
        )
    finally:
        hooks.remove(_limit_wait)
    return Path(folder)


def _limit_wait(request: Any) -> None:
    """Gives a request the time limit that it lacks: huggingface_hub sets none where it asks for a
    repository's state and for the list of its files."""
    limits = request.extensions["timeout"]
    for phase, seconds in limits.items():
        limits[phase] = constants.HF_HUB_ETAG_TIMEOUT if seconds is None else seconds


def _names(path: str, quantisation: str) -> bool:
    """Returns whether the quantisation is a word of the path: Q4_K is no word of a-Q4_K_M.gguf."""
    word = rf"(?<![a-z0-9]){re.escape(quantisation)}(?![a-z0-9_])"
    return re.search(word, path, re.IGNORECASE) is not None


def _listed(paths: Iterable[str], most: int = 30) -> str:
    paths = list(paths)
    more = f" and {len(paths) - most} more" if len(paths) > most else ""
    return ", ".join(paths[:most]) + more


def _refusal(name: str, tag: str | None, error: errors.HfHubHTTPError) -> SettingError:
    """The answer of the Hub in words that say what to do."""
    page = f"{constants.ENDPOINT}/{name}"
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError) and status == 403:
        words = f"the account of your token may not read {name} yet: accept its terms at {page}"
    elif isinstance(error, errors.GatedRepoError):
        words = (
            f"{name} is gated: accept its terms at {page}, then set HF_TOKEN to a token of that "
            "account, or run `hf auth login`"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        words = f"{name} has no revision {tag}, and that is no name of a quantisation"
    elif isinstance(error, errors.RepositoryNotFoundError):
        words = (
            f"there is neither a directory {name} here nor a repository {page}; a private one "
            "needs HF_TOKEN, or `hf auth login`"
        )
    elif status in (401, 403):
        words = f"{constants.ENDPOINT} refuses your token (HF_TOKEN, or that of `hf auth login`)"
    else:
        words = f"{name} cannot be downloaded: {constants.ENDPOINT} answers {status}; try again"
    return SettingError("PATH", words)


def _unreachable(name: str, error: errors.LocalEntryNotFoundError) -> SettingError:
    cause = error.__cause__
    if isinstance(cause, errors.HfHubHTTPError):
        return _refusal(name, None, cause)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE forbids downloads"
    else:
        reason = type(cause).__name__ if cause is not None else str(error)
        why = f"{constants.ENDPOINT} cannot be reached ({reason})"
    return SettingError(
        "PATH",
        f"{name} is not, or not wholly, in {constants.HF_HUB_CACHE}, and {why}; the path of a "
        "directory needs no network",
    )
