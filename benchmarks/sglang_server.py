"""SGLang's OpenAI server for `versus`; random weights keep the size of what they multiply.

    PYTHONPATH=SITE python3 -P benchmarks/sglang_server.py --model-path DIR --load-format dummy ...

Changes to SGLang 0.5.17: random weights are drawn as `vllm_server.py` draws them. /v1/completions
works with --skip-tokenizer-init: events have token_ids and an empty text, where SGLang raises
KeyError 'text'. With that option a model that takes images needs no files of an image processor.
Configurations that the installed Transformers has already may be registered again.

This file runs in SGLang's environment and uses nothing of Pensieve. A process that SGLang starts
imports it again.
"""

import runpy
from collections.abc import AsyncIterator
from typing import Any

import torch
from transformers.models.auto import configuration_auto

register_of_transformers = configuration_auto._LazyConfigMapping.register


def register(self: Any, key: str, value: Any, exist_ok: bool = False) -> None:
    register_of_transformers(self, key, value, exist_ok=True)


# before SGLang is imported, which registers its own
configuration_auto._LazyConfigMapping.register = register  # type: ignore[method-assign]

from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: E402
from sglang.srt.model_loader import loader  # noqa: E402

weights_of_sglang = loader.initialize_dummy_weights
requests_of_sglang = TokenizerManager.generate_request
processors_of_sglang = TokenizerManager.init_tokenizer_and_processor


def initialize(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Fills the parameters of a module. Scales, quantised weights and positions stay as SGLang
    fills them."""
    weights_of_sglang(module, *args, **kwargs)
    for name, parameter in module.state_dict().items():
        if parameter.is_meta or parameter.dtype not in (
            torch.bfloat16,
            torch.float16,
            torch.float32,
        ):
            continue
        if "cos_sin_cache" in name or "inv_freq" in name:
            continue
        if parameter.ndim > 1 and not name.endswith("bias"):
            generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
        elif parameter.ndim:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)


async def generate(self: Any, obj: Any, request: Any = None) -> AsyncIterator[Any]:
    """SGLang's events; without a tokenizer they get an empty text."""
    async for content in requests_of_sglang(self, obj, request):
        for event in content if isinstance(content, list) else [content]:
            if event.get("text") is None:
                event["text"] = ""
        yield content


def prepare(self: Any) -> None:
    """SGLang's tokenizer and image processor; with --skip-tokenizer-init neither."""
    if self.server_args.skip_tokenizer_init:
        self.model_config.is_multimodal = False
    processors_of_sglang(self)


loader.initialize_dummy_weights = initialize
TokenizerManager.init_tokenizer_and_processor = prepare
TokenizerManager.generate_request = generate

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
