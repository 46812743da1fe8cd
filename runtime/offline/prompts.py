"""The forms in which the offline API takes prompts and their parameters: vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...scheduler.types import ErrorKind, RequestError, SettingError
from ..text.tokenizer import ChatTemplate, Tokenizer
from .params import SamplingParams

Prompt = str | list[int] | Mapping[str, Any]
Messages = list[dict[str, Any]]
Params = SamplingParams | Sequence[SamplingParams]

FORMS = "text, token ids, {'prompt': text} or {'prompt_token_ids': ids}"


class OfflinePrompt(NamedTuple):
    """A prompt or a dialogue. `text`: the prompt's text, if it is known. `fields`: those of the
    HTTP API's body."""

    text: str | None
    fields: dict[str, Any]


def read_prompts(prompts: Any) -> list[OfflinePrompt]:
    """Reads one prompt or several. RequestError for other forms."""
    return [_read(prompt) for prompt in (prompts if _several(prompts, int) else [prompts])]


def read_dialogues(dialogues: Any, more: dict[str, Any]) -> list[OfflinePrompt]:
    """Reads one dialogue or several. `more`: fields that all of them have."""
    each = dialogues if _several(dialogues, Mapping) else [dialogues]
    return [OfflinePrompt(None, {"messages": messages} | more) for messages in each]


def read_template(given: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Reads a chat template: its text, which has a brace, or the path of its file. RequestError if
    it cannot be read or does not parse."""
    name = "chat_template"
    try:
        is_text = isinstance(given, str) and "{" in given
        return tokenizer.other_template(str(given) if is_text else Path(given).read_text("utf-8"))
    except SettingError as error:
        raise RequestError(ErrorKind.INVALID, str(error), name) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or NUL in the path
        message = f"{name}: cannot read {str(given)!r}: {error}"
        raise RequestError(ErrorKind.INVALID, message, name) from error


def read_params(params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """Returns the parameters of each of `count` prompts; None: `default`. TypeError for other
    types, RequestError for another number."""
    each = (
        list(params)
        if isinstance(params, Sequence)
        else [default if params is None else params] * count
    )
    for given in each:
        if isinstance(given, Mapping):
            fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise TypeError(f"sampling_params: write SamplingParams({fields}), not a dictionary")
        if not isinstance(given, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(given).__name__}")
    if len(each) != count:
        message = (
            f"sampling_params: give one for all prompts or one for each, not {len(each)} for "
            f"{count}"
        )
        raise RequestError(ErrorKind.INVALID, message, "sampling_params")
    return each


def _several(given: Any, part: type[Any]) -> bool:
    """True for a list of prompts. `part`: the type of the parts of one prompt."""
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and not (given and isinstance(given[0], part))
    )


def _read(prompt: Any) -> OfflinePrompt:
    if not isinstance(prompt, Mapping):
        prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    given = {name: value for name, value in prompt.items() if value is not None}
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    if given:
        raise RequestError(
            ErrorKind.INVALID,
            f"a prompt must be {FORMS}; {next(iter(given))!r} is not supported",
            "prompt",
        )
    if ids is None and isinstance(text, str):
        return OfflinePrompt(text, {"prompt": text})
    if (
        isinstance(ids, Sequence)
        and all(isinstance(each, int) for each in ids)
        and isinstance(text, str | None)
    ):
        return OfflinePrompt(text, {"prompt": list(ids)})
    raise RequestError(ErrorKind.INVALID, f"a prompt must be {FORMS}", "prompt")
