"""Builds an engine directory from a checkpoint or from a config.json alone: writes it to a
temporary directory, makes it durable, then renames it into place."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..scheduler.types import SettingError
from .checkpoints.architectures import OPT, decoder_config, text_settings
from .checkpoints.config import DecoderConfig, Shard
from .checkpoints.gguf_config import gguf_config
from .checkpoints.gguf_file import is_gguf, open_gguf
from .checkpoints.gguf_tokenizer import tokenizer_files
from .checkpoints.gguf_weights import BLOCK, read_gguf_weights
from .checkpoints.hugging_face import read_json, read_weights
from .checkpoints.tensorrt_llm import is_legacy, legacy_config, read_legacy_weights
from .checkpoints.tokenizer import copy_tokenizer
from .choices import BACKENDS, DEVICES, DTYPES, WEIGHTS
from .inductor.compile_parent import compile_apart, cpp_compiler
from .inductor.host_target import this_target
from .inductor.lock import locked
from .manifest import (
    RANDOM,
    TOKENIZER_FILES,
    Manifest,
    Parts,
    code_digest,
    files_digest,
    published_fingerprint,
    versions,
    weights_file,
)
from .parity import check_quantisation
from .quantised import QuantisedWeights, names_in_fp8, names_in_int4, projections, stored_as
from .quantization import check_quantization, fp8_block
from .random_weights import random_weights
from .tensorrt.installed import check_decoder, tensorrt_version
from .verify import intact_engine
from .weights import Advance, save_weights, watched, weights_digest

MOST_SEED = 2**63 - 1
RANDOM_GROUP = 128  # inputs that share a scale in random weights in int4
ROOM = 2**26  # bytes that an engine may need besides its weights

Say = Callable[[str], None]
"""Called with a description of the build's next stage."""


def _say_nothing(stage: str) -> None:
    pass


