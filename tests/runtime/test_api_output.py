"""Log probabilities, several choices, tool calls and forms of replies, as the HTTP process writes
them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pensieve.runtime.frontend.call_forms import HERMES
from pensieve.runtime.frontend.chat_messages import Message
from pensieve.runtime.frontend.logprobs import LogprobsWriter
from pensieve.runtime.frontend.reply import ChatWriter, Reply, Style
from pensieve.runtime.frontend.reply_reader import ReplyReader
from pensieve.runtime.http.settings import DEFAULTS
from pensieve.runtime.messages import Submit
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.types import FinishReason, Request, RequestId, RowResult, TokenLogprobs

from .fake_loop import EOS, FIRST_BYTE, FakeLoop, byte_tokens, say
from .http.test_app import chat, complete, events, post
from .text.test_tokenizer import in_bytes, sentencepiece_like

Ask = Callable[..., Any]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def submitted(loop: FakeLoop) -> list[Request]:
    return [message.request for message in loop.messages(Submit)]


# Sampling


def test_sampling_fields_reach_the_loop(ask: Ask) -> None:
    loop = FakeLoop()
    fields = {
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2.0,
    }
    ask(
        complete(
            prompt=[9], logit_bias={"5": -100, "259": 3.5}, prompt_logprobs=3, logprobs=2, **fields
        ),
        loop,
    )
    (request,) = submitted(loop)
    sampling = request.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == ((5, -100.0), (259, 3.5)) and sampling.logprobs == 2
    assert request.prompt_logprobs == 3 and sampling.grammar is None


# Log probabilities; the made up ones of a token are minus its id, the likeliest tokens ids from 10
# on


def test_chat_logprobs(ask: Ask) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    (choice,) = ask(chat("x", **body), FakeLoop(say("aé"))).json()["choices"]
    tops = [
        {"token": chr(token - FIRST_BYTE), "logprob": -0.5 * token, "bytes": [token - FIRST_BYTE]}
        for token in (10, 11)
    ]
    assert choice["logprobs"]["refusal"] is None
    *content, end = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], [0xC3], [0xA9]]
    assert [entry["token"] for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert [entry["logprob"] for entry in content] == [-token for token in byte_tokens("aé")]
    assert all(entry["top_logprobs"] == tops for entry in content)
    assert (end["token"], end["bytes"], end["logprob"]) == ("</s>", None, -EOS)
    (choice,) = ask(chat("x", logprobs=True), FakeLoop(say("a"))).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_streamed_chat_logprobs_are_those_of_the_whole(ask: Ask) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "max_tokens": 20, "stop": "END"}
    reply = FakeLoop(say("aé one END more"), step_seconds=0.001)
    (choice,) = ask(chat("x", **body), FakeLoop(say("aé one END more"))).json()["choices"]
    chunks = events(ask(chat("x", stream=True, **body), reply))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    content = [entry for piece in pieces if piece for entry in piece["content"]]
    assert content == choice["logprobs"]["content"] and len(content) == len("aé one END".encode())


def test_completion_logprobs(ask: Ask) -> None:
    (choice,) = ask(complete(prompt="aé b", logprobs=1)).json()["choices"]
    logprobs = choice["logprobs"]
    ids = [*byte_tokens("aé b"), EOS]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", " ", "b", "</s>"]
    assert logprobs["token_logprobs"] == [-float(token) for token in ids]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    top = {chr(10 - FIRST_BYTE): -5.0}
    assert logprobs["top_logprobs"] == [
        {text: value, **top}
        for text, value in zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
    ]
    (choice,) = ask(complete(prompt="a", logprobs=0)).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -101.0}, {"</s>": -2.0}]


def test_of_tokens_that_read_alike_the_first_is_reported(tokenizer_directory: Path) -> None:
    """Bytes of unfinished characters read alike. The token's own comes first, then the likelier."""
    first = FIRST_BYTE + 0xF0
    second = FIRST_BYTE + 0xF1
    third = FIRST_BYTE + 0xF2
    entry = TokenLogprobs(-2.0, 2, (first, second, third), (-1.0, -2.0, -3.0))
    writer = LogprobsWriter(Tokenizer.load(tokenizer_directory), 3, None)
    assert writer.completion([second], [entry], [0])["top_logprobs"] == [{"\ufffd": -2.0}]
    (a,) = byte_tokens("a")
    likelier = TokenLogprobs(-0.5, 1, (a, first, third), (-0.5, -1.0, -3.0))
    assert writer.completion([a], [likelier], [0])["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0}]


def test_streamed_completion_logprobs_are_those_of_the_whole(ask: Ask) -> None:
    whole = ask(complete(prompt="aé b", logprobs=1)).json()["choices"][0]["logprobs"]
    chunks = events(
        ask(complete(prompt="aé b", logprobs=1, stream=True), FakeLoop(step_seconds=0.001))
    )
    joined: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            joined[name] += values
    assert joined == whole


def test_a_completion_goes_on_behind_a_long_run_of_byte_tokens(ask: Ask, tmp_path: Path) -> None:
    """Of the prompt's last tokens the first ones end a character that began before them."""
    sentencepiece_like().save(str(tmp_path / "tokenizer.json"))
    loop = FakeLoop(lambda request: [*in_bytes("今é"), EOS])
    (choice,) = ask(complete(prompt="今日は世界"), loop, directory=tmp_path).json()["choices"]
    assert choice["text"] == "今é"


def test_echo(ask: Ask) -> None:
    (choice,) = ask(complete(prompt="ab", echo=True), FakeLoop(say("cd"))).json()["choices"]
    assert choice["text"] == "abcd" and choice["logprobs"] is None
    chunks = events(ask(complete(prompt=["ab", "x"], echo=True, stream=True), FakeLoop(say("cd"))))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["abcd", "xcd"]


def test_echo_repeats_what_was_written_special_tokens_too(ask: Ask) -> None:
    prompt = "<s>é</s>b"
    ids = [1, 1, *byte_tokens("é"), EOS, *byte_tokens("b")]
    loop = FakeLoop(say("cd"))
    (choice,) = ask(complete(prompt=prompt, echo=True, logprobs=0), loop).json()["choices"]
    assert list(submitted(loop)[0].prompt) == ids
    assert choice["text"] == prompt + "cd"
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 3, 4, 8, 9, 10, 11]
    (choice,) = ask(
        complete(prompt=prompt, echo=True, conversation="a"), FakeLoop(say("cd"))
    ).json()["choices"]
    assert choice["text"] == prompt + "cd"
    chunks = events(ask(complete(prompt=prompt, echo=True, stream=True), FakeLoop(say("cd"))))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == prompt + "cd"
    (choice,) = ask(complete(prompt=ids, echo=True, logprobs=0), FakeLoop(say("cd"))).json()[
        "choices"
    ]
    assert choice["text"] == "ébcd" and choice["logprobs"]["text_offset"] == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
        3,
        4,
    ]


