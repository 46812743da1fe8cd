"""A model with linear attention, served without reuse: replies are those of plain transformers, and
log probabilities too."""

from __future__ import annotations

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.engine import open_engine
from pensieve.runtime.llm import LLM, SamplingParams
from pensieve.scheduler.declaration import flag
from pensieve.scheduler.types import SettingError
from tests.models import save_random, tiny_config

from .chatter import TIGHT, Chatter


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory of the engine, the model in transformers)."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("hybrid")
    reference = save_random(tiny_config("qwen3-5"), directory / "checkpoint", gain=1.0)
    build_engine(directory / "checkpoint", directory / "engine")
    return directory / "engine", reference


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
def test_replies_of_random_conversations(model, disturbed):
    """With forks, aborts, overflows, and steps that are delayed at random."""
    directory, reference = model
    chatter = Chatter(
        open_engine(directory), reference, 4, disturbed=disturbed, reuse=False, gpu_kv_chunks=60
    )
    counts = chatter.run(50)
    assert counts["gpu"] == counts["host"] == counts["recomputed"] == 0


def test_replies_of_suspended_requests(model):
    """A request that resumes begins with the zero state again."""
    directory, reference = model
    chatter = Chatter(open_engine(directory), reference, 9, reuse=False, gpu_kv_chunks=29, **TIGHT)
    chatter.run(50, events=["suspended"])


def test_log_probabilities_of_turns_choices_and_prompts(model):
    """Prompts in pieces of up to 64 tokens, each turn computed anew."""
    directory, reference = model
    torch.manual_seed(5)
    params = SamplingParams(n=2, max_tokens=20, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(directory), max_num_batched_tokens=64) as llm:
        prompts = [torch.randint(3, 160, (length,)).tolist() for length in (1, 63, 64, 65, 129)]
        for _ in range(2):
            for output in llm.generate(prompts, params):
                assert output.usage.new == len(output.prompt_token_ids)
                for choice in output.outputs:
                    check(reference, output, choice)
            prompts = [
                output.prompt_token_ids + output.outputs[1].token_ids
                for output in llm.generate(prompts, params)
            ]


def check(reference, output, choice) -> None:
    """Compares the log probabilities of the prompt's tokens and of the choice's."""
    tokens = output.prompt_token_ids + choice.token_ids
    expected = reference(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    reported = (output.prompt_logprobs + choice.logprobs)[1:]
    ours = [one[token].logprob for one, token in zip(reported, tokens[1:], strict=True)]
    theirs = expected[range(len(tokens) - 1), tokens[1:]]
    torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"host_kv_chunks": 10},
        {"speculate": "lookup"},
        {"overflow": "keep"},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_needs_kept_states_is_refused_by_name(model, options):
    directory, _ = model
    (name,) = options
    with pytest.raises(SettingError, match="not supported yet for linear attention") as refused:
        LLM(str(directory), **options)
    assert refused.value.setting == flag(name)


def test_states_that_do_not_fit_are_refused(model):
    directory, _ = model
    with pytest.raises(SettingError, match="the states of 1000000000 requests take") as refused:
        LLM(str(directory), max_num_seqs=10**9, max_num_batched_tokens=10**9)
    assert refused.value.setting == "--max-num-seqs"
