"""Allowed values of a build's options. Commands that only parse options import them from here, without torch."""

BACKENDS = ("inductor", "reference", "tensorrt")
DEFAULT_BACKEND = "inductor"  # the commands' default
WEIGHTS = ("same", "fp8", "int4")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