def test_offsets_of_tokens_that_the_text_would_not_be_encoded_to(tokenizer_directory: Path) -> None:
    """The model may have written such tokens of a conversation."""
    writer = LogprobsWriter(Tokenizer.load(tokenizer_directory), 0, None)
    x, y = byte_tokens("xy")
    # encoded it has a second <s>
    assert writer.offsets([1, x, EOS, y], "<s>x</s>y") == [0, 3, 4, 8]
    assert writer.offsets([1, x, EOS, y], "xy") == [0, 0, 1, 1]


def test_echo_with_logprobs_scores_the_prompt_too(ask: Ask) -> None:
    loop = FakeLoop(say("cd"))
    answer = ask(complete(prompt="ab", echo=True, logprobs=1, n=2), loop).json()
    assert [request.prompt_logprobs for request in submitted(loop)] == [1, None]
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["<s>", "a", "b", "c", "d", "</s>"]
        assert logprobs["token_logprobs"] == [
            None,
            *(-float(token) for token in byte_tokens("abcd")),
            -EOS,
        ]
        assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]
        assert logprobs["top_logprobs"][0] is None and len(logprobs["top_logprobs"][1]) == 2
        assert "prompt_logprobs" not in choice


def test_prompt_logprobs(ask: Ask) -> None:
    expected = [
        None,
        {
            "101": {"logprob": -101.0, "rank": 101, "decoded_token": "a"},
            "10": {"logprob": -5.0, "rank": 1, "decoded_token": "\x06"},
        },
    ]
    answer = ask(complete(prompt="a", prompt_logprobs=1, n=2)).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
    assert answer["choices"][0]["logprobs"] is None
    answer = ask(chat("a", prompt_logprobs=0)).json()
    assert len(answer["prompt_logprobs"]) == len([1, *byte_tokens("user: a\nassistant: ")])
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"][1]) == 1


