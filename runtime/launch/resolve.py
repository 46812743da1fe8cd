"""Resolves the open options of `pensieve serve`: the engine of a checkpoint, and the state
directory."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ...builder.engine_cache import engine_for
from ...builder.model_names import Model, find_model, find_small_model
from ...builder.small_model import SMALL_MODEL
from ...scheduler.types import SettingError
from ..conversations.databases import stored_tokenizer
from ..text.tokenizer import Tokenizer
from .assemble import demo_engine
from .checks import check_engine
from .command_line import ending_at_once
from .settings import HISTORY_FILE, ServeSettings, default_state_dir

log = logging.getLogger("pensieve")

OWNER_FILE = "belongs-to"  # in `default_state_dir`: names the state directory that it replaces


def resolved(settings: ServeSettings) -> ServeSettings:
    """Returns the settings with an engine's directory, built if needed, and a state directory.
    Raises SettingError."""
    model = None if settings.engine == "demo" else _model(settings.engine)
    if model is None:
        check_engine(replace(settings, engine="demo"))
        state = settings.state_dir or state_directory(
            "demo", "demo", lambda: tokenizer_digest(DEMO_CHECKPOINT)
        )
        return replace(settings, engine=str(demo_engine(state, settings.device)), state_dir=state)
    engine = engine_for(
        model.path,
        name=model.name,
        dtype=settings.dtype,
        quantization=settings.quantization,
        tensor_parallel=settings.tensor_parallel_size,
        device=settings.device,
    )
    state = settings.state_dir or state_directory(
        Path(model.origin).name, model.origin, lambda: tokenizer_digest(engine)
    )
    names = settings.served_model_name
    if names is None and settings.attach is None and model.name != engine.resolve().name:
        names = (model.name,)
    return replace(settings, engine=str(engine), state_dir=state, served_model_name=names)


def _model(text: str | None) -> Model | None:
    """The model that the text names; without a text the small model, or None, the demo model, if
    it cannot be downloaded."""
    try:
        with ending_at_once("pensieve serve"):  # else Ctrl-C waits for the end of a download
            return find_small_model(log.info) if text is None else find_model(text, log.info)
    except SettingError as error:
        if text is not None:
            raise
        log.warning("serving the tiny demo model instead of %s: %s", SMALL_MODEL, error.message)
        return None


def state_directory(name: str, path: str, tokenizer: Callable[[], bytes]) -> Path:
    """Returns the default state directory of the engine or checkpoint at `path`, one for each so
    that servers do not collide.

    A rebuilt engine keeps it. Versions before 0.2 stored all conversations in `default_state_dir`
    itself. The first engine with the same tokenizer takes that directory as its own. Raises
    SettingError.
    """
    shared = default_state_dir()
    own = shared / f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if not (shared / HISTORY_FILE).exists():
        return own
    owner = shared / OWNER_FILE
    try:
        if (
            not owner.exists()
            and not own.exists()
            and _same_tokenizer(shared / HISTORY_FILE, tokenizer)
        ):
            with owner.open("x", encoding="utf-8") as file:
                file.write(own.name)
        if owner.exists() and owner.read_text("utf-8") == own.name:
            log.info("conversations of earlier versions are found again in %s", shared)
            return shared
    except FileExistsError:
        pass  # another server was first
    except OSError as error:
        raise SettingError("--state-dir", f"cannot use {shared}: {error}") from error
    return own


def tokenizer_digest(engine: Path) -> bytes:
    """The digest that `TurnManager` takes."""
    return Tokenizer.load(engine).digest() if (engine / "tokenizer.json").exists() else b""


def _same_tokenizer(history: Path, tokenizer: Callable[[], bytes]) -> bool:
    """Returns whether the conversations stored there have this tokenizer, or no known one."""
    try:
        stored = stored_tokenizer(history)
    except SettingError as error:
        log.warning("conversations of earlier versions are left alone: %s", error)
        return False
    if stored is None or stored == tokenizer():
        return True
    log.info("%s has conversations of another model; they are left alone", history)
    return False
