"""A model with linear attention: replies and log probabilities are those of plain
transformers."""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.launch.settings import ServeSettings
from pensieve.runtime.launch.sizing import ESTIMATES, refuse_for_states
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.runtime.shared import store
from pensieve.runtime.shared.config import DirectoryOptions, SharedConfig
from pensieve.runtime.shared.directory import DirectoryEngine
from pensieve.runtime.shared.store import SharedSettings
from pensieve.runtime.text.tokenizer import Tokenizer
from pensieve.scheduler.declaration import flag
from pensieve.scheduler.types import SettingError
from tests.models import save_random, tiny_config

from ..runtime.kv_events.routers import LlmDDouble
from ..runtime.kv_events.test_publisher import Subscriber
from .chatter import TIGHT, Chatter, check_logprobs
from .server import Server, wait_for
from .shared_kv import WRITTEN


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory of the engine, the model in transformers)."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("hybrid")
    reference = save_random(tiny_config("qwen3-5"), directory / "checkpoint", gain=1.0)
    build_engine(directory / "checkpoint", directory / "engine")
    return directory / "engine", reference


@pytest.fixture(scope="module", params=["qwen3-5-moe", "qwen3-next"])
def mixture(request, tmp_path_factory):
    """(directory of the engine, the model in transformers), with experts."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    reference = save_random(tiny_config(request.param), directory / "checkpoint", gain=1.0)
    build_engine(directory / "checkpoint", directory / "engine")
    return directory / "engine", reference


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The directory of an engine with a tokenizer. Its states are so large that a prompt's are
    kept every 512 tokens."""
    directory = tmp_path_factory.mktemp("chat")
    config = tiny_config("qwen3-5")
    config.linear_num_value_heads = 8
    config.linear_value_head_dim = 128
    config.vocab_size = json.loads((DEMO_CHECKPOINT / "config.json").read_text())["vocab_size"]
    config.max_position_embeddings = 1024
    save_random(config, directory / "checkpoint", gain=1.0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_CHECKPOINT / name, directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return directory / "engine"


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize("host", [0, 60, 300])
def test_replies_of_random_conversations(model, disturbed, host):
    """With forks, aborts, overflows, and steps that are delayed at random. Without HOST no state is
    kept, and nothing is reused."""
    directory, reference = model
    chatter = Chatter(
        open_engine(directory),
        reference,
        4,
        disturbed=disturbed,
        within=1e-4,
        gpu_kv_chunks=60,
        host_kv_chunks=host,
    )
    counts = chatter.run(50)
    assert (counts["gpu"] + counts["host"] > 0) == (host > 0)


def test_replies_of_a_mixture_of_experts(mixture):
    """Cold, from the GPU, from HOST, forked and suspended."""
    directory, reference = mixture
    sizes = dict(gpu_kv_chunks=60, host_kv_chunks=300, disturbed=True)
    chatter = Chatter(open_engine(directory), reference, 4, within=1e-4, **sizes)
    chatter.run(50, events=["new", "gpu", "host", "forked"])
    sizes = dict(gpu_kv_chunks=29, host_kv_chunks=200, **TIGHT)
    chatter = Chatter(open_engine(directory), reference, 9, within=1e-4, **sizes)
    chatter.run(50, events=["suspended"])


def test_replies_of_suspended_requests(model):
    directory, reference = model
    chatter = Chatter(
        open_engine(directory),
        reference,
        9,
        within=1e-4,
        gpu_kv_chunks=29,
        host_kv_chunks=200,
        **TIGHT,
    )
    chatter.run(50, events=["suspended"])


@pytest.mark.parametrize("reuse", [False, True])
def test_log_probabilities_of_turns_choices_and_prompts(model, reuse):
    """Prompts in pieces of up to 64 tokens. The second turn begins at a state."""
    directory, reference = model
    torch.manual_seed(5)
    params = SamplingParams(n=2, max_tokens=20, logprobs=1, ignore_eos=True)
    settings = {"host_kv_chunks": 4000, "gpu_kv_chunks": 200} if reuse else {"reuse": False}
    with LLM(str(directory), max_num_batched_tokens=64, **settings) as llm:
        prompts = [torch.randint(3, 160, (length,)).tolist() for length in (1, 63, 64, 65, 129)]
        for turn in range(2):
            outputs = llm.generate(prompts, params)
            for output in outputs:
                begins = len(output.prompt_token_ids) >= 64 + 20  # a state before the reply
                assert (output.usage.cached > 0) == (reuse and turn == 1 and begins)
                for choice in output.outputs:
                    check(reference, output, choice)
            prompts = [output.prompt_token_ids + output.outputs[1].token_ids for output in outputs]
        params = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=0, ignore_eos=True)
        for output in llm.generate(prompts, params):
            check(reference, output, output.outputs[0])


