"""Metrics, logs, traces and where KV is."""
