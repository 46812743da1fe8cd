"""Turns a checked body into requests for the engine: tokenizes it, and resolves limits and
defaults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ...scheduler.types import ErrorKind, Request, RequestError, RequestId, Sampling, check_logprobs
from ..conversations.transcript import Message
from ..conversations.turns import OpenTurn, TurnManager, session_name
from ..messages import Keep, Ready
from ..text.tokenizer import Tokenizer
from .bodies import ChatBody, ChoicesBody, CompletionBody, GenerationBody
from .calls import ONE_REPLY, Caller, GenerationCall, OutputOptions
from .grammar_check import GrammarChecker, open_checker
from .logprobs import LogprobsWriter
from .reply import ChatWriter, CompletionWriter, Style
from .structured_output import ReplyForm, reply_form

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default
MOST_REQUESTS = 16384  # of one call: more than any queue holds, and few enough to create at once
MOST_BIASES = 1024  # each is added to the logits in every step
TOO_LONG = "context_length_exceeded"  # OpenAI's code
TOOLS_IGNORED = (
    "this model's chat template does not render tools, so the model is not told of them (said "
    "once): it calls one only "
    "where tool_choice is required or names a function; --chat-template takes another template"
)

log = logging.getLogger(__name__)


class RequestBuilder:
    """Turns bodies into calls for the engine described by `ready`."""

    def __init__(
        self,
        ready: Ready,
        tokenizer: Tokenizer | None,
        histories: TurnManager,
        new_id: Callable[[], RequestId],
    ):
        self._ready = ready
        self._tokenizer = tokenizer
        self._histories = histories
        self._new_id = new_id
        self._grammars: GrammarChecker | None = None
        self._opened = False  # at first use
        self._tools_checked = False
        self._opening = asyncio.Lock()

    async def asked(self, body: ChoicesBody, caller: Caller) -> OutputOptions:
        """Returns the options for `completion` and `chat`. Raises RequestError if the requested
        form of the reply cannot be followed (400) or checked (503). This call may be cancelled.
        `completion` and `chat` may not: expired conversations would not be deleted, and threads
        would go on after the request has stopped counting."""
        self.model(body)
        check_logprobs(body.prompt_logprobs, "prompt_logprobs")
        form = reply_form(body)
        if form is not None:
            await self._check_form(form, caller.share)
        return OutputOptions(
            n=body.n,
            logprobs=body.reply_logprobs,
            prompt_logprobs=body.prompt_logprobs,
            grammar=form.grammar if form is not None else None,
            most_tool_calls=body.most_tool_calls,
        )

    async def completion(
        self,
        body: CompletionBody,
        asked: OutputOptions,
        arrived: float,
        caller: Caller,
        most_tokens: int = DEFAULT_COMPLETION_TOKENS,
    ) -> GenerationCall:
        """`most_tokens`: the reply's limit if the body has none; lowered to the room in the
        context."""
        if body.echo and body.logprobs is not None:
            asked = replace(asked, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
        several = body.prompts
        if len(several) * body.n > MOST_REQUESTS:
            message = (
                f"{len(several)} prompts with n = {body.n} are more than {MOST_REQUESTS} replies "
                "in one request"
            )
            raise RequestError(ErrorKind.INVALID, message, "prompt")
        caller.claim(len(several) * body.n, "prompt" if len(several) > 1 else "n")
        prompts = [self._checked(prompt) for prompt in several]
        if body.conversation_id is None:
            turn = None
            ids = [await self._encoded(prompt) for prompt in prompts]
        elif len(prompts) > 1:
            raise RequestError(
                ErrorKind.INVALID, "a conversation takes one prompt at a time", "prompt"
            )
        else:
            open_turn = self._histories.open_completion
            server_history = body.server_history
            turn = await open_turn(
                caller.owner, body.conversation_id, prompts[0], server_history=server_history
            )
            ids = [turn.prompt]
        style = self._style(body, asked)
        with closed_on_error(turn):
            echoes = [self._echo(body, *pair) for pair in zip(prompts, ids, strict=True)]
            return self._call(
                body,
                ids,
                CompletionWriter(style),
                most_tokens,
                arrived,
                caller,
                turn,
                asked,
                echoes,
            )

    async def chat(
        self,
        body: ChatBody,
        asked: OutputOptions,
        arrived: float,
        caller: Caller,
        *,
        writer: CompletionWriter | None = None,
        most_tokens: int | None = None,
        keep_s: float | None = None,
    ) -> GenerationCall:
        """writer    writes an agent API's answer; there a session has several dialogues, told apart
        by their beginnings
        most_tokens  the reply's limit if the body has none; lowered to the room in the context
        keep_s       seconds from the reply's end for which the session's KV is evicted last
        """
        caller.claim(body.n, "n")
        turn = await self._open_chat(body, caller)
        with closed_on_error(turn):
            if writer is not None and caller.session is not None:
                turn.in_session(caller.session)
            writer = writer or ChatWriter(self._style(body, asked))
            default = self._ready.max_model_len if most_tokens is None else most_tokens
            call = self._call(body, [turn.prompt], writer, default, arrived, caller, turn, asked)
        if keep_s is None or turn.conversation is None:
            return call
        return replace(call, keep=Keep(turn.conversation, None, keep_s))

    async def prompt_tokens(self, body: ChatBody, caller: Caller) -> int:
        """Returns how many tokens the prompt of this chat has. Raises as `chat`."""
        self.model(body)
        turn = await self._open_chat(body, caller)
        turn.close()
        return len(turn.prompt)

    async def _open_chat(self, body: ChatBody, caller: Caller) -> OpenTurn:
        messages = [message.for_template() for message in body.messages]
        render = self._need_tokenizer("messages").render_chat
        server_history = body.server_history
        if body.tools and body.tool_choice != "none":
            self._say_if_tools_are_ignored()
            render = partial(render, tools=[tool.for_template() for tool in body.tools])
        render = partial(render, variables=body.template_variables)
        open_turn = self._histories.open_chat
        name = body.conversation_id
        return await open_turn(caller.owner, name, messages, render, server_history=server_history)

    async def response(
        self,
        body: GenerationBody,
        writer: CompletionWriter,
        arrived: float,
        caller: Caller,
        *,
        previous: str | None,
        instructions: list[Message],
        messages: list[Message],
        stored_as: str | None,
    ) -> GenerationCall:
        """Returns the call for a reply that continues the response `previous`; it is stored under
        the id `stored_as`, if given."""
        turn = await self._histories.open_response(
            caller.owner,
            previous=previous,
            conversation=body.conversation_id,
            instructions=instructions,
            messages=messages,
            render=partial(
                self._need_tokenizer("input").render_chat, variables=body.template_variables
            ),
            stored_as=stored_as,
        )
        with closed_on_error(turn):
            return self._call(
                body, [turn.prompt], writer, self._ready.max_model_len, arrived, caller, turn
            )

    def model(self, body: GenerationBody) -> str:
        """Returns the name of the model that answers. Raises RequestError if the body names another
        one."""
        check_model(body.model, self._ready)
        return self._ready.model

    def _style(self, body: ChoicesBody, asked: OutputOptions) -> Style:
        logprobs = None
        if (body.reply_logprobs, asked.prompt_logprobs) != (None, None):
            logprobs = LogprobsWriter(self._tokenizer, body.reply_logprobs, body.prompt_logprobs)
        echo = isinstance(body, CompletionBody) and body.echo
        return Style(
            self._ready.model,
            body.return_token_ids,
            body.include_usage,
            body.return_sources,
            logprobs,
            echo,
        )

    def _need_tokenizer(self, param: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                ErrorKind.INVALID,
                "this engine has no tokenizer: send token ids to /v1/completions",
                param,
            )
        return self._tokenizer

    def _say_if_tools_are_ignored(self) -> None:
        if not self._tools_checked and self._need_tokenizer("tools").ignores_tools:
            log.warning(TOOLS_IGNORED)
        self._tools_checked = True

    def _checked(self, prompt: str | list[int]) -> str | array[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(ErrorKind.INVALID, "the prompt is empty", "prompt")
            self._need_tokenizer("prompt")
            return prompt
        self._check_ids(prompt, "prompt")
        return array("i", prompt)

    async def _encoded(self, prompt: str | array[int]) -> array[int]:
        if isinstance(prompt, str):
            return await asyncio.to_thread(self._need_tokenizer("prompt").encode, prompt)
        return prompt

    def _echo(self, body: CompletionBody, prompt: str | array[int], ids: array[int]) -> str:
        """The prompt's text as the client sent it, if it covers all of the prompt's ids; else the
        text of the ids, without special tokens."""
        if not body.echo or self._tokenizer is None:
            return ""
        return (
            prompt
            if isinstance(prompt, str) and not body.server_history
            else self._tokenizer.decode(ids)
        )

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._ready.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise RequestError(
                ErrorKind.INVALID,
                f"{param}: token ids are from 0 to {self._ready.vocab_size - 1}, not {wrong}",
                param,
            )

    def _call(
        self,
        body: GenerationBody,
        prompts: Sequence[array[int]],
        writer: CompletionWriter,
        default: int,
        arrived: float,
        caller: Caller,
        turn: OpenTurn | None,
        asked: OutputOptions = ONE_REPLY,
        echoes: Sequence[str] = ("",),
    ) -> GenerationCall:
        """`default`: the most tokens to generate if the body has no limit and the context has room;
        `echoes`: for each prompt, the text before its replies."""
        if body.stop:
            self._need_tokenizer("stop")
        self._check_ids(body.stop_token_ids, "stop_token_ids")
        # checked for text too: a tokenizer may have more tokens than the model
        for prompt in prompts:
            self._check_ids(prompt, "prompt")
        stop_ids = frozenset(body.stop_token_ids) | frozenset(
            () if body.ignore_eos else self._ready.stop_ids
        )
        if body.min_tokens and len(stop_ids) > MOST_BIASES:
            message = (
                f"stop_token_ids: with min_tokens at most {MOST_BIASES} ids may end a reply, not "
                f"{len(stop_ids)}"
            )
            raise RequestError(ErrorKind.INVALID, message, "stop_token_ids")
        sampling = self._sampling(body, asked)
        truncate = body.truncates and self._ready.overflow
        salt = kv_salt(body.cache_salt, caller.owner)
        session = body.session or caller.session
        marked = turn.conversation if turn is not None else None
        if marked is None and session is not None and len(prompts) == 1:
            marked = session_name(caller.owner, session)
        seeds = [_random_seed() if body.seed is None else sampling.seed for _ in prompts]
        requests = [
            Request(
                id=self._new_id(),
                prompt=prompt,
                max_tokens=self._max_tokens(len(prompt), *body.limit, default, truncate),
                conversation=marked if choice == 0 else None,
                salt=salt,
                min_tokens=body.min_tokens,
                stop_ids=stop_ids,
                sampling=replace(sampling, seed=choice_seed(seed, choice)),
                priority=body.priority,
                expect_next_s=body.expect_next_s,
                owner=caller.share,
                known=turn.known if turn is not None and turn.known_salt == salt else 0,
                confirm=bool(body.stop),
                prompt_logprobs=asked.prompt_logprobs if choice == 0 else None,
                choice=choice,
                truncate=truncate,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
            for choice in range(asked.n)
        ]
        return GenerationCall(
            requests=tuple(requests),
            echoes=tuple(text for text in echoes for _ in range(asked.n)),
            writer=writer,
            stream=body.stream,
            chat=not isinstance(body, CompletionBody),
            stops=tuple(body.stop),
            stop_token_ids=tuple(body.stop_token_ids),
            include_stop=body.include_stop_str_in_output,
            arrived=arrived,
            turn=turn,
            session=session,
            most_tool_calls=asked.most_tool_calls,
        )

    def _max_tokens(
        self, prompt: int, name: str, limit: int | None, default: int, truncate: bool
    ) -> int:
        """Returns the tokens to generate after a prompt of `prompt` tokens, at most the body's
        `limit`."""
        context = self._ready.max_model_len
        if limit is not None and limit < 1:
            raise RequestError(ErrorKind.INVALID, f"{name} must be at least 1, not {limit}", name)
        # checked first, because Python refuses to print very large numbers
        if limit is not None and limit > context:
            raise RequestError(
                ErrorKind.INVALID,
                f"{name} is {limit}; the model's context holds {context}",
                name,
                TOO_LONG,
            )
        if truncate:
            return min(default, context) if limit is None else limit
        if prompt >= context:
            raise RequestError(
                ErrorKind.INVALID,
                f"the prompt is too long: {prompt} tokens > {context - 1} maximum "
                f"(the model's context holds {context}, reply included)",
                "prompt",
                TOO_LONG,
            )
        if limit is None:
            return min(default, context - prompt)
        if prompt + limit > context:
            raise RequestError(
                ErrorKind.INVALID,
                f"the prompt has {prompt} tokens and {name} is {limit}, together {prompt + limit}; "
                f"the model's context holds {context}",
                name,
                TOO_LONG,
            )
        return limit

    async def _check_form(self, form: ReplyForm, owner: str) -> None:
        await asyncio.shield(self._open_grammars())  # for all calls, even if this client hangs up
        if self._grammars is None:
            raise RequestError(
                ErrorKind.INVALID,
                f"{form.param} is not supported with this model's tokenizer",
                form.param,
            )
        await asyncio.wrap_future(self._grammars.begin_check(form.grammar, form.param, owner))

    async def _open_grammars(self) -> None:
        async with self._opening:
            if not self._opened:
                ready = self._ready
                about = ready.tokenizer, ready.vocab_size, ready.stop_ids
                self._grammars = await asyncio.to_thread(open_checker, *about)
                self._opened = True

    def _logit_bias(self, body: GenerationBody) -> tuple[tuple[int, float], ...]:
        try:
            biases = {int(token): bias for token, bias in body.logit_bias.items()}
        except ValueError:
            raise RequestError(
                ErrorKind.INVALID, "logit_bias: its keys must be token ids", "logit_bias"
            ) from None
        if len(biases) > MOST_BIASES:
            raise RequestError(
                ErrorKind.INVALID,
                f"logit_bias may name {MOST_BIASES} tokens, not {len(biases)}",
                "logit_bias",
            )
        self._check_ids(list(biases), "logit_bias")
        return tuple(biases.items())

    def _sampling(self, body: GenerationBody, asked: OutputOptions) -> Sampling:
        """A top_k of -1, or of the vocabulary's size and above, switches top-k off. A seed may be
        any signed number of 64 bits."""
        top_k = 0 if body.top_k == -1 or body.top_k >= self._ready.vocab_size else body.top_k
        seed = body.seed or 0
        if not -(2**63) <= seed < 2**63:
            raise RequestError(
                ErrorKind.INVALID, f"seed must be between -2**63 and 2**63 - 1, not {seed}", "seed"
            )
        return Sampling(
            temperature=body.temperature,
            top_k=top_k,
            top_p=body.top_p,
            seed=seed % 2**63,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=self._logit_bias(body),
            logprobs=asked.logprobs,
            grammar=asked.grammar,
        )


def check_model(name: str | None, ready: Ready) -> None:
    """Raises RequestError (404, as OpenAI) if no model of that name is served here. None is any
    model."""
    if name not in (None, ready.model, *ready.aliases):
        message = f"model {name!r} is not served here; {ready.model!r} is"
        raise RequestError(ErrorKind.NOT_FOUND, message, "model", "model_not_found")


def _random_seed() -> int:
    """Drawn for each prompt: two equal prompts in one call get different replies."""
    return random.getrandbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 has the given seed. Seeds of other choices are far from it and from those of near
    seeds."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**63


def kv_salt(given: str | None, owner: str) -> bytes:
    """Requests share KV within one salt: the given one, else the owner's. A given salt never equals
    an owner's."""
    if given is not None:
        return b"given:" + given.encode()
    return b"owner:" + owner.encode() if owner else b""


@contextlib.contextmanager
def closed_on_error(turn: OpenTurn | None) -> Iterator[None]:
    """Closes the turn if its call is not made: without a call no other code closes it."""
    try:
        yield
    except BaseException:
        if turn is not None:
            turn.close()
        raise
