"""Names that a build takes. Commands that only read their options import them from here, without torch."""

BACKENDS = ("inductor", "reference", "tensorrt")
DEFAULT_BACKEND = "inductor"  # of the commands
WEIGHTS = ("same", "fp8")
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
