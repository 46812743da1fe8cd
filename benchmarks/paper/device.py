"""What figures need of a GPU: commands of this project, and their result lines as the figures'
values."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pensieve.scheduler.types import SettingError

from .overlap import A100, MEMORY
from .pensieve import LIMITS_MS, between_rates
from .report import AT_LEAST, today

Lines = Sequence[Mapping[str, Any]]
Values = dict[str, dict[str, float]]
Curve = dict[float, Mapping[str, Any]]  # by rate: what benchmarks.serving found
SHAPES = Path(__file__).parents[1] / "shapes"
HOST_BYTES = "110GiB"
THINK_S = 14
"""For an H200. The paper's GPU is slower and has more memory for KV: 260 GB, here 158. With a
shorter think time the KV of users who think, over this memory, is the paper's: 60 s * 1.6 / 4.25 *
158 / 260."""
LOAD = "--turn-counts geometric --send-histories"
# figure 15 has figure 10b's load with longer think times
COMPARED_MS = LIMITS_MS | {"15": LIMITS_MS["10b"]}


class Measurement(NamedTuple):
    """words    a command, the name of its module, with its options; {engine} and {output} are
    filled in
    figures     the figures whose values `read` finds in the command's JSON lines (printed, or in
                {output})
    how         "hardware": the paper's settings on other GPUs
    """

    figures: tuple[str, ...]
    words: tuple[str, ...]
    read: Callable[[Lines], Values]
    how: str = "other settings"


def of(lines: Lines, bench: str) -> Mapping[str, Any]:
    """The last line of that benchmark. Raises SettingError."""
    records = [line for line in lines if line.get("bench") == bench]
    if not records:
        raise SettingError("--device", f"the command printed no line of {bench}")
    return records[-1]


IN_FIRST = (
    "time of a swap-in beside a swap-out, in-first over duplex",
    "time until both are copied, in-first over duplex",
)
"""Arithmetic with the measured speeds."""
LINEAR = "growth of a chunk's cost from 1,024 to 16,384 tokens over that to 8,192"


def profile_values(lines: Lines) -> Values:
    profile = of(lines, "profile")
    turns = profile["turns"]
    prefill = {f"prefill over generation, {turn['history']:,} tokens of history":
               turn["prefill_recomputed"] / turn["generation"] for turn in turns}  # fmt: skip
    base = profile["cost"]["chunk_seconds"]
    attention = dict(map(tuple, profile["cost"]["attention"]))
    chunk = {
        f"a chunk at {context:,} tokens over one at 1,024": (base + seconds)
        / (base + attention[1024])
        for context, seconds in attention.items()
        if context > 1024
    }
    _, _, swap_in, swap_out, both = profile["measured"]["copies"][-1]  # a CopyTime of whole records
    lost = {"speed that each direction loses while both run, %": 100 * (1 - swap_in / both),
            IN_FIRST[0]: swap_in / both, IN_FIRST[1]: (swap_in + swap_out) / both}  # fmt: skip
    grown = {name.split(" over ")[0]: ratio - 1 for name, ratio in chunk.items()}
    far, near = (grown.get(f"a chunk at {context:,} tokens") for context in (16384, 8192))
    if far and near:
        chunk[LINEAR] = far / near
    return {"3": prefill, "4": chunk, "section 5": lost}


def kernel_values(lines: Lines) -> Values:
    """Of shapes like "append 32 x 8 at 8192", the paper's, and "queries 32 x 4 at 8192"; others are
    left out."""
    values: dict[str, float] = {}
    ways = {"contiguous": "contiguous", "copy out": "copied out", "rounds": "one token a round"}
    for row in lines[-1]["results"]:
        kind, *words = row["shape"].split()
        if kind not in ("append", "queries"):
            continue
        _, _, queries, _, context = words
        tokens = (
            f"{int(context):,} tokens"
            if kind == "append"
            else f"{queries} query tokens at {int(context):,}"
        )
        values |= {
            f"{name} over ours, {tokens}": row[way] / row["ours"] for way, name in ways.items()
        }
    return {"12": values}


def tier_values(lines: Lines) -> Values:
    tiers = of(lines, "tiers_tiers")
    ratio = tiers["recomputed_s"] / tiers["host_s"]
    return {"14": {"first token, % less with the history on HOST": 100 * (1 - 1 / ratio)},
            "15": {"prompts prefilled, times as many with the history on HOST": ratio}}  # fmt: skip


def batch_values(lines: Lines) -> Values:
    """NO-PL: the copy of the known tokens' KV alone, and then the step as with this KV on the
    GPU."""
    figures: Values = {"18": {}, "19": {}, "20": {}}
    for split in of(lines, "tiers_batch")["splits"]:
        name, recomputed, piped, ready = (
            split[key] for key in ("split", "recomputed_s", "host_s", "gpu_s")
        )
        first = ready + split["copy_in_s"]
        if name == "1000/100":
            figures["19"] = {
                "PL-B0 over NO-PL": 100 * (1 - piped / first),
                "KV on the GPU over NO-PL, the limit": 100 * (1 - ready / first),
            }
        else:
            figures["18"] |= {
                f"speedup at {name}": recomputed / piped,
                f"speedup at {name}, copied first": recomputed / first,
                f"speedup at {name}, KV on the GPU": recomputed / ready,
            }
    for turn in of(lines, "tiers_saved_batch")["turns"]:
        stopped = turn["dropped_s"] + turn["copy_out_s"]
        figures["20"][f"saved at {turn['prompt']} tokens"] = 100 * (
            1 - turn["copied_beside_s"] / stopped
        )
    return figures


class FigureComparison(NamedTuple):
    """What is compared in a figure."""

    figure: str
    other: str
    name: str
    ours: str = "pensieve"


def versus_values(claims: Sequence[FigureComparison]) -> Callable[[Lines], Values]:
    """Requests/s of our server over the other one's at the paper's time a token, which is divided
    by the speedup of the GPU's memory. If ours is faster at all its rates, a lower bound: at its
    largest one. Of figures without such a time: the other's time a token over ours, at each rate,
    and of another policy what was found."""

    def read(lines: Lines) -> Values:
        curves: dict[str, Curve] = {}
        for line in lines:
            curves.setdefault(line["server"], {})[line["result"]["rate"]] = line["result"]
        values: Values = {}
        for number, other, name, our in claims:
            ours, theirs = curves.get(our, {}), curves.get(other, {})
            limit = (
                COMPARED_MS[number] / memory_speedup(machine(lines))
                if number in COMPARED_MS
                else None
            )
            values[number] = (
                _at_rates(name, ours, theirs)
                if limit is None
                else _at_limit(name, ours, theirs, limit)
            )
        return values

    return read


def memory_speedup(name: str) -> float:
    """Over an A100. SettingError for a GPU whose memory's speed is not known."""
    for word in re.split(r"[ -]", name):
        if word in MEMORY:
            return MEMORY[word] / A100.memory
    raise SettingError(
        "--device", f"the speed of {name}'s memory is not known: only {', '.join(MEMORY)}'s"
    )


