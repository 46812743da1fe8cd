"""What the HTTP server and the Triton backend share: requests, replies and the engine's client."""
