"""Shared by the HTTP server and the Triton backend: requests, replies and the engine's client."""
