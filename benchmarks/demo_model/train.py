"""Trains the demo models, a Llama and an OPT of about 5 million parameters that chat in simple
English.

Writes ordinary Hugging Face checkpoints in bfloat16, OUTPUT/llama and OUTPUT/opt.
docs/use/demo-model.md tells where the text comes from and how the models in the repository were
trained. Needs `transformers` (the `test` extra).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

from .data import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, VOCABULARY, Corpus, Ids, Rows

KINDS = ("llama", "opt")
CONTEXT = {"llama": 4096, "opt": 2048}
SHORT = 2048  # length of the rows for most of the training; its last quarter uses the whole context
LAST_PART = 0.75
# of the tokens seen; all chat files together have one share
SHARES = {"chats": 0.3, "wordnet": 0.2, "written": 0.5}
MEASURED_ROWS = 64  # at most, of each source
BLOCK_OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")


def make_model(kind: str, stop: list[int]) -> PreTrainedModel:
    """An untrained model. Both have heads of 64 dimensions and tied embeddings."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "max_position_embeddings": CONTEXT[kind],
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": stop,
        "pad_token_id": None,  # a padding row in the embedding would never learn
        "attention_dropout": 0.0,
    }
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=6,
                intermediate_size=576,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=64,
                **common,
            )
        )
    return OPTForCausalLM(
        OPTConfig(num_hidden_layers=6, ffn_dim=1024, num_attention_heads=4, dropout=0.0, **common)
    )


def add_dropout(model: PreTrainedModel, share: float) -> None:
    """Drops `share` of the output of attention and MLP into the residual stream (Llama has no such
    setting)."""

    def drop(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, share, module.training)

    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in BLOCK_OUTPUTS:
            module.register_forward_hook(drop)


