from __future__ import annotations

import pytest

from pensieve.scheduler.kv import lower_tiers
from pensieve.scheduler.kv.disk_tier import DiskTier

from .memory_tier import MemoryTier


@pytest.fixture(params=[DiskTier, MemoryTier], ids=["disk", "memory"])
def each_lower_tier(request, monkeypatch):
    """The test runs with DISK's own tier, and with a dict in its place."""
    monkeypatch.setattr(lower_tiers, "DiskTier", request.param)
