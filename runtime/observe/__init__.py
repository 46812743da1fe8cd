"""Metrics, logs, traces and the residency of KV."""
