"""The tensor sets by the names that users give them."""

from __future__ import annotations

from collections.abc import Mapping

from .ensemble import EnsembleTensors
from .llmapi import LlmapiTensors
from .tensors import TensorSet

TENSOR_SETS: Mapping[str, type[TensorSet]] = {"llmapi": LlmapiTensors, "ensemble": EnsembleTensors}
