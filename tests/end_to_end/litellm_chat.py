"""A streamed chat of three turns through litellm, in its own environment; `test_clients` checks its
answer."""

from __future__ import annotations

import json
import sys

import litellm

request = json.loads(sys.argv[1])
litellm.telemetry = False
messages = request["begin"]
cached = []


def turn(**options):
    """The next message, put together from its pieces."""
    stream = litellm.completion(
        model="openai/demo",
        api_base=request["url"],
        api_key="none",
        messages=messages,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    reply = litellm.stream_chunk_builder(list(stream), messages=messages)
    cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    return reply.choices[0].message


asks = turn(tools=[request["tool"]], tool_choice="required")
(call,) = asks.tool_calls
messages += [
    asks.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": request["result"]},
]
told = turn(tools=[request["tool"]], stop=" ")
messages += [told.model_dump(exclude_none=True), {"role": "user", "content": request["last"]}]
forecast = json.loads(turn(response_format=request["form"]).content)
try:
    litellm.completion(
        model="openai/gpt-4o",
        api_base=request["url"],
        api_key="none",
        messages=messages,
        num_retries=0,
    )
except litellm.NotFoundError:
    call = {"name": call.function.name, "args": json.loads(call.function.arguments)}
    print(json.dumps({"call": call, "text": told.content, "forecast": forecast, "cached": cached}))
