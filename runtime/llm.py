"""The offline API: `LLM` answers prompts and chats in this process, with the engine, scheduler and cache of the server.

    prompts -> RequestBuilder -> EngineLoop.step, again and again -> Reply -> RequestOutput

The caller's thread runs the loop. Histories and the tokenizer are asynchronous: an event loop in a second thread runs
them while the caller's thread waits, so that `LLM` also works where an event loop runs already (in a notebook).
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..builder.build import build_engine
from ..scheduler.types import (
    InvariantError,
    Output,
    RequestError,
    RequestId,
    Sampling,
    SettingError,
    TokenLogprobs,
    Usage,
)
from .conversations.store import HistoryStore
from .conversations.turns import TurnManager
from .frontend.bodies import ChatBody, CompletionBody, parse
from .frontend.caller import Caller
from .frontend.engine_client import outputs
from .frontend.reply import Reply
from .frontend.request_builder import GenerationCall, RequestBuilder
from .launch.assemble import assemble, demo_engine, locked_directories
from .launch.options import ServeSettings, parser, read_chat_template, settings_of
from .loop import EngineLoop
from .messages import Forget, Fork, Keep
from .service import STUCK, forget
from .text.tokenizer import StopMatcher, Tokenizer

Result = TypeVar("Result")
Prompt = str | list[int]
Messages = list[dict[str, Any]]

OPTIONS = frozenset(
    {
        "device",
        "enforce_eager",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "batching",
        "queue_order",
        "gpu_kv_chunks",
        "gpu_kv_bytes",
        "gpu_memory_utilization",
        "host_kv_chunks",
        "host_kv_bytes",
        "disk_kv_chunks",
        "disk_kv_bytes",
        "disk_dir",
        "save",
        "prefetch",
        "lower_tier_kv",
        "chunk_tokens",
        "conversation_ttl",
        "eviction",
        "swap_out_below",
        "generation_reserve",
        "swap_in",
        "link",
        "overflow",
        "overflow_ratio",
        "reuse",
        "chat_template",
    }
)
"""Options of `pensieve serve` that `LLM` takes, by their names without dashes."""

CLOSING_SECONDS = 30.0  # for KV on its way to the disk


@dataclass(frozen=True)
class SamplingParams:
    """How replies are sampled; fields and meanings are vLLM's. RequestError (a ValueError) names a wrong field.

    n                   replies to each prompt
    max_tokens          most tokens of a reply (None: 16 for `generate`, the rest of the context for `chat`)
    temperature         0 is greedy
    logprobs, prompt_logprobs
                        how many of the likeliest tokens are reported with each token of the reply, of the prompt
    structured_outputs  one of json, json_object, regex, choice, grammar, as in the HTTP API
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        _body(CompletionBody, self, prompt="checked")
        Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
        )


def _body(kind: type[Any], params: SamplingParams, **fields: Any) -> Any:
    """The body of the HTTP API that asks for the same."""
    asked = asdict(params) | fields
    if kind is ChatBody:
        asked |= {"logprobs": params.logprobs is not None, "top_logprobs": params.logprobs}
    return parse(kind, json.dumps(asked).encode())


