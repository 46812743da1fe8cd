"""The tensors of TensorRT-LLM's models `ensemble` and `tensorrt_llm_bls`.

`ensemble` and `tensorrt_llm_bls` differ in little, and their releases in a few names: all are here.
What cannot be served is an input too, so that it is refused by name: Triton's `generate` ignores
what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...scheduler.types import ErrorKind, RequestError
from ..frontend.calls import GenerationCall
from ..frontend.reply import Reply
from .tensors import SHARED_INPUTS, Input, NewPiece, Tensors, TensorSet, TritonBody

ONE_REPLY = "one request has one reply"
LOGITS = "logits are not served; return_log_probs are"
ADAPTERS = "adapters are not served"
PROMPT_TABLES = "tables of prompt embeddings are not served"
DRAFTS = "the server drafts by its own options"
BIASES = "biases of words are not served"

UNSERVED: Mapping[str, tuple[Input, Any, str]] = {
    "beam_width": (Input("INT32"), 1, ONE_REPLY),
    "num_return_sequences": (Input("INT32"), 1, ONE_REPLY),
    "return_context_logits": (Input("BOOL"), False, LOGITS),
    "return_generation_logits": (Input("BOOL"), False, LOGITS),
    "num_draft_tokens": (Input("INT32"), 0, DRAFTS),
    "use_draft_logits": (Input("BOOL"), False, DRAFTS),
    "decoder_text_input": (Input("STRING"), "", "models have no encoder"),
    "embedding_bias_words": (Input("STRING", several=True), [], BIASES),
    "embedding_bias_weights": (Input("FP32", several=True), [], BIASES),
    "image_url_input": (Input("STRING"), "", "prompts are text"),
    "prompt_embedding_table": (Input("FP16", dims=(-1, -1)), [], PROMPT_TABLES),
    "prompt_vocab_size": (Input("INT32"), 0, PROMPT_TABLES),
    "prompt_table_extra_id": (Input("UINT64"), 0, PROMPT_TABLES),
    "lora_task_id": (Input("UINT64"), None, ADAPTERS),
    "lora_weights": (Input("FP16", dims=(-1, -1)), [], ADAPTERS),
    "lora_config": (Input("INT32", dims=(-1, 3)), [], ADAPTERS),
}
"""Each with the value that asks for nothing, and the reason why others are refused."""

GUIDES = {
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf_grammar": "guided_grammar",
}
"""The body's fields by guided_decoding_guide_type. The type `json` has no guide."""


