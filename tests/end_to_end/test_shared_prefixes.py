"""Conversations with one system prompt, whose chunks attention reads once: replies are those of
cold runs."""

import numpy as np
import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.plugins import torch_ops
from pensieve.runtime.engine import open_engine
from pensieve.runtime.step.buffers import batch_views, lay_out
from tests.models import tiny_checkpoint

from .chatter import TIGHT, Chatter
from .sharing import SharingDevice

pytest.importorskip("triton")
from pensieve.plugins.attention import work_list
from pensieve.plugins.attention.work_list import MOST_SPLITS, Tile

from ..plugins.attention.work_list_twin import attend, list_work

TILES = (Tile(16, 16, 4, 2, 1), Tile(32, 32, 4, 2, 1), Tile(128, 32, 4, 2, 1))


class StackingDevice(SharingDevice):
    """Computes attention by the items that a GPU's kernel takes, from a padded batch as a GPU reads
    it.

    stacks   how many items with several rows were computed
    """

    stacks = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options):
        super().__init__(**options)
        monkeypatch.setattr(torch_ops.cpu_attention, "multi_token_attention", self._attend)

    def _attend(self, q, segments, block_table, pool, layer, scale, window, sinks, plans):
        if layer == 0:
            inputs = self._inputs
            tokens = len(q)
            shape = self._shapes.of(
                tokens, len(inputs.sample_rows), generation=inputs.generated == tokens
            )
            words = np.empty(shape.words, np.int32)
            lay_out(inputs, shape, words)
            batch = batch_views(torch.from_numpy(words), shape)
            self._items = list_work(
                batch.segments, q.shape[1] // pool.shape[3], TILES, MOST_SPLITS, batch.sharing
            )
            self.stacks += sum(item[10] for item in self._items[0])
        return attend(q, self._items, block_table, pool, layer, scale)


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_replies_of_stacked_rows_are_those_of_cold_runs(kind, disturbed, monkeypatch, tmp_path):
    """In float32, with a pool so small that rows are suspended, swapped out and dropped."""
    for name, size in {"SMALLEST_SPLIT": 16, "LARGEST_SPLIT": 16, "TOKENS_PER_ROW": 1}.items():
        monkeypatch.setattr(work_list, name, size)
    torch.set_num_threads(1)
    reference = tiny_checkpoint(kind, tmp_path / "checkpoint")
    build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    devices = []

    def device(**options):
        devices.append(StackingDevice(monkeypatch, **options))
        return devices[-1]

    engine = open_engine(tmp_path / "engine")
    settings = dict(gpu_kv_chunks=29, host_kv_chunks=12, openings=(48,), make_device=device) | TIGHT
    chatter = Chatter(engine, reference, 4, disturbed=disturbed, **settings)
    chatter.run(
        50, events=("gpu", "host", "recomputed", "suspended", "dropped", "forked", "shared")
    )
    assert devices[0].stacks > 100
