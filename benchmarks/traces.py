"""Reads conversations to be played against a server, from several forms of traces.

* lengths and text: see `scripts/simulation/traces.py`
* Mooncake, one request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (a
  block of 512 tokens each, the last one shorter). Requests with equal ids have equal tokens; the
  trace does not tell which request continues which.
* vLLM's `benchmarks/multi_turn` (.json): a list of `{id, messages}`, or its settings for generated
  conversations (`"filetype": "generate_conversations"`)

If a form has no think times they are drawn from an exponential distribution.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pensieve.scheduler.sim.simulator import Session, SessionTurn
from pensieve.scheduler.types import SettingError
from pensieve.scripts.simulation.trace_lines import Natural, Positive, checked
from pensieve.scripts.simulation.traces import (
    Dialogue,
    Encode,
    SyntheticTokens,
    parse_json,
    read_lines,
    read_rows,
    synthetic_dialogue,
    text_dialogues,
)

BLOCK_TOKENS = 512  # Mooncake's
MEDIAN_RATIO = 0.85  # of a lognormal that vLLM's settings describe only by its average


class MooncakeLine(BaseModel, strict=True):
    timestamp: Natural
    input_length: Positive
    output_length: Positive
    hash_ids: list[int]


def read_dialogues(
    path: Path, *, encode: Encode | None, think_s: float, seed: int
) -> list[Dialogue]:
    """The trace's conversations. `encode` is needed for text, `think_s` (mean, seconds) if the
    trace has no times.

    SettingError names the file and place that cannot be read, or `--tokenizer` if it is missing.
    """
    draw = random.Random(seed)
    if ".json" in path.suffixes:
        dialogues = _vllm(path, encode, think_s, draw)
    else:
        dialogues = _json_lines(path, encode, think_s, draw)
    if not dialogues:
        raise SettingError("--trace", f"{path} holds no conversations")
    if len({dialogue.start_s is None for dialogue in dialogues}) > 1:
        raise SettingError(
            "--trace", f"{path}: some conversations have an arrival_s and some have none"
        )
    return dialogues


def _json_lines(
    path: Path, encode: Encode | None, think_s: float, draw: random.Random
) -> list[Dialogue]:
    where, line = next(read_lines(path), ("", "{}"))
    first = parse_json(line, where)
    if not isinstance(first, dict):
        raise SettingError("--trace", f"{where}: needs an object")
    if "hash_ids" in first:
        return [
            _mooncake(line, where, index) for index, (where, line) in enumerate(read_lines(path))
        ]
    if "messages" in first:
        objects = [(parse_json(line, where), where) for where, line in read_lines(path)]
        return text_dialogues(objects, "conversation", encode, think_s, draw)
    return [synthetic_dialogue(session, arrival) for session, arrival in read_rows(path)]


def _mooncake(text: str, where: str, index: int) -> Dialogue:
    line = checked(MooncakeLine, text, where)
    tokens, blocks = line.input_length, line.hash_ids
    if len(blocks) != -(-tokens // BLOCK_TOKENS):
        raise SettingError(
            "--trace", f"{where}: {len(blocks)} hash_ids for {tokens} tokens, {BLOCK_TOKENS} each"
        )
    pieces = tuple(
        SyntheticTokens(min(BLOCK_TOKENS, tokens - place * BLOCK_TOKENS), f"block {block}")
        for place, block in enumerate(blocks)
    )
    return Dialogue(
        f"m{index}", line.timestamp / 1e3, (SessionTurn(0, tokens, line.output_length),), (pieces,)
    )


def _vllm(path: Path, encode: Encode | None, think_s: float, draw: random.Random) -> list[Dialogue]:
    value = parse_json("".join(line for _, line in read_lines(path)), str(path))
    if isinstance(value, list):
        objects = [(item, f"{path}, conversation {number}") for number, item in enumerate(value)]
        return text_dialogues(objects, "id", encode, think_s, draw)
    if not isinstance(value, dict) or value.get("filetype") != "generate_conversations":
        raise SettingError(
            "--trace", f"{path}: needs a list of conversations or filetype generate_conversations"
        )
    return list(_generated(value, path, think_s, draw))


def _generated(
    settings: dict[str, Any], path: Path, think_s: float, draw: random.Random
) -> Iterator[Dialogue]:
    """Made-up conversations of these distributions. `num_turns` counts both sides' messages."""
    count = settings.get("num_conversations")
    if not isinstance(count, int) or count < 1:
        raise SettingError(
            "--trace",
            f"{path}: num_conversations must be a whole number of at least 1, not {count!r}",
        )

    def sample(section: str, name: str, least: int) -> int:
        return max(
            least, _sample(settings.get(section, {}).get(name), f"{path}: {section}.{name}", draw)
        )

    common = settings.get("prompt_input", {}).get("common_prefix_num_tokens")
    shared = 0 if common is None else sample("prompt_input", "common_prefix_num_tokens", 0)
    for index in range(count):
        turns: list[SessionTurn] = []
        history = 0
        for _ in range((sample("prompt_input", "num_turns", 1) + 1) // 2):
            prefix = 0 if turns else shared + sample("prompt_input", "prefix_num_tokens", 0)
            given = prefix + sample("prompt_input", "num_tokens", 1)
            reply = sample("prompt_output", "num_tokens", 1)
            turns.append(
                SessionTurn(history, given, reply, draw.expovariate(1 / think_s) if turns else 0.0)
            )
            history += given + reply
        yield synthetic_dialogue(Session(f"v{index}", 0.0, tuple(turns), shared))


def _sample(distribution: Any, where: str, draw: random.Random) -> int:
    """A whole number; at most the distribution's `max`."""
    try:
        kind = distribution["distribution"]
        if kind == "constant":
            return int(distribution["value"])
        if kind == "uniform":
            return draw.randint(distribution["min"], distribution["max"])
        if kind == "zipf":
            values = range(1, distribution["max"] + 1)
            return draw.choices(values, [value ** -distribution["alpha"] for value in values])[0]
        if kind == "poisson":
            value = _poisson(distribution["alpha"], draw)
        elif kind == "lognormal":
            value = round(draw.lognormvariate(*_lognormal(distribution)))
        else:
            raise SettingError(
                "--trace", f"{where}: {kind!r} is no distribution that is known here"
            )
        return min(value, distribution.get("max") or value)
    except (TypeError, KeyError, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(
            "--trace", f"{where}: not a distribution: {distribution!r} ({error})"
        ) from error


def _lognormal(distribution: dict[str, Any]) -> tuple[float, float]:
    """(mean, sigma) of the normal below it. median / average = exp(-sigma^2 / 2)."""
    if "average" not in distribution:
        return distribution["mean"], distribution["sigma"]
    sigma = math.sqrt(-2 * math.log(distribution.get("median_ratio") or MEDIAN_RATIO))
    return math.log(distribution["average"]) - sigma**2 / 2, sigma


def _poisson(mean: float, draw: random.Random) -> int:
    """Events of a Poisson process of rate 1 in `mean` seconds."""
    count = 0
    now = draw.expovariate(1)
    while now < mean:
        count = count + 1
        now = now + draw.expovariate(1)
    return count
