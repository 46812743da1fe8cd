"""Words come over as they are, and no others."""

import pytest
import torch

from ..kernel_cases import CUDA, DEVICE, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.kv_forms.host_copy_kernel import BLOCK, copy_words


@needs_kernels
@pytest.mark.parametrize("count", [0, 1, 5, BLOCK, 3 * BLOCK + 17])
def test_there_and_back(count):
    """On a GPU from and to pinned memory; the words after them stay unchanged."""
    generator = torch.Generator().manual_seed(count)
    source = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int32)
    target = torch.full((count + 8,), 7, dtype=torch.int32)
    if CUDA:
        source = source.pin_memory()
        target = target.pin_memory()
    between = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    copy_words(between, source)
    copy_words(target[:count], between)
    if CUDA:
        torch.cuda.synchronize()
    assert torch.equal(target[:count], source) and torch.equal(between.cpu(), source)
    assert target[count:].tolist() == [7] * 8


@needs_kernels
def test_unlike_sizes_are_refused():
    words = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="4 words"):
        copy_words(words[:3], words)
    with pytest.raises(ValueError, match="int64"):
        copy_words(words, words.long())
