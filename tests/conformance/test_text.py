"""The behaviour that users of the OpenAI API expect of text: whole and streamed, its end, its
sampling."""

from __future__ import annotations

from collections import Counter

from .asked_server import Server, texts, user

LONG = "Tell me a long story about a river, a bridge and a town."


def test_models_are_listed(server: Server) -> None:
    """`models.list` names the model that is asked for."""
    models = list(server.client.models.list())
    assert server.model in [model.id for model in models]
    assert all(model.object == "model" and model.created > 0 and model.owned_by for model in models)


def test_a_model_is_retrieved(server: Server) -> None:
    """`models.retrieve` describes one model."""
    assert server.client.models.retrieve(server.model).id == server.model


def test_a_chat_completion_is_whole(server: Server) -> None:
    """All fields that applications read are there, and the usage adds up."""
    answer = server.chat()
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id and answer.created > 0 and answer.model
    assert (choice.index, choice.message.role) == (0, "assistant") and choice.message.content
    assert (
        choice.finish_reason in ("stop", "length")
        and choice.logprobs is None
        and not choice.message.tool_calls
    )
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 10
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_what_a_whole_answer_says(server: Server) -> None:
    """Its deltas join to the same text and its chunks share one id."""
    chunks = list(server.chat(temperature=0, stream=True))
    assert texts(chunks) == [server.chat(temperature=0).choices[0].message.content]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"} and len(
        {chunk.id for chunk in chunks}
    ) == 1
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])


def test_a_stream_begins_with_the_role(server: Server) -> None:
    """The first delta names the assistant; later ones do not name another role."""
    first, *rest = server.chat(stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert all(
        choice.delta.role in (None, "assistant") for chunk in rest for choice in chunk.choices
    )


def test_a_stream_ends_with_usage_if_asked(server: Server) -> None:
    """With include_usage the last chunk has the usage and no choices, and the others have no usage;
    without, none has."""
    *chunks, last = server.chat(stream=True, temperature=0, stream_options={"include_usage": True})
    assert last.choices == [] and all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.usage.completion_tokens == server.chat(temperature=0).usage.completion_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in server.chat(stream=True))


def test_a_streamed_completion_says_the_same(server: Server) -> None:
    """The older endpoint streams too, with usage."""
    *chunks, last = server.complete(
        temperature=0, stream=True, stream_options={"include_usage": True}
    )
    whole = server.complete(temperature=0)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert (
        last.usage.completion_tokens == whole.usage.completion_tokens
        and whole.object == "text_completion"
    )


def test_max_tokens_and_max_completion_tokens_are_one_limit(server: Server) -> None:
    """Either ends the answer with finish_reason length."""
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = server.client.chat.completions.create(
            model=server.model, messages=user(LONG), temperature=0, **limit
        )
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


