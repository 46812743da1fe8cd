"""The lines of traces, checked: their fields, and which of them is wrong. Loaded only when a trace
is read."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ...scheduler.sim.simulator import SessionTurn
from ...scheduler.types import SettingError

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TraceLine(BaseModel, strict=True):
    """One request of a trace of lengths."""

    conversation: str
    turn: Natural
    input_tokens: Positive
    output_tokens: Positive
    history_tokens: Natural | None = None
    system_tokens: Natural | None = None
    arrival_s: Seconds | None = None
    think_s: Seconds | None = None

    def session_turn(self) -> SessionTurn:
        return SessionTurn(
            self.history_tokens or 0, self.input_tokens, self.output_tokens, self.think_s or 0.0
        )


Model = TypeVar("Model", bound=BaseModel)


def checked(model: type[Model], line: str, where: str) -> Model:
    """SettingError names the field that is wrong."""
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][:1]))
        fault = f"{field}: {first['msg']}, not {first['input']!r}" if field else first["msg"]
        raise SettingError("--trace", f"{where}: {fault}") from error
