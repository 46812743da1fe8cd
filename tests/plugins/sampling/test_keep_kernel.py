import pytest
import torch

from ..kernel_cases import CUDA, DEVICE, INTERPRETED, needs_kernels

pytest.importorskip("triton")
from pensieve.plugins.sampling.compiled import compile_kernels
from pensieve.plugins.sampling.keep_kernel import keep_samples
from pensieve.plugins.sampling.kept_kernel import lowest_kept

from ..recording_driver import RecordingDriver


@needs_kernels
@pytest.mark.parametrize("rows", [0, 1, 7, 128, 300])
def test_tokens_reach_the_host_and_their_seats(rows):
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(150_000, (rows,), generator=generator)
    seats = torch.randperm(400, generator=generator)[:rows]
    last_samples = torch.arange(400, dtype=torch.int32)
    tokens = torch.full((rows + 1,), -5, dtype=torch.int32, pin_memory=CUDA)
    expected = last_samples.clone()
    expected[seats] = drawn.int()

    last_samples = last_samples.to(DEVICE)
    keep_samples(drawn.to(DEVICE), seats.to(DEVICE), last_samples, tokens[:rows])
    if CUDA:
        torch.cuda.synchronize()
    assert tokens.tolist() == [*drawn.tolist(), -5]
    assert last_samples.tolist() == expected.tolist()


@pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")
def test_one_kernel_serves_all_sizes_of_step(monkeypatch):
    recording = RecordingDriver(monkeypatch)
    last_samples = torch.zeros(512, dtype=torch.int32)
    for rows in (1, 16, 17, 512):
        ids = torch.zeros(rows, dtype=torch.int64)
        keep_samples(ids, ids, last_samples, torch.zeros(rows, dtype=torch.int32))
    launched = recording.take()
    assert [launch.grid[0] for launch in launched] == [1, 1, 1, 4]
    assert len({launch.image for launch in launched}) == 1


@pytest.mark.skipif(CUDA or INTERPRETED, reason="compiles where no kernel can run")
@pytest.mark.parametrize("vocab", [1000, 49_152])
def test_kernels_are_compiled_before_steps_need_them(vocab, monkeypatch):
    recording = RecordingDriver(monkeypatch)
    compile_kernels(vocab, "cpu")
    before = {launch.image for launch in recording.take()}
    ids = torch.zeros(5, dtype=torch.int64)
    reals = torch.ones(5, dtype=torch.float64)
    lowest_kept(torch.zeros(5, vocab), torch.ones(5, vocab).double(), ids, reals, reals)
    keep_samples(ids, ids, torch.zeros(8, dtype=torch.int32), torch.zeros(5, dtype=torch.int32))
    assert {launch.image for launch in recording.take()} == before and len(before) == 2
