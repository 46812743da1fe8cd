"""The tensors of TensorRT-LLM's llmapi model.

Names, types and meanings are its own if it has them. `input_ids`, `output_ids` and a few sampling
parameters are ours.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.calls import GenerationCall
from ..frontend.reply import Reply
from .tensors import SHARED_INPUTS, Input, NewPiece, Tensors, TensorSet, TritonBody


class LlmapiTensors(TensorSet):
    """Those of TensorRT-LLM's llmapi model, without a dimension for a batch."""

    MOST_ROWS = 0
    INPUTS: ClassVar = {
        **SHARED_INPUTS,
        "text_input": Input("STRING", "prompt"),
        "input_ids": Input("INT32", "prompt", several=True),
        "streaming": Input("BOOL", "stream"),
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
    OUTPUTS: ClassVar = {
        "text_output": ("STRING", [-1]),
        "output_ids": ("INT32", [-1]),
        "finish_reason": ("STRING", [-1]),
        "stop_reason": ("STRING", [-1]),
        "cumulative_logprob": ("FP32", [-1]),
        "kv_cache_reused_block": ("INT32", [-1]),
        "kv_cache_missed_block": ("INT32", [-1]),
        "kv_cache_hit_rate": ("FP32", [-1]),
        "kv_cache_alloc_new_blocks": ("INT32", [-1]),
        "kv_cache_alloc_total_blocks": ("INT32", [-1]),
        "arrival_time_ns": ("INT64", [1]),
        "first_scheduled_time_ns": ("INT64", [1]),
        "first_token_time_ns": ("INT64", [1]),
        "last_token_time_ns": ("INT64", [1]),
    }

    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        if "text_input" in values and "input_ids" in values:
            raise RequestError(
                ErrorKind.INVALID,
                "text_input and input_ids are two prompts: send one of them",
                "input_ids",
            )
        if "text_input" not in values and "input_ids" not in values:
            raise RequestError(
                ErrorKind.INVALID, "there is no prompt: send text_input or input_ids", "text_input"
            )
        fields = self.named(values)
        if fields.get("return_cumulative_logprob"):
            fields["logprobs"] = 0
        fields["echo"] = not values.get("sampling_param_exclude_input_from_output", True)
        return fields

    def response(
        self, body: TritonBody, call: GenerationCall, reply: Reply, piece: NewPiece
    ) -> Tensors:
        tensors = self.tensors(text_output=piece.text.encode(), output_ids=list(piece.tokens))
        return tensors if reply.finish is None else tensors | self._end(body, call, reply, piece)

    def _end(
        self, body: TritonBody, call: GenerationCall, reply: Reply, piece: NewPiece
    ) -> Tensors:
        """The requested tensors about the whole reply."""
        values: dict[str, Any] = {}
        if body.return_finish_reason:
            values["finish_reason"] = str(reply.reason).encode()
        if body.return_stop_reason and reply.stop_reason is not None:
            values["stop_reason"] = str(reply.stop_reason).encode()
        if body.return_cumulative_logprob:
            values["cumulative_logprob"] = sum(entry.logprob for entry in reply.logprobs)
        if body.return_perf_metrics:
            prompt = len(reply.request.prompt)
            blocks = -(-prompt // self._chunk_tokens)
            reused = reply.sources.cached // self._chunk_tokens
            values |= {
                "kv_cache_reused_block": reused,
                "kv_cache_missed_block": blocks - reused,
                "kv_cache_hit_rate": reply.sources.cached / prompt,
                **self.performance(call, reply, piece.now),
            }
        return self.tensors(**values)
