"""A JSON object of the API that refuses what it does not know."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from ...scheduler.types import RequestError

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
ConversationId = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
"""It stands in paths, where a character takes up to 12 bytes of a head that is limited too."""


class Body(BaseModel):
    """A JSON object that refuses what it does not know."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """Accepted: has no effect on what this server does, whatever its value."""
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Not supported: accepted with these values, which ask for nothing."""
    KEEPS_NULL: ClassVar[bool] = False
    """null says something else than nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if (value is None and not cls.KEEPS_NULL) or name in cls.IGNORED:
                continue
            if name in cls.NEUTRAL:
                if value not in cls.NEUTRAL[name]:
                    raise RequestError(400, f"{name} is not supported by this server", name)
                continue
            if name not in cls._names():
                raise RequestError(400, f"{name} is not a field that this server knows", name)
            kept[name] = value
        return kept

    @classmethod
    def _names(cls) -> set[str]:
        """Of the fields, as JSON has them."""
        return {field.alias or name for name, field in cls.model_fields.items()}
