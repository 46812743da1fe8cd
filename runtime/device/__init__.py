"""The devices: memory, copies, forward passes and their times."""
