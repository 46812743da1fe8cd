import pytest

from pensieve.runtime.step import prefixes


@pytest.fixture(autouse=True)
def short_shared_prefixes(monkeypatch):
    """Contexts are short here, and so must be the prefixes that rows share."""
    monkeypatch.setattr(prefixes, "SHARED_KEYS", 16)
    monkeypatch.setattr(prefixes, "BAND_KEYS", 256)
