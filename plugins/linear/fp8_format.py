"""The eight-bit format of weights and activations: e4m3, with a scale for each row."""

import torch

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of e4m3
LEAST_SCALE = 1e-30  # of a row of zeros
