"""Benchmarks: of the scheduler, the engine, its kernels and tiers, and the load that `bench_serving` sends."""
