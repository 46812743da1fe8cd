"""The offline API on the demo engine."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.builder import engine_cache
from pensieve.builder.manifest import Manifest
from pensieve.runtime.conversations.schema import Name
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.runtime.offline.settings import read_settings
from pensieve.scheduler.types import RequestError, SettingError, Tier
from tests.models import tiny_checkpoint

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
SIZES = dict(gpu_kv_bytes="64MiB", host_kv_bytes="64MiB")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
NEXT = [{"role": "user", "content": "And of Italy?"}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.fixture(scope="module")
def llm(cache):
    with LLM("demo", **SIZES) as opened:
        yield opened


def test_prompts_are_answered_in_their_order(llm):
    outputs = llm.generate(["hello", [1, 2, 3]], GREEDY)
    assert [output.prompt for output in outputs] == ["hello", None]
    assert outputs[1].prompt_token_ids == [1, 2, 3]
    assert all(output.finished for output in outputs)
    (reply,) = outputs[0].outputs
    assert reply.finish_reason in ("length", "stop") and 1 <= len(reply.token_ids) <= 8
    (alone,) = llm.generate("hello", GREEDY)
    assert alone.outputs[0].token_ids == reply.token_ids


def test_prompts_have_the_forms_of_vllm(llm):
    (text,) = llm.generate("hello", GREEDY)
    (ids,) = llm.generate([1, 2, 3], GREEDY)
    for prompts, expected in (
        ({"prompt": "hello"}, [text]),
        ({"prompt_token_ids": [1, 2, 3]}, [ids]),
        (
            [
                {"prompt_token_ids": (1, 2, 3)},
                {"prompt": "hello", "multi_modal_data": None},
                "hello",
            ],
            [ids, text, text],
        ),
    ):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt for output in outputs] == [output.prompt for output in expected]
        assert [output.prompt_token_ids for output in outputs] == [
            output.prompt_token_ids for output in expected
        ]
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]
    (both,) = llm.generate({"prompt": "shown", "prompt_token_ids": [1, 2, 3]}, GREEDY)
    assert (both.prompt, both.outputs) == ("shown", ids.outputs)
    assert llm.generate([], GREEDY) == []


@pytest.mark.parametrize(
    "prompt", [None, 5, {}, {"prompt": 5}, [["a", "b"]], [1, "a"], {"prompt_token_ids": "abc"}]
)
def test_other_forms_of_prompts_are_refused(llm, prompt):
    with pytest.raises(RequestError, match="a prompt must be text, token ids"):
        llm.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match="'multi_modal_data' is not supported"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (2, 5)]
    for outputs in (llm.generate(["a", "b"], params), llm.chat([QUESTION, NEXT], params)):
        assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]
    with pytest.raises(RequestError, match="not 2 for 3"):
        llm.generate(["a", "b", "c"], params)
    with pytest.raises(TypeError, match=r"write SamplingParams\(temperature=0\), not a dictionary"):
        llm.chat(QUESTION, {"temperature": 0})
    with pytest.raises(TypeError, match="must be SamplingParams, not float"):
        llm.generate("a", 0.5)


def test_more_prompts_than_the_queue_holds(llm, monkeypatch):
    monkeypatch.setattr(llm, "_most", 3)
    outputs = llm.generate([[number] for number in range(1, 9)], GREEDY)
    assert [output.prompt_token_ids for output in outputs] == [[number] for number in range(1, 9)]


def test_several_replies_and_log_probabilities(llm):
    params = SamplingParams(
        n=2, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    (output,) = llm.generate("hello there", params)
    assert [reply.index for reply in output.outputs] == [0, 1]
    for reply in output.outputs:
        assert [
            token in entry for token, entry in zip(reply.token_ids, reply.logprobs, strict=True)
        ] == [True] * 4
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


@pytest.mark.parametrize("ask", ["generate", "chat"])
def test_replies_have_16_tokens_or_as_many_as_are_asked_for_or_fill_the_context(ask, cache):
    prompt = "hello" if ask == "generate" else QUESTION
    with LLM("demo", max_model_len=96, **SIZES) as llm:

        def reply(**params):
            (output,) = getattr(llm, ask)(
                prompt, SamplingParams(temperature=0, ignore_eos=True, **params)
            )
            return len(output.prompt_token_ids), len(output.outputs[0].token_ids)

        assert reply()[1] == 16
        assert reply(max_tokens=3)[1] == 3
        assert sum(reply(max_tokens=None)) == 96
        assert sum(reply(max_tokens=10**9)) == 96


def test_a_stop_string_ends_a_reply(llm):
    (whole,) = llm.generate("hello", GREEDY)
    text = whole.outputs[0].text
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, stop=text[2:4]))
    (reply,) = output.outputs
    assert (reply.finish_reason, reply.stop_reason) == ("stop", text[2:4])
    assert reply.text == text[: text.index(text[2:4])]
    (token, *_) = whole.outputs[0].token_ids
    (output,) = llm.generate("hello", SamplingParams(temperature=0, stop_token_ids=[token]))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", token)


def test_a_chat_sets_variables_of_the_template(cache, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% if enable_thinking %}Think. {% endif %}{{ messages[0].content }}")
    with LLM("demo", chat_template=str(template), **SIZES) as llm:
        plain, thinks = llm.generate(
            [QUESTION[0]["content"], "Think. " + QUESTION[0]["content"]], GREEDY
        )
        for variables, expected in ((None, plain), ({"enable_thinking": True}, thinks)):
            (whole,) = llm.chat(QUESTION, GREEDY, chat_template_kwargs=variables)
            *_, last = llm.stream_chat(QUESTION, GREEDY, chat_template_kwargs=variables)
            assert whole.prompt_token_ids == last.prompt_token_ids == expected.prompt_token_ids
        with pytest.raises(RequestError, match="chat_template_kwargs cannot set messages"):
            llm.chat(QUESTION, GREEDY, chat_template_kwargs={"messages": []})


def test_a_chat_shows_the_model_its_tools(cache, tmp_path, monkeypatch):
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content "
        "}}"
    )
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    ]
    # calls stay in the text, as in vLLM
    monkeypatch.delattr("pensieve.runtime.frontend.reply_forms.ReplyReader")
    with LLM("demo", chat_template=str(template), **SIZES) as llm:
        plain, told = llm.generate(
            [QUESTION[0]["content"], "weather " + QUESTION[0]["content"]], GREEDY
        )
        for given_tools, expected in ((None, plain), (tools, told)):
            (whole,) = llm.chat(QUESTION, GREEDY, tools=given_tools)
            *_, last = llm.stream_chat(QUESTION, GREEDY, tools=given_tools)
            assert whole.prompt_token_ids == last.prompt_token_ids == expected.prompt_token_ids
            assert whole.outputs == last.outputs
        with pytest.raises(RequestError, match=r"tools\.0\.function"):
            llm.chat(QUESTION, GREEDY, tools=[{"type": "function"}])


PLAIN = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
ENDED = PLAIN + "{% if add_generation_prompt %} Well,{% endif %}"


@pytest.mark.parametrize("as_file", [False, True], ids=["text", "path"])
def test_a_chat_has_a_template_of_its_own(llm, tmp_path, as_file):
    template = ENDED
    if as_file:
        template = tmp_path / "template.jinja"
        template.write_text(ENDED)
    bos = llm.get_tokenizer().bos_token or ""
    (expected,) = llm.generate(
        {"prompt_token_ids": [*llm._tokenizer.encode_rendered(f"{bos}tea Well,")]}, GREEDY
    )
    dialogue = [{"role": "user", "content": "tea"}]
    for given in (template, str(template)):
        (whole,) = llm.chat(dialogue, GREEDY, chat_template=given)
        *_, last = llm.stream_chat(dialogue, GREEDY, chat_template=given)
        assert whole.prompt_token_ids == last.prompt_token_ids == expected.prompt_token_ids
        assert whole.outputs == last.outputs == expected.outputs
    (other,) = llm.chat(dialogue, GREEDY)
    assert other.prompt_token_ids != whole.prompt_token_ids, "the model's own, as before"


def test_a_chat_ends_its_prompt_where_the_caller_wants(llm):
    dialogue = [{"role": "user", "content": "tea"}, {"role": "assistant", "content": "green "}]

    def prompt(**options):
        options = {"chat_template": ENDED, **options}
        (whole,) = llm.chat(dialogue, GREEDY, **options)
        *_, last = llm.stream_chat(dialogue, GREEDY, **options)
        assert whole.outputs == last.outputs
        return llm._tokenizer.decode(whole.prompt_token_ids)

    assert prompt() == prompt(add_generation_prompt=True) == "teagreen  Well,"
    assert prompt(add_generation_prompt=False) == "teagreen "
    continued = dict(continue_final_message=True, chat_template=ENDED + "<end>")
    assert prompt(**continued) == prompt(**continued, add_generation_prompt=False) == "teagreen "
    with pytest.raises(RequestError, match="exclude each other"):
        llm.chat(dialogue, GREEDY, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="last message of the assistant"):
        llm.chat(QUESTION, GREEDY, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for",
        "nowhere.jinja",
        "nul\0",
        Path("nul\0"),
        Path("nowhere.jinja"),
        "{{ raise_exception('no') }}",
    ],
)
def test_a_bad_template_of_a_chat_is_named(llm, template):
    with pytest.raises(RequestError, match="template"):
        llm.chat(QUESTION, GREEDY, chat_template=template)


def test_a_grammar_begins_behind_the_thought(cache, tmp_path):
    """The reply's text stays whole, as in vLLM."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if enable_thinking is false %}<think>\n\n</think>\n\n"
        "{% elif add_generation_prompt %}<think>\n{% endif %}"
    )
    form = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    with LLM("demo", chat_template=str(template), **SIZES) as llm:
        (thought,) = llm.chat(QUESTION, form)
        (free,) = llm.chat(QUESTION, GREEDY)
        (answer,) = llm.chat(QUESTION, form, chat_template_kwargs={"enable_thinking": False})
    with LLM("demo", chat_template=str(template), reasoning_parser="none", **SIZES) as llm:
        (undivided,) = llm.chat(QUESTION, form)
    assert thought.outputs[0].text == free.outputs[0].text and free.outputs[0].text
    assert answer.outputs[0].text in ("yes", "no")
    assert undivided.outputs[0].text in ("yes", "no")


