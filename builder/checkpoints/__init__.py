"""Checkpoints and configs that are read, and their tokenizers."""
