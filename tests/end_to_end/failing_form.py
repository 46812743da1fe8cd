"""A form of KV outside the GPU in which some copies fail, for tests."""

import math

import torch

from pensieve.plugins.kv_forms.forms import Form


def encode(chunks):
    """The chunks' bytes, layer by layer, and a flag; of one layer in nine, by its bytes, only the
    flag is right."""
    pieces = chunks.contiguous().flatten(2).view(torch.uint8)
    failed = pieces.int().sum(-1, keepdim=True) % 9 == 0
    return torch.cat((torch.where(failed, 66, pieces), failed.byte().expand(-1, -1, 4)), dim=-1)


def decode(records, shape, dtype):
    return records[..., :-4].contiguous().view(dtype).view(*records.shape[:2], *shape[2:])


def is_exact(record, shape):
    return not record.reshape(shape[1], -1)[:, -1].any()


def kernels():
    raise NotImplementedError("for the CPU")


FAILING_FORM = Form(lambda shape: math.prod(shape[2:]) * 4 + 4, encode, decode, kernels, is_exact)
"""For chunks of float32."""