def test_a_reply_follows_its_grammar(llm):
    (output,) = llm.generate("hello", SamplingParams(structured_outputs={"choice": ["yes", "no"]}))
    assert output.outputs[0].text in ("yes", "no")


@pytest.mark.parametrize("speculate", ["off", "lookup"])
def test_a_reply_has_none_of_the_bad_words(cache, speculate):
    """Equal to a loop that forbids by hand, token by token, what would complete a word."""
    prompt = "one two three four five six seven eight " * 4
    with LLM("demo", speculate=speculate, **SIZES) as llm:
        encode = llm._tokenizer.encode_rendered
        (plain,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=40))
        text = plain.outputs[0].text
        words = ["four", "ze", "q"]
        assert text.startswith("ze. ") and text.count(" four") > 10
        sequences = [[*encode(space + word)] for word in words for space in ("", " ")]
        assert {len(sequence) for sequence in sequences} > {1, 2}
        begun = plain.prompt_token_ids
        tokens = []
        for _ in range(40):
            never = {
                sequence[-1]: -100
                for sequence in sequences
                if tokens[len(tokens) - len(sequence) + 1 :] == sequence[:-1]
            }
            params = SamplingParams(temperature=0, max_tokens=1, logit_bias=never)
            (step,) = llm.generate([[*begun, *tokens]], params)
            tokens += step.outputs[0].token_ids
        params = SamplingParams(temperature=0, max_tokens=40, bad_words=words, ignore_eos=True)
        whole = llm.generate(prompt, params)[0].outputs[0]
        *_, last = llm.stream(prompt, replace(params, n=2))
    assert whole.token_ids == tokens != plain.outputs[0].token_ids
    assert [reply.token_ids for reply in last.outputs] == [tokens] * 2
    assert not [word for word in words if word in whole.text]


