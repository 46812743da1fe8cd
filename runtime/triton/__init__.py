"""The Triton Inference Server backend."""
