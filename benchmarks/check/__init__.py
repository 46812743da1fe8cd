"""Checks that run long or need a GPU: reuse, ranks, quality, recorded traces, and servers that are
killed."""
