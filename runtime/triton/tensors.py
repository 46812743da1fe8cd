"""The tensors of Triton's clients: reads inputs into a completion's body, and writes a reply as
output tensors.

A `TensorSet` has those of one kind of model of TensorRT-LLM. `conversation_id` and `history` are
ours.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import CompletionBody, parse
from ..frontend.calls import GenerationCall
from ..frontend.reply import Reply

DTYPES = {"STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32}
"""numpy's types of the outputs; strings are bytes."""


Tensors = dict[str, np.ndarray]


class Input(NamedTuple):
    """`field`: the field of `TritonBody` that gets its value; None: none. `several`: any number
    of values, not one. `dims`: its shape if it is a matrix."""

    type: str
    field: str | None = None
    several: bool = False
    dims: tuple[int, ...] = ()


SHARED_INPUTS = {
    "conversation_id": Input("STRING", "conversation"),
    "history": Input("STRING", "history"),
    "stop": Input("BOOL"),
}
"""The inputs of every `TensorSet`."""


class TritonBody(CompletionBody):
    """A completion, and the optional outputs of its responses. `after_prompt`: a whole reply's text
    starts with the prompt's."""

    after_prompt: bool = False
    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_cumulative_logprob: bool = False
    return_log_probs: bool = False
    return_perf_metrics: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False


class TensorSet(ABC):
    """A model's inputs and outputs.

    INPUTS      all are optional for Triton. A missing one gets the completion body's default, or is
                refused by name
    OUTPUTS     the type and the shape of each
    MOST_ROWS   the most prompts of a request; every shape's first dimension is theirs. 0: there is
                one prompt, and no dimension for it
    """

    INPUTS: ClassVar[Mapping[str, Input]]
    OUTPUTS: ClassVar[Mapping[str, tuple[str, Sequence[int]]]]
    MOST_ROWS: ClassVar[int]

    def __init__(self, chunk_tokens: int):
        self._chunk_tokens = chunk_tokens

    @property
    def batched(self) -> bool:
        return self.MOST_ROWS > 0

    @abstractmethod
    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """The fields of a `TritonBody` for these values of inputs. Raises RequestError (INVALID)
        for values that cannot be served."""

    @abstractmethod
    def response(
        self, body: TritonBody, call: GenerationCall, reply: Reply, piece: NewPiece
    ) -> Tensors:
        """The tensors of one response. The last one is that of a reply with `finish`."""

    def read(self, tensors: Mapping[str, np.ndarray], sequence: str) -> TritonBody:
        """`sequence`: Triton's sequence id, "" for none; it names the conversation unless
        `conversation_id` does.

        Raises RequestError (INVALID) for requests that HTTP would refuse too.
        """
        fields = self.fields({name: self.value(name, tensor) for name, tensor in tensors.items()})
        if sequence:
            fields.setdefault("conversation", sequence)
        return parse(TritonBody, json.dumps(fields).encode())

    def value(self, name: str, tensor: np.ndarray) -> Any:
        """Returns the one value of an input (Triton ensures that there is one), or the list of all
        values if there may be several.

        Raises RequestError (INVALID) for bytes that are not text.
        """
        kind = self.INPUTS[name]
        values = tensor.ravel().tolist()
        if kind.type == "STRING":
            try:
                values = [value.decode() for value in values]
            except UnicodeDecodeError:
                raise RequestError(ErrorKind.INVALID, f"{name} is not UTF-8", name) from None
        return values if kind.several or kind.dims else values[0]

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values by their inputs' fields."""
        return {
            field: value
            for name, value in values.items()
            if (field := self.INPUTS[name].field) is not None
        }

    def tensors(self, **values: Any) -> Tensors:
        """Output tensors with these values. A single value gets the dimensions of its output."""
        tensors: Tensors = {}
        for name, value in values.items():
            kind, dims = self.OUTPUTS[name]
            tensors[name] = np.array(value, dtype=DTYPES[kind], ndmin=len(dims) + self.batched)
        return tensors

    def performance(self, call: GenerationCall, reply: Reply, now: float) -> dict[str, Any]:
        """Blocks are chunks. A chunk of the prompt was reused if it had KV for all of its tokens in
        some tier. Reused and new chunks together hold the KV of prompt and reply; the last token
        has none."""
        prompt = len(reply.request.prompt)
        reused = reply.sources.cached // self._chunk_tokens
        held = -(-(prompt + len(reply.tokens) - 1) // self._chunk_tokens)
        return {
            "kv_cache_alloc_new_blocks": held - reused,
            "kv_cache_alloc_total_blocks": held,
            "arrival_time_ns": _nanoseconds(call.arrived),
            "first_scheduled_time_ns": _nanoseconds(call.arrived + reply.queued),
            "first_token_time_ns": _nanoseconds(reply.started or now),
            "last_token_time_ns": _nanoseconds(now),
        }


class NewPiece(NamedTuple):
    """What a response has of a reply: the text and tokens since the response before. `now`: time of
    its last token, time.perf_counter's seconds. `row`: its prompt's number in the request."""

    text: str
    tokens: Sequence[int]
    now: float
    row: int = 0


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
