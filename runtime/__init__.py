"""Does what step plans say, and serves."""