def test_a_stream_grows_to_what_generate_gives(llm):
    seen = list(llm.stream("hello", GREEDY))
    assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].outputs == llm.generate("hello", GREEDY)[0].outputs


def test_a_stream_that_is_left_is_aborted(llm):
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    with pytest.raises(RuntimeError, match="stream that is open"):
        llm.generate("hello", GREEDY)
    stream.close()
    assert not llm._session.scheduler.open_requests()
    assert llm.generate("hello", GREEDY)


def test_a_conversation_goes_on_with_its_cache(llm):
    (first,) = llm.chat(QUESTION, GREEDY, conversation="c")
    assert first.num_cached_tokens == 0
    (second,) = llm.chat(NEXT, GREEDY, conversation="c", history="server")
    assert second.num_cached_tokens > 0
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids)
    with pytest.raises(RequestError, match="one prompt at a time"):
        llm.chat([QUESTION, NEXT], GREEDY, conversation="c")


def test_a_stream_that_is_never_read_holds_no_conversation(llm):
    llm.chat(QUESTION, GREEDY, conversation="unread")
    llm.stream_chat(NEXT, GREEDY, conversation="unread", history="server").close()
    (reply,) = llm.chat(NEXT, GREEDY, conversation="unread", history="server")
    assert reply.finished


