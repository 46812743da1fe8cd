"""Opens engine directories: checks that this program can run the engine, then loads its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..builder.checkpoints.config import Shard
from ..builder.checkpoints.hugging_face import active_parameters, parameter_shapes
from ..builder.cpu_packing import pack
from ..builder.forward_batch import Forward, ForwardBatch
from ..builder.inductor.host_target import why_not_here
from ..builder.inductor.package import Package, laid_out
from ..builder.manifest import Manifest, code_digest, files_digest, versions, weights_file
from ..builder.model import Decoder
from ..builder.random_weights import random_weights
from ..builder.states import state_shape
from ..builder.weights import load_weights, weights_digest
from ..plugins.attention import fp8_pool
from ..plugins.linear import fp8
from ..scheduler.types import SettingError

EXPERTS = ("mlp.up.weight", "mlp.down.weight")  # of a mixture's layer
FP8_CAPABILITY = (8, 9)  # Ada: the first GPUs that convert e4m3


def widened_values(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The most weights of this rank that a step widens at a time, on the engine's device. shapes:
    those of its parameters."""
    if not (manifest.fp8 or manifest.group):
        return 0
    experts = [0, 0]  # of one layer: `up` and `down`, which are widened together
    largest = 0
    for name, shape in shapes.items():
        if name.startswith("layers.") and name.endswith(".weight"):
            values = math.prod(shape)
            part = name.split(".", 2)[2]
            if manifest.decoder.experts and part in EXPERTS:
                place = EXPERTS.index(part)
                experts[place] = max(experts[place], values)
            else:
                largest = max(largest, values)
    if manifest.int4:
        return largest
    if manifest.device == "cuda" and fp8.runs_in_kernels(getattr(torch, manifest.dtype)):
        # of blocks in a long step; a scale for each output has products in bfloat16 alone
        return largest if manifest.group or manifest.dtype != "bfloat16" else 0
    return max(largest, sum(experts))


class Engine:
    """A loaded engine: the forward pass of one rank, and the manifest that describes it."""

    def __init__(self, manifest: Manifest, decoder: Forward, kv_cache_dtype: str = "auto"):
        self.manifest = manifest
        self.dtype: torch.dtype = getattr(torch, manifest.dtype)
        self.kv_cache_dtype = "auto" if kv_cache_dtype == "auto" else "fp8"
        self.kv_dtype = self.dtype if kv_cache_dtype == "auto" else fp8_pool.DTYPE
        self.vocab_size = manifest.vocab_size
        shapes = parameter_shapes(manifest.decoder, manifest.tensor_parallel)
        self.parameters = sum(math.prod(shape) for shape in shapes.values())  # of this rank
        # that one token uses
        self.active_parameters = active_parameters(manifest.decoder, manifest.tensor_parallel)
        self.weight_bytes = manifest.weight_bytes  # of this rank
        self.widened_bytes = widened_values(manifest, shapes) * self.dtype.itemsize
        # None: the model has no states
        self.state_shape = state_shape(
            Shard(manifest.decoder, manifest.tensor_parallel), self.dtype
        )
        self._decoder = decoder

    def chunk_bytes(self, chunk_tokens: int) -> int:
        """One chunk's KV on this rank."""
        return math.prod(self.kv_shape(1, chunk_tokens)) * self.kv_dtype.itemsize

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        """Shape of a KV pool of `slots` slots, in `self.kv_dtype`."""
        width = fp8_pool.pool_width(self.manifest.head_dim, self.kv_dtype)
        return (slots, self.manifest.kv_layers, 2, self.manifest.kv_heads, chunk_tokens, width)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: int) -> Tensor:
        """Computes what `Decoder.forward` does."""
        return self._decoder(batch, pool)


