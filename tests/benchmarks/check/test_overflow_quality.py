"""The measured cost of truncation equals that of a plain model."""

from __future__ import annotations

import gzip
import json
import math

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from benchmarks.check.quality import (
    RESTART,
    Context,
    held_out_rows,
    perplexities,
    stretches,
    truncated_loss,
)
from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.context_window import KEEP, OVERFLOW_MODES, RECOMPUTE, ContextWindow
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

LENGTH, STEP, COUNT = 64, 32, 150


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    by_kind = {}
    for kind in ("llama", "opt"):
        directory = tmp_path_factory.mktemp(kind)
        reference = tiny_checkpoint(kind, directory / "checkpoint")
        build_engine(directory / "checkpoint", directory / "engine")
        by_kind[kind] = (open_engine(directory / "engine"), reference)
    return by_kind


def row(seed=0):
    return torch.randint(160, (COUNT + 1,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_stretches_end_where_windows_do():
    windows = ContextWindow(LENGTH, STEP, KEEP)
    assert list(stretches(windows, COUNT)) == [(0, 64), (64, 96), (96, 128), (128, 150)]
    for start, end in stretches(windows, COUNT):
        assert windows.start(start) == windows.start(end - 1)


def plain_loss(reference, tokens, windows):
    """One forward pass with a mask, or one for each window."""
    if windows.mode == RECOMPUTE:
        total = 0.0
        for start, end in stretches(windows, COUNT):
            if seen := windows.start(start):
                logits = reference(torch.tensor([tokens[seen:end]])).logits[0, start - seen :]
                total += F.cross_entropy(
                    logits, torch.tensor(tokens[start + 1 : end + 1]), reduction="sum"
                ).item()
        return total
    position = torch.arange(COUNT)
    seen = torch.tensor([windows.start(p) for p in range(COUNT)])
    hidden = (position > position[:, None]) | (position < seen[:, None])
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    told = position if windows.mode == KEEP else position - seen
    logits = reference(
        torch.tensor([tokens[:COUNT]]), attention_mask=mask[None, None], position_ids=told[None]
    ).logits
    return F.cross_entropy(
        logits[0, LENGTH:], torch.tensor(tokens[LENGTH + 1 :]), reduction="sum"
    ).item()


@pytest.mark.parametrize(
    ("kind", "mode"), [*(("llama", mode) for mode in OVERFLOW_MODES), ("opt", RECOMPUTE)]
)
@torch.inference_mode()
def test_losses_are_those_of_transformers(models, kind, mode):
    engine, reference = models[kind]
    context = Context(engine, COUNT)
    windows = ContextWindow(LENGTH, STEP, mode)
    assert truncated_loss(context, row(), windows) == pytest.approx(
        plain_loss(reference, row(), windows), rel=1e-5
    )


def test_every_way_is_measured_that_the_positions_allow(models):
    rows = [row(1), row(2)]
    by_mode = perplexities(models["llama"][0], rows, LENGTH, STEP)
    assert set(by_mode) == {*OVERFLOW_MODES, RESTART}
    by_mode = perplexities(models["opt"][0], rows, LENGTH, STEP)
    assert KEEP not in by_mode and all(
        math.isfinite(value) and value > 1 for value in by_mode.values()
    )


def test_rows_are_held_out_chats(tmp_path):
    path = tmp_path / "chats.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        for number in range(30):
            messages = [
                {"role": "user", "content": f"chat {number} " * 9},
                {"role": "assistant", "content": "yes"},
            ]
            lines.write(json.dumps({"conversation": f"c{number}", "messages": messages}) + "\n")
    tokenizer = Tokenizer.from_file(str(DEMO_CHECKPOINT / "tokenizer.json"))
    rows = held_out_rows(path, tokenizer, 16)
    assert rows and {len(one) for one in rows} == {16}
    with pytest.raises(SettingError, match="holds out"):
        held_out_rows(path, tokenizer, 100_000)
