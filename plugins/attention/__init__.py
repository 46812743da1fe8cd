"""Attention over scattered chunks: kernel, reference and work list; the KV write."""