def open_engine(
    directory: str | Path, device: str = "cpu", rank: int = 0, kv_cache_dtype: str = "auto"
) -> Engine:
    """Loads one rank of an engine onto the device it was built for, "cpu" or "cuda".

    kv_cache_dtype: of its pools on the GPU, as `pensieve serve` takes it.
    With several ranks its forward pass needs a group registered as `collectives.TENSOR_PARALLEL`.
    ValueError if there is no such rank. Raises SettingError('--engine', ...) that names the
    difference from this program or from the engine's build, or if the weights are larger than the
    GPU's free memory; SettingError('--device', ...) without a GPU; SettingError('--kv-cache-dtype',
    ...) if the engine or the GPU cannot have such pools.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    if manifest.device != device:
        raise SettingError(
            "--engine", f"{directory} was built for the device {manifest.device}, not {device}"
        )
    _check_part(directory, "code of the forward pass", manifest.parts.code, code_digest())
    for package, here in versions().items():
        _check_part(directory, f"version of {package}", getattr(manifest.parts, package), here)
    dtype = getattr(torch, manifest.dtype)
    shard = Shard(manifest.decoder, manifest.tensor_parallel, rank)
    if device == "cuda":
        _check_gpu(directory, manifest.weight_bytes)
    if kv_cache_dtype != "auto":
        _check_fp8_pool(manifest)
    if manifest.backend != "reference":
        _check_package(directory, manifest)
    if manifest.random_seed is None:
        weights = _stored_weights(directory, manifest, rank, device)
    else:
        weights = random_weights(
            shard.config,
            dtype,
            device,
            manifest.random_seed,
            rank,
            shard.ranks,
            manifest.fp8,
            manifest.group,
        )
    return Engine(manifest, _decoder(directory, manifest, weights), kv_cache_dtype)


def _decoder(directory: Path, manifest: Manifest, weights: Mapping[str, Tensor]) -> Forward:
    if manifest.backend == "reference":
        decoder = Decoder.from_weights(manifest.decoder, weights, manifest.tensor_parallel)
        if manifest.device == "cpu":
            pack(decoder)
        return decoder
    path = directory / manifest.package
    try:
        if manifest.backend == "tensorrt":
            from ..builder.tensorrt.package import load_decoder  # Triton comes with CUDA only

            return load_decoder(path, manifest.decoder, weights, manifest.tensor_parallel)
        return Package(path, manifest.decoder, laid_out(weights))
    except RuntimeError as error:
        # the content was checked, so this is the machine's failure, for example a full disk
        raise SettingError("--engine", f"{path} cannot be loaded: {error}") from error


def _check_package(directory: Path, manifest: Manifest) -> None:
    """Checks the compiled package before any code in it runs."""
    if reason := why_not_here(manifest.target, manifest.device, manifest.backend):
        raise SettingError(
            "--engine", f"{directory} cannot run here: {reason}; build the engine again, here"
        )
    if manifest.compiled is None:
        raise SettingError("--engine", f"{directory} was never compiled; build the engine again")
    try:
        digest = files_digest([directory / manifest.package])
    except OSError as error:
        raise SettingError(
            "--engine", f"{directory / manifest.package} cannot be read: {error}"
        ) from None
    _check_part(directory, "digest of the compiled code", manifest.compiled.package, digest)


def _stored_weights(
    directory: Path, manifest: Manifest, rank: int, device: str
) -> dict[str, Tensor]:
    """Loads the weights one tensor at a time onto the device. The host holds only pages of the
    file, which it may drop."""
    path = directory / weights_file(rank, manifest.tensor_parallel)
    try:
        weights = load_weights(path)
    except (OSError, SafetensorError) as error:
        raise SettingError("--engine", f"{path} cannot be read: {error}") from None
    _check_part(
        directory, "digest of the weights", manifest.parts.weights[rank], weights_digest(weights)
    )
    return {name: tensor.to(device) for name, tensor in weights.items()}


def _check_gpu(directory: Path, needed: int) -> None:
    if not torch.cuda.is_available():
        raise SettingError("--device", "PyTorch finds no usable NVIDIA GPU here")
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise SettingError(
            "--engine",
            f"the weights of {directory} take {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB "
            "of the GPU are free",
        )


def _check_fp8_pool(manifest: Manifest) -> None:
    if manifest.device == "cuda" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        message = (
            f"fp8 needs compute capability {needed} or newer, which {torch.cuda.get_device_name()} "
            "has not"
        )
        raise SettingError("--kv-cache-dtype", message)


def _check_part(directory: Path, part: str, built: str, here: str) -> None:
    if built != here:
        raise SettingError(
            "--engine",
            f"the {part} differs: {directory} was built with {built[:16]}, here it is {here[:16]}; "
            "delete the directory and build the engine again",
        )
