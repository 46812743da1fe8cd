"""KV events: tells routers which chunks of KV are here, in vLLM's format."""