def test_two_streams_are_not_mixed(llm):
    first = llm.stream("hello", GREEDY)
    with pytest.raises(RuntimeError, match="stream that is open"):
        llm.stream("tea", GREEDY)
    assert list(first)[-1].outputs == llm.generate("hello", GREEDY)[0].outputs


def test_conversations_survive_on_disk(cache, tmp_path):
    options = dict(state_dir=tmp_path, disk_kv_bytes="64MiB", chunk_tokens=8, **SIZES)
    with LLM("demo", **options) as llm:
        (first,) = llm.chat(QUESTION, GREEDY, conversation="c")
        with pytest.raises(SettingError, match="state-dir"):
            LLM("demo", **options)
    with LLM("demo", **options) as llm:
        assert (
            len(llm._session.executor.stored_records()[Tier.DISK])
            >= len(first.prompt_token_ids) // 8
        )
        (second,) = llm.chat(NEXT, GREEDY, conversation="c", history="server")
        store = llm._histories._store
        store.change(Name("", "c"), 1.0, history_ttl=1e-9)
        llm.generate("hello", GREEDY)
        assert store._db.execute("SELECT count(*) FROM conversations") == [(0,)], (
            "any call deletes what has expired"
        )
    # The tokens of the first turn were loaded, or computed again where that is sooner.
    assert second.usage.disk + second.usage.recomputed >= len(first.prompt_token_ids)


def test_wrong_arguments_are_named(cache, llm):
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)
    for wrong in (
        dict(temperature=-1),
        dict(n=0),
        dict(stop=""),
        dict(bad_words=["a", "  "]),
        dict(top_k=1.5),
        dict(logprobs=21),
        dict(max_tokens=0),
        dict(skip_special_tokens=False),
    ):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SamplingParams(**wrong)
    # vLLM's default, which scripts often write
    assert SamplingParams(skip_special_tokens=True) == SamplingParams()
    with pytest.raises(TypeError, match="port"):
        LLM("demo", port=1)
    with pytest.raises(SettingError, match="eviction"):
        LLM("demo", eviction="none")
    with pytest.raises(SettingError, match="state_dir"):
        LLM("demo", disk_kv_bytes="1MiB")
    with pytest.raises(SettingError, match="no engine"):
        LLM(cache)
    with pytest.raises(RequestError, match="context holds"):
        llm.generate([[1], [1] * 100_000], GREEDY)


def test_the_tokenizer_is_that_of_the_prompts(llm):
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("hello there", GREEDY)
    assert tokenizer.encode("hello there") == output.prompt_token_ids
    (output,) = llm.chat(QUESTION, GREEDY)
    assert (
        tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
        == output.prompt_token_ids
    )


def test_without_a_tokenizer_there_is_none_to_get(llm, monkeypatch):
    monkeypatch.setattr(llm, "_tokenizer", None)
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.get_tokenizer()