def test_logprobs_without_a_tokenizer_name_ids(ask: Ask) -> None:
    (choice,) = ask(complete(prompt=[7], logprobs=0), directory=None).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:7", f"token_id:{EOS}"]
    assert choice["logprobs"]["text_offset"] == [0, 0]


# Choices


def test_choices_share_the_prompt_and_differ_in_their_seeds(ask: Ask) -> None:
    loop = FakeLoop()
    answer = ask(complete(prompt=["one", "three"], n=3, seed=5, max_tokens=20), loop).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == ["one"] * 3 + ["three"] * 3
    requests = submitted(loop)
    assert [request.choice for request in requests] == [0, 1, 2, 0, 1, 2]
    assert (
        requests[0].sampling.seed == 5 and len({request.sampling.seed for request in requests}) == 3
    )
    assert answer["usage"]["prompt_tokens"] == 4 + 6 and answer["usage"][
        "completion_tokens"
    ] == 3 * (4 + 6)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3 + 5


def test_choice_0_is_the_conversations(ask: Ask) -> None:
    loop = FakeLoop()
    ask(chat("hi", n=2, conversation="c"), loop)
    assert [request.conversation for request in submitted(loop)] == ["c", None]


def test_metrics_count_a_prompt_once(ask: Ask) -> None:
    async def work(http: Any) -> str:
        await http.post("/v1/completions", json={"prompt": [9, 8, 7], "n": 4})
        return (await http.get("/metrics")).text

    assert 'pensieve:prompt_tokens_total{source="gpu"} 2.0' in ask(work)


def test_streamed_choices_of_a_chat(ask: Ask) -> None:
    chunks = events(ask(chat("hi", n=2, best_of=2, stream=True), FakeLoop(say("well"))))
    texts = ["", ""]
    ends = []
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks[:2]] == ["assistant"] * 2
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] == "stop" else []
    assert texts == ["well", "well"] and sorted(ends) == [0, 1]


# Forms


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "integer"}},
            }
        },
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[0-9]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a"+'}},
        {"structured_outputs": {"grammar": 'root ::= cup "s"?\ncup ::= "a" | [b-d]'}},
    ],
)
def test_forms_reach_the_loop_as_grammars(ask: Ask, form: dict[str, Any]) -> None:
    loop = FakeLoop()
    assert (
        ask(chat("x", **form), loop).is_success
        and ask(chat("x", response_format={"type": "text"})).is_success
    )
    assert submitted(loop)[0].sampling.grammar


