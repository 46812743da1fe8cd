"""The tensors of Triton's clients: reads inputs into a completion's body, and writes a reply as
output tensors.

Names, types and meanings are those of TensorRT-LLM's llmapi model if it has them. `input_ids`,
`output_ids`, `conversation_id`, `history` and a few sampling parameters are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.bodies import CompletionBody, parse
from ..frontend.calls import GenerationCall
from ..frontend.reply import Reply

DTYPES = {"STRING": np.object_, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32}
"""numpy's types of the outputs; strings are bytes."""


class Input(NamedTuple):
    """`field`: the field of `TritonBody` that gets its value; None: none. `several`: any number
    of values, not one."""

    type: str
    field: str | None = None
    several: bool = False


INPUTS = {
    "text_input": Input("STRING", "prompt"),
    "input_ids": Input("INT32", "prompt", several=True),
    "conversation_id": Input("STRING", "conversation"),
    "history": Input("STRING", "history"),
    "streaming": Input("BOOL", "stream"),
    "stop": Input("BOOL"),
    "sampling_param_best_of": Input("INT32", "best_of"),
    "sampling_param_temperature": Input("FP32", "temperature"),
    "sampling_param_top_k": Input("INT32", "top_k"),
    "sampling_param_top_p": Input("FP32", "top_p"),
    "sampling_param_min_p": Input("FP32", "min_p"),
    "sampling_param_frequency_penalty": Input("FP32", "frequency_penalty"),
    "sampling_param_presence_penalty": Input("FP32", "presence_penalty"),
    "sampling_param_repetition_penalty": Input("FP32", "repetition_penalty"),
    "sampling_param_max_tokens": Input("INT32", "max_tokens"),
    "sampling_param_min_tokens": Input("INT32", "min_tokens"),
    "sampling_param_stop": Input("STRING", "stop", several=True),
    "sampling_param_bad_words": Input("STRING", "bad_words", several=True),
    "sampling_param_stop_token_ids": Input("INT32", "stop_token_ids", several=True),
    "sampling_param_ignore_eos": Input("BOOL", "ignore_eos"),
    "sampling_param_seed": Input("UINT64", "seed"),
    "sampling_param_exclude_input_from_output": Input("BOOL"),
    "sampling_param_return_perf_metrics": Input("BOOL", "return_perf_metrics"),
    "return_finish_reason": Input("BOOL", "return_finish_reason"),
    "return_stop_reason": Input("BOOL", "return_stop_reason"),
    "return_cumulative_logprob": Input("BOOL", "return_cumulative_logprob"),
}
"""All are optional for Triton. A missing one gets the completion body's default, or is refused by
name."""

OUTPUTS = {
    "text_output": "STRING",
    "output_ids": "INT32",
    "finish_reason": "STRING",
    "stop_reason": "STRING",
    "cumulative_logprob": "FP32",
    "kv_cache_reused_block": "INT32",
    "kv_cache_missed_block": "INT32",
    "kv_cache_hit_rate": "FP32",
    "kv_cache_alloc_new_blocks": "INT32",
    "kv_cache_alloc_total_blocks": "INT32",
    "arrival_time_ns": "INT64",
    "first_scheduled_time_ns": "INT64",
    "first_token_time_ns": "INT64",
    "last_token_time_ns": "INT64",
}

Tensors = dict[str, np.ndarray]


class TritonBody(CompletionBody):
    """A completion, and the optional outputs of its last response."""

    return_finish_reason: bool = False
    return_stop_reason: bool = False
    return_cumulative_logprob: bool = False
    return_perf_metrics: bool = False


def read_inputs(tensors: Mapping[str, np.ndarray], sequence: str) -> TritonBody:
    """`sequence`: Triton's sequence id, "" for none; it names the conversation unless
    `conversation_id` does.

    Raises RequestError (INVALID) for requests that HTTP would refuse too.
    """
    if "text_input" in tensors and "input_ids" in tensors:
        raise RequestError(
            ErrorKind.INVALID,
            "text_input and input_ids are two prompts: send one of them",
            "input_ids",
        )
    if "text_input" not in tensors and "input_ids" not in tensors:
        raise RequestError(
            ErrorKind.INVALID, "there is no prompt: send text_input or input_ids", "text_input"
        )
    values = {name: read_value(name, tensor) for name, tensor in tensors.items()}
    fields = {
        INPUTS[name].field: value
        for name, value in values.items()
        if INPUTS[name].field is not None
    }
    if sequence:
        fields.setdefault("conversation", sequence)
    if fields.get("return_cumulative_logprob"):
        fields["logprobs"] = 0
    fields["echo"] = not values.get("sampling_param_exclude_input_from_output", True)
    return parse(TritonBody, json.dumps(fields).encode())


def read_value(name: str, tensor: np.ndarray) -> Any:
    """Returns the one value of an input (Triton ensures that there is one), or the list of all
    values if there may be several.

    Raises RequestError (INVALID) for bytes that are not text.
    """
    kind = INPUTS[name]
    values = tensor.ravel().tolist()
    if kind.type == "STRING":
        try:
            values = [value.decode() for value in values]
        except UnicodeDecodeError:
            raise RequestError(ErrorKind.INVALID, f"{name} is not UTF-8", name) from None
    return values if kind.several else values[0]


def piece_tensors(text: str, tokens: list[int]) -> Tensors:
    """The tensors of a piece of a reply."""
    return _tensors(text_output=text.encode(), output_ids=tokens)


def end_tensors(
    body: TritonBody, call: GenerationCall, reply: Reply, chunk_tokens: int, now: float
) -> Tensors:
    """The requested tensors about the whole reply. `now`: time of its last token,
    time.perf_counter's seconds.

    Blocks are chunks. A chunk of the prompt was reused if it had KV for all of its tokens in some
    tier. Reused and new chunks together hold the KV of prompt and reply; the last token has none.
    """
    tensors: Tensors = {}
    if body.return_finish_reason:
        tensors |= _tensors(finish_reason=str(reply.reason).encode())
    if body.return_stop_reason and reply.stop_reason is not None:
        tensors |= _tensors(stop_reason=str(reply.stop_reason).encode())
    if body.return_cumulative_logprob:
        tensors |= _tensors(cumulative_logprob=sum(entry.logprob for entry in reply.logprobs))
    if body.return_perf_metrics:
        prompt = len(reply.request.prompt)
        cached = reply.sources.cached
        blocks = -(-prompt // chunk_tokens)
        reused = cached // chunk_tokens
        held = -(-(prompt + len(reply.tokens) - 1) // chunk_tokens)
        tensors |= _tensors(
            kv_cache_reused_block=reused,
            kv_cache_missed_block=blocks - reused,
            kv_cache_hit_rate=cached / prompt,
            kv_cache_alloc_new_blocks=held - reused,
            kv_cache_alloc_total_blocks=held,
            arrival_time_ns=_nanoseconds(call.arrived),
            first_scheduled_time_ns=_nanoseconds(call.arrived + reply.queued),
            first_token_time_ns=_nanoseconds(reply.started or now),
            last_token_time_ns=_nanoseconds(now),
        )
    return tensors


def _tensors(**values: Any) -> Tensors:
    return {
        name: np.array(value, dtype=DTYPES[OUTPUTS[name]], ndmin=1)
        for name, value in values.items()
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