def test_options_have_the_aliases_of_serve():
    read = read_settings(
        "demo", None, dict(enable_prefix_caching=False, block_size=16, kv_cache_memory_bytes="1GiB")
    )
    assert (read.reuse, read.chunk_tokens, read.gpu_kv_bytes) == (False, 16, 2**30)
    assert read_settings("demo", None, dict(enable_prefix_caching=True)).reuse


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        (dict(swap_space=4), ': host_kv_bytes="4GiB" keeps KV in host memory'),
        (dict(enable_chunked_prefill=True), ": prompts are always cut to max_num_batched_tokens"),
        (dict(enable_chunked_prefill=False), ": prompts are always cut to max_num_batched_tokens"),
        (dict(batching="separate"), ": only benchmarks set it; leave it out"),
        (
            dict(swap_in="first"),
            ": KV is copied in by groups of layers while a step computes; leave it out",
        ),
        (dict(seed=0), ": requests take a seed (offline: SamplingParams(seed=0))"),
        (dict(trust_remote_code=True), ": code of a checkpoint is never run"),
        # LLM has no log_level
        (dict(disable_log_requests=True), "; docs/use/offline.md says what it takes"),
        (dict(max_batch_size=8), ": use max_num_seqs"),
        (dict(max_seq_len=8), ": use max_model_len"),
        (dict(max_num_seq=3), "; did you mean max_num_seqs?"),
        (dict(gpu_kv=3), "; did you mean gpu_kv_bytes or gpu_kv_chunks?"),
        (dict(no_reuse=True), "; did you mean reuse?"),
    ],
)
def test_an_option_that_is_missing_has_a_hint(option, hint):
    with pytest.raises(TypeError) as refused:
        read_settings("demo", None, option)
    assert str(refused.value) == f"LLM takes no option {next(iter(option))!r}{hint}"


@pytest.mark.filterwarnings("error")
def test_a_closed_llm_says_so(cache):
    llm = LLM("demo", **SIZES)
    stream = llm.stream("a", SamplingParams(ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    for ask in (
        lambda: next(stream),
        lambda: llm.generate("a"),
        lambda: llm.chat(QUESTION),
        lambda: llm.stream("a"),
        lambda: llm.stream_chat(QUESTION),
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            ask()


def test_progress_is_told(llm, capsys):
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert capsys.readouterr().err.endswith("2 of 2 prompts\n")


@pytest.mark.slow
def test_no_lane_outlives_python(cache):
    """With an LLM that is not closed; handlers run in the reverse order of their registration."""
    code = f"""
import atexit, threading
names = lambda: [thread.name for thread in threading.enumerate()]
atexit.register(lambda: print([name for name in names() if name.startswith("lane")]))
from pensieve import LLM
LLM("demo", **{SIZES}).chat({QUESTION})
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, pensieve; pensieve.__version__; print([m for m in ('torch', 'numpy') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_clone_is_no_package_of_its_parent_folder(tmp_path):
    (tmp_path / "pensieve").symlink_to(ROOT)
    code = "from pensieve import LLM; print(LLM.__module__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "pensieve.runtime.llm\n"


def test_the_documented_example_runs(cache, capsys):
    page = (ROOT / "docs" / "use" / "offline.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "offline.md", "exec"), {})
    assert "The capital of France is ->" in capsys.readouterr().out


def test_a_checkpoint_is_built_once(cache, tmp_path, monkeypatch):
    tiny_checkpoint("qwen3", tmp_path / "tiny")
    with LLM(tmp_path / "tiny", dtype="bfloat16", **SIZES) as llm:
        (first,) = llm.generate([[1, 2, 3]], GREEDY)
    (built,) = cache.glob("pensieve/engines/*/tiny/manifest.json")
    assert Manifest.read(built.parent).dtype == "bfloat16"
    monkeypatch.delattr(engine_cache, "build_engine")  # not needed any more
    with LLM(
        model=tmp_path / "tiny",
        dtype="bfloat16",
        quantization=None,
        tensor_parallel_size=1,
        **SIZES,
    ) as llm:
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs == first.outputs


def test_models_that_are_not_here_say_how_they_get_here(cache):
    with pytest.raises(SettingError, match=r"^model: Qwen3-8B does not exist; .* ORG/NAME"):
        LLM("Qwen3-8B")
    with pytest.raises(SettingError, match=r"tensor_parallel_size.*pensieve serve"):
        LLM("demo", tensor_parallel_size=2)
    with pytest.raises(SettingError, match="--dtype"):
        LLM("demo", dtype="int4")


def test_the_checkpoints_sampling_holds_for_calls_without_parameters(cache, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    with LLM("demo", generation_config=tmp_path, **SIZES) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
        (short,) = llm.generate("hello")
        assert len(short.outputs[0].token_ids) == 3
        (own,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
        assert len(own.outputs[0].token_ids) == 5
