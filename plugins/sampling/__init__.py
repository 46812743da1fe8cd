"""Kernels of the sampler."""
