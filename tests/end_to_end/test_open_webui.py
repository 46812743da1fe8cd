"""What Open WebUI sends to a server with OpenAI's API: its list of models, chats, and the tasks
(title, tags, follow-ups) that it has done beside them.

The shapes are those of its routers `openai.py` and `tasks.py`; a direct connection of its browser
sends the fields that its server takes out.
"""

from __future__ import annotations

import json

import pytest

from tests.scripted_model import CHUNK, OTHERWISE, scripted_server

from .server import HTTP

pytestmark = pytest.mark.slow

ORIGIN = "http://open-webui.example"
KEY = "of-open-webui"
TEA = "Boil the water. Pour it over the leaves. Let it stand for three minutes."
USER = {
    "X-OpenWebUI-User-Name": "Nora%20Berg",
    "X-OpenWebUI-User-Id": "8f0c8a4e-1f0b-4ad4-9a43-9a1f6a6a8f10",
    "X-OpenWebUI-User-Email": "nora@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c1e9a1c8-51f6-4c53-8a0a-3ad2ef4a1b77",
}
PARAMS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "max_tokens": 40,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "seed": 3,
    "stop": ["###"],
    "logit_bias": {"5": 1},
    "reasoning_effort": "low",
}
DIRECT = {
    "chat_id": USER["X-OpenWebUI-Chat-Id"],
    "session_id": "yH0rQ5xw",
    "id": "0b4f9f3e-6a57-4d6a-bc19-27e1a7a9a2f1",
    "parent_id": None,
    "features": {"web_search": False, "image_generation": False, "code_interpreter": False},
    "variables": {"{{USER_NAME}}": "Nora", "{{CURRENT_DATE}}": "2026-11-27"},
    "background_tasks": {"title_generation": True, "tags_generation": True},
    "tool_servers": [],
    "files": [],
    "filter_ids": [],
    "params": {},
    "metadata": {"chat_id": USER["X-OpenWebUI-Chat-Id"], "task": None},
}
TASKS = {
    "title_generation": "### Task:\nGenerate a concise, 3-5 word title with an emoji.",
    "tags_generation": "### Task:\nGenerate 1-3 broad tags that categorize the main themes.",
    "follow_up_generation": "### Task:\nSuggest 3-5 relevant follow-up questions.",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--api-key", KEY, "--cors-origins", ORIGIN)
    small = ("--max-model-len", 4096, "--gpu-kv-chunks", 512)
    directory = tmp_path_factory.mktemp("scripted")
    with scripted_server(directory, {"tea": TEA}, *options, *small) as running:
        yield running


def send(server, method, path, **body):
    headers = {"Authorization": f"Bearer {KEY}", "Origin": ORIGIN, **USER}
    url = f"{server.url}/v1{path}"
    answer = HTTP.request(method, url, headers=headers, json=body or None)
    assert answer.status_code == 200, answer.text
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    return answer


def streamed(server, messages, **fields):
    """The text and the usage of a chat as Open WebUI reads it."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"model": "scripted", "messages": messages, **options, **fields}
    lines = send(server, "POST", "/chat/completions", **body).text.splitlines()
    assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return text, events[-1]["usage"]


def tasks(server, messages):
    """The chat is told inside of one message."""
    told = "\n".join(f"{message['role'].upper()}: {message['content']}" for message in messages)
    for task, words in TASKS.items():
        content = f"{words}\n### Chat History:\n<chat_history>\n{told}\n</chat_history>"
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": content}],
            "stream": False,
            "max_completion_tokens": 1000,
            "metadata": {"task": task, "task_body": {"messages": messages}, **DIRECT["metadata"]},
        }
        answer = send(server, "POST", "/chat/completions", **body).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("fields", [{}, PARAMS, PARAMS | DIRECT], ids=["plain", "params", "direct"])
def test_a_chat_of_open_webui_finds_its_kv(server, fields):
    (model,) = send(server, "GET", "/models").json()["data"]
    assert model["id"] == "scripted" and model["object"] == "model"
    system = {"role": "system", "content": f"You help Nora with boats. {sorted(fields)}"}
    messages = [system, {"role": "user", "content": "Tell me about tea, slowly."}]
    prompts = []
    for question in ("And coffee?", "And cocoa?", None):
        reply, usage = streamed(server, messages, **fields)
        assert reply == (TEA if len(prompts) == 0 else OTHERWISE)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        prompts.append(usage["prompt_tokens"] + usage["completion_tokens"])
        if len(prompts) > 1:
            assert cached > prompts[-2] - CHUNK, (cached, prompts)  # all but an unfilled chunk
        tasks(server, messages)
        messages.append({"role": "assistant", "content": reply})
        if question:
            content = [{"type": "text", "text": question}]
            messages.append({"role": "user", "content": content if fields else question})


def test_the_preflight_request_of_its_browser_is_answered(server):
    wanted = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = HTTP.options(f"{server.url}/v1/chat/completions", headers=wanted)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