def make_optimizer(model: PreTrainedModel, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; biases, norms and embeddings do not decay."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    decayed = [p for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings]
    others = [p for p in model.parameters() if p.dim() != 2 or id(p) in embeddings]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises linearly for 3% of the steps, then falls along a cosine to 3% of the peak."""
    warm_up = max(1, steps * 3 // 100)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    fallen = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * fallen)))


def token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross entropy of each next token, nats; ids [rows, length]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: nn.Module, rows: list[Ids], device: torch.device) -> float:
    """Mean loss of all rows, which have equal lengths, without dropout; four at a time to save
    memory."""
    model.eval()
    batches = [rows[start : start + 4] for start in range(0, len(rows), 4)]
    total = sum(
        token_loss(model, torch.tensor(batch, device=device)).item() * len(batch)
        for batch in batches
    )
    model.train()
    return total / len(rows)


def source_shares(corpus: Corpus) -> dict[str, float]:
    """SHARES, with the share of the chats divided among their files by size."""
    chats = {name: sum(map(len, ids)) for name, ids in corpus.train.items() if name not in SHARES}
    shares = {name: SHARES[name] for name in corpus.train if name in SHARES}
    return shares | {
        name: SHARES["chats"] * size / sum(chats.values()) for name, size in chats.items()
    }


def train(kind: str, corpus: Corpus, args: argparse.Namespace) -> PreTrainedModel:
    """Trains from scratch and returns the state of the last quarter that was best on the held-out
    chats."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    stop = [corpus.token_id(text) for text in (TURN_END, END_OF_TEXT)]
    model = make_model(kind, stop)
    model.to(device)  # type: ignore[arg-type]  # its decorator hides `self`
    add_dropout(model, args.dropout)
    runner: Any = torch.compile(model, dynamic=False) if args.compile else model
    optimizer = make_optimizer(model, args.weight_decay)
    rows = Rows(corpus, source_shares(corpus), args.seed)
    watched = [
        row
        for name, chats in corpus.held_out.items()
        if name not in SHARES
        for row in corpus.packed(chats, args.row_tokens)
    ]
    best = math.inf
    best_state = model.state_dict()
    start = time.perf_counter()

    for step in range(args.steps):
        last_part = step >= args.steps * LAST_PART
        length = CONTEXT[kind] * args.row_tokens // SHORT if last_part else args.row_tokens
        batch = [rows.next(length) for _ in range(max(1, args.batch_tokens // length))]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        loss = token_loss(runner, torch.tensor(batch, device=device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.eval_every and step + 1 < args.steps:
            continue
        held_out = mean_loss(model, watched, device)
        if last_part and held_out < best:
            best = held_out
            best_state = {
                name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()
            }
        seconds = time.perf_counter() - start
        losses = f"loss {loss.item():.3f}, held-out chats {held_out:.3f}"
        print(f"{kind} step {step + 1}: {losses}, {seconds:.0f} s", flush=True)

    model.load_state_dict(best_state)
    return model


def perplexities(
    model: PreTrainedModel, corpus: Corpus, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """By source: perplexity per token on the held-out chats and on about as many training chats."""
    result: dict[str, dict[str, float]] = {}
    for name, away in corpus.held_out.items():
        result[name] = {}
        for part, chats in (("train", corpus.train[name][: len(away)]), ("held_out", away)):
            rows = corpus.packed(chats, args.row_tokens)[:MEASURED_ROWS]
            result[name][part] = round(
                math.exp(mean_loss(model, rows, torch.device(args.device))), 3
            )
    return result


def save(model: PreTrainedModel, corpus: Corpus, directory: Path, context: int) -> None:
    """A checkpoint directory as from_pretrained, build_engine and chat templates expect it."""
    model.to(torch.bfloat16).save_pretrained(directory)  # type: ignore[arg-type]
    corpus.tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {
        "eos_token_id": model.config.eos_token_id,
        "pad_token_id": corpus.tokenizer.token_to_id(END_OF_TEXT),
    }
    for name, value in (
        ("tokenizer_config", tokenizer_config),
        ("generation_config", generation_config),
    ):
        (directory / f"{name}.json").write_text(
            json.dumps(value, indent=2) + "\n", encoding="utf-8"
        )


def make(kind: str, corpus: Corpus, args: argparse.Namespace) -> None:
    """Trains, measures and saves one model; prints its report as one line of JSON."""
    model = train(kind, corpus, args)
    report = {
        "model": kind,
        "parameters": model.num_parameters(),
        "steps": args.steps,
        "perplexity": perplexities(model, corpus, args),
    }
    save(model, corpus, args.output / kind, CONTEXT[kind])
    print(json.dumps(report), flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demo_model.train", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="gets a directory a model"
    )
    parser.add_argument(
        "--chats",
        required=True,
        type=Path,
        nargs="+",
        metavar="FILE",
        help="*.jsonl.gz with {conversation, messages: [{role, content}]} a line",
    )
    parser.add_argument(
        "--wordnet",
        required=True,
        type=Path,
        metavar="DIR",
        help="WordNet 3.0 with data.noun ... and cntlist.rev",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="which to train (default: both)",
    )
    parser.add_argument(
        "--steps", type=int, default=2400, help="optimizer steps (default %(default)s)"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=32768, help="tokens a step (default %(default)s)"
    )
    parser.add_argument(
        "--row-tokens",
        type=int,
        default=SHORT,
        help="tokens a row; less only to try things (default %(default)s)",
    )
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="at its peak (default %(default)s)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.2, help="in the residual branches (default %(default)s)"
    )
    parser.add_argument(
        "--weight-decay", type=float, default=0.1, help="of the matrices (default %(default)s)"
    )
    parser.add_argument(
        "--eval-every", type=int, default=100, metavar="STEPS", help="(default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="(default %(default)s)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="(default %(default)s)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="use torch.compile: slower start, faster steps"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("demo_model.train", lambda: run(args), (SettingError, FileNotFoundError))


def run(args: argparse.Namespace) -> None:
    corpus = Corpus(args.chats, args.wordnet, args.seed)
    sizes = {name: sum(map(len, chats)) for name, chats in corpus.train.items()}
    print(f"training tokens: {sizes}", flush=True)
    for kind in args.models:
        make(kind, corpus, args)


if __name__ == "__main__":
    sys.exit(main())