class EnsembleTensors(TensorSet):
    """Each prompt of a request has a reply of its own. A response belongs to one of them, and has
    all outputs that the request asks for, about the reply so far."""

    MOST_ROWS = 64
    INPUTS: ClassVar = {
        **SHARED_INPUTS,
        "text_input": Input("STRING", "prompt"),
        "stream": Input("BOOL", "stream"),
        "max_tokens": Input("INT32", "max_tokens"),
        "min_tokens": Input("INT32", "min_tokens"),
        "min_length": Input("INT32", "min_tokens"),
        "stop_words": Input("STRING", "stop", several=True),
        "bad_words": Input("STRING", "bad_words", several=True),
        "end_id": Input("INT32"),
        "pad_id": Input("INT32"),  # nothing is padded
        "exclude_input_in_output": Input("BOOL"),
        "temperature": Input("FP32", "temperature"),
        "top_k": Input("INT32", "top_k"),
        "top_p": Input("FP32", "top_p"),
        "length_penalty": Input("FP32"),  # it ranks beams, and there is one
        "repetition_penalty": Input("FP32", "repetition_penalty"),
        "presence_penalty": Input("FP32", "presence_penalty"),
        "frequency_penalty": Input("FP32", "frequency_penalty"),
        "seed": Input("UINT64", "seed"),
        "random_seed": Input("UINT64", "seed"),
        "return_log_probs": Input("BOOL", "return_log_probs"),
        "return_perf_metrics": Input("BOOL", "return_perf_metrics"),
        "return_num_input_tokens": Input("BOOL", "return_num_input_tokens"),
        "return_num_output_tokens": Input("BOOL", "return_num_output_tokens"),
        "guided_decoding_guide_type": Input("STRING"),
        "guided_decoding_guide": Input("STRING"),
        **{name: kind for name, (kind, _, _) in UNSERVED.items()},
    }
    OUTPUTS: ClassVar = {
        "text_output": ("STRING", (1,)),
        "batch_index": ("INT32", (1,)),
        "sequence_index": ("INT32", (1,)),
        "cum_log_probs": ("FP32", (-1,)),
        "output_log_probs": ("FP32", (-1, -1)),
        "num_input_tokens": ("INT32", (1,)),
        "num_output_tokens": ("INT32", (1,)),
        "kv_cache_alloc_new_blocks": ("INT32", (1,)),
        "kv_cache_reused_blocks": ("INT32", (1,)),
        "kv_cache_alloc_total_blocks": ("INT32", (1,)),
        "arrival_time_ns": ("INT64", (1,)),
        "first_scheduled_time_ns": ("INT64", (1,)),
        "first_token_time_ns": ("INT64", (1,)),
        "last_token_time_ns": ("INT64", (1,)),
        "acceptance_rate": ("FP32", (1,)),
        "total_accepted_draft_tokens": ("INT32", (1,)),
        "total_draft_tokens": ("INT32", (1,)),
    }

    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, (_, nothing, reason) in UNSERVED.items():
            if name in values and values[name] != nothing:
                raise RequestError(ErrorKind.INVALID, f"{name}: {reason}", name)
        if "text_input" not in values:
            raise RequestError(
                ErrorKind.INVALID, "there is no prompt: send text_input", "text_input"
            )
        fields = self.named(values)
        for name in ("stop", "bad_words"):
            fields[name] = [word for word in fields.get(name, []) if word]  # clients send one ""
        if "end_id" in values:  # in place of the model's own; -1: none
            fields["ignore_eos"] = True
            fields["stop_token_ids"] = [values["end_id"]] if values["end_id"] >= 0 else []
        if fields.get("return_log_probs"):
            fields["logprobs"] = 0
        whole = not fields.get("stream", False)
        fields["after_prompt"] = whole and not values.get("exclude_input_in_output", False)
        return fields | _sampling(values) | _guide(values)

    def response(
        self, body: TritonBody, call: GenerationCall, reply: Reply, piece: NewPiece
    ) -> Tensors:
        prompt = str(body.prompt) if body.after_prompt else ""
        values: dict[str, Any] = {
            "text_output": (prompt + piece.text).encode(),
            "batch_index": piece.row,
            "sequence_index": 0,
        }
        if body.return_log_probs:
            logprobs = [entry.logprob for entry in reply.logprobs]
            values["cum_log_probs"] = sum(logprobs)
            values["output_log_probs"] = logprobs[len(logprobs) - len(piece.tokens) :]
        if body.return_num_input_tokens:
            values["num_input_tokens"] = len(reply.request.prompt)
        if body.return_num_output_tokens:
            values["num_output_tokens"] = len(reply.tokens)
        if body.return_perf_metrics:
            values |= {
                "kv_cache_reused_blocks": reply.sources.cached // self._chunk_tokens,
                **self.performance(call, reply, piece.now),
                # drafts are counted for the whole server
                "acceptance_rate": 0.0,
                "total_accepted_draft_tokens": 0,
                "total_draft_tokens": 0,
            }
        tensors = self.tensors(**values)
        # the only one that clients read without its first dimension
        return tensors | {"text_output": tensors["text_output"].ravel()}


def _sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """As TensorRT-LLM samples: with top_k or top_p; else the reply is greedy."""
    filters = {name: values[name] for name in ("top_k", "top_p") if values.get(name)}
    fields = {"top_k": None, "top_p": None, **filters}
    if not filters:
        return fields | {"temperature": 0.0}
    return fields | {"temperature": values.get("temperature", 1.0)}


def _guide(values: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the reply. Raises RequestError (INVALID)."""
    kind = values.get("guided_decoding_guide_type")
    guide = values.get("guided_decoding_guide")
    if kind is None and guide is None:
        return {}
    if kind == "json" and guide is None:
        return {"response_format": {"type": "json_object"}}
    if kind in GUIDES and guide is not None:
        return {GUIDES[kind]: guide}
    raise RequestError(
        ErrorKind.INVALID,
        f"guided_decoding_guide_type must be json, without a guide, or with a "
        f"guided_decoding_guide one of {', '.join(GUIDES)}",
        "guided_decoding_guide_type",
    )