def _advance_nothing(done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Built:
    """outcome: "built", "replaced" (another engine was there) or "reused" (the same engine was
    there).

    has_tokenizer False: the checkpoint has no supported tokenizer; the engine takes and returns
    token ids only.
    """

    manifest: Manifest
    outcome: str
    has_tokenizer: bool


def build_engine(
    checkpoint: str | Path,
    output: str | Path,
    backend: str = "reference",
    dtype: str | None = None,
    tensor_parallel: int = 1,
    device: str = "cpu",
    say: Say = _say_nothing,
    workspace: int | None = None,
    weights: str = "same",
    advance: Advance = _advance_nothing,
) -> Built:
    """Makes `output` the engine of a Hugging Face checkpoint, of a GGUF file, or of a TensorRT-LLM
    checkpoint in the legacy format.

    `dtype` None: the checkpoint's own. `tensor_parallel`: number of ranks that share the decoder.
    `weights`: "same" keeps the projections' weights as in the checkpoint, but dequantises those of
    a GGUF file, except Q4_0 and Q4_1 on a GPU; "fp8" rounds them to FP8 and measures the error on
    the device.

    `output` may be missing, empty, or an engine. The same, undamaged engine is kept; any other is
    replaced. Any other content is refused. `output` does not change before the very end. Of several
    builds of it at once, one runs and the others wait.

    `say` gets the build's next stage, `advance` the progress. `workspace`, MiB, limits the memory
    of one layer in a TensorRT plan. Raises SettingError.
    """
    checkpoint = Path(checkpoint)
    output = Path(output).resolve()
    check_settings(backend, tensor_parallel, device, workspace, weights)
    if weights == "int4":
        raise SettingError(
            "--weights", "int4 is of random weights only; take a checkpoint in int4 (AWQ or GPTQ)"
        )
    hf_config, decoder, dtype = read_config(checkpoint, dtype, tensor_parallel)
    _check_linear(decoder, backend, weights)
    if backend == "tensorrt":
        check_decoder(decoder, dtype)
    _check_quantised(weights, backend, decoder)
    quantization = hf_config.get("quantization_config")
    form = check_quantization(quantization)
    block = fp8_block(quantization)
    if form or (quantization and backend == "tensorrt"):
        _check_quantised("int4" if form else "fp8", backend, decoder, "--checkpoint")
    packed = weights == "same" and device == "cuda" and backend != "tensorrt"
    read = _reader(checkpoint, decoder, dtype, packed)
    own = [read(rank, tensor_parallel) for rank in range(tensor_parallel)]
    rounded = own if weights == "same" else _rounded(decoder, own, read())
    in_fp8 = names_in_fp8(rounded[0])
    in_int4 = names_in_int4(rounded[0])
    setting = "--checkpoint" if weights == "same" else "--weights"
    _check_quantised("fp8" if in_fp8 else "int4" if in_int4 else "same", backend, decoder, setting)
    group = block[1] if block and in_fp8 else 0
    if in_int4:
        group = form.group if form else BLOCK
    stored = stored_as(decoder, getattr(torch, dtype), tensor_parallel, in_fp8, in_int4, group)
    size = sum(kind.nbytes for kind in stored.values())
    with _beside(output, say) as aside:
        has_tokenizer = _write_tokenizer(checkpoint, aside, decoder)
        tokenizer = files_digest(
            [aside / name for name in TOKENIZER_FILES if (aside / name).exists()]
        )
        say("reading the weights")
        digests = tuple(map(weights_digest, watched(rounded, tensor_parallel * size, advance)))
        parts = Parts(digests, tokenizer, code_digest(), **versions())
        # an error names the checkpoint's own file, and a GGUF file has none
        generation = (aside if is_gguf(checkpoint) else checkpoint) / "generation_config.json"
        stop_ids = _stop_ids(hf_config, generation)
        target = target_of(backend, device)
        manifest = Manifest(
            backend,
            dtype,
            device,
            tensor_parallel,
            decoder,
            stop_ids,
            parts,
            size,
            target=target,
            fp8=bool(in_fp8),
            group=group,
        )
        if there := intact_engine(output, manifest.fingerprint):
            manifest = there
            outcome = "reused"
        else:
            _check_room(output.parent, tensor_parallel * size + ROOM)
            if weights == "fp8":
                manifest = _measured(manifest, read, lambda rank: rounded[rank], say)
            say("writing the weights")
            for rank, each in enumerate(watched(rounded, tensor_parallel * size, advance)):
                save_weights(each, stored, aside / weights_file(rank, tensor_parallel))
            manifest, outcome = _complete(manifest, aside, output, say, workspace)
    return Built(manifest, outcome, has_tokenizer)


def read_config(
    checkpoint: Path, dtype: str | None = None, tensor_parallel: int = 1
) -> tuple[dict[str, Any], DecoderConfig, str]:
    """Returns a checkpoint's config.json with Hugging Face's keys, its decoder, and the dtype of
    its engine (`dtype` None: its own).

    SettingError if such an engine is impossible.
    """
    if is_gguf(checkpoint):
        hf_config = gguf_config(open_gguf(checkpoint))
    else:
        hf_config = read_json(checkpoint / "config.json")
        # of a model that also takes images
        hf_config = (hf_config.get("text_config") or {}) | hf_config
    if is_legacy(checkpoint):
        hf_config = legacy_config(checkpoint, hf_config)
    dtype = _checked_dtype(dtype or _own_dtype(hf_config))
    decoder = decoder_config(hf_config)
    Shard(decoder, tensor_parallel)  # raises if it cannot be divided
    return hf_config, decoder, dtype


def _reader(
    checkpoint: Path, decoder: DecoderConfig, dtype: str, packed: bool
) -> Callable[..., Mapping[str, Tensor]]:
    """Reads the weights of a rank of several, its two arguments. `packed`: a GGUF file's
    projections may stay in int4."""
    torch_dtype = getattr(torch, dtype)
    if is_gguf(checkpoint):
        packed = packed and not decoder.experts
        return partial(
            read_gguf_weights, open_gguf(checkpoint), decoder, torch_dtype, packed=packed
        )
    reader = read_legacy_weights if is_legacy(checkpoint) else read_weights
    return partial(reader, checkpoint, decoder, torch_dtype)


def _write_tokenizer(checkpoint: Path, engine: Path, decoder: DecoderConfig) -> bool:
    """Like `copy_tokenizer`; a GGUF file has the content of the files in its metadata."""
    if not is_gguf(checkpoint):
        return copy_tokenizer(checkpoint, engine, opt=decoder.architecture == OPT)
    texts = tokenizer_files(open_gguf(checkpoint).fields)
    for name, text in texts.items():
        (engine / name).write_text(text, encoding="utf-8")
    return "tokenizer.json" in texts


def _rounded(
    decoder: DecoderConfig, own: Sequence[Mapping[str, Tensor]], whole: Mapping[str, Tensor]
) -> Sequence[Mapping[str, Tensor]]:
    """Each rank's weights in FP8, from the rank's own and from the undivided ones."""
    if names_in_fp8(whole) or names_in_int4(whole):
        kind = "FP8" if names_in_fp8(whole) else "int4"
        raise SettingError(
            "--weights", f"the checkpoint's weights are in {kind} already; leave the option out"
        )
    return [QuantisedWeights(decoder, each, whole) for each in own]


def _check_quantised(
    weights: str, backend: str, decoder: DecoderConfig, setting: str = "--weights"
) -> None:
    if weights != "same" and backend == "tensorrt":
        kind = "FP8" if weights == "fp8" else "int4"
        raise SettingError(
            "--backend",
            f"tensorrt's engines with weights in {kind} do not exist yet: use inductor",
        )
    in_checkpoint = setting == "--checkpoint" and weights == "fp8"
    for part, there in (("experts", decoder.experts), ("linear attention", decoder.linear)):
        if weights != "same" and there and not in_checkpoint:
            raise SettingError(
                setting,
                f"{weights} weights of {part} ({decoder.architecture}) are not supported yet; take "
                "the unquantised checkpoint without --weights, or one in FP8 with --backend "
                "reference",
            )
    if in_checkpoint and decoder.experts and backend != "reference":
        raise SettingError(
            "--backend", f"{backend} has no FP8 weights of experts yet; take reference"
        )


def _check_linear(decoder: DecoderConfig, backend: str, weights: str) -> None:
    """SettingError if linear attention is in the decoder, and not supported with these settings."""
    for setting, value, possible in (
        ("--backend", backend, "reference"),
        ("--weights", weights, "same"),
    ):
        if decoder.linear and value != possible:
            raise SettingError(
                setting,
                f"{value} is not supported yet for linear attention ({decoder.architecture}); take "
                f"{possible}",
            )


def _measured(
    manifest: Manifest,
    original: Callable[[], Mapping[str, Tensor]],
    rounded: Callable[[int], Mapping[str, Tensor]],
    say: Say,
) -> Manifest:
    """Returns the manifest with the error of rounding to FP8. original(): the undivided weights;
    rounded(rank): one rank's."""
    say("measuring what FP8 costs")
    ranks = range(manifest.tensor_parallel)
    on_device = [
        {name: x.to(manifest.device) for name, x in rounded(rank).items()} for rank in ranks
    ]
    manifest = replace(
        manifest, quantisation=check_quantisation(manifest.decoder, original(), on_device)
    )
    del on_device
    if manifest.device == "cuda":
        torch.cuda.empty_cache()  # another process compiles, and needs the memory
    return manifest


def build_random_engine(
    config: str | Path,
    output: str | Path,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    backend: str = "reference",
    dtype: str | None = None,
    tensor_parallel: int = 1,
    device: str = "cpu",
    say: Say = _say_nothing,
    workspace: int | None = None,
    weights: str = "same",
) -> Built:
    """Like `build_engine`, from a Hugging Face config.json alone, for measuring: `open_engine`
    makes random weights, and there is no tokenizer.

    `overrides` replaces or adds keys of config.json; a key that no code reads is refused.
    """
    output = Path(output).resolve()
    check_settings(backend, tensor_parallel, device, workspace, weights)
    if not 0 <= seed <= MOST_SEED:
        raise SettingError("--seed", f"must be between 0 and {MOST_SEED}, not {seed}")
    hf_config = _Read({**text_settings(read_json(Path(config), "--config")), **(overrides or {})})
    dtype = _checked_dtype(dtype or _own_dtype(hf_config))
    decoder = _decoder_of_config(hf_config)
    _check_linear(decoder, backend, weights)
    if backend == "tensorrt":
        check_decoder(decoder, dtype)
    _check_quantised(weights, backend, decoder)
    fp8 = weights == "fp8"
    int4 = RANDOM_GROUP if weights == "int4" else 0
    torch_dtype = getattr(torch, dtype)
    quantised = projections(decoder)
    stored = stored_as(
        decoder,
        torch_dtype,
        tensor_parallel,
        quantised if fp8 else (),
        quantised if int4 else (),
        int4,
    )
    size = sum(kind.nbytes for kind in stored.values())
    stop_ids = _stop_ids(hf_config, setting="--config")
    unread = sorted(set(overrides or {}) - hf_config.read)
    if unread:
        raise SettingError(
            "--set", f"{', '.join(unread)}: nothing of {decoder.architecture} is set by that"
        )
    parts = Parts(
        (f"{RANDOM}{seed}",) * tensor_parallel, files_digest([]), code_digest(), **versions()
    )
    target = target_of(backend, device)
    manifest = Manifest(
        backend,
        dtype,
        device,
        tensor_parallel,
        decoder,
        stop_ids,
        parts,
        size,
        target=target,
        fp8=fp8,
        group=int4,
    )
    make = partial(random_weights, decoder, torch_dtype, device, seed)
    with _beside(output, say) as aside:
        if there := intact_engine(output, manifest.fingerprint):
            manifest = there
            outcome = "reused"
        else:
            _check_room(output.parent, ROOM)
            if fp8:
                manifest = _measured(
                    manifest, make, lambda rank: make(rank, tensor_parallel, fp8=True), say
                )
            manifest, outcome = _complete(manifest, aside, output, say, workspace)
    return Built(manifest, outcome, has_tokenizer=False)


class _Read(UserDict[str, Any]):
    """Records which keys were read."""

    def __init__(self, values: Mapping[str, Any]):
        self.read: set[str] = set()
        super().__init__(values)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)


