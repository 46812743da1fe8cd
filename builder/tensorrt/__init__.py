"""Engines compiled by TensorRT."""
