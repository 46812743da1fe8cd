"""A step's inputs, sampling and grammars."""
