"""Collectives as torch operations, and ranks on the threads of one process: sums, order, and no
rank that waits for ever."""

import time

import pytest
import torch

from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    RanksParted,
    ThreadRanks,
    register_group,
    release_group,
)

ops = torch.ops.pensieve
RANKS = 3


@pytest.fixture
def group():
    ranks = ThreadRanks(RANKS)
    register_group(TENSOR_PARALLEL, ranks)
    yield ranks
    release_group(TENSOR_PARALLEL)


def all_reduce(x):
    return ops.all_reduce(x, TENSOR_PARALLEL)


def test_every_rank_gets_the_sum_and_the_row_of_all(group):
    shares = torch.randn(RANKS, 5, 4)

    def work(rank):
        x = shares[rank].clone()
        total = all_reduce(x)
        row = ops.all_gather(x, RANKS, TENSOR_PARALLEL)
        assert torch.equal(x, shares[rank])  # unchanged, and no result shares memory with it
        x.zero_()
        return total, row

    for total, row in group.run(work):
        torch.testing.assert_close(total, shares.sum(0))
        assert torch.equal(row, torch.cat(tuple(shares), dim=1))


def test_a_sum_goes_where_it_is_wanted(group):
    shares = torch.randn(RANKS, 5, 4)

    def work(rank):
        total = torch.empty(5, 4)
        assert group.all_reduce(shares[rank], total).data_ptr() == total.data_ptr()
        return total

    assert all(torch.equal(total, shares.sum(0)) for total in group.run(work))


def test_sums_are_rounded_once(group):
    # bfloat16 holds 258, and not 257
    shares = (torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0]))

    def work(rank):
        return all_reduce(shares[rank].bfloat16())

    assert [total.item() for total in group.run(work)] == [258.0] * RANKS


def test_embeddings_of_other_ranks_tokens_are_zeros(group):
    table = torch.randn(RANKS * 4, 2)
    ids = torch.tensor([0, 3, 4, 11, 7, 0], dtype=torch.int32)

    def work(rank):
        share = ops.vocabulary_embed(ids, table[rank * 4 : rank * 4 + 4], TENSOR_PARALLEL)
        assert torch.equal(share.any(dim=1), ids // 4 == rank)
        return all_reduce(share)

    for x in group.run(work):
        assert torch.equal(x, table[ids])


def test_a_slow_rank_neither_mixes_calls_up_nor_reads_too_late(group):
    def work(rank):
        sums = []
        for i in range(50):
            if (i + rank) % 7 == 0:
                time.sleep(0.001)
            x = torch.full((1,), float(i * 10**rank))
            sums.append(all_reduce(x))
            x.fill_(-1.0)
        return torch.cat(sums).tolist()

    assert group.run(work) == [[111.0 * i for i in range(50)]] * RANKS


def test_an_error_of_one_rank_is_the_error_of_all(group):
    def work(rank):
        all_reduce(torch.zeros(1))
        if rank == 1:
            raise ZeroDivisionError("mine")
        all_reduce(torch.zeros(1))

    with pytest.raises(ZeroDivisionError, match="mine"):
        group.run(work)
    # as good as new
    assert group.run(lambda rank: all_reduce(torch.ones(1)).item()) == [3.0] * RANKS


def test_a_rank_that_ends_early_is_not_waited_for(group):
    def work(rank):
        all_reduce(torch.zeros(1))
        if rank != 2:
            all_reduce(torch.zeros(1))

    with pytest.raises(RanksParted, match="of 3 ranks' call 1 there is: rank 0 all_reduce"):
        group.run(work)


@pytest.mark.parametrize("shape, dtype", [((2,), torch.float32), ((1,), torch.bfloat16)], ids=str)
def test_ranks_that_call_different_things_are_told_so(shape, dtype, group):
    def work(rank):
        return all_reduce(torch.zeros(shape, dtype=dtype) if rank == 1 else torch.zeros(1))

    with pytest.raises(RanksParted, match=r"rank 1 all_reduce of \[\d\] torch\."):
        group.run(work)


def test_a_handle_names_one_group_until_it_is_released(group):
    with pytest.raises(ValueError, match="registered already"):
        register_group(TENSOR_PARALLEL, group)
    with pytest.raises(KeyError):
        ops.all_reduce(torch.zeros(1), TENSOR_PARALLEL + 1)
    with pytest.raises(KeyError):
        release_group(TENSOR_PARALLEL + 1)


def test_what_torch_promises_of_an_operation_holds():
    alone = ThreadRanks(1)
    register_group(TENSOR_PARALLEL, alone)
    checks = ("test_schema", "test_faketensor")
    x = torch.randn(3, 4)
    ids = torch.arange(3, dtype=torch.int32)

    def work(rank):
        torch.library.opcheck(ops.all_reduce.default, (x, TENSOR_PARALLEL), test_utils=checks)
        torch.library.opcheck(ops.all_gather.default, (x, 1, TENSOR_PARALLEL), test_utils=checks)
        torch.library.opcheck(
            ops.vocabulary_embed.default, (ids, x, TENSOR_PARALLEL), test_utils=checks
        )

    alone.run(work)
    release_group(TENSOR_PARALLEL)
