"""The operations inside engines, with their reference implementations."""
