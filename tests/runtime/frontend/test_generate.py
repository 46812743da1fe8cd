"""The bodies of all APIs, and of `LLM`, end in one `Generate`; equal wishes make equal records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pensieve.runtime.frontend.bodies import MOST_TOOLS, ChatBody, CompletionBody, parse
from pensieve.runtime.frontend.generate import Generate
from pensieve.runtime.http.messages import MessageBody
from pensieve.runtime.http.responses import ResponseBody
from pensieve.runtime.offline.params import SamplingParams, body_of
from pensieve.runtime.triton.llmapi import LlmapiTensors

SAMPLING = {"temperature": 0.5, "top_k": 7, "top_p": 0.75}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
SCHEMA = {"type": "object", "properties": {"sunny": {"type": "boolean"}}}


def generate(kind: type[Any], **fields: Any) -> Generate:
    record: Generate = parse(kind, json.dumps(fields).encode()).generate()
    return record


def chat(**fields: Any) -> Generate:
    return generate(ChatBody, messages=[{"role": "user", "content": "hi"}], **fields)


def message(**fields: Any) -> Generate:
    """Without the wishes that only agents have."""
    whole = generate(
        MessageBody,
        model="m",
        max_tokens=9,
        messages=[{"role": "user", "content": "hi"}],
        **fields,
    )
    assert (whole.default_limit, whole.several_dialogues) == (9, True)
    return replace(whole, default_limit=None, several_dialogues=False)


@pytest.mark.parametrize("prompt", ["hi", [3, 1, 2]], ids=["text", "ids"])
def test_completions_triton_and_llm_agree(prompt: str | list[int]) -> None:
    limits = {"max_tokens": 9, "min_tokens": 2, "stop": ["b"], "stop_token_ids": [5]}
    expected = generate(
        CompletionBody, prompt=prompt, conversation="mine", seed=3, **limits, **SAMPLING
    )
    assert (expected.prompt, expected.limit, expected.stops) == (prompt, 9, ("b",))
    if isinstance(prompt, str):
        tensors = {"text_input": np.array([prompt.encode()], dtype=object)}
    else:
        tensors = {"input_ids": np.array(prompt, dtype=np.int32)}
    tensors |= {
        "conversation_id": np.array([b"mine"], dtype=object),
        "sampling_param_max_tokens": np.array([9], dtype=np.int32),
        "sampling_param_min_tokens": np.array([2], dtype=np.int32),
        "sampling_param_stop": np.array([b"b"], dtype=object),
        "sampling_param_stop_token_ids": np.array([5], dtype=np.int32),
        "sampling_param_seed": np.array([3], dtype=np.uint64),
        "sampling_param_temperature": np.array([0.5], dtype=np.float32),
        "sampling_param_top_k": np.array([7], dtype=np.int32),
        "sampling_param_top_p": np.array([0.75], dtype=np.float32),
    }
    assert LlmapiTensors(chunk_tokens=32).read(tensors, "").generate() == expected
    params = SamplingParams(**limits, **SAMPLING, seed=3)
    offline = body_of(CompletionBody, params, prompt=prompt, conversation="mine")
    # SamplingParams have no defaults of the server
    assert offline.generate() == replace(expected, min_p=0.0, repetition_penalty=1.0)


@pytest.mark.parametrize(
    ("of_chat", "of_message"),
    [
        ({}, {}),
        (SAMPLING, SAMPLING),
        ({"stop": ["b"], "stream": True}, {"stop_sequences": ["b"], "stream": True}),
        (
            {
                "tools": [{"type": "function", "function": FUNCTION}],
                "tool_choice": "required",
                "parallel_tool_calls": False,
            },
            {
                "tools": [
                    {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
                ],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
    ],
    ids=["plain", "sampling", "end", "tools", "form"],
)
def test_chats_and_messages_agree(of_chat: dict[str, Any], of_message: dict[str, Any]) -> None:
    wanted = chat(**of_chat)
    if wanted.form is not None and wanted.form.param == "response_format":
        # errors name the field of each API
        wanted = replace(wanted, form=replace(wanted.form, param="output_config.format"))
    assert message(**of_message) == wanted


def test_a_response_is_a_chat_with_a_history_of_its_own() -> None:
    fields = {"stream": True, "seed": 3, "priority": 2, "reasoning": {"effort": "low"}, **SAMPLING}
    response = generate(
        ResponseBody, input="hi", max_output_tokens=9, instructions="be short", **fields
    )
    assert response.response and response.store
    assert response.instructions == ({"role": "system", "content": "be short"},)
    same = replace(
        response,
        response=False,
        store=False,
        instructions=(),
        prompt_field="messages",
        limit_field="max_completion_tokens",
    )
    fields["reasoning_effort"] = fields.pop("reasoning")["effort"]
    assert same == chat(max_completion_tokens=9, **fields)


def test_tools_that_the_model_may_not_call_are_left_out() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    assert (
        chat(tools=tools).tools == tuple(tools) and chat(tools=tools).most_tool_calls == MOST_TOOLS
    )
    forbidden = chat(tools=tools, tool_choice="none")
    assert (forbidden.tools, forbidden.most_tool_calls, forbidden.form) == ((), 0, None)
