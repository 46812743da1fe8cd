"""Engines compiled by AOTInductor."""
