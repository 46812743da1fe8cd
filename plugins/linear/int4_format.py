"""Sizes of int4 weights, see `int4`."""

GROUPS = (32, 64, 128, 256)  # sizes that the product takes
TILE_OUTPUTS, TILE_INPUTS = 8, 128  # a weight consists of whole tiles
MIDDLE = 8  # the number of the weight 0, if zero is 0


def packed_shape(outputs: int, inputs: int) -> tuple[int, ...]:
    return outputs // TILE_OUTPUTS, inputs // TILE_INPUTS, 32, 4
