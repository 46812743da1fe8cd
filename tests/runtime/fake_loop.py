"""The other end of the HTTP process's pipe: a thread that answers requests with tokens computed by
hand.

Also a byte-level tokenizer of 260 tokens: 0 <pad>, 1 <s>, 2 </s>, 3 unused, 4 + b the byte b.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from pensieve.runtime.messages import (
    Abort,
    Drain,
    Erased,
    Fatal,
    Finish,
    Forget,
    Look,
    Ready,
    StepMessage,
    Submit,
)
from pensieve.scheduler.types import (
    Applied,
    ConversationKV,
    Erasure,
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RequestId,
    Residency,
    RowResult,
    TokenLogprobs,
    Usage,
)

FIRST_BYTE = 4
EOS = 2
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'stranger' %}{{ raise_exception('no strangers here') }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def byte_tokens(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def byte_tokenizer() -> tokenizers.Tokenizer:
    signs = pre_tokenizers.ByteLevel.alphabet()
    # The alphabet's signs in the order of the bytes they stand for: printable bytes stand for
    # themselves.
    plain = [
        byte
        for byte in range(256)
        if chr(byte) in signs and byte not in range(128, 161) and byte != 173
    ]
    others = [byte for byte in range(256) if byte not in plain]
    sign = {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + at) for at, byte in enumerate(others)
    }
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unused>": 3}
    vocabulary |= {sign[byte]: FIRST_BYTE + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save_tokenizer(directory: Path) -> Path:
    """A tokenizer directory as an engine has it."""
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def ready(tokenizer: str = "", max_model_len: int = 256) -> Ready:
    return Ready("fake", max_model_len, 260, (EOS,), tokenizer, 32, 100)


MOST_SEEN = 2000  # tokens of a prompt; of longer ones the rest is truncated

Answers = Callable[[Request], Sequence[int]]


def echo(request: Request) -> Sequence[int]:
    """The prompt again, without its special tokens, then end of sequence."""
    return [token for token in request.prompt if token >= FIRST_BYTE] + [EOS]


def say(text: str) -> Answers:
    return lambda _: [*byte_tokens(text), EOS]


def fake_logprobs(token: int, top: int) -> TokenLogprobs:
    """The token's is minus its id; the likeliest tokens are the ids from 10 on."""
    ids = tuple(range(10, 10 + top))
    return TokenLogprobs(-float(token), token, ids, tuple(-0.5 * id for id in ids))


def eventually(happened: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)


def step_message(*results: RowResult, **others: Any) -> StepMessage:
    """The loop's message: rows with tokens only in two arrays."""
    plain = [row for row in results if row == RowResult(row.request, row.tokens)]
    requests = array("q", [row.request for row in plain for _ in row.tokens])
    tokens = array("i", [token for row in plain for token in row.tokens])
    return StepMessage(
        Applied(requests, tokens, tuple(row for row in results if row not in plain)), **others
    )


