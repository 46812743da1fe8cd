"""Reads checkpoints, their configurations and their tokenizers."""
