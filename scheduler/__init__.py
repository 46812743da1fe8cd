"""Decides what every step computes and which chunks move. Standard library only."""