def _at_rates(name: str, ours: Curve, theirs: Curve) -> dict[str, float]:
    values: dict[str, float] = {}
    for rate in sorted(ours.keys() & theirs.keys()):
        our = ours[rate]
        their = theirs[rate]
        values[f"{name}, at {rate:g}/s"] = their["ms_per_token_mean"] / our["ms_per_token_mean"]
        if name == LRU.name:
            host, recomputed = (
                [_share(one, source) for one in (our, their)] for source in ("host", "recomputed")
            )
            values[f"host hits, points above LRU's, at {rate:g}/s"] = host[0] - host[1]
            fewer = 1 - recomputed[0] / max(recomputed[1], 1e-9)
            values[f"tokens recomputed, % fewer than LRU's, at {rate:g}/s"] = 100 * fewer
    return values


def _share(row: Mapping[str, Any], source: str) -> float:
    """% of the prompts' tokens."""
    return 100 * float(row["sources"][source]) / sum(row["sources"].values())


def _at_limit(name: str, ours: Curve, theirs: Curve, limit_ms: float) -> dict[str, float]:
    points = [
        [
            (curve[rate]["ms_per_token_mean"], curve[rate]["completed_per_s"])
            for rate in sorted(curve)
        ]
        for curve in (ours, theirs)
    ]
    reached = [between_rates(curve, limit_ms) for curve in points]
    if reached[0] and reached[1]:
        return {name: reached[0] / reached[1]}
    if reached[1] and points[0] and max(points[0])[0] < limit_ms:
        return {f"{name}{AT_LEAST}": points[0][-1][1] / reached[1]}
    return {}


def versus(
    claims: Sequence[FigureComparison],
    shape: str,
    servers: Sequence[str],
    load: str = "",
    think_s: int = THINK_S,
) -> Measurement:
    words: tuple[str, ...] = (
        "benchmarks.versus",
        "--workload",
        "chats",
        "--shape",
        str(SHAPES / f"{shape}.json"),
    )
    words += (
        "--load",
        f"--think-s {think_s} {LOAD} {load}".rstrip(),
        "--host-kv-bytes",
        HOST_BYTES,
    )
    windows = WINDOWS if think_s == THINK_S else SLOW_WINDOWS
    words += (*windows.split(), "--servers", *servers, "--seed", "0")
    words += ("--output", "{output}", "--vllm", "{vllm}")
    return Measurement(tuple(claim.figure for claim in claims), words, versus_values(claims))


