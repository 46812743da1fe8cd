"""Conversations on a virtual clock, for hit rates and latencies without a device."""