def test_a_conversation_whose_kv_left_the_gpu_gives_the_same_bits(model):
    """Its states are on HOST in any case."""
    directory, _ = model
    torch.manual_seed(6)
    prompt, *others = (torch.randint(3, 160, (150,)).tolist() for _ in range(8))
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
    results = []
    for chunks in (400, 12):
        sizes = {"gpu_kv_chunks": chunks, "host_kv_chunks": 6000, "chunk_tokens": 32}
        with LLM(str(directory), max_num_batched_tokens=64, max_num_seqs=1, **sizes) as llm:
            (first,) = llm.generate([prompt], params)
            llm.generate(others, params)
            (second,) = llm.generate([prompt + first.outputs[0].token_ids + [7]], params)
        results.append(second.outputs[0])
        assert (second.usage.gpu > 0, second.usage.host > 0) == (chunks == 400, chunks == 12)
    stayed, moved = results
    assert stayed.token_ids == moved.token_ids
    assert stayed.logprobs == moved.logprobs


def test_replies_across_restarts_with_a_disk(model, tmp_path):
    """Pools so small that KV and states are spilled and read all the time."""
    directory, reference = model
    chatter = Chatter(
        open_engine(directory),
        reference,
        5,
        within=1e-4,
        disk=DiskSettings(tmp_path, 1500, "ab"),
        gpu_kv_chunks=29,
        host_kv_chunks=120,
        disk_kv_chunks=1500,
    )
    assert chatter.run(60, restarts=3, events=["disk"])["restarted"] == 3


def test_log_probabilities_after_a_restart(model, tmp_path, monkeypatch):
    """All of a prompt up to a multiple of 64 comes from the disk, with the state there."""
    monkeypatch.setitem(ESTIMATES, "cpu", ESTIMATES["cpu"] | {"flops_per_s": 1e6})
    directory, reference = model
    torch.manual_seed(8)
    params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True)
    prompts = [torch.randint(3, 160, (length,)).tolist() for length in (63, 64, 65, 127, 128, 200)]
    sizes = dict(gpu_kv_chunks=200, host_kv_chunks=4000, disk_kv_chunks=4000, chunk_tokens=32)
    with LLM(str(directory), state_dir=tmp_path, **sizes) as llm:
        llm.generate(prompts, params)
    with LLM(str(directory), state_dir=tmp_path, **sizes) as llm:
        for output in llm.generate(prompts, params):
            count = len(output.prompt_token_ids)
            assert output.usage.disk == (count - 1) // 64 * 64
            check(reference, output, output.outputs[0])


