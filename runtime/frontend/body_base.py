"""A JSON object of the API. Each of its fields has an effect, is known to have none, or is refused
or ignored by name."""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationInfo, model_validator

from ...scheduler.types import ErrorKind, RequestError

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
ConversationId = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
"""Limited because ids appear in paths, where a character takes up to 12 bytes of the request's
limited head."""
Affinity = Annotated[str, StringConstraints(max_length=1000)]
"""A name of requests with a common beginning; an empty one is none."""

MOST_NAMED = 16  # the most ignored fields that are named
MOST_UNKNOWN = 1024  # of one object: each is compared with the project's own fields
LONGEST_NAME = 64
LIKE = 0.85  # difflib's ratio of "histroy" to "history" is 0.857


class Body(BaseModel):
    """A JSON object. The context of its validation is a list that gets the names of unknown fields;
    without a context unknown fields are refused."""

    model_config = ConfigDict(strict=True, frozen=True)

    OWN: ClassVar[frozenset[str]] = frozenset()
    """This project's own fields: unknown fields that resemble one are never ignored."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Accepted with any value, without effect."""
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Not supported; accepted with these values, which have no effect."""
    INSTEAD: ClassVar[dict[str, str]] = {}
    """What to do instead, for some of these."""
    KEEPS_NULL: ClassVar[bool] = False
    """True if null differs from an absent field."""

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        unknown = 0
        field_names = cls._names()
        for name, value in data.items():
            if (value is None and not cls.KEEPS_NULL) or name in cls.IGNORED:
                continue
            if name in cls.NEUTRAL:
                if value not in cls.NEUTRAL[name]:
                    reason = f"{name} is not supported by this endpoint"
                    if name in cls.INSTEAD:
                        reason = f"{reason}: {cls.INSTEAD[name]}"
                    raise RequestError(ErrorKind.INVALID, reason, name)
                continue
            if name not in field_names:
                if (
                    name == "extra_body"
                    and isinstance(value, dict)
                    and (own := sorted(cls.OWN & value.keys()))
                ):
                    fields = ", ".join(own)
                    reason = "only OpenAI's client for Python unpacks extra_body"
                    raise RequestError(
                        ErrorKind.INVALID, f"{reason}: put {fields} into the body itself", name
                    )
                cls._ignore(name, info.context)
                unknown += 1
                if unknown > MOST_UNKNOWN and cls.OWN:
                    reason = f"more than {MOST_UNKNOWN} fields are none that this server knows"
                    raise RequestError(ErrorKind.INVALID, reason, name)
                continue
            kept[name] = value
        return kept

    @classmethod
    def _ignore(cls, name: str, ignored: list[str] | None) -> None:
        """Adds the name, in letters that a header may contain. Raises RequestError if the field
        must not be ignored."""
        near = cls._own_like(name)
        if ignored is None or near is not None:
            hint = f"; did you mean {near}?" if near is not None else ""
            raise RequestError(
                ErrorKind.INVALID, f"{name} is not a field that this server knows{hint}", name
            )
        plain = header_name(name)
        if plain not in ignored and len(ignored) < MOST_NAMED:
            ignored.append(plain)

    @classmethod
    def _own_like(cls, name: str) -> str | None:
        """The project's own field that this name resembles, if there is one."""
        timed = f"{name}_s"  # without its unit
        if timed in cls.OWN:
            return timed
        if not cls.OWN:
            return None
        return next(iter(difflib.get_close_matches(name[:LONGEST_NAME], cls.OWN, 1, LIKE)), None)

    @classmethod
    def _names(cls) -> set[str]:
        """The names of the fields in JSON."""
        return {field.alias or name for name, field in cls.model_fields.items()}


def leave_out(name: str, ignored: list[str] | None) -> None:
    """Records that the model does not see this part of the request: the answer's header names it.
    Raises RequestError (INVALID) if fields are not ignored (None)."""
    if ignored is None:
        raise RequestError(ErrorKind.INVALID, f"{name} is not supported by this server")
    plain = header_name(name)
    if plain not in ignored and len(ignored) < MOST_NAMED:
        ignored.append(plain)


_SURROGATE = re.compile(
    rb"""(?<!\\)((?:\\\\)*+)  # escaped backslashes
    \\(?:(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})
    |u[dD][89a-fA-F][0-9a-fA-F]{2})""",
    re.VERBOSE,
)


def with_whole_pairs(text: bytes) -> bytes:
    """Returns the JSON text with U+FFFD in the place of each half of a surrogate pair. JavaScript
    sends halves of a character that it has cut; UTF-8 cannot encode them."""
    if b"\\ud" not in text and b"\\uD" not in text:
        return text
    return _SURROGATE.sub(lambda match: match[0] if match["pair"] else match[1] + rb"\ufffd", text)


def header_name(name: str) -> str:
    """The name in letters that a header may contain, shortened; "_" for an empty name."""
    return re.sub(r"[^\w.-]", "_", name[:LONGEST_NAME], flags=re.ASCII) or "_"
