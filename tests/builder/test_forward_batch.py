"""The inputs of the forward pass: one list for packing, compiled code and TensorRT's network."""

import subprocess
import sys
from dataclasses import fields, replace

import torch
from torch.utils import _pytree

import pensieve.builder.model  # noqa: F401 - registers ForwardBatch for export
from pensieve.builder.forward_batch import INPUTS, PACKED, SIZES, ForwardBatch, InputShape
from pensieve.builder.parity import SeatSpan, batch_of


def batch() -> ForwardBatch:
    """Two pieces; the KV of the first token is not written."""
    pieces = [SeatSpan(1, 2, 5, write_from=3), SeatSpan(0, 0, 1)]
    table = torch.tensor([[7, 8], [5, 6]])
    return batch_of(pieces, torch.arange(4), table, torch.tensor([2, 3]), chunk_tokens=4)


def test_a_batch_of_pieces():
    ours = batch()
    assert ours.positions.tolist() == [2, 3, 4, 0]
    assert ours.slots.tolist() == [-1, 5 * 4 + 3, 6 * 4, 7 * 4]
    assert ours.segments.tolist() == [[0, 3, 0, 5, 1], [3, 1, 0, 1, 0]]
    assert ours.token_ids.tolist() == [0, 1, 2, 3] and ours.sample_rows.tolist() == [2, 3]
    assert ours.block_table.tolist() == [[7, 8], [5, 6]]
    assert {part.dtype for part in ours.tensors()} == {torch.int32}


def test_every_field_is_an_input_and_has_the_shape_that_it_declares():
    ours = batch()
    assert list(INPUTS) == [field.name for field in fields(ForwardBatch)]
    sizes = dict(zip(SIZES, (4, 2, 2, 2, 2), strict=True))
    shapes = {name: one.shape(sizes) for name, one in INPUTS.items()}
    assert shapes == {name: tuple(getattr(ours, name).shape) for name in INPUTS}
    assert InputShape(("tokens", 5)).shape({"tokens": 3, "rows": 1}) == (3, 5)


def test_compiled_code_takes_the_tensors_in_the_order_of_the_export():
    ours = batch()
    leaves = _pytree.tree_leaves(ours)
    assert len(leaves) == len(INPUTS)
    assert all(leaf is tensor for leaf, tensor in zip(leaves, ours.tensors(), strict=True))


def test_others_take_the_place_of_packed_inputs():
    ours = batch()
    tokens = torch.ones(4)
    table = torch.zeros(1, 1)
    replaced = ForwardBatch.of(ours, token_ids=tokens, block_table=table)
    assert replaced.token_ids is tokens and replaced.block_table is table
    assert all(
        getattr(replaced, name) is getattr(ours, name) for name in PACKED if name != "token_ids"
    )
    moved = replace(ours, block_table=table).map(lambda part: part + 1)
    assert moved.block_table.tolist() == [[1]] and moved.token_ids.tolist() == [1, 2, 3, 4]


def test_batches_are_packed_without_torch():
    """Packing needs numpy only."""
    code = "import sys, pensieve.runtime.step.inputs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
