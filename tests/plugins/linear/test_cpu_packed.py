"""Products with packed weights are those of plain ones."""

import pytest
import torch
import torch.nn.functional as F

from pensieve.plugins.linear.cpu_packed import BLOCK, can_pack, linear, packed, padded_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 16, 17, 70, 256, 600])
@pytest.mark.parametrize("inputs, outputs", [(64, 96), (37, 51)])
def test_a_packed_weight_gives_the_same_product(inputs, outputs, rows, dtype):
    if not can_pack(dtype):
        pytest.skip(f"this CPU has no packed products in {dtype}")
    x = torch.randn(rows, inputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    for bias in (None, torch.randn(outputs).to(dtype)):
        with torch.inference_mode():
            product = linear(x, packed(weight), bias)
        torch.testing.assert_close(product, F.linear(x, weight, bias))


def test_other_types_are_not_packed():
    assert not can_pack(torch.float16)
    assert not can_pack(torch.float64)


def test_few_numbers_of_rows_are_multiplied():
    """Each number keeps memory, and prompts have any length."""
    numbers = {rows: padded_rows(rows) for rows in range(BLOCK + 1)}
    assert all(rows <= number <= rows * 9 / 8 for rows, number in numbers.items())
    assert all(numbers[rows] == rows for rows in range(17))
    assert len(set(numbers.values())) <= 50 and max(numbers.values()) == BLOCK
