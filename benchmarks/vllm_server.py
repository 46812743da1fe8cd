"""vLLM's OpenAI server for `versus`, with random weights that keep the size of what they multiply.

    VENV/bin/python -P benchmarks/vllm_server.py --model DIR --load-format dummy ...

vLLM's own random weights are so small that the routers of some mixtures of experts choose the same
experts for all tokens. The other experts are then never read, and steps are faster than with any
trained model. These weights are drawn much as Pensieve draws its own: projections keep the size of
their input, norms multiply by 1, biases are 0.

This file runs in vLLM's environment and uses nothing of Pensieve. A process that vLLM starts
imports it again.
"""

import runpy
import sys

import torch
from vllm.model_executor.model_loader import dummy_loader

of_vllm = dummy_loader.initialize_dummy_weights


def initialize(module: torch.nn.Module, model_config: object) -> None:
    """Fills the parameters of a module. Scales (one number) and quantised weights stay as vLLM
    fills them."""
    of_vllm(module, model_config)
    for name, parameter in module.state_dict().items():
        if parameter.is_meta or parameter.dtype not in (
            torch.bfloat16,
            torch.float16,
            torch.float32,
        ):
            continue
        if parameter.ndim > 1 and not name.endswith("bias"):
            generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        elif parameter.ndim:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)


dummy_loader.initialize_dummy_weights = initialize

if __name__ == "__main__":
    if "--api-server-count" in sys.argv:  # the module below ignores it
        sys.argv[:1] = ["vllm", "serve"]
        runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
