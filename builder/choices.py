"""Allowed values of a build's and an engine's options. Commands that only parse options import them
without torch."""

BACKENDS = ("inductor", "reference", "tensorrt")
DEFAULT_BACKEND = "inductor"  # the commands' default
WEIGHTS = ("same", "fp8", "int4")
DEVICES = ("cpu", "cuda")
# what people call the tier GPU, by device; names in the code and of metrics are always `gpu`
GPU_TIER_NAMES = {"cpu": "device", "cuda": "GPU"}
DTYPES = ("float32", "bfloat16", "float16")
# of an engine's pools, with vLLM's names: the last two are one
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
