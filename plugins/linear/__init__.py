"""Matrix products in fp8, and norms."""