def test_one_form_may_have_its_older_name_too(ask: Ask) -> None:
    """guidance sends both names of a grammar, for older and newer versions of vLLM."""
    grammar = '%llguidance {}\n\nstart: "a"+\n'
    grammars = []
    for form in (
        {"structured_outputs": {"grammar": grammar}},
        {"structured_outputs": {"grammar": grammar}, "guided_grammar": grammar},
    ):
        loop = FakeLoop()
        assert ask(chat("x", **form), loop).is_success
        grammars.append(submitted(loop)[0].sampling.grammar)
    assert grammars[0] == grammars[1]
    schema = {"type": "object"}
    written = {"structured_outputs": {"json": schema}, "guided_json": json.dumps(schema)}
    assert ask(chat("x", **written)).is_success
    for name, new, old in (
        ("grammar", grammar, 'start: "b"'),
        ("json", {"const": 1}, {"const": True}),
    ):
        other = {"structured_outputs": {name: new}, f"guided_{name}": old}
        error = ask(chat("x", **other)).json()["error"]
        assert error["message"] == (
            f"structured_outputs and guided_{name} cannot be combined unless they are equal"
        )


def test_grammars_of_vllm_are_the_same_in_lark(ask: Ask) -> None:
    grammars = []
    for grammar in (
        'root ::= "a" word\nword ::= [b-d]+',
        '%llguidance {}\n\nstart: "a" WORD\nWORD: /[b-d]/+\n',
    ):
        loop = FakeLoop()
        assert ask(chat("x", guided_grammar=grammar), loop).is_success
        grammars.append(submitted(loop)[0].sampling.grammar)
    assert grammars[0] == grammars[1]


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("root ::= nothing", "Rule 'nothing' not found"),
        ("::=", "Expected name"),
        ('root ::= "a\\', "EBNF"),
        ("root ::= " + "(" * 2000 + '"a"' + ")" * 2000, "EBNF"),
        ("root ::= " + '"a" ' * 3000, "8192"),
    ],
    ids=["unknown rule", "no name", "cut", "deep", "long"],
)
def test_a_wrong_grammar_of_vllm_is_refused(ask: Ask, grammar: str, message: str) -> None:
    response = ask(chat("x", guided_grammar=grammar))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_grammar") and message in error[
        "message"
    ]


def test_forms_need_a_tokenizer(ask: Ask) -> None:
    response = ask(complete(prompt=[7], response_format={"type": "json_object"}), directory=None)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


# Tools


def test_a_tool_call_is_found_in_the_text(ask: Ask) -> None:
    loop = FakeLoop(say(f"Let me see.\n{CALL}"))
    (choice,) = ask(chat("x", tools=[WEATHER]), loop).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert submitted(loop)[0].sampling.grammar is None
    (choice,) = ask(chat("x", tools=[WEATHER]), FakeLoop(say(CALL))).json()["choices"]
    assert choice["message"]["content"] is None
    (choice,) = ask(chat("x", tools=[WEATHER], tool_choice="none"), FakeLoop(say(CALL))).json()[
        "choices"
    ]
    assert choice["message"]["content"] == CALL and choice["finish_reason"] == "stop"
    (choice,) = ask(chat("x", tools=[WEATHER]), FakeLoop(say("Fine < weather"))).json()["choices"]
    assert (
        choice["message"]["content"] == "Fine < weather" and "tool_calls" not in choice["message"]
    )


