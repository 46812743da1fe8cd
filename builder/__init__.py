"""Turns a Hugging Face checkpoint or a GGUF file into an engine directory."""
