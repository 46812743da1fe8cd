"""The parts of a decoder's layers."""
