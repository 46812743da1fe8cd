"""Turns a `Generate` into requests for the engine: tokenizes it, and resolves limits and
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
from typing import TypeVar

from ...scheduler.types import ErrorKind, Request, RequestError, RequestId, Sampling
from ..cache_salt import kv_salt
from ..conversations.sessions import Prompt
from ..conversations.turns import OpenTurn, Turns, session_name
from ..messages import Keep, Ready
from ..text.template_form import text_of
from ..text.tokenizer import Tokenizer
from .bodies import MOST_TOOLS
from .calls import Caller, GenerationCall
from .generate import Generate
from .grammar_check import TOO_COMPLEX, UNSATISFIABLE, GrammarChecker, open_checker
from .reply import CompletionWriter
from .reply_forms import TAIL_TOKENS, ReplyForms, Tail
from .structured_output import ToolsForm

MOST_REQUESTS = 16384  # of one call: more than any queue holds, and few enough to create at once
MOST_BIASES = 1024  # each is added to the logits in every step
TOO_LONG = "context_length_exceeded"  # OpenAI's code
TOOLS_IGNORED = (
    "this model's chat template does not render tools, so the model is not told of them (said "
    "once): it calls one only "
    "where tool_choice is required or names a function; --chat-template takes another template"
)

Number = TypeVar("Number", int, float)

log = logging.getLogger(__name__)


class GrammarChecks:
    """Grammar checks for the engine of `ready`. The checkers start at the first use."""

    def __init__(self, ready: Ready):
        self._ready = ready
        self._checker: GrammarChecker | None = None
        self._opened = False
        self._opening = asyncio.Lock()

    async def can_check(self) -> bool:
        """False if this model's tokenizer has no grammars."""
        # for all calls, even if this client hangs up
        await asyncio.shield(self._open())
        return self._checker is not None

    async def check(self, grammar: str, param: str, owner: str) -> tuple[str, ...]:
        """As `GrammarChecker.begin_check`, after `can_check`."""
        assert self._checker is not None
        return await asyncio.wrap_future(self._checker.begin_check(grammar, param, owner))

    async def _open(self) -> None:
        async with self._opening:
            if not self._opened:
                ready = self._ready
                about = ready.tokenizer, ready.vocab_size, ready.stop_ids
                self._checker = await asyncio.to_thread(open_checker, *about)
                self._opened = True


