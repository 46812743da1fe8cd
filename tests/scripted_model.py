"""A model that says what a script tells it, served by the real `pensieve serve`.

Only the forward pass is replaced. The KV of a token is the token itself, one number. The forward
pass reads its whole prompt from the KV pool, so a reply is right only if the KV that was reused
is. Scheduler, chunk store, CPU device and HTTP process are the real ones.

    with scripted_server(directory, {"Part one": tool_call("read", path="a.txt")}) as server:

A script has markers, each with a reply. The last marker among the messages since the model's last
reply decides; without one there, the model says OTHERWISE. So a tool's result with a marker in it
shows that it came back. Run as a program, this file is the server's launcher:
`python tests/scripted_model.py SCRIPT serve [options]`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import tokenizers
import torch

from pensieve.builder.build import build_random_engine
from pensieve.builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from pensieve.builder.forward_batch import ForwardBatch
from pensieve.plugins.torch_ops import pool_of
from pensieve.runtime.engine import Engine

CONTEXT = 262_144
CHUNK = 32
OTHERWISE = "Well."
TOKENIZER = DEMO_CHECKPOINT / "tokenizer.json"
BEGIN, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}


def tool_call(name, **arguments):
    """The text with which a Hermes model calls a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def scripted_server(directory: Path, script: Mapping[str, str], *options):
    """A server that is not started yet; the model's name is `scripted`."""
    from .end_to_end.server import Server

    engine = directory / "scripted"
    build_random_engine(DEMO_CHECKPOINT / "config.json", engine, SHAPE, dtype="float32")
    settings = json.loads((DEMO_CHECKPOINT / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "model_max_length": CONTEXT}
    (engine / "tokenizer_config.json").write_text(json.dumps(settings))
    (engine / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    file = directory / "script.json"
    file.write_text(json.dumps(script))
    chunks = 2 * CONTEXT // CHUNK
    return Server(
        directory / "state",
        *("--gpu-kv-chunks", chunks, "--host-kv-chunks", 0, "--chunk-tokens", CHUNK),
        *("--max-num-batched-tokens", 8192, "--max-num-seqs", 8),
        *options,
        engine=engine,
        command=(sys.executable, __file__, file, "serve"),
    )


class Script:
    """Chooses the next token from all tokens before it."""

    def __init__(self, replies: Mapping[str, str]):
        self._replies = replies
        self._tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
        self._begin = self._tokenizer.token_to_id(BEGIN)
        self._end = self._tokenizer.token_to_id(END)
        self._head = len(self._ids(BEGIN + "assistant\n"))
        self._reply = functools.lru_cache(self._reply_to)

    def next_token(self, tokens: torch.Tensor) -> int:
        """tokens: [n] int32, a prompt that ends with the beginning of the assistant's message, and
        the reply so far."""
        start = int((tokens == self._begin).nonzero()[-1]) + self._head
        reply = self._reply(tokens[:start].numpy().tobytes())
        place = len(tokens) - start
        return reply[place] if place < len(reply) else self._end

    def _reply_to(self, prompt: bytes) -> list[int]:
        ids = torch.frombuffer(bytearray(prompt), dtype=torch.int32).tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        return self._ids(self.say(text))

    def say(self, prompt: str) -> str:
        """The reply to a rendered prompt."""
        *before, _ = prompt.split(f"{BEGIN}assistant\n")
        new = before[-1] if len(before) == 1 else before[-1].partition(END)[2]
        marker = max(self._replies, key=new.rfind)
        return self._replies[marker] if marker in new else OTHERWISE

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids


class ScriptedEngine(Engine):
    """Takes the place of `Engine`: KV is the token, logits are the script's."""

    script: Script

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        """Keys and values of one layer, one head and one dimension; only the keys are used."""
        return (slots, 1, 2, 1, chunk_tokens, 1)

    def forward(self, batch: ForwardBatch, pool: int) -> torch.Tensor:
        """Returns logits that leave one token possible in each row."""
        kv = pool_of(pool)
        kv.gate(0)
        keys = kv.tensor[:, 0, 0, 0, :, 0]
        chunk_tokens = keys.shape[1]
        written = batch.slots >= 0
        slot = batch.slots[written]
        keys[slot // chunk_tokens, slot % chunk_tokens] = batch.token_ids[written].to(keys.dtype)
        logits = torch.zeros(len(batch.sample_rows), self.vocab_size)
        for row, sampled in enumerate(batch.sample_rows.tolist()):
            for q_start, q_len, _, kv_len, seat in batch.segments.tolist():
                if q_start <= sampled < q_start + q_len:
                    length = kv_len - q_len + sampled - q_start + 1
                    blocks = batch.block_table[seat, : -(-length // chunk_tokens)]
                    tokens = keys[blocks].flatten()[:length].int()
                    logits[row, self.script.next_token(tokens)] = 1000.0
        return logits


if __name__ == "__main__":
    from pensieve.runtime.launch import assemble
    from pensieve.scripts.pensieve import main

    _, script, *words = sys.argv
    ScriptedEngine.script = Script(json.loads(Path(script).read_text()))
    open_engine = assemble.open_engine

    def open_scripted(*arguments, **options):
        engine = open_engine(*arguments, **options)
        engine.__class__ = ScriptedEngine
        return engine

    assemble.open_engine = open_scripted
    sys.exit(main(words))