def _decoder_of_config(hf_config: Mapping[str, Any]) -> DecoderConfig:
    try:
        return decoder_config(hf_config)
    except SettingError as error:  # names --checkpoint, the usual source of a config.json
        raise SettingError("--config", str(error).removeprefix(f"{error.setting}: ")) from None


def check_settings(
    backend: str, tensor_parallel: int, device: str, workspace: int | None, weights: str
) -> None:
    """SettingError if no checkpoint can be built here with these settings."""
    choices = (
        ("--backend", backend, BACKENDS),
        ("--device", device, DEVICES),
        ("--weights", weights, WEIGHTS),
    )
    for setting, value, allowed in choices:
        if value not in allowed:
            raise SettingError(setting, f"{value!r} does not exist; there is {', '.join(allowed)}")
    if workspace is not None and (backend != "tensorrt" or workspace < 1):
        raise SettingError(
            "--workspace", f"must be positive, and is of --backend tensorrt only, not {workspace}"
        )
    if backend == "tensorrt":
        tensorrt_version()
        if device != "cuda":
            raise SettingError("--device", f"tensorrt runs on cuda, not on {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            "--device", "cuda needs an NVIDIA GPU in this machine, and PyTorch finds none"
        )
    if backend == "inductor" and cpp_compiler() is None:
        raise SettingError(
            "--backend",
            "inductor needs a C++ compiler: install g++, or name one in CXX; or use --backend "
            "reference",
        )


