"""Measured costs of steps and copies."""
