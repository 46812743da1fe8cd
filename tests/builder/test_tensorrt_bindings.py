"""Our code against NVIDIA's own Python bindings: every name exists there, and every call has a real signature."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import pensieve.builder.build as build_module
from pensieve.builder.tensorrt.installed import tensorrt_version
from pensieve.scheduler.types import SettingError
from pensieve.scripts import build_engine
from tests.models import tiny_checkpoint
from tests.tensorrt import twin
from tests.tensorrt.bindings import Mismatch, check_call, load_bindings, signatures

ROOT = Path(build_module.__file__).parent.parent
OURS = (
    "builder/tensorrt/compile.py",
    "builder/tensorrt/network.py",
    "builder/tensorrt/package.py",
    "plugins/tensorrt/plugins.py",
)
OWN_PLUGINS = {"write_kv", "write_kv_unrotated", "multi_token_attention"}


def chains(tree):
    """("trt", "DataType", "FLOAT") for each such expression."""
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and names:
            yield (node.id, *reversed(names))


@pytest.mark.parametrize("path", OURS)
def test_every_name_of_tensorrt_that_we_use_exists(path):
    with twin.install() as module:
        roots = {"trt": load_bindings(), "trtp": module.plugin}
        found = [chain for chain in chains(ast.parse((ROOT / path).read_text("utf-8"))) if chain[0] in roots]
        assert len(found) >= 10
        for root, *names in found:
            value = roots[root]
            for name in names:
                assert hasattr(value, name), f"{root}.{'.'.join(names)}"
                value = getattr(value, name)
                if root == "trtp" and name == "op":
                    break  # ours


def test_signatures_are_read_from_docstrings():
    network, context = twin.real.INetworkDefinition, twin.real.IExecutionContext
    (overload,) = signatures(network, "add_gather")
    assert [parameter.name for parameter in overload] == ["input", "indices", "axis"]
    assert len(signatures(context, "set_input_shape")) == 3
    (overload,) = signatures(twin.real.IShuffleLayer, "reshape_dims")
    assert overload[0].type.endswith(".Dims")


@pytest.mark.parametrize("name, args, named", [
    ("add_input", ("x", twin.real.float32), {}),
    ("add_input", ("x", twin.real.float32, (1,), 2), {}),
    ("add_input", ("x", twin.real.float32), {"size": (1,)}),
    ("add_input", ("x", twin.real.UnaryOperation.EXP, (1,)), {}),
    ("add_input", (1, twin.real.float32, (1,)), {}),
    ("add_input", ("x", twin.real.float32, (1.5,)), {}),
])  # fmt: skip
def test_calls_that_the_bindings_would_not_take_are_found(name, args, named):
    with pytest.raises(Mismatch, match=name):
        check_call(twin.real.INetworkDefinition, name, args, named, {})
    check_call(twin.real.INetworkDefinition, "add_input", ("x", twin.real.float32), {"shape": (-1, 2)}, {})


def test_a_twin_has_nothing_that_the_bindings_lack():
    with pytest.raises(AttributeError):

        class Builder(twin.Twin, stands_for="Builder"):
            @property
            def turbo(self):
                return True

    with pytest.raises(AttributeError, match="turbo"):
        twin.IBuilderConfig().turbo = True


def test_the_twin_refuses_what_tensorrt_refuses():
    network = twin.INetworkDefinition()
    wide = network.add_input("wide", twin.real.float32, (-1, 4))
    half = network.add_input("half", twin.real.float16, (-1, 4))
    flat = network.add_input("flat", twin.real.float32, (4,))
    ids = network.add_input("ids", twin.real.int32, (-1,))
    total = twin.real.ElementWiseOperation.SUM
    for refused in (
        lambda: network.add_elementwise(wide, half, total),
        lambda: network.add_elementwise(wide, flat, total),
        lambda: network.add_unary(ids, twin.real.UnaryOperation.SQRT),
        lambda: network.add_gather(wide, half, 0),
        lambda: network.add_slice(wide, (0,), (1,), (1,)),
        lambda: network.add_input("wide", twin.real.float32, (1,)),
        lambda: twin.Builder(twin.real.Logger()).create_network(0),
    ):
        with pytest.raises(twin.Refused):
            refused()


def test_without_tensorrt_we_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # as if it were not installed
    with pytest.raises(
        SettingError, match=r'--backend: tensorrt needs NVIDIA TensorRT .*pip install "tensorrt-cu13>=11'
    ):
        tensorrt_version()
    with twin.install() as module:
        assert tensorrt_version() == module.__version__
        module.__version__ = "10.9.0"
        with pytest.raises(SettingError, match=r"10\.9\.0 is too old"):
            tensorrt_version()


def test_build_engine_without_tensorrt_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    where = ["--checkpoint", str(tmp_path / "checkpoint"), "--output", str(tmp_path / "engine")]
    assert build_engine.main([*where, "--backend", "tensorrt", "--device", "cuda"]) == 2
    assert 'pip install "tensorrt-cu13>=11.1"' in capsys.readouterr().err
    assert build_engine.main([*where, "--backend", "reference", "--workspace", "1024"]) == 2
    assert "--workspace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
