"""Conversations, the turns that run, owners' quotas and times to live."""
