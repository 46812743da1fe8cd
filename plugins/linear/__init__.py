"""Matrix products in fp8 and of experts, and norms."""
