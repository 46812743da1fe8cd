"""Chunks of KV: their keys, slots on each tier, and the order in which they are evicted."""
