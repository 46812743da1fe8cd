"""The trained demo models: small enough for a repository, complete, and they answer in words and
come to an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.engine import Engine, open_engine
from tests.models import ScatteredRunner

OPT = Path(__file__).parents[1] / "demo_models" / "opt"
PROMPTS = (
    "Hello!",
    "Who are you?",
    "Tell me about the sea.",
    "Tell me a story about a fox.",
    "How do I cook rice?",
    "Can you recommend a good book?",
    "My computer is slow. What can I do?",
    "Write a short poem about autumn.",
    "Give me some tips for a job interview.",
    "I want to cancel my flight.",
)
LIMIT = 200
MEGABYTE = 10**6


def greedy_replies(engine: Engine, prompts: list[list[int]], limit: int) -> list[list[int]]:
    """The most probable continuation of each prompt, at most `limit` tokens, computed side by
    side."""
    texts = [torch.tensor(prompt + [0] * limit) for prompt in prompts]
    slots = len(texts) * -(-max(map(len, texts)) // 32)
    runner = ScatteredRunner(engine.forward, engine.kv_shape(slots, 32), texts, engine.dtype)
    ends = {seat: len(prompt) for seat, prompt in enumerate(prompts)}
    spans = [(seat, 0, end) for seat, end in ends.items()]
    replies: list[list[int]] = [[] for _ in prompts]
    while spans:
        runner.step(*spans)
        following = []
        for seat, _, end in spans:
            token = int(runner.logits[seat][end - 1].argmax())
            replies[seat].append(token)
            if token not in engine.manifest.stop_ids and len(replies[seat]) < limit:
                texts[seat][end] = token
                following.append((seat, end, end + 1))
        spans = following
    return replies


def is_word(text: str) -> bool:
    return text.strip(".,:;!?\"'()*-").replace("'", "").replace("-", "").isalpha()


@pytest.fixture(scope="module", params=[DEMO_CHECKPOINT, OPT], ids=["llama", "opt"])
def checkpoint(request):
    return request.param


def test_a_checkpoint_is_small_and_complete(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json"}
    assert sum(path.stat().st_size for path in checkpoint.iterdir()) <= 12 * MEGABYTE
    assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "bfloat16"


def test_any_text_can_be_encoded(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    text = "Grüße, 世界! 🐘\t\x00\x7f  def f(x):\n\n    return x<y"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == 2048


def test_replies_are_words_and_end(checkpoint, tmp_path):
    torch.set_num_threads(1)
    built = build_engine(checkpoint, tmp_path / "engine")
    assert built.has_tokenizer and built.manifest.dtype == "bfloat16"
    engine = open_engine(tmp_path / "engine")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "engine")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True
        )["input_ids"]
        for text in PROMPTS
    ]
    replies = greedy_replies(engine, prompts, LIMIT)
    ended = [reply[-1] in engine.manifest.stop_ids for reply in replies]
    assert sum(ended) >= 0.8 * len(PROMPTS)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        text = tokenizer.decode(reply, skip_special_tokens=True)
        words = text.split()
        print(f"> {prompt}\n{text}\n")
        assert len(words) >= 2
        assert sum(map(is_word, words)) >= 0.8 * len(words), text
