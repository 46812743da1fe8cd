"""build_engine: compiles a Hugging Face checkpoint into an engine directory."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ..builder.build import BACKENDS, DEVICES, build_engine
from ..builder.manifest import DTYPES
from ..scheduler.types import SettingError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="build_engine", description="Compile a Hugging Face checkpoint into an engine.")
    made.add_argument("--checkpoint", required=True, metavar="DIR", help="config.json, *.safetensors, tokenizer files")
    made.add_argument("--output", required=True, metavar="DIR", help="the engine directory to make or replace")
    made.add_argument("--backend", default="reference", help=f"one of {', '.join(BACKENDS)} (default %(default)s)")
    made.add_argument("--dtype", help=f"one of {', '.join(DTYPES)} (default: the checkpoint's own)")
    made.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks (default %(default)s)")
    made.add_argument("--device", default="cpu", help=f"one of {', '.join(DEVICES)} (default %(default)s)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    start = time.perf_counter()
    try:
        built = build_engine(args.checkpoint, args.output, args.backend, args.dtype, args.tensor_parallel, args.device)
    except SettingError as error:
        print(f"build_engine: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    manifest = built.manifest
    print(
        f"{built.outcome} {args.output}: {manifest.architecture}, {manifest.backend} backend, {manifest.dtype}, "
        f"{manifest.layers} layers, {built.weight_bytes / 2**20:.1f} MiB of weights, "
        f"contexts up to {manifest.max_model_len} tokens, in {seconds:.1f} s (fingerprint {manifest.fingerprint[:16]})"
    )
    if not built.has_tokenizer:
        print("the checkpoint has neither tokenizer.json nor vocab.json and merges.txt: prompts must be token ids")
    return 0


if __name__ == "__main__":
    sys.exit(main())
