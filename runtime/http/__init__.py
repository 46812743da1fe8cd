"""The OpenAI-compatible HTTP server, its limits and its page."""