def test_streamed_tool_calls(ask: Ask) -> None:
    loop = FakeLoop(say(f"See:\n{CALL}\n{CALL}"), step_seconds=0.0005)
    chunks = events(ask(chat("x", tools=[WEATHER], stream=True, max_tokens=200), loop))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "See:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and len({call["id"] for call in calls}) == 2
    assert all(
        call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'} for call in calls
    )
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_parallel_calls_there_is_one(ask: Ask) -> None:
    loop = FakeLoop(say(CALL + CALL))
    (choice,) = ask(
        chat("x", tools=[WEATHER], parallel_tool_calls=False, max_tokens=200), loop
    ).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_change_no_prompt(ask: Ask) -> None:
    """Their purpose is that the prompt's KV stays. A call of another tool is content."""
    tools = [WEATHER, function_of({"type": "object"}, "other")]
    prompts = []
    for choice, finish in (
        ("auto", "tool_calls"),
        (allowed("auto", "weather"), "tool_calls"),
        (allowed("auto", "other"), "stop"),
        (allowed("auto"), "stop"),
        (allowed("required", "weather"), "tool_calls"),
    ):
        answer = ask(chat("x", tools=tools, tool_choice=choice), loop := FakeLoop(say(CALL)))
        (reply,) = answer.json()["choices"]
        assert reply["finish_reason"] == finish, choice
        assert (reply["message"]["content"] == CALL) == (finish == "stop")
        (request,) = submitted(loop)
        assert (request.sampling.grammar is None) == ("required" not in str(choice))
        prompts.append(request.prompt)
    assert prompts == prompts[:1] * len(prompts)
    grammar = request.sampling.grammar
    assert grammar is not None and "weather" in str(grammar) and "other" not in str(grammar)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_forced_calls_and_forms_are_grammars(ask: Ask, fields: dict[str, Any]) -> None:
    loop = FakeLoop(say(CALL))
    (choice,) = ask(chat("x", tools=[WEATHER], **fields), loop).json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and submitted(loop)[0].sampling.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("required")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("never", "weather")}, "tool_choice"),
        ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "frob"}}}
                ],
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(ask: Ask, fields: dict[str, Any], param: str) -> None:
    response = ask(chat("x", **fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def function_of(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_tool_whose_schema_cannot_be_followed_does_not_refuse_the_others(
    ask: Ask,
) -> None:
    loop = FakeLoop(say(CALL))
    no_such = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [WEATHER, function_of(no_such, "no_such"), function_of(unique, "unique")]
    response = ask(chat("x", tools=tools, tool_choice="required"), loop)
    assert response.headers["x-pensieve-ignored-fields"] == (
        "tools.no_such.parameters, tools.uniqueItems"
    )
    grammar = submitted(loop)[0].sampling.grammar
    assert grammar is not None and "example.com" not in grammar and "uniqueItems" in grammar


def test_many_tools_whose_schemas_cannot_be_followed_are_named_in_part(ask: Ask) -> None:
    pattern = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}}
    tools = [function_of(pattern, f"a_tool_with_a_long_name_{at}") for at in range(20)]
    response = ask(chat("x", tools=tools, tool_choice="required"))
    assert response.is_success
    assert len(response.headers["x-pensieve-ignored-fields"].split(", ")) == 16


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_a_schema_that_is_not_json_is_refused(ask: Ask, value: str) -> None:
    error = ask(chat("x", guided_json=f'{{"const": {value}}}')).json()["error"]
    assert error["param"] == "guided_json" and "not JSON" in error["message"]


def test_strict_fields_refuse_what_cannot_be_enforced(ask: Ask) -> None:
    schema = {"type": "array", "uniqueItems": True}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    settings = replace(DEFAULTS, strict_fields=True)
    response = ask(chat("x", response_format=response_format), settings=settings)
    assert response.status_code == 400
    assert "response_format.uniqueItems" in response.json()["error"]["message"]


def test_a_tool_that_nothing_satisfies_is_refused(ask: Ask) -> None:
    never = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    tools = [WEATHER, function_of(never)]
    error = ask(chat("x", tools=tools, tool_choice="required")).json()["error"]
    assert error["param"] == "tools"
    assert error["message"] == (
        "tools is a JSON schema that nothing satisfies: see its required property 'a'"
    )


def test_what_a_schema_asks_in_vain_is_named(ask: Ask) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    response = ask(chat("x", response_format=response_format))
    assert response.status_code == 200
    assert response.headers["x-pensieve-ignored-fields"] == "response_format.format.path"


def test_tools_and_calls_go_through_the_template(
    ask: Ask, tmp_path: Path, tokenizer_directory: Path
) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}{{ "
        "message.role }}:"
        "{{ message.content }}{% for call in message.tool_calls or [] %}<{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}>{% endfor %}{{ message.tool_call_id or '' }}\n{% "
        "endfor %}"
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tokenizer_directory / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(template)
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    expected = 'user:x\nassistant:<weather{"city": "Oslo"}>\ntool:sunnyc1\n'
    for fields, shown in (({}, json.dumps([WEATHER]) + "\n"), ({"tool_choice": "none"}, "")):
        loop = FakeLoop()
        body = {"messages": messages, "tools": [WEATHER], "max_tokens": 4, **fields}
        assert ask(post("/v1/chat/completions", body), loop, directory=tmp_path).is_success
        assert (
            bytes(token - FIRST_BYTE for token in submitted(loop)[0].prompt).decode()
            == shown + expected
        )


def test_a_template_that_ignores_tools_is_said_once(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask_five_times(http: httpx.AsyncClient) -> None:
        for fields in ({"tool_choice": "none"}, {}, {}, {"tool_choice": "required"}, {}):
            await chat("x", tools=[WEATHER], **fields)(http)
            told.append(len(caplog.records))

    told: list[int] = []
    ask(ask_five_times)
    assert told == [0, 1, 1, 1, 1] and "does not render tools" in caplog.text


def test_a_reply_is_remembered_as_its_client_will_send_it_back(tokenizer_directory: Path) -> None:
    for text in ("Fine.", CALL, f"Let me see.\n{CALL}\n{CALL}"):
        request = Request(RequestId(1), array("i", [5]), 200)
        tokenizer = Tokenizer.load(tokenizer_directory)
        reader = ReplyReader(None, HERMES, {}, 9)
        reply = Reply(request, None, tokenizer, continues_prompt=False, reader=reader)  # type: ignore[arg-type]
        reply.add(RowResult(request.id, tuple(byte_tokens(text)), FinishReason.LENGTH))
        answer = ChatWriter(Style("fake", False, False)).whole([reply])
        sent_back = json.dumps(answer["choices"][0]["message"])
        assert Message.model_validate_json(sent_back).for_template() == reply.message


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "x"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[1]"}}],
        },
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}],
        },
    ],
)
def test_bad_messages_with_calls_are_refused(ask: Ask, message: dict[str, Any]) -> None:
    response = ask(post("/v1/chat/completions", {"messages": [message]}))
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages")


FORMATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "response_format": lambda schema: {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    },
    "text.format": lambda schema: {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "f", "schema": schema}},
    },
    "output_config.format": lambda schema: {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    },
}
PATHS = {
    "response_format": "/v1/chat/completions",
    "text.format": "/v1/responses",
    "output_config.format": "/v1/messages",
}
UNUSABLE = {
    "NaN": {"const": float("nan")},
    "never": {"type": "object", "properties": {"a": False}, "required": ["a"]},
}


@pytest.mark.parametrize("with_tools", [False, True], ids=["", "beside tools"])
@pytest.mark.parametrize("schema", UNUSABLE.values(), ids=UNUSABLE)
@pytest.mark.parametrize("field", FORMATS)
def test_a_schema_that_is_refused_is_named_by_its_own_field(
    ask: Ask, field: str, schema: Any, with_tools: bool
) -> None:
    body = {"model": "fake", **FORMATS[field](schema)}
    if with_tools:
        tool = function_of({"type": "object"})
        about = tool["function"]
        tools = {
            "response_format": tool,
            "text.format": {"type": "function", **about},
            "output_config.format": {"name": about["name"], "input_schema": about["parameters"]},
        }
        body["tools"] = [tools[field]]

    async def work(http: httpx.AsyncClient) -> httpx.Response:
        return await http.post(PATHS[field], content=json.dumps(body))

    response = ask(work)
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["message"].startswith(field), error
    assert error.get("param", field) == field