WINDOWS = "--ramp-s 35 --warm-up-s 55 --measure-s 28"
SLOW_WINDOWS = "--ramp-s 200 --warm-up-s 270 --measure-s 60"
OVER_VLLM = "requests/s over vLLM's"
RETENTION = "pensieve:--eviction retention"
LRU = FigureComparison("14", "pensieve", "time a token, LRU over retention", ours=RETENTION)
SEPARATE = FigureComparison(
    "13", "pensieve:--batching separate", "time a token, separate over unified"
)
IN_FIRST_SERVED = FigureComparison(
    "section 5", "pensieve:--link in-first", "time a token, in-first over duplex"
)
OVER_VLLM_LATER = f"{OVER_VLLM}, think time ten times figure 10's"
OPT, LLAMA = "opt-13b", "llama-2-13b-gqa"
ULTRACHAT = "--synthetic ultrachat"
KERNELS = Measurement(
    ("12",),
    (
        "benchmarks.kernels",
        "--heads",
        "40/40",
        "--shapes",
        "append",
        "--queries",
        "1",
        "2",
        "4",
        "16",
        "32",
    ),
    kernel_values,
    "hardware",
)
PROFILE_WORDS = """pensieve.scripts.profile_engine --engine {engine} --device cuda
                   --max-num-seqs 256
                   --max-num-batched-tokens 2048"""
PROFILE = Measurement(
    ("3", "4", "section 5"),
    (*PROFILE_WORDS.split(), "--plots", "{output}", "--json"),
    profile_values,
    "hardware",
)
TIERS = Measurement(
    ("14", "15"),
    ("benchmarks.tiers", "--engine", "{engine}", "--device", "cuda", "--parts", "tiers"),
    tier_values,
)
BATCH_WORDS = """benchmarks.tiers --engine {engine} --device cuda --parts batch
                 --history 1024 --prompt 1000 --reply 20
                 --turns 64 --repeats 2 --max-num-batched-tokens 2048"""
BATCH = Measurement(("18", "19", "20"), tuple(BATCH_WORDS.split()), batch_values, "hardware")
MEASUREMENTS: dict[str, tuple[Measurement, ...]] = {
    "pensieve": (
        PROFILE,
        KERNELS,
        versus(
            [FigureComparison("10a", "vllm", OVER_VLLM), LRU],
            OPT,
            ["pensieve@1.1,1.4,1.7", "vllm@0.9,1.2,1.5", RETENTION.replace(":", "@1.4,1.7:")],
        ),
        versus(
            [FigureComparison("10b", "vllm", OVER_VLLM), SEPARATE],
            LLAMA,
            ["pensieve@4,5.5,7", "vllm@2.5,3.25,4", "pensieve@4,5.5:--batching separate"],
        ),
        versus(
            [FigureComparison("10c", "vllm", OVER_VLLM)],
            OPT,
            ["pensieve@1.8,2.4,3", "vllm@1.3,1.8,2.3"],
            ULTRACHAT,
        ),
        versus(
            [FigureComparison("10d", "vllm", OVER_VLLM)],
            LLAMA,
            ["pensieve@5.5,7,8.5", "vllm@3.25,4.25,5.25"],
            ULTRACHAT,
        ),
        versus([IN_FIRST_SERVED], LLAMA, ["pensieve@5.5", "pensieve@5.5:--link in-first"]),
        versus(
            [FigureComparison("15", "vllm", OVER_VLLM_LATER)],
            LLAMA,
            ["pensieve@2.5,3.1", "vllm@2,2.6"],
            think_s=10 * THINK_S,
        ),
    ),
    "cachedattention": (TIERS, BATCH),
}


def chosen(paper: str, figures: Sequence[str]) -> list[Measurement]:
    return [one for one in MEASUREMENTS[paper] if set(figures) & set(one.figures)]


def needs_engine(paper: str, figures: Sequence[str]) -> bool:
    return any("{engine}" in one.words for one in chosen(paper, figures))


def measure(
    paper: str, figures: Sequence[str], engine: Path | None, vllm: Path | None, directory: Path
) -> Iterator[dict[str, Any]]:
    """Records of the figures that a GPU measures, as soon as a command ends. `vllm`: as `versus`
    has it. Raises SettingError."""
    for number, measurement in enumerate(chosen(paper, figures)):
        output = directory / f"{paper}-{number}"
        words = [
            word.format(engine=engine, output=output, vllm=vllm or sys.executable)
            for word in measurement.words
        ]
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SettingError("--device", f"`{' '.join(words)}` failed: its message is above")
        text = done.stdout + (output.read_text(encoding="utf-8") if output.is_file() else "")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        heading = {
            "paper": paper,
            "how": measurement.how,
            "date": today(),
            "source": " ".join(words),
        }
        for figure, values in measurement.read(lines).items():
            first_values = {name: values.pop(name) for name in IN_FIRST if name in values}
            for record in ({"values": values}, {"values": first_values, "how": "computed"}):
                if figure in figures and record["values"]:
                    yield {**heading, "machine": machine(lines), "figure": figure, **record}


def machine(lines: Lines) -> str:
    """Returns its name in result lines."""
    for line in lines:
        if name := line.get("hardware") or line.get("gpu") or line.get("machine", {}).get("name"):
            return str(name)
    return "a GPU"