def test_a_stop_string_ends_the_text(server: Server) -> None:
    """The answer stops before it, with finish_reason stop."""
    text = server.chat(LONG, temperature=0).choices[0].message.content
    stop = text[len(text) // 2 :][:4]
    choice = server.chat(LONG, temperature=0, stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_the_first_of_several_stop_strings_counts(server: Server) -> None:
    """Up to four are allowed; the first match ends the text."""
    text = server.chat(LONG, temperature=0).choices[0].message.content
    stops = ["never said", text[-5:], text[8:12]]
    choice = server.chat(LONG, temperature=0, stop=stops).choices[0]
    ends = [text.index(stop) for stop in stops if stop in text]
    assert (choice.message.content, choice.finish_reason) == (text[: min(ends)], "stop")


def test_a_stop_string_is_found_across_tokens(server: Server) -> None:
    """Its beginning is in one token and its end in the next one."""
    choice = server.chat(LONG, temperature=0, logprobs=True).choices[0]
    tokens = [entry.token for entry in choice.logprobs.content]
    stop = tokens[3][-1] + tokens[4][:2] if len(tokens) > 5 else ""
    if not stop.isascii() or len(stop) < 2:
        server.skip("the answer is too short, or not plain")
    text = choice.message.content
    assert (
        server.chat(LONG, temperature=0, stop=stop).choices[0].message.content
        == text[: text.index(stop)]
    )


def test_a_streamed_stop_string_is_never_seen(server: Server) -> None:
    """No delta shows any of it, not even its first letters."""
    text = server.chat(LONG, temperature=0).choices[0].message.content
    stop = text[len(text) // 2 :][:6]
    chunks = list(server.chat(LONG, temperature=0, stop=[stop], stream=True))
    assert (
        texts(chunks) == [text[: text.index(stop)]]
        and chunks[-1].choices[0].finish_reason == "stop"
    )


def test_temperature_zero_repeats_itself(server: Server) -> None:
    """With any seed."""
    assert (
        len(
            {server.chat(temperature=0, seed=seed).choices[0].message.content for seed in (1, 2, 3)}
        )
        == 1
    )


def test_a_seed_repeats_a_sample(server: Server) -> None:
    """Equal seeds give equal answers, others (nearly always) others."""
    samples = [
        server.chat(LONG, temperature=1.2, seed=seed).choices[0].message.content
        for seed in (7, 7, 8, 9)
    ]
    assert samples[0] == samples[1] and len(set(samples)) == 3


def test_without_a_seed_answers_differ(server: Server) -> None:
    """Sampling is not the same each time."""
    assert (
        len(
            {
                server.chat(LONG, temperature=1.2, max_tokens=40).choices[0].message.content
                for _ in range(3)
            }
        )
        > 1
    )


def test_top_p_near_zero_is_greedy(server: Server) -> None:
    """Only the likeliest token is left to draw."""
    greedy = server.chat(temperature=0).choices[0].message.content
    assert server.chat(temperature=1, top_p=1e-6, seed=4).choices[0].message.content == greedy


def test_several_choices_of_one_prompt(server: Server) -> None:
    """n=3: three indexes, different samples, the prompt counted once."""
    answer, one = server.chat(LONG, n=3, temperature=1.2, seed=5), server.chat(LONG, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert (
        answer.usage.prompt_tokens == one.usage.prompt_tokens
        and answer.usage.completion_tokens > 10
    )


def test_several_choices_are_streamed_side_by_side(server: Server) -> None:
    """Each chunk names its choice; each choice has its role and its end."""
    options = dict(n=2, temperature=1.2, seed=5)
    chunks = list(server.chat(LONG, **options, stream=True))
    assert texts(chunks, 2) == [
        choice.message.content for choice in server.chat(LONG, **options).choices
    ]
    parts = [choice for chunk in chunks for choice in chunk.choices]
    assert sorted(part.index for part in parts if part.delta.role) == [0, 1]
    assert sorted(part.index for part in parts if part.finish_reason) == [0, 1]


def test_logit_bias_forces_a_token(server: Server) -> None:
    """+100 leaves no other choice."""
    entries = (
        server.chat(logit_bias={"70": 100}, logprobs=True, max_tokens=4).choices[0].logprobs.content
    )
    assert len(entries) == 4 and len({entry.token for entry in entries}) == 1


def test_logit_bias_bans_a_token(server: Server) -> None:
    """-100 removes the token that would have been chosen."""
    extra = {"extra_body": {"return_token_ids": True}}
    ids = getattr(
        server.complete(temperature=0, max_tokens=1, **extra).choices[0], "token_ids", None
    )
    if ids is None:
        server.skip("the server does not tell token ids")
    banned = server.complete(temperature=0, max_tokens=8, logit_bias={str(ids[0]): -100}, **extra)
    assert ids[0] not in banned.choices[0].token_ids


def test_frequency_penalty_spreads_tokens(server: Server) -> None:
    """Of two favoured tokens, the likelier one is not chosen every time."""

    def most_common(penalty: float) -> int:
        bias = {"70": 100, "71": 100}
        answer = server.chat(
            logit_bias=bias, temperature=0, logprobs=True, max_tokens=12, frequency_penalty=penalty
        )
        return max(Counter(entry.token for entry in answer.choices[0].logprobs.content).values())

    assert most_common(2.0) < most_common(-2.0) == 12


def test_presence_penalty_asks_for_other_tokens(server: Server) -> None:
    """It makes the text use more of the favoured tokens than without it."""

    def kinds(penalty: float) -> int:
        bias = {str(token): 100 for token in range(70, 90)}
        answer = server.chat(
            logit_bias=bias, temperature=0, logprobs=True, max_tokens=12, presence_penalty=penalty
        )
        return len({entry.token for entry in answer.choices[0].logprobs.content})

    assert kinds(2.0) > kinds(-2.0)


def test_system_and_developer_messages_count(server: Server) -> None:
    """Both roles are read: they lengthen the prompt."""
    plain = server.chat(max_tokens=1).usage.prompt_tokens
    for role in ("system", "developer"):
        messages = [
            {"role": role, "content": "You are brief and polite."},
            *user("Tell me about tea."),
        ]
        assert server.chat(messages=messages, max_tokens=1).usage.prompt_tokens > plain, role


def test_content_parts_are_text(server: Server) -> None:
    """A list of one text part is the text."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me about tea."}]}]
    plain, split = server.chat(temperature=0), server.chat(messages=parts, temperature=0)
    assert split.usage.prompt_tokens == plain.usage.prompt_tokens
    assert split.choices[0].message.content == plain.choices[0].message.content


def test_several_prompts_are_completed_at_once(server: Server) -> None:
    """A list of prompts gives one choice each, in their order, as if asked one by one."""
    prompts = ["Tea is", "A horse is", "Rivers run"]
    answer = server.complete(prompts, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [
        server.complete(prompt, temperature=0).choices[0].text for prompt in prompts
    ]


def test_token_ids_are_a_prompt(server: Server) -> None:
    """A list of token ids is read as it is; as an extension ids come back, and prompt and answer
    join to the text."""
    answer = server.complete([60, 61, 62, 63], temperature=0, extra_body={"return_token_ids": True})
    assert answer.usage.prompt_tokens == 4
    ids = getattr(answer.choices[0], "token_ids", None)
    if ids is None:
        server.skip("the server does not tell token ids")
    assert len(ids) == answer.usage.completion_tokens and answer.choices[0].prompt_token_ids == [
        60,
        61,
        62,
        63,
    ]


def test_echo_repeats_the_prompt(server: Server) -> None:
    """The text begins with the prompt's."""
    plain, echo = (
        server.complete(temperature=0, echo=echo).choices[0].text for echo in (False, True)
    )
    assert echo == "Tea is" + plain
