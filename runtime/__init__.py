"""Executes step plans, and serves clients."""