class FakeLoop:
    """Serves in a thread: each running request gets one token in each step.

    step_seconds    seconds of a step
    queue           requests that may be open at once; more are refused with 429
    dies_with       Fatal is sent once this many requests run and each has got a token
    log             the HTTP side's messages, in order
    confirmed       token counts by request, from `Finish`
    erasure         the answer to deletions; None: no answer
    pauses_behind   after this many tokens of a reply, pauses once like `pause`
    """

    def __init__(
        self,
        answers: Answers = echo,
        step_seconds: float = 0.0,
        queue: int = 100,
        dies_with: int | None = None,
    ):
        self.client_end, self._pipe = multiprocessing.Pipe()
        self.log: list[Submit | Abort | Finish | Drain] = []
        self.confirmed: dict[RequestId, int] = {}
        self.erasure: Erasure | None = Erasure.WHOLLY
        self.pauses_behind: int | None = None
        self._answers = answers
        self._step_seconds = step_seconds
        self._queue = queue
        self._dies_with = dies_with
        self._running: dict[RequestId, tuple[Request, deque[int], int]] = {}
        self._paused = threading.Event()
        self._pausing = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends like the real loop, even with open requests: sends nothing more, but receives the
        other side's messages.

        The log is complete once that side has closed its end too and `join` has returned.
        """
        self._ended.set()

    def join(self) -> None:
        self._thread.join()

    def pause(self) -> None:
        """Accepts requests, but sends no tokens until `go_on`: open requests stay open."""
        self._paused.set()

    def go_on(self) -> None:
        """A pause of `pauses_behind` that has not come yet does not come any more."""
        with self._pausing:
            self.pauses_behind = None
            self._paused.clear()

    def say(self, message: object) -> None:
        self._pipe.send(message)

    def messages(self, kind: type, at_least: int = 0) -> list[object]:
        """The messages of this kind so far, once there are at least `at_least` (they arrive by a
        thread)."""
        until = time.monotonic() + 60
        while (
            len(messages := [message for message in self.log if isinstance(message, kind)])
            < at_least
        ):
            assert time.monotonic() < until, (
                f"only {len(messages)} of {at_least} {kind.__name__} arrived"
            )
            time.sleep(0.001)
        return messages

    def _serve(self) -> None:
        self._run()
        with contextlib.suppress(EOFError, OSError):
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
                end.shutdown(socket.SHUT_WR)
            while True:  # until the other side closes too
                self._note(self._pipe.recv())
        self._pipe.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            outputs = self._hear()
            if not self._paused.is_set():
                if self._running and self._ended.wait(self._step_seconds):
                    return
                outputs += self._step()
            if outputs:
                self._pipe.send(step_message(*outputs))
            if sum(count > 0 for _, _, count in self._running.values()) == self._dies_with:
                self._pipe.send(Fatal("the books disagree"))
                return

    def _note(self, received: Any) -> list[Any]:
        messages = received if isinstance(received, list) else [received]
        self.log += messages
        self.confirmed |= {
            message.request: message.tokens for message in messages if isinstance(message, Finish)
        }
        return messages

    def _hear(self) -> list[RowResult]:
        outputs: list[RowResult] = []
        while self._pipe.poll(0 if self._running and not self._paused.is_set() else 0.005):
            try:
                received = self._pipe.recv()
            except (EOFError, OSError):
                self._ended.set()
                break
            for message in self._note(received):
                self._answer(message, outputs)
        return outputs

    def _answer(self, message: object, outputs: list[RowResult]) -> None:
        match message:
            case Submit(request) if len(self._running) < self._queue:
                self._running[request.id] = (request, deque(self._answers(request)), 0)
            case Submit(request):
                outputs.append(
                    RowResult(
                        request.id, error=RequestError(ErrorKind.TOO_MANY, "the queue is full")
                    )
                )
            case Abort(request):
                self._running.pop(request, None)
            case Look():
                self._pipe.send(
                    Residency(
                        32, [ConversationKV("c", {"gpu": 1, "host": 2, "disk": 4, "dropped": 3})], 0
                    )
                )
            case Forget() if self.erasure is not None:
                self._pipe.send(Erased(self.erasure))
            case Finish(request, _):
                if self._running.pop(request, None) is not None:
                    outputs.append(RowResult(request, (), FinishReason.STOP))

    def _step(self) -> Iterator[RowResult]:
        for id, (request, rest, count) in list(self._running.items()):
            token = rest.popleft() if rest else EOS
            count += 1
            with self._pausing:
                if count == self.pauses_behind:
                    self.pauses_behind = None
                    self.pause()
            finish = None
            if token in request.stop_ids and count >= request.min_tokens:
                finish = FinishReason.STOP
            elif count == request.max_tokens:
                finish = FinishReason.LENGTH
            usage = Usage(gpu=len(request.prompt) - 1, new=1) if count == 1 else None
            top = request.sampling.logprobs
            prompt_top = request.prompt_logprobs if count == 1 else None
            logprobs = () if top is None else (fake_logprobs(token, top),)
            prompt = (
                ()
                if prompt_top is None
                else [fake_logprobs(own, prompt_top) for own in request.prompt[1:]]
            )
            unseen = max(0, len(request.prompt) - MOST_SEEN) if usage or finish else 0
            yield RowResult(
                id,
                (token,),
                finish,
                usage,
                logprobs=logprobs,
                prompt_logprobs=tuple(prompt),
                truncated=unseen,
            )
            if finish is None:
                self._running[id] = (request, rest, count)
            else:
                del self._running[id]
