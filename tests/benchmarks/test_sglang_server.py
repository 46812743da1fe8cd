"""What SGLang's server is changed in for `versus`, with the parts of SGLang that are changed."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from transformers.models.auto import configuration_auto

from benchmarks.compared import SGLANG_SERVER

MODULES = {
    "model_loader/loader.py": "def initialize_dummy_weights(module):\n    module.filled = True\n",
    "managers/tokenizer_manager.py": (
        "class TokenizerManager:\n"
        "    def init_tokenizer_and_processor(self):\n"
        "        self.reads_images = self.model_config.is_multimodal\n"
        "    async def generate_request(self, obj, request):\n"
        "        yield {'output_ids': [1]}\n"
    ),
}


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """The changed class of SGLang's first process."""
    for name, text in MODULES.items():
        module = tmp_path / "sglang" / "srt" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    mapping = configuration_auto._LazyConfigMapping
    monkeypatch.setattr(mapping, "register", mapping.register)  # taken back at the end
    spec = importlib.util.spec_from_file_location("sglang_server", SGLANG_SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.TokenizerManager()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.mark.parametrize("skip", [True, False])
def test_without_a_tokenizer_no_image_processor_is_read(manager, skip):
    manager.server_args = SimpleNamespace(skip_tokenizer_init=skip)
    manager.model_config = SimpleNamespace(is_multimodal=True)
    manager.init_tokenizer_and_processor()
    assert manager.reads_images is not skip
