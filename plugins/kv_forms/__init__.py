"""Forms of chunks on the lower tiers: unchanged, packed, or in fp8."""
