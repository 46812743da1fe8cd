"""How chunks are stored on the lower tiers: as they are, packed, or in fp8."""