@dataclass(frozen=True)
class Logprob:
    """A token's log probability; `rank` 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One reply, as far as it is there. `finish_reason` None: it goes on. `stop_reason`: the stop string that ended
    it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its replies. `usage`: where the KV of the prompt's tokens came from; `num_cached_tokens` of them
    were not computed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    usage: Usage

    @property
    def num_cached_tokens(self) -> int:
        return self.usage.cached


class _Job:
    """A prompt on its way to its replies."""

    def __init__(self, number: int, prompt: str | None, call: GenerationCall):
        self.number, self.prompt, self.call = number, prompt, call
        self.replies: list[Reply] = []
        self.committed = False

    @property
    def ended(self) -> bool:
        return bool(self.replies) and all(reply.finish is not None for reply in self.replies)


class LLM:
    """An engine in this process. One thread at a time may use it; `close` it, or use it in a `with` statement.

    engine      an engine directory, a checkpoint's directory (an engine is built from it into the user's cache, with
                the reference backend), or "demo"
    state_dir   keeps conversations, and the disk tier if `disk_kv_bytes` asks for one, for later processes; without it
                conversations last as long as the object
    options     `OPTIONS`: as those of `pensieve serve`, with underscores

    TypeError for an unknown option, SettingError (a ValueError) for one that cannot work.
    """

    def __init__(self, engine: str | Path, *, state_dir: str | Path | None = None, **options: Any):
        args = _settings(engine, state_dir, options)
        self._closing = ExitStack()
        with ExitStack() as opened:
            history = ":memory:"
            if state_dir is not None:
                opened.enter_context(locked_directories(args))
                history = str(args.state_dir / "history.sqlite")
            self._scheduler, self._executor, _, _, self._ready = assemble(args)
            opened.callback(self._executor.close)
            # An LLM may be left open: a thread inside torch that outlives Python aborts the process.
            atexit.register(self._executor.close)
            opened.callback(atexit.unregister, self._executor.close)
            template = None if args.chat_template is None else read_chat_template(args.chat_template)
            self._tokenizer = Tokenizer.load(self._ready.tokenizer, template) if self._ready.tokenizer else None
            self._loop = EngineLoop(self._scheduler, self._executor)
            self._events = asyncio.new_event_loop()
            thread = threading.Thread(target=self._events.run_forever, name="llm-events", daemon=True)
            thread.start()
            opened.callback(self._events.close)
            opened.callback(thread.join)
            opened.callback(self._events.call_soon_threadsafe, self._events.stop)
            self._ids = itertools.count(1)
            self._most = args.max_queue
            self._jobs: dict[RequestId, tuple[_Job, Reply]] = {}
            self._late: list[Output] = []  # ends that `finish` brought
            self._erasing: deque[asyncio.Future[bool]] = deque()
            self._histories = TurnManager(HistoryStore(history), self._tell, self._forget, self._tokenizer)
            opened.callback(lambda: self._wait(self._histories.close()))
            self._builder = RequestBuilder(self._ready, self._tokenizer, self._histories, self._new_id)
            opened.callback(self._save)
            self._closing = opened.pop_all()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine, once KV on its way to the disk is there. Idempotent."""
        self._closing.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """The replies to one prompt or several (text or token ids each), in their order.

        conversation    the prompt is a turn of it; one prompt only
        history         "server": the prompt is only what is new, and goes on behind the stored conversation
        use_tqdm        whether to write progress to stderr (None: if it is a terminal)

        RequestError (a ValueError) if a prompt cannot be answered; nothing of the others goes on then.
        """
        jobs = self._completions(prompts, sampling_params, conversation, history)
        return self._all(jobs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one dialogue or several: lists of {"role": ..., "content": ...}."""
        return self._all(self._chats(messages, sampling_params, conversation, history), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
    ) -> Iterator[RequestOutput]:
        """As `generate`, with an output whenever a prompt's replies have grown: all of them so far, the last one
        `finished`. What is not read to its end is aborted."""
        return self._run(self._completions(prompts, sampling_params, conversation, history), grown=True)

    def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
    ) -> Iterator[RequestOutput]:
        """As `stream`, for dialogues."""
        return self._run(self._chats(messages, sampling_params, conversation, history), grown=True)

    # -- from prompts to jobs

    def _completions(
        self, prompts: Any, params: SamplingParams | None, conversation: str | None, history: str
    ) -> list[_Job]:
        several = [prompts] if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)) else list(prompts)
        return self._make(CompletionBody, "prompt", several, params, conversation, history)

    def _chats(
        self, messages: Any, params: SamplingParams | None, conversation: str | None, history: str
    ) -> list[_Job]:
        several = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self._make(ChatBody, "messages", several, params, conversation, history)

    def _make(
        self,
        kind: type[Any],
        name: str,
        prompts: Sequence[Any],
        params: SamplingParams | None,
        conversation: str | None,
        history: str,
    ) -> list[_Job]:
        if conversation is not None and len(prompts) != 1:
            raise RequestError(400, "a conversation takes one prompt at a time", name)
        if self._jobs:
            raise RuntimeError("read the stream that is open to its end, or close it, before the next call")
        jobs: list[_Job] = []
        try:
            for prompt in prompts:
                fields = {name: prompt, "conversation": conversation, "history": history}
                call = self._wait(self._call(_body(kind, params or SamplingParams(), **fields)))
                jobs.append(_Job(len(jobs), prompt if isinstance(prompt, str) else None, call))
        except BaseException:
            _close_turns(jobs)
            raise
        return jobs

    async def _call(self, body: Any) -> GenerationCall:
        arrived, caller = time.perf_counter(), Caller()
        asked = await self._builder.asked(body, caller)
        make = self._builder.chat if isinstance(body, ChatBody) else self._builder.completion
        return await make(body, asked, arrived, caller)

    # -- the loop

    def _all(self, jobs: list[_Job], progress: bool | None) -> list[RequestOutput]:
        shown = sys.stderr.isatty() if progress is None else progress
        done: dict[int, RequestOutput] = {}
        for output in self._run(jobs, grown=False):
            done[int(output.request_id)] = output
            if shown:
                print(f"\r{len(done)} of {len(jobs)} prompts", end="", file=sys.stderr, flush=True)
        if shown:
            print(file=sys.stderr)
        return [done[job.number] for job in jobs]

    def _run(self, jobs: list[_Job], grown: bool) -> Iterator[RequestOutput]:
        """Each job's output when it has ended; with `grown` also whenever there is more of it."""
        waiting = deque(jobs)
        try:
            while waiting or self._jobs:
                while waiting and (not self._jobs or len(self._jobs) + len(waiting[0].call.requests) <= self._most):
                    self._submit(waiting.popleft())
                for job in self._step():
                    if job.ended:
                        self._commit(job)
                    if grown or job.ended:
                        yield self._output(job)
        finally:
            for request in list(self._jobs):
                del self._jobs[request]
                self._scheduler.abort(request, self._loop.clock())
            _close_turns(jobs)

    def _submit(self, job: _Job) -> None:
        call = job.call
        for request in call.requests:
            grammar = request.sampling.grammar
            if grammar is not None and (compiling := self._executor.begin_grammar(grammar)) is not None:
                compiling.result()
            matcher = StopMatcher(call.stops, call.include_stop, request.min_tokens) if call.stops else None
            reply = Reply(
                request,
                self,  # type: ignore[arg-type]  # it needs `finish`
                self._tokenizer,
                matcher,
                continues_prompt=not call.chat,
                include_stop=call.include_stop,
            )
            job.replies.append(reply)
            self._scheduler.add(request, self._loop.clock())
            self._jobs[request.id] = job, reply

    def _step(self) -> list[_Job]:
        """One pass of the loop; the jobs whose replies have grown or ended."""
        applied = self._loop.step()
        for wholly in self._scheduler.disk.take_erased():
            self._events.call_soon_threadsafe(self._erasing.popleft().set_result, wholly)
        if applied is None:
            if self._loop.idle and not self._late:
                self._sleep()
            news: list[Output] = []
        else:
            if applied.stuck:
                raise RequestError(500, STUCK)
            news = list(outputs(applied))
        late, self._late = self._late, []
        grown: dict[_Job, None] = {}
        for output in (*late, *news):
            if output.request not in self._jobs:
                continue  # aborted
            job, reply = self._jobs[output.request]
            reply.add(output)
            if output.finish is not None:
                del self._jobs[output.request]
            grown[job] = None
        return list(grown)

    def _sleep(self) -> None:
        """Until the scheduler wants to plan again. InvariantError if it never does."""
        left = self._scheduler.wake_at - self._loop.clock()
        if left == float("inf"):
            raise InvariantError("requests are open and nothing is left to do")
        time.sleep(max(0.0, left))

    def finish(self, request: RequestId, tokens: int) -> None:
        """For `Reply`: confirms that the reply is its first `tokens` tokens."""
        ended = self._scheduler.finish(request, tokens, self._loop.clock())
        if ended is not None:
            self._late.append(ended)

    def _commit(self, job: _Job) -> None:
        turn, first = job.call.turn, job.replies[0]
        if turn is not None:
            answer = first.message if job.call.chat else None
            self._wait(turn.commit(first.tokens, "".join(first.texts), answer, first.request.salt))

    def _save(self) -> None:
        """Waits for KV on its way to the disk."""
        until = self._loop.clock() + CLOSING_SECONDS
        while (self._scheduler.disk.saving or self._scheduler.in_flight) and self._loop.clock() < until:
            self._loop.step()

    # -- for the histories; called while the caller's thread waits for them

    def _new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def _tell(self, message: Fork | Keep) -> None:
        """A stored conversation has claims of its own."""
        now = self._loop.clock()
        if isinstance(message, Keep) and message.conversation in self._scheduler.conversations:
            self._scheduler.conversations.keep(message.conversation, message.ttl, now + message.pinned, now)

    def _forget(self, message: Forget) -> asyncio.Future[bool]:
        """A stored conversation has expired."""
        erased: asyncio.Future[bool] = self._events.create_future()
        self._erasing.append(erased)
        forget(self._scheduler, message)
        return erased

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._events).result()

    # -- outputs

    def _output(self, job: _Job) -> RequestOutput:
        first, requests = job.replies[0], job.call.requests
        prompt = requests[0].prompt.tolist()
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if requests[0].prompt_logprobs is not None:
            prompt_logprobs = [None, *self._logprobs(prompt[1:], first.prompt_logprobs)]
        return RequestOutput(
            request_id=str(job.number),
            prompt=job.prompt,
            prompt_token_ids=prompt,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(index, reply) for index, reply in enumerate(job.replies)],
            finished=job.ended,
            usage=first.sources,
        )

    def _completion(self, index: int, reply: Reply) -> CompletionOutput:
        scored = reply.request.sampling.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(reply.texts),
            token_ids=list(reply.tokens),
            logprobs=self._logprobs(reply.tokens, reply.logprobs) if scored else None,
            finish_reason=None if reply.reason is None else str(reply.reason),
            stop_reason=reply.stop_string,
        )

    def _logprobs(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
        told = []
        for token, entry in zip(tokens, entries, strict=False):
            top = zip(entry.top_ids, entry.top_logprobs, strict=True)
            likeliest = {other: (logprob, rank) for rank, (other, logprob) in enumerate(top, 1)}
            told.append(
                {
                    other: Logprob(logprob, rank, self._tokenizer.decode([other]) if self._tokenizer else None)
                    for other, (logprob, rank) in ({token: (entry.logprob, entry.rank)} | likeliest).items()
                }
            )
        return told


def _close_turns(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.call.turn is not None:
            job.call.turn.close()


def _settings(engine: str | Path, state_dir: str | Path | None, options: Mapping[str, Any]) -> ServeSettings:
    """As `pensieve serve` would parse them. TypeError for an unknown one, SettingError for a wrong one."""
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"LLM takes no option {sorted(unknown)[0]!r}; it takes {', '.join(sorted(OPTIONS))}")
    words = [f"--engine={engine}"]
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is not None:
            words.append(
                f"--{flag}={value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}"
            )
    made = parser()

    def refuse(message: str) -> NoReturn:
        raise SettingError("LLM", message)

    made.error = refuse  # type: ignore[method-assign]
    args = made.parse_args(words)
    if state_dir is not None:
        args.state_dir = Path(state_dir)
    elif args.disk_kv_bytes is not None or args.disk_kv_chunks:
        raise SettingError("state_dir", "must name a directory: the disk tier is for conversations that are stored")
    args.engine = str(_engine(str(engine), args.device))
    return settings_of(args)


def _engine(engine: str, device: str) -> Path:
    """The directory of an engine, which is built first for "demo" and for a checkpoint."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pensieve"
    if engine == "demo":
        return demo_engine(cache, device)
    directory = Path(engine)
    if (directory / "manifest.json").exists() or not (directory / "config.json").exists():
        return directory  # an engine, or nothing that can be served: opening it says so
    place = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    built = cache / f"{directory.resolve().name}-{place}-{device}"
    build_engine(directory, built, device=device)  # reuses the engine there if it is still this checkpoint's
    return built
