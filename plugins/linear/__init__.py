"""Products in fp8 and norms."""
