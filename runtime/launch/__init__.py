"""The parts of `pensieve serve`: options, sizes, and an engine with its scheduler and service."""