DROPS_THOUGHTS = """
{%- set ns = namespace(last=0) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last = loop.index %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\n\n</think>\n\n' }}
{%- endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


def qwens_own_template() -> str | None:
    for wheel in sorted(Path(sys.prefix, "chat-templates").glob("trl-*.whl")):
        return zipfile.ZipFile(wheel).read("trl/chat_templates/qwen3_5_think.jinja").decode()
    return None


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, qwens_own_template()], ids=["ours", "Qwen"])
@pytest.mark.parametrize("conversation", [None, "tea"])
def test_a_template_that_drops_thoughts_finds_all_up_to_the_users_message(
    chat_model, template, conversation
):
    """The multiple of 64 before the prompt's end lies in the beginning of the reply, from which the
    next prompt parts."""
    if template is None:
        pytest.skip("make chat-templates downloads Qwen's template")
    render = Tokenizer.load(chat_model).other_template(template).render
    encode = Tokenizer.load(chat_model).encode_rendered
    for words in range(200, 400):
        question = {"role": "user", "content": "tea " * words}
        answer = {"role": "assistant", "content": "Yes."}
        again = [question, answer, {"role": "user", "content": "Why?"}]
        prompt, later = encode(render([question])), encode(render(again))
        common = next(
            at for at, pair in enumerate(zip(prompt, later, strict=False)) if len({*pair}) > 1
        )
        question_end = len(encode(render([question], False)))
        if question_end // 64 == common // 64 < len(prompt) // 64:
            break
    else:
        raise AssertionError("no question has the right length")
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options = dict(chat_template=template, conversation=conversation)
    sizes = dict(host_kv_chunks=6000, chunk_tokens=32)
    with LLM(str(chat_model), max_num_seqs=1, **sizes) as llm:
        llm.chat([question], params, **options)
        (second,) = llm.chat(again, params, **options)
    assert second.usage.gpu + second.usage.host == question_end // 64 * 64


def check(reference, output, choice) -> None:
    """Compares the log probabilities of the prompt's tokens and of the choice's."""
    tokens = output.prompt_token_ids + choice.token_ids
    expected = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    reported = [*(output.prompt_logprobs or [])[1:], *choice.logprobs]
    begin = len(tokens) - len(reported)
    ours = [one[token].logprob for one, token in zip(reported, tokens[begin:], strict=True)]
    theirs = expected[range(begin - 1, len(tokens) - 1), tokens[begin:]]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"lower_tier_kv": "packed", "host_kv_chunks": 100},
        {"overflow": "keep"},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_not_built_for_states_is_refused_by_name(model, options):
    directory, _ = model
    name = next(iter(options))
    with pytest.raises(SettingError, match="not supported yet for linear attention") as refused:
        LLM(str(directory), **options)
    assert refused.value.setting == flag(name)


def test_a_router_is_promised_what_the_next_request_gets(model, tmp_path):
    """In host memory there is room for some of the states."""
    directory, _ = model
    torch.manual_seed(11)
    prompts = [torch.randint(3, 160, (length,)).tolist() for length in (63, 129, 150, 200, 260)]
    ends = dict(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    options = dict(
        kv_events_config=json.dumps({"enable_kv_cache_events": True, **ends}),
        chunk_tokens=32,
        gpu_kv_chunks=100,
        host_kv_chunks=20,
        served_model_name="demo",
    )
    words = [word for name, value in options.items() for word in (flag(name), value)]
    promised = []
    with Server(tmp_path, *words, engine=directory) as server:
        line = next(line for line in server.log if "KV events at" in line)
        endpoint, replay_endpoint = re.findall(r"tcp://[\d.:]+", line)
        subscriber = Subscriber(SimpleNamespace(endpoint=endpoint, replay_endpoint=replay_endpoint))

        def score(tokens):
            router = LlmDDouble()
            for _, number, payload in subscriber.replay(0):
                router.take(number, payload)
            return 32 * router.score(tokens, 32)[-1]

        def cached(tokens):
            body = dict(prompt=tokens, max_tokens=1, ignore_eos=True)
            usage = server.post("/v1/completions", **body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        for prompt in prompts:
            cached(prompt)
        for prompt in prompts:
            other = torch.randint(3, 160, (130,)).tolist()
            cached(other)
            wait_for(lambda other=other: score(other) == 128)  # so all before it is told
            promised.append(score(prompt))
            assert cached(prompt) == promised[-1]
        subscriber.close()
    assert min(promised[1:]) == 0 and max(promised) > 64, promised


def test_a_shared_store_is_refused_for_states_on_several_ranks():
    """There the records of two ranks could be of two computations."""
    settings = ServeSettings(
        "demo",
        kv_shared_config='{"engine": "directory", "path": "kv", "max_bytes": 1000000}',
    )
    manifest = SimpleNamespace(architecture="Qwen3_5ForCausalLM", tensor_parallel=1)
    refuse_for_states(settings, manifest)
    manifest.tensor_parallel = 2
    with pytest.raises(SettingError, match="not supported yet for linear attention"):
        refuse_for_states(settings, manifest)


class Moving(Chatter):
    """Each restart is another server, which has only the store. `spoil` is called with the files of
    all states there before it starts."""

    spoil = staticmethod(lambda files: None)
    folder: Path

    def _stats(self):
        shared = self.executor.shared_counters
        return super()._stats() + Counter(rejected=shared.rejected, late=shared.late)

    def restart(self):
        super().restart()
        files = [file for file in self.folder.rglob("*") if file.name.endswith(b"state".hex())]
        self.counts["state files"] += len(files)
        self.spoil(files)


def removed(files):
    for file in files:
        file.unlink()


def damaged(files):
    """Each in another piece."""
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-(1 + 5000 * number) % len(content)] ^= 1
        file.write_bytes(content)


def exchanged(files):
    """The states of two contexts."""
    for one, other in zip(files[::2], files[1::2], strict=False):
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)


def pieces_exchanged(files):
    """The last pieces of two states."""
    for one, other in zip(files[::2], files[1::2], strict=False):
        first, second = (file.read_bytes() for file in (one, other))
        half = len(first) // 2 // 4096 * 4096
        one.write_bytes(first[:half] + second[half:])
        other.write_bytes(second[:half] + first[half:])


@pytest.mark.parametrize("spoil", [None, removed, damaged, exchanged, pieces_exchanged])
def test_replies_of_conversations_that_move(model, tmp_path, spoil, monkeypatch):
    """Server after server has the store alone. What is wrong there is computed again."""
    rejects = spoil not in (None, removed)
    events = ["rejected"] if rejects else ["fetched"] if spoil is None else []
    counts = move(model, tmp_path, monkeypatch, spoil, events)
    assert counts["restarted"] == 4 and counts["state files"] > 0
    assert (counts["rejected"] > 0) == rejects, counts


def test_replies_of_conversations_whose_states_come_late(model, tmp_path, monkeypatch):
    """A read of a state ends when its server does."""
    get = DirectoryEngine.get
    hold = Event()

    def waits(self, keys, records):
        if any(key.endswith(b"state".hex()) for key in keys):
            hold.wait()
        return get(self, keys, records)

    close = Executor.close

    def lets_go(self):
        hold.set()
        close(self)
        hold.clear()

    monkeypatch.setattr(DirectoryEngine, "get", waits)
    monkeypatch.setattr(Executor, "close", lets_go)
    monkeypatch.setattr(store, "DEADLINE_S", 0.01)
    assert move(model, tmp_path, monkeypatch, None, ["late"])["late"] > 0


def move(model, folder, monkeypatch, spoil, events):
    directory, reference = model
    monkeypatch.setattr(Moving, "folder", folder, raising=False)
    if spoil is not None:
        monkeypatch.setattr(Moving, "spoil", staticmethod(spoil))
    options = DirectoryOptions(folder, 2**30)
    shared = SharedSettings(SharedConfig(options), "ab", 300, states=True)
    chatter = Moving(
        open_engine(directory),
        reference,
        6,
        within=1e-4,
        make_executor=partial(Executor, shared=shared),
        gpu_kv_chunks=60,
        host_kv_chunks=300,
        shared_min_tokens=16,
    )
    assert chatter.config.states.chunks > 1
    return chatter.run(60, restarts=4, events=events)


def test_a_conversation_moves_to_another_server(model, tmp_path):
    """Its log probabilities are those of transformers, with the prompt's KV and a state fetched."""
    directory, reference = model
    torch.manual_seed(12)
    where = {"engine": "directory", "path": str(tmp_path / "kv"), "max_bytes": 2**30}
    where["min_tokens"] = 64
    options = (
        *("--chunk-tokens", 32, "--gpu-kv-chunks", 100, "--host-kv-chunks", 2000),
        *("--served-model-name", "demo", "--kv-shared-config", json.dumps(where)),
    )

    def turn(server, tokens):
        body = dict(prompt=tokens, max_tokens=8, ignore_eos=True, logprobs=0, temperature=0)
        answer = server.post(
            "/v1/completions", return_token_ids=True, return_sources=True, **body
        ).json()
        (choice,) = answer["choices"]
        reply = choice["token_ids"]
        check_logprobs(reference, tokens + reply, choice["logprobs"]["token_logprobs"], 1e-4)
        return reply, answer["usage"]["prompt_tokens_details"]["shared"]

    with (
        Server(tmp_path / "a", *options, engine=directory) as server,
        Server(tmp_path / "b", *options, engine=directory) as other,
    ):

        def moves():
            """False: a busy machine has not written or answered in time."""
            prompt = torch.randint(3, 160, (400,)).tolist()
            log = prompt + turn(server, prompt)[0]
            wait_for(lambda: server.metric(WRITTEN) >= len(prompt) // 32)
            fetched = turn(other, [*log, 7, 8, 9])[1]
            assert fetched <= 384  # up to the last state
            return fetched > 0

        wait_for(moves, 300)


@pytest.mark.parametrize(("chunks", "warns"), [(4, True), (4000, False)])
def test_a_host_memory_for_few_states_is_warned_of(model, chunks, warns, caplog):
    directory, _ = model
    with LLM(str(directory), host_kv_chunks=chunks, max_num_seqs=8):
        pass
    assert ("fewer than two for each of --max-num-seqs 8" in caplog.text) == warns


def test_states_that_do_not_fit_are_refused(model):
    directory, _ = model
    with pytest.raises(SettingError, match="the states of 1000000000 requests take") as refused:
        LLM(str(directory), max_num_seqs=10**9, max_num_batched_tokens=10**9)
    assert refused.value.setting == "--max-num-seqs"
