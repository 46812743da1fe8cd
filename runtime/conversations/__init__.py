"""Stored conversations: tokens, texts and turns, in SQLite."""
