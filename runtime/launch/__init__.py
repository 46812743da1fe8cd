"""What `pensieve serve` puts together: options, sizes, and an engine with its scheduler and service."""
