"""The offline API: `LLM` answers prompts and chats in this process, with the server's engine,
scheduler and cache.

    prompts -> RequestBuilder -> EngineSession.step, repeatedly -> Reply -> RequestOutput

The caller's thread runs the loop. Histories and the tokenizer are asynchronous: an event loop in a
second thread runs them while the caller's thread waits. So `LLM` also works where an event loop is
already running (in a notebook).
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..builder.progress import is_terminal
from ..scheduler.types import Erasure, ErrorKind, RequestError, RequestId, SettingError
from .conversations.store import HistoryStore
from .conversations.turns import TurnManager
from .engine_session import EngineSession
from .frontend.bodies import ChatBody, CompletionBody
from .frontend.calls import Caller, GenerationCall
from .frontend.reply import Reply
from .frontend.reply_forms import reply_forms
from .frontend.request_builder import RequestBuilder
from .launch.assemble import assemble, locked_directories
from .launch.http_options import read_chat_template
from .launch.settings import DEFAULT_HOST_KV, HISTORY_FILE
from .messages import SAMPLING_DEFAULTS, Forget, Fork, Keep
from .observe.logs import shown_while_open
from .offline.outputs import CompletionOutput, Logprob, RequestOutput, request_output
from .offline.params import SamplingParams, body_of
from .offline.prompts import (
    Messages,
    OfflinePrompt,
    Params,
    Prompt,
    read_dialogues,
    read_params,
    read_prompts,
    read_template,
)
from .offline.settings import model_engine, read_settings
from .system import hold_streams
from .text.tokenizer import ChatTemplate, Tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

Result = TypeVar("Result")

CLOSING_SECONDS = 30.0  # seconds for spilling KV to the disk

log = logging.getLogger(__name__)


class _Job:
    """A prompt in progress, with its replies."""

    def __init__(self, number: int, prompt: str | None, call: GenerationCall):
        self.number = number
        self.prompt = prompt
        self.call = call
        self.replies: list[Reply] = []

    @property
    def ended(self) -> bool:
        return bool(self.replies) and all(reply.finish is not None for reply in self.replies)


class LLM:
    """An engine in this process. One thread at a time may use it. Call `close`, or use it in a
    `with` statement.

    model       an engine directory, a checkpoint's directory or GGUF file (its engine is found in
                the user's cache or built there), or "demo"
    dtype, quantization, backend
                of the engine of a checkpoint, as in `engine_for`
    state_dir   keeps conversations for later processes, and also their KV if `disk_kv_bytes` asks
                for a disk tier; without it conversations last as long as the object
    options     `OPTIONS`: the options of `pensieve serve`, with underscores

    TypeError for an unknown option, SettingError (a ValueError) for an impossible value.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        backend: str | None = None,
        tensor_parallel_size: int = 1,
        state_dir: str | Path | None = None,
        **options: Any,
    ):
        if tensor_parallel_size != 1:
            raise SettingError(
                "tensor_parallel_size",
                "must be 1 in one process; several ranks need `pensieve serve`",
            )
        hold_streams()
        args = read_settings(model, state_dir, options)
        self._closing = ExitStack()
        with shown_while_open(), ExitStack() as opened:
            began = time.monotonic()
            engine = model_engine(
                model, dtype=dtype, quantization=quantization, backend=backend, device=args.device
            )
            args = replace(args, engine=str(engine))
            if args.host_grows:  # other programs of the machine come first
                args = replace(args, host_kv_bytes=DEFAULT_HOST_KV)
            history = ":memory:"
            if state_dir is not None:
                opened.enter_context(locked_directories(args))
                history = str(args.state_directory / HISTORY_FILE)
            assembled = assemble(args)
            scheduler = assembled.scheduler
            executor = assembled.executor
            self._ready = assembled.ready
            opened.callback(executor.close)
            # If an LLM stays open, a thread inside torch that outlives Python aborts the process.
            atexit.register(executor.close)
            opened.callback(atexit.unregister, executor.close)
            self._session = EngineSession(scheduler, executor)
            template = (
                None if args.chat_template is None else read_chat_template(args.chat_template)
            )
            self._tokenizer = (
                Tokenizer.load(self._ready.tokenizer, template) if self._ready.tokenizer else None
            )
            self._events = asyncio.new_event_loop()
            thread = threading.Thread(
                target=self._events.run_forever, name="llm-events", daemon=True
            )
            thread.start()
            opened.callback(self._events.close)
            opened.callback(thread.join)
            opened.callback(self._events.call_soon_threadsafe, self._events.stop)
            self._ids = itertools.count(1)
            self._most = args.max_queue
            self._jobs: dict[RequestId, tuple[_Job, Reply]] = {}
            self._running = False  # from the making of a call's prompts to their end
            self._histories = self._wait(self._open_histories(history))
            opened.callback(lambda: self._wait(self._histories.close()))
            # each SamplingParams is whole: it has no defaults of the checkpoint, and no limit
            ready = replace(self._ready, sampling=SAMPLING_DEFAULTS)
            forms = reply_forms(self._tokenizer, args.reasoning_parser)
            # replies stay whole, as in vLLM
            self._builder = RequestBuilder(
                ready, self._tokenizer, self._histories, self._new_id, forms, divides=False
            )
            opened.callback(self._session.spill, CLOSING_SECONDS)
            self._closing = opened.pop_all()
            log.info("ready after %.1f s", time.monotonic() - began)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine after its KV is spilled to the disk. Idempotent."""
        self._closing.close()

    def get_tokenizer(self) -> Any:
        """Returns the model's tokenizer, with its own chat template, as an object of the package
        transformers, which must be installed. RequestError if the engine has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError(ErrorKind.INVALID, "this engine has no tokenizer")
        return importlib.import_module("transformers").AutoTokenizer.from_pretrained(
            self._ready.tokenizer
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters of calls without any: those that the checkpoint's
        generation_config.json gives, else the API's."""
        given = self._ready.sampling._asdict()
        if given["max_tokens"] is None:
            del given["max_tokens"]
        return SamplingParams(**given)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Returns the replies to one prompt or several (text or token ids each), in their order.

        sampling_params one for all prompts, or a list with one for each; None: the default ones
        conversation    the prompt is a turn of this conversation; one prompt only
        history         "server": the prompt contains only new text and continues the stored
                        conversation
        use_tqdm        True: writes progress to stderr; None: if it is a terminal

        RequestError (a ValueError) if a prompt cannot be answered; the other prompts are then
        aborted.
        """
        jobs = self._completions(prompts, sampling_params, conversation, history)
        return self._all(jobs, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
        chat_template: str | Path | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates like `generate`, for one dialogue or several, each a list of {"role": ...,
        "content": ...}.

        chat_template           the text of a template, or the path of its file; None: the model's
        add_generation_prompt   the prompt ends with the beginning of the reply's message; None:
                                unless `continue_final_message`
        continue_final_message  the reply goes on from the text of the last message
        chat_template_kwargs    variables for the chat template, as {"enable_thinking": False}
        tools                   functions in OpenAI's form, for the chat template

        A reply's thoughts and its calls of tools stay in its text.
        """
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        jobs = self._chats(messages, sampling_params, conversation, history, chat_template, more)
        return self._all(jobs, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
    ) -> Iterator[RequestOutput]:
        """Generates like `generate`, but yields an output each time a prompt's replies grow. It
        holds the whole replies so far; the last one is `finished`. Prompts are aborted if the
        iterator is closed early."""
        return self._run(
            self._completions(prompts, sampling_params, conversation, history), grown=True
        )

    def stream_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params | None = None,
        *,
        conversation: str | None = None,
        history: str = "client",
        chat_template: str | Path | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> Iterator[RequestOutput]:
        """Streams like `stream`, for dialogues; the other arguments are those of `chat`."""
        more = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        jobs = self._chats(messages, sampling_params, conversation, history, chat_template, more)
        return self._run(jobs, grown=True)

    # -- from prompts to jobs

    def _completions(
        self, prompts: Any, params: Params | None, conversation: str | None, history: str
    ) -> list[_Job]:
        return self._make(
            CompletionBody, "prompt", read_prompts(prompts), params, conversation, history
        )

    def _chats(
        self,
        messages: Any,
        params: Params | None,
        conversation: str | None,
        history: str,
        chat_template: str | Path | None,
        more: dict[str, Any],
    ) -> list[_Job]:
        dialogues = read_dialogues(messages, more)
        template = None
        if chat_template is not None and self._tokenizer is not None:
            template = read_template(chat_template, self._tokenizer)
        return self._make(ChatBody, "messages", dialogues, params, conversation, history, template)

    def _make(
        self,
        kind: type[Any],
        name: str,
        prompts: Sequence[OfflinePrompt],
        params: Params | None,
        conversation: str | None,
        history: str,
        template: ChatTemplate | None = None,
    ) -> list[_Job]:
        self._check_open()
        each = read_params(params, len(prompts), self.get_default_sampling_params())
        if conversation is not None and len(prompts) != 1:
            raise RequestError(ErrorKind.INVALID, "a conversation takes one prompt at a time", name)
        if self._running:
            raise RuntimeError(
                "read the stream that is open to its end, or close it, before the next call"
            )
        self._wait(self._histories.expire_some())
        jobs: list[_Job] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                fields = prompt.fields | {"conversation": conversation, "history": history}
                call = self._wait(self._call(kind, own, fields, template))
                jobs.append(_Job(len(jobs), prompt.text, call))
        except BaseException:
            _close_turns(jobs)
            raise
        return jobs

    async def _call(
        self,
        kind: type[Any],
        params: SamplingParams,
        fields: dict[str, Any],
        template: ChatTemplate | None,
    ) -> GenerationCall:
        arrived = time.perf_counter()
        caller = Caller()
        body = body_of(kind, params, **fields, max_tokens=None)
        generate = replace(
            body.generate(),
            default_limit=params.max_tokens,
            most_tool_calls=0,  # they stay in the text
            template=template,
        )
        generate = await self._builder.check_form(generate, caller)
        if generate.form is not None and generate.form.remarks:
            log.warning("not enforced: %s", ", ".join(generate.form.remarks))
        writer = body.writer(self._ready.model, self._tokenizer)
        return await self._builder.call(generate, writer, arrived, caller)

    # -- the loop

    def _all(self, jobs: list[_Job], progress: bool | None) -> list[RequestOutput]:
        shown = is_terminal(sys.stderr) if progress is None else progress
        done: dict[int, RequestOutput] = {}
        for output in self._run(jobs, grown=False):
            done[int(output.request_id)] = output
            if shown:
                print(f"\r{len(done)} of {len(jobs)} prompts", end="", file=sys.stderr, flush=True)
        if shown:
            print(file=sys.stderr)
        return [done[job.number] for job in jobs]

    def _run(self, jobs: list[_Job], grown: bool) -> Iterator[RequestOutput]:
        """Yields each job's output when it has ended; with `grown` also each time it grows."""
        outputs = self._outputs(jobs, grown)
        next(outputs)  # an iterator that is closed before it has begun would not end its jobs
        return outputs

    def _outputs(self, jobs: list[_Job], grown: bool) -> Iterator[Any]:
        """Yields None once, then what `_run` yields."""
        waiting = deque(jobs)
        self._running = True
        try:
            yield None
            while waiting or self._jobs:
                while waiting and (
                    not self._jobs or len(self._jobs) + len(waiting[0].call.requests) <= self._most
                ):
                    self._submit(waiting.popleft())
                for job in self._step():
                    if job.ended and job.call.turn is not None:
                        self._wait(job.call.commit(job.replies))
                    if grown or job.ended:
                        yield request_output(job.number, job.prompt, job.replies, self._tokenizer)
        finally:
            self._running = False
            for request in list(self._jobs):
                del self._jobs[request]
                self._session.abort(request)
            _close_turns(jobs)

    def _submit(self, job: _Job) -> None:
        job.replies = job.call.replies(self, self._tokenizer)  # type: ignore[arg-type]  # replies need `finish`
        for reply in job.replies:
            self._session.add(reply.request)
            self._jobs[reply.request.id] = job, reply

    def _step(self) -> list[_Job]:
        """Makes one pass of the loop. Returns the jobs whose replies have grown or ended."""
        self._check_open()
        applied = self._session.step()
        if applied is None:
            if self._session.idle:
                self._session.sleep()
            return []
        grown: dict[_Job, None] = {}
        for result in applied.results():
            if result.request not in self._jobs:
                continue  # aborted
            if result.error is not None:
                raise result.error
            job, reply = self._jobs[result.request]
            reply.add(result)
            if result.finish is not None:
                del self._jobs[result.request]
            grown[job] = None
        return list(grown)

    def finish(self, request: RequestId, tokens: int) -> None:
        """Confirms, for `Reply`, that the reply is its first `tokens` tokens."""
        self._session.finish(request, tokens)

    # -- for the histories; called while the caller's thread waits for them

    def _new_id(self) -> RequestId:
        return RequestId(next(self._ids))

    def _tell(self, message: Fork | Keep) -> None:
        """Applies a `Keep` if the scheduler knows the conversation. A `Fork` changes nothing
        here."""
        self._session.change(message)

    def _forget(self, message: Forget) -> asyncio.Future[Erasure]:
        """Begins to erase the KV of an expired conversation. The future's result: whether all of
        it is erased."""
        erased: asyncio.Future[Erasure] = self._events.create_future()

        def answer(erasure: Erasure) -> None:
            self._events.call_soon_threadsafe(erased.set_result, erasure)

        self._session.forget(message, answer)
        return erased

    def _check_open(self) -> None:
        if self._events.is_closed():
            raise RuntimeError("this LLM is closed; make a new one")

    async def _open_histories(self, where: str) -> TurnManager:
        return TurnManager(HistoryStore(where), self._tell, self._forget, self._tokenizer)

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._events).result()


def _close_turns(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        job.call.close(job.replies)