def target_of(backend: str, device: str) -> str:
    """The target for which an engine is compiled here; "" if it is not compiled."""
    return "" if backend == "reference" else this_target(device, backend)


def _check_output(output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise SettingError("--output", f"{output} is a file")
    if output.is_mount():
        raise SettingError(
            "--output", f"{output} is a mount point, and cannot be renamed; name a directory in it"
        )
    if output.is_dir() and any(output.iterdir()) and published_fingerprint(output) is None:
        raise SettingError(
            "--output", f"{output} is neither empty nor an engine; name another directory"
        )


def _own_dtype(hf_config: Mapping[str, Any]) -> str:
    own = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    in_int4 = check_quantization(hf_config.get("quantization_config")) is not None
    # PyTorch's int4 product takes bfloat16 only
    return "bfloat16" if in_int4 and own == "float16" else own


def _checked_dtype(dtype: str) -> str:
    if dtype not in DTYPES:
        raise SettingError("--dtype", f"must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return dtype


def _stop_ids(
    hf_config: Mapping[str, Any], generation: Path | None = None, setting: str = "--checkpoint"
) -> tuple[int, ...]:
    """End-of-sequence ids; those of generation_config.json, if it exists, take precedence.

    SettingError, of `setting`, if they are not ids: no token would equal them, and no reply would
    end.
    """
    ids = read_json(generation).get("eos_token_id") if generation and generation.exists() else None
    ids = hf_config.get("eos_token_id") if ids is None else ids
    if ids is None:
        return ()
    ids = tuple(ids) if isinstance(ids, list) else (ids,)
    if any(type(token) is not int for token in ids):
        raise SettingError(
            setting, f"eos_token_id must be a token id or a list of some, not {list(ids)!r}"
        )
    return ids


@contextmanager
def _beside(output: Path, say: Say) -> Iterator[Path]:
    """Yields a new directory next to `output`, removed at the end unless it was renamed. No other
    build has one meanwhile.

    SettingError if `output` is neither an engine nor empty, or the system cannot create it, for
    example on a full disk.
    """
    aside = output.parent / f".{output.name}.{secrets.token_hex(4)}.building"
    lock = output.parent / f".{output.name}.lock"
    _make_parent(output)
    try:
        with locked(lock, lambda: say(f"waiting for another build of {output}")):
            _clear_up(output)
            _check_output(output)
            aside.mkdir()
            try:
                yield aside
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SettingError("--output", f"the disk of {output.parent} became full") from error
        if error.errno is None:
            raise  # not a system error: a library that cannot be loaded
        raise SettingError("--output", f"cannot be made: {error}") from error


def _clear_up(output: Path) -> None:
    """Cleans up after a killed build of `output`: an engine that was moved aside returns, other
    temporary directories are removed."""
    ours = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}\.(building|replaced)")
    for left in [path for path in output.parent.iterdir() if ours.fullmatch(path.name)]:
        if left.suffix == ".replaced" and not output.exists():
            os.rename(left, output)
        else:
            shutil.rmtree(left)


def _make_parent(output: Path) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError("--output", f"cannot be made: {error}") from None
    if not os.access(output.parent, os.W_OK):
        raise SettingError("--output", f"cannot be made: {output.parent} must not be written to")


def _check_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise SettingError(
            "--output",
            f"the engine takes {needed / 2**20:.0f} MiB, and the disk of {directory} has "
            f"{free / 2**20:.0f} MiB free",
        )


def _complete(
    manifest: Manifest, aside: Path, output: Path, say: Say, workspace: int | None
) -> tuple[Manifest, str]:
    """Compiles the engine if its backend requires it, and publishes it. Returns (the completed
    manifest, outcome)."""
    if manifest.backend != "reference":
        manifest.write(aside)
        manifest = replace(
            manifest,
            compiled=compile_apart(aside, say, () if workspace is None else (str(workspace),)),
        )
    return manifest, _publish(manifest, aside, output)


def _publish(manifest: Manifest, aside: Path, output: Path) -> str:
    """Completes the engine and renames it into place; returns "built" or "replaced".

    An existing engine is moved aside first, and moved back if that fails.
    """
    manifest.write(aside)
    for path in (*aside.rglob("*"), aside):
        _sync(path)
    replaced = published_fingerprint(output) is not None
    if replaced:
        old = aside.with_suffix(".replaced")
        os.rename(output, old)
        try:
            os.rename(aside, output)
        except OSError:
            os.rename(old, output)
            raise
        shutil.rmtree(old)
    else:
        os.rename(aside, output)
    _sync(output.parent)
    return "replaced" if replaced else "built"


def _sync(path: Path) -> None:
    """Returns once a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
