"""All-reduce between ranks."""