class RequestBuilder:
    """Turns each `Generate` into a call for the engine described by `ready`."""

    def __init__(
        self,
        ready: Ready,
        tokenizer: Tokenizer | None,
        histories: Turns,
        new_id: Callable[[], RequestId],
        forms: ReplyForms | None = None,
        divides: bool = True,
        grammars: GrammarChecks | None = None,
    ):
        """forms    of the replies of chats: a grammar begins behind the thought
        divides  replies of chats are divided by `forms`; False: they stay whole
        grammars  None: checkers of its own
        """
        self._forms = forms
        self._divides = divides
        self._ready = ready
        self._tokenizer = tokenizer
        self._histories = histories
        self._new_id = new_id
        self._grammars = grammars or GrammarChecks(ready)
        self._tools_checked = False

    async def check_form(self, generate: Generate, caller: Caller) -> Generate:
        """Returns the same with what of the reply's form can be enforced, and remarks on the rest.

        Raises RequestError if the form cannot be followed (INVALID) or checked (UNAVAILABLE). This
        call may be cancelled. `call` may not: expired conversations would not be deleted, and
        threads would go on after the request has stopped counting.
        """
        forms = self._forms or ReplyForms()
        if generate.thought_budget is not None:
            generate = await self._with_budget(generate, forms)
        form = generate.form
        if form is None:
            return generate
        if form.tools is not None:
            form = replace(form, grammar=form.tools.grammar(forms))
        if not await self._grammars.can_check():
            raise RequestError(
                ErrorKind.INVALID,
                f"{form.param} is not supported with this model's tokenizer",
                form.param,
            )
        try:
            remarks = await self._check_grammar(form.grammar, form.param, caller.share)
        except RequestError as error:
            tools = form.tools
            if error.kind is not ErrorKind.INVALID or tools is None:
                raise
            names = await self._unfollowable(tools, caller.share)
            if not names:
                raise
            tools = tools.with_any_arguments(names)
            form = replace(form, grammar=tools.grammar(forms), tools=tools)
            remarks = await self._check_grammar(form.grammar, form.param, caller.share)
            remarks = (*(f"tools.{name}.parameters" for name in names), *remarks)
        if form.tools is not None:
            words = forms.calls.unenforced(form.tools.functions)
            remarks = (*remarks, *(f"tools.{word}" for word in words))
        return replace(generate, form=replace(form, remarks=remarks))

    async def _with_budget(self, generate: Generate, forms: ReplyForms) -> Generate:
        """The same without a budget of thoughts that cannot be kept, and a remark on it."""
        if forms.can_limit_thoughts and await self._grammars.can_check():
            return generate
        return replace(generate, thought_budget=None, remarks=(generate.budget_field,))

    async def _check_grammar(self, grammar: str, param: str, owner: str) -> tuple[str, ...]:
        """Returns the names of what is not enforced."""
        remarks = await self._grammars.check(grammar, param, owner)
        return tuple(f"{param}.{remark}" for remark in remarks)

    async def _unfollowable(self, tools: ToolsForm, owner: str) -> list[str]:
        """Returns the names of functions whose schemas cannot be followed: they may have any
        arguments, and do not refuse the others. Raises RequestError for a schema that nothing
        satisfies, or that takes too long: each may take as long as the whole grammar."""
        if len(tools.functions) > MOST_TOOLS:
            return []
        names = []
        for function in tools.functions:
            alone = ToolsForm((function,), several=False)
            try:
                await self._check_grammar(
                    alone.grammar(self._forms or ReplyForms()), "tools", owner
                )
            except RequestError as error:
                decided = UNSATISFIABLE in error.message or TOO_COMPLEX in error.message
                if error.kind is not ErrorKind.INVALID or decided:
                    raise
                names.append(function["name"])
        return names

    async def call(
        self, generate: Generate, writer: CompletionWriter, arrived: float, caller: Caller
    ) -> GenerationCall:
        """`writer`: of the answer; a stored response has its id."""
        prompts = generate.prompts
        n_replies = max(len(prompts), 1) * generate.n
        if n_replies > MOST_REQUESTS:
            message = (
                f"{len(prompts)} prompts with n = {generate.n} are more than {MOST_REQUESTS} "
                "replies in one request"
            )
            raise RequestError(ErrorKind.INVALID, message, "prompt")
        await caller.claim(n_replies, "prompt" if len(prompts) > 1 else "n")
        given = [self._checked(prompt) for prompt in prompts]
        bad_words = await self._bad_words(generate.bad_words)
        turn: OpenTurn | None
        if generate.chat:
            turn = await self._open_chat(generate, caller, writer.id)
        else:
            turn = await self._open_completion(generate, given, caller)
        with closed_on_error(turn):
            if turn is None:
                ids = [await self._encoded(prompt) for prompt in given]
            else:
                ids = [turn.prompt]
                session = caller.session_of(generate)
                if session is not None and (generate.several_dialogues or not generate.session):
                    turn.in_session(session)
            if generate.chat:
                echoes = [""]
            else:
                echoes = [self._echo(generate, *pair) for pair in zip(given, ids, strict=True)]
            return self._call(generate, bad_words, ids, echoes, writer, arrived, caller, turn)

    async def prompts(self, generate: Generate, caller: Caller) -> list[array[int]]:
        """The tokens of each prompt. Nothing is generated or stored. Raises as `call`, and INVALID
        for a prompt that continues the server's history."""
        in_conversation = generate.response and generate.conversation_id is not None
        if generate.server_history or in_conversation:
            raise RequestError(
                ErrorKind.INVALID,
                "a prompt of the server's history cannot be rendered: send all messages",
                "conversation" if in_conversation else "history",
            )
        if generate.chat:
            apart = replace(generate, conversation_id=None, store=False)
            turn = await self._open_chat(apart, caller, "")
            turn.close()
            return [turn.prompt]
        return [await self._encoded(self._checked(prompt)) for prompt in generate.prompts]

    async def _open_chat(self, generate: Generate, caller: Caller, answer_id: str) -> OpenTurn:
        render = self._need_tokenizer(generate.prompt_field).render_chat
        if generate.template is not None:
            render = generate.template.render
        if generate.tools:
            if generate.template is None:
                self._say_if_tools_are_ignored()
            render = partial(render, tools=list(generate.tools))
        render = partial(
            render,
            variables=generate.template_variables,
            add_generation_prompt=generate.add_generation_prompt,
            continue_final_message=generate.continue_final_message,
        )
        if generate.response:
            return await self._histories.open_response(
                caller.owner,
                previous=generate.previous,
                conversation=generate.conversation_id,
                instructions=generate.instructions,
                messages=generate.messages,
                render=render,
                stored_as=answer_id if generate.store else None,
            )
        return await self._histories.open_chat(
            caller.owner,
            generate.conversation_id,
            list(generate.messages),
            render,
            server_history=generate.server_history,
        )

    async def _open_completion(
        self, generate: Generate, prompts: Sequence[str | array[int]], caller: Caller
    ) -> OpenTurn | None:
        """Returns None if the prompts belong to no conversation."""
        if generate.conversation_id is None:
            return None
        if len(prompts) > 1:
            raise RequestError(
                ErrorKind.INVALID, "a conversation takes one prompt at a time", "prompt"
            )
        return await self._histories.open_completion(
            caller.owner,
            generate.conversation_id,
            prompts[0],
            server_history=generate.server_history,
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

    def _echo(self, generate: Generate, prompt: str | array[int], ids: array[int]) -> str:
        """The prompt's text as the client sent it, if it covers all of the prompt's ids; else the
        text of the ids, without special tokens."""
        if not generate.echo or self._tokenizer is None:
            return ""
        return (
            prompt
            if isinstance(prompt, str) and not generate.server_history
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
        generate: Generate,
        bad_words: tuple[tuple[int, ...], ...],
        prompts: Sequence[array[int]],
        echoes: Sequence[str],
        writer: CompletionWriter,
        arrived: float,
        caller: Caller,
        turn: OpenTurn | None,
    ) -> GenerationCall:
        """`echoes`: for each prompt, the text before its replies."""
        if generate.stops:
            self._need_tokenizer("stop")
        self._check_ids(generate.stop_token_ids, "stop_token_ids")
        # checked for text too: a tokenizer may have more tokens than the model
        for prompt in prompts:
            self._check_ids(prompt, "prompt")
        special_stops = self._special_stops(generate.stops)
        stop_ids = frozenset((*generate.stop_token_ids, *special_stops)) | frozenset(
            () if generate.ignore_eos else self._ready.stop_ids
        )
        if generate.min_tokens and len(stop_ids) > MOST_BIASES:
            message = (
                f"stop_token_ids: with min_tokens at most {MOST_BIASES} ids may end a reply, not "
                f"{len(stop_ids)}"
            )
            raise RequestError(ErrorKind.INVALID, message, "stop_token_ids")
        forms = self._forms if generate.chat else None
        continued = generate.continue_final_message
        tail = ""
        if forms is not None:
            last = generate.messages[-1] if continued else None
            tail = self._tail(prompts[0]) if last is None else text_of(last["content"])
        sampling = replace(self._sampling(generate), bad_words=bad_words)
        if forms is not None:
            is_calls = generate.form is not None and generate.form.tools is not None
            budget = generate.thought_budget
            grammar = forms.framed(sampling.grammar, is_calls, tail, budget, continued)
            sampling = replace(sampling, grammar=grammar)
        truncate = generate.truncates and self._ready.overflow
        salt = kv_salt(generate.cache_salt, caller.owner)
        session = caller.session_of(generate)
        marked = turn.conversation if turn is not None else None
        if marked is None and session is not None and len(prompts) == 1:
            marked = session_name(caller.owner, session)
        all_marks = [self._marks(generate, prompt) for prompt in prompts]
        seeds = [_random_seed() if generate.seed is None else sampling.seed for _ in prompts]
        requests = [
            Request(
                id=self._new_id(),
                prompt=prompt,
                max_tokens=self._max_tokens(generate, len(prompt), truncate),
                conversation=marked if choice == 0 else None,
                salt=salt,
                min_tokens=generate.min_tokens,
                stop_ids=stop_ids,
                sampling=replace(sampling, seed=choice_seed(seed, choice)),
                priority=generate.priority,
                expect_next_s=generate.expect_next_s,
                owner=caller.share,
                stored_tokens=turn.stored_tokens
                if turn is not None and turn.stored_salt == salt
                else 0,
                confirm=len(special_stops) < len(set(generate.stops)),
                prompt_logprobs=generate.prompt_logprobs if choice == 0 else None,
                choice=choice,
                truncate=truncate,
                marks=marks,
            )
            for prompt, seed, marks in zip(prompts, seeds, all_marks, strict=True)
            for choice in range(generate.n)
        ]
        keep = None
        if generate.keep_s is not None and marked is not None:
            keep = Keep(marked, None, generate.keep_s)
        held = contextlib.ExitStack()
        if marked is not None and session and not (turn is not None and turn.in_conversation):
            self._histories.open_session((caller.owner, session), marked, held)
        if turn is not None and generate.chat:
            self._watch(turn, generate, caller.owner, session)
        return GenerationCall(
            generate=generate,
            requests=tuple(requests),
            echoes=tuple(text for text in echoes for _ in range(generate.n)),
            writer=writer,
            arrived=arrived,
            turn=turn,
            session=session,
            keep=keep,
            forms=forms if self._divides else None,
            tail=tail,
            special_stops=special_stops,
            held=held,
        )

    def _marks(self, generate: Generate, prompt: array[int]) -> tuple[int, ...]:
        """The end of a chat's last message: a template that drops old thoughts at a new message of
        the user parts from this prompt behind it. () without states."""
        if not (self._ready.states and generate.chat and generate.add_generation_prompt):
            return ()
        try:
            beginning = self._beginning_of_reply(generate)
        except RequestError:
            return ()  # the template takes no dialogue of one question
        end = len(prompt) - len(beginning)
        return (end,) if 0 < end < len(prompt) and prompt[end:] == beginning else ()

    def _beginning_of_reply(self, generate: Generate) -> array[int]:
        """The tokens with which a prompt of this chat ends: the beginning of its next message."""
        tokenizer = self._need_tokenizer(generate.prompt_field)
        render = tokenizer.render_chat if generate.template is None else generate.template.render
        question = [{"role": "user", "content": "?"}]
        whole, without = (
            render(question, add, variables=generate.template_variables) for add in (True, False)
        )
        return tokenizer.encode_rendered(whole.removeprefix(without))

    def _special_stops(self, stops: Sequence[str]) -> dict[int, str]:
        """The stop strings that are special tokens, by their ids: such a token has no text."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return {}
        ids = {stop: tokenizer.added.get(stop) for stop in stops}
        return {at: stop for stop, at in ids.items() if at is not None and at in tokenizer.special}

    def _tail(self, prompt: array[int]) -> Tail:
        """The text at the prompt's end, which tells whether the reply begins in a thought."""
        tokenizer = self._need_tokenizer("messages")
        return tokenizer.decode_all(prompt[-TAIL_TOKENS:].tolist())

    def _watch(self, turn: OpenTurn, generate: Generate, owner: str, session: str | None) -> None:
        """Compares the prompt with the last one of a dialogue that the client names."""
        name = generate.conversation_id or session
        if turn.conversation is not None and name:
            messages = (*generate.instructions, *turn.messages)
            prompt = Prompt(turn.prompt, messages, generate.tools)
            self._histories.watch_prompt((owner, name), turn.conversation, prompt)

    def _max_tokens(self, generate: Generate, prompt: int, truncate: bool) -> int:
        """Returns the tokens to generate after a prompt of `prompt` tokens: at most what the
        context has room for."""
        context = self._ready.max_model_len
        name = generate.limit_field
        limit = generate.limit
        default = context if generate.default_limit is None else generate.default_limit
        if limit is not None and limit < 1:
            raise RequestError(ErrorKind.INVALID, f"{name} must be at least 1, not {limit}", name)
        wanted = default if limit is None else limit
        if (most := self._ready.sampling.max_tokens) is not None:
            wanted = min(wanted, most)
        if generate.min_tokens > wanted:
            raise self._above_limit(generate, wanted)
        if truncate:
            return min(wanted, context)
        if prompt >= context:
            raise RequestError(
                ErrorKind.INVALID,
                f"the prompt is too long: {prompt} tokens > {context - 1} maximum "
                f"(the model's context holds {context}, reply included)",
                "prompt",
                TOO_LONG,
            )
        room = context - prompt
        if room < generate.min_tokens:
            raise RequestError(
                ErrorKind.INVALID,
                f"the prompt has {prompt} tokens and min_tokens is {generate.min_tokens}; "
                f"the model's context holds {context}",
                "min_tokens",
                TOO_LONG,
            )
        return min(wanted, room)

    def _above_limit(self, generate: Generate, most: int) -> RequestError:
        """The error of a min_tokens above `most`, with what limits the reply."""
        if most == (generate.default_limit if generate.limit is None else generate.limit):
            reason = f"{generate.limit_field} is {most}"
        elif most == self._ready.sampling.max_tokens:
            reason = (
                f"a reply of this server has at most {most} tokens (max_new_tokens in its "
                "generation_config.json)"
            )
        else:
            reason = f"the model's context holds {most}"
        message = f"min_tokens is {generate.min_tokens}, and {reason}"
        return RequestError(ErrorKind.INVALID, message, "min_tokens")

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, without a space in front and with one: at the beginning of a
        text and within it. A word with a token that the model does not have is never drawn."""
        if not words:
            return ()
        encode = self._need_tokenizer("bad_words").encode_words
        texts = [space + word.lstrip() for word in words for space in ("", " ")]
        encoded = await asyncio.to_thread(encode, texts)
        for text, ids in zip(texts, encoded, strict=True):
            if not ids:
                raise RequestError(
                    ErrorKind.INVALID, f"bad_words: {text!r} has no tokens", "bad_words"
                )
        can_be_drawn = (tuple(ids) for ids in encoded if max(ids) < self._ready.vocab_size)
        return tuple(dict.fromkeys(can_be_drawn))

    def _logit_bias(self, generate: Generate) -> tuple[tuple[int, float], ...]:
        try:
            biases = {int(token): bias for token, bias in generate.logit_bias.items()}
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

    def _sampling(self, generate: Generate) -> Sampling:
        """A top_k of -1, or of the vocabulary's size and above, switches top-k off. A seed may be
        any signed number of 64 bits."""
        defaults = self._ready.sampling
        top_k = _first(generate.top_k, defaults.top_k)
        if top_k == -1 or top_k >= self._ready.vocab_size:
            top_k = 0
        seed = generate.seed or 0
        if not -(2**63) <= seed < 2**63:
            raise RequestError(
                ErrorKind.INVALID, f"seed must be between -2**63 and 2**63 - 1, not {seed}", "seed"
            )
        return Sampling(
            temperature=_first(generate.temperature, defaults.temperature),
            top_k=top_k,
            top_p=_first(generate.top_p, defaults.top_p),
            seed=seed % 2**63,
            min_p=_first(generate.min_p, defaults.min_p),
            repetition_penalty=_first(generate.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=generate.presence_penalty,
            frequency_penalty=generate.frequency_penalty,
            logit_bias=self._logit_bias(generate),
            logprobs=generate.logprobs,
            grammar=generate.form.grammar if generate.form is not None else None,
        )


def check_model(name: str | None, ready: Ready) -> None:
    """Raises RequestError (NOT_FOUND, as OpenAI) if no model of that name is served here. None is
    any model."""
    if name not in (None, ready.model, *ready.aliases):
        message = f"model {name!r} is not served here; {ready.model!r} is"
        raise RequestError(ErrorKind.NOT_FOUND, message, "model", "model_not_found")


def _first(given: Number | None, default: Number) -> Number:
    return default if given is None else given


def _random_seed() -> int:
    """Drawn for each prompt: two equal prompts in one call get different replies."""
    return random.getrandbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """Choice 0 has the given seed. Seeds of other choices are far from it and from those of near
    seeds."""
    return (seed + choice * 0x9E3779B97F4A7C15) % 2**63


@contextlib.contextmanager
def closed_on_error(turn: OpenTurn | None) -> Iterator[None]:
    """Closes the turn if its call is not made: without a call no other code closes it."""
    try:
        yield
    except BaseException:
        if turn is not None:
            turn.close()
        raise
