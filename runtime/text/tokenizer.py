"""The tokenizer with its chat template, incremental detokenizing, and stop strings."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...scheduler.types import ErrorKind, RequestError, SettingError
from .template_form import template_form, text_of
from .token_bytes import TokenBytes

REPLACEMENT = "\ufffd"  # the decoded text of an incomplete or invalid UTF-8 sequence
CONTEXT_TOKENS = 8  # tokens that can change how the following text decodes
TOOLS = "tool_use"  # the name of the chat template for requests with tools
TEMPLATES = ("default", TOOLS)
# tokens that may stay undecoded: only broken UTF-8 and ids without text need so many
LONGEST_WINDOW = 64


class GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training. It has no effect here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class ChatTemplate:
    """The tokenizer's own template, run in a sandbox with the helpers that Hugging Face templates
    expect."""

    def __init__(self, source: str, special_tokens: dict[str, str], setting: str = "--engine"):
        """Raises SettingError (of `setting`) if the template does not parse."""

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self.renders_tools = "tools" in meta.find_undeclared_variables(
                environment.parse(source)
            )
        except jinja2.TemplateSyntaxError as error:
            raise SettingError(setting, f"the chat template does not parse: {error}") from error
        self.source = source
        self._special_tokens = special_tokens
        self.form = template_form(lambda messages, tools: self._render(messages, tools=tools))

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Renders the dialogue, and the prompt for the assistant's next message. Messages get the
        form that the template takes (`TemplateForm.messages`). With `continue_final_message` the
        text ends inside the last message. Raises RequestError if the template refuses, or fails on
        messages that it did not expect."""
        text = self._render(self.form.messages(messages), add_generation_prompt, tools, variables)
        return _up_to_end(text, messages[-1]) if continue_final_message else text

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self._template.render(
                {
                    "documents": None,
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RequestError(
                ErrorKind.INVALID,
                f"the model's chat template refuses these messages: {error}",
                "messages",
            ) from error


def _up_to_end(text: str, message: Mapping[str, Any]) -> str:
    """The rendered text up to the end of its last message. Raises RequestError (INVALID) if it is
    not in the text as it was sent."""
    content = text_of(message.get("content") or "")
    for ending in (content, content.strip()):
        if ending and (begin := text.rfind(ending)) >= 0:
            return text[: begin + len(ending)]
    raise RequestError(
        ErrorKind.INVALID,
        "the last message cannot be continued: the model's chat template does not show its text",
        "messages",
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Does what transformers does. Unlike jinja2's own filter this does not escape HTML: a prompt
    is not a web page."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Tokenizer:
    """Text to token ids and back. Encoding and rendering may run in any thread."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        tools_template: ChatTemplate | None = None,
        special_tokens: dict[str, str] | None = None,
    ):
        """tools_template  used instead of `template` for requests with tools; None: `template` is
                        used
        special_tokens  the texts of special tokens, by the names that templates have for them
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._tools_template = tools_template
        self._special_tokens = special_tokens or {}
        self.token_bytes = TokenBytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.added = {token.content: at for at, token in added.items()}
        self.special = frozenset(at for at, token in added.items() if token.special)

    @classmethod
    def load(cls, directory: str | Path, template: str | None = None) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, its settings and chat templates. Raises
        SettingError.

        `template`: the source of a chat template to use instead.
        """
        directory = Path(directory)
        if not (directory / "tokenizer.json").is_file():
            raise SettingError("--engine", f"{directory} holds no tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
            config = _settings(directory)
            special_tokens = _special_tokens(config)
            sources = (
                _template_sources(directory, config) if template is None else {"default": template}
            )
        except Exception as error:  # the library raises this class for a file that it cannot parse
            raise SettingError(
                "--engine", f"the tokenizer in {directory} cannot be read: {error}"
            ) from error
        templates = {
            name: ChatTemplate(sources[name], special_tokens)
            for name in TEMPLATES
            if name in sources
        }
        default, tools = (templates.get(name) for name in TEMPLATES)
        return cls(tokenizer, default, tools, special_tokens)

    def other_template(self, source: str) -> ChatTemplate:
        """A chat template with this tokenizer's special tokens. Raises SettingError (of
        "chat_template") if it does not parse."""
        return ChatTemplate(source, self._special_tokens, "chat_template")

    def digest(self) -> bytes:
        """SHA-256 of the tokenizer. With equal digests, token ids have the same meaning."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).digest()

    def encode(self, text: str) -> array[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer's post-processor
        adds."""
        return self._ids(text, add_special_tokens=True)

    def written(self, token: int) -> str:
        """The text form of a special token; "" for other tokens."""
        return self._tokenizer.id_to_token(token) or "" if token in self.special else ""

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """Returns the ids of `encode`, and the place in the text at which each token begins. A
        space in front of a token belongs to it."""
        (encoded,) = self._tokenizer.encode_batch([text])
        places = []
        done = 0
        for start, end in encoded.offsets:
            # added special tokens have no place of their own
            places.append(min(start, done) if end > start else done)
            done = max(done, end)
        return encoded.ids, places

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The dialogue as the model reads it, by default up to the beginning of its next message.
        `tools` in OpenAI's form; `variables` are the template's own."""
        template = self._template_for_tools if tools else self._template
        if template is None:
            cure = "use /v1/completions, or start the server with --chat-template FILE"
            raise RequestError(
                ErrorKind.INVALID, f"this model has no chat template; {cure}", "messages"
            )
        return template.render(
            messages, add_generation_prompt, tools, variables, continue_final_message
        )

    @property
    def template_source(self) -> str:
        """The source of the chat template for requests with tools; "" if there is none."""
        template = self._template_for_tools
        return "" if template is None else template.source

    @property
    def shows_calls(self) -> bool:
        """True if the chat template writes the tool calls of earlier replies."""
        template = self._template_for_tools
        return template is not None and template.form.calls

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def ignores_tools(self) -> bool:
        """True if the chat template ignores the tools passed to `render_chat`."""
        template = self._template_for_tools
        return template is not None and not template.renders_tools

    @property
    def _template_for_tools(self) -> ChatTemplate | None:
        return self._template if self._tools_template is None else self._tools_template

    def encode_rendered(self, text: str) -> array[int]:
        """Token ids of a rendered dialogue. The template writes special tokens itself, so none are
        added."""
        return self._ids(text, add_special_tokens=False)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word, as a part of a text."""
        encoded = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [one.ids for one in encoded]

    def _ids(self, text: str, add_special_tokens: bool) -> array[int]:
        """Encodes a batch of one, as `encode_behind` does: only for a batch does the library
        release the interpreter lock. Without that, the longest possible body would stop every
        stream for half a minute."""
        (encoded,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return array("i", encoded.ids)

    def encode_behind(self, before: Sequence[int], text: str) -> array[int] | None:
        """Token ids of `text` as the continuation of the tokens `before`; None if this tokenizer
        cannot continue there.

        Some tokenizers add a space in front of every text. To remove it, the text is encoded after
        a newline, the ids are cut behind the newline, and the result is decoded to check it.
        """
        context = self.context(before)
        decoded = self._tokenizer.decode(context, skip_special_tokens=False)
        normalizer = self._tokenizer.normalizer
        wanted = {
            decoded + text,
            decoded + (normalizer.normalize_str(text) if normalizer is not None else text),
        }
        for anchor in ("", "\n"):
            (encoded,) = self._tokenizer.encode_batch([anchor + text], add_special_tokens=False)
            ids = [
                at
                for at, (_, end) in zip(encoded.ids, encoded.offsets, strict=True)
                if end > len(anchor)
            ]
            if self.decode_all(context + ids) in wanted:
                return array("i", ids)
        return None

    def context(self, ids: Sequence[int]) -> list[int]:
        """Returns the last tokens of `ids`. Earlier tokens cannot change how later text decodes.

        They begin with a whole character, unless the text is broken. Otherwise a byte-fallback
        decoder would turn the run of bytes at their beginning into replacement characters, also
        the part of the run that comes behind `ids`.
        """
        context = list(ids[-CONTEXT_TOKENS:])
        if len(ids) > CONTEXT_TOKENS:
            for start in range(4):  # a character has at most 4 bytes
                text = self.decode(context[start:])
                if text and not text.startswith(REPLACEMENT):
                    return context[start:]
        return context

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; special tokens have none."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decodes like `decode`, with the text forms of special tokens, and without the interpreter
        lock (as `_ids`): a client may send millions of ids."""
        (text,) = self._tokenizer.decode_batch([ids], skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """Each token's entry in the vocabulary; None for an id without one."""
        return [self._tokenizer.id_to_token(token) for token in ids]


def _settings(directory: Path) -> dict[str, Any]:
    """Reads tokenizer_config.json. Older checkpoints have their special tokens in
    special_tokens_map.json."""
    config: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file() and "added_tokens_decoder" not in config:
            config = {**config, **json.loads((directory / name).read_text("utf-8"))}
    return config


def _template_sources(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Template sources by name. Files override the configuration."""
    files = {
        "default": directory / "chat_template.jinja",
        TOOLS: directory / "additional_chat_templates" / "tool_use.jinja",
    }
    sources = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if sources:
        return sources
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the other special tokens, the model's own included. The file gives each as text
    or as the description of an added token."""
    extra = config.get("extra_special_tokens")
    roles = {**config, **(extra if isinstance(extra, dict) else {})}
    special = {role: value for role, value in roles.items() if role.endswith("_token")}
    texts = {
        role: value.get("content") if isinstance(value, dict) else value
        for role, value in special.items()
    }
    # skips add_bos_token, which is not a token
    return {role: text for role, text in texts.items() if isinstance(text, str)}


class Detokenizer:
    """A reply's text, token by token; the pieces joined are the full decode of the reply.

    One exception: at a broken character, a byte-fallback decoder also replaces the characters in
    bytes before it, which are already returned.

    A token's text can depend on its left neighbour (a sentencepiece decoder drops a leading space),
    and a character can need several tokens. So a small window is decoded, and new text is returned
    once it is complete:

        window = | context: text already returned | held: not a whole character yet |

    `context`: ids before the reply; their text is not returned again.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._decode, self._special = tokenizer.decode, tokenizer.special
        self._window = [token for token in context if token not in self._special]
        self._held = len(self._window)  # index in the window at which the held tokens begin
        self._text = self._decode(self._window) if self._window else ""

    def push(self, token: int) -> str:
        """Returns the text that this token completes, possibly none."""
        if token in self._special:
            return ""
        self._window.append(token)
        new = self._unsaid()
        if (new and not new.endswith(REPLACEMENT)) or len(self._window) > LONGEST_WINDOW:
            return self._say_all(new)
        if not new or len(self._window) - self._held < 4:
            return ""
        # A character has at most 4 bytes, and each token has at least one: everything before the
        # last 3 replacement characters is final, broken or not (one stands for a byte or for
        # several; held tokens may have no text, for example a first space). No token boundary is
        # known to be a character boundary here, so the window stays.
        signs = len(new) - len(new.rstrip(REPLACEMENT))
        new = new[: len(new) - min(signs, 3)]
        self._text += new
        return new

    def flush(self) -> str:
        """Returns the rest at the reply's end: a character that was never completed."""
        return self._say_all(self._unsaid())

    def _unsaid(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._text):
            return text[len(self._text) :]
        # Byte-fallback decoders turn a whole run of bytes into replacement characters if a later
        # byte is invalid.
        return self._decode(self._window[self._held :])

    def _say_all(self, new: str) -> str:
        """Moves the window: its held tokens become the next window's context."""
        del self._window[: self._held]
        self._held = len(self._window)
        self._text = self._decode(self._window)
        return new


class _StopString:
    """The part of one stop string that a growing text ends with. Reads each character once (Knuth,
    Morris, Pratt 1977)."""

    def __init__(self, text: str):
        self.text = text
        # count of the stop string's leading characters that the text read so far ends with
        self.matched = 0
        # Entry n: how many of the stop string's leading characters (fewer than n) its first n
        # characters end with. Computed only as far as the text has matched: a stop string may be
        # much longer than the reply.
        self._borders = array("i", (0, 0))

    def read(self, piece: str) -> int | None:
        """Reads the next piece. Returns the place in the piece at which the first match ends, or
        None."""
        stop = self.text
        at = 0
        while at < len(piece):
            if not self.matched and (at := piece.find(stop[0], at)) < 0:
                return None
            self.matched = self._longer(self.matched, piece[at])
            at += 1
            if self.matched == len(stop):
                return at
            if self.matched == len(self._borders):
                self._borders.append(self._longer(self._borders[-1], stop[self.matched - 1]))
        return None

    def _longer(self, matched: int, sign: str) -> int:
        """The new count of matched characters after `sign` follows a text that matched
        `matched`."""
        stop = self.text
        while matched and stop[matched] != sign:
            matched = self._borders[matched]
        return matched + 1 if stop[matched] == sign else 0


class StopMatcher:
    """Finds the first stop string in a growing text. Holds back text that may be the beginning of
    one.

    Of several matches, the one that ends first counts (of these the longest). So the outcome does
    not depend on how tokens divide the text. A match may begin only in the text after the first
    `min_tokens` tokens. The time is proportional to the text's length.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0):
        """`stops`: at least one, none empty. `include`: the match itself stays in the text."""
        self._stops = [_StopString(stop) for stop in stops]
        self._include = include
        self._min_tokens = min_tokens
        # Held text: these pieces, without the first `_begin` characters of the first one.
        self._pieces: deque[str] = deque()
        self._begin = 0
        self._held = 0  # characters held
        self.tokens = 0
        self.match: str | None = None

    @property
    def matched(self) -> bool:
        return self.match is not None

    def push(self, piece: str) -> str:
        """Takes the text of one more token. Returns the text that may be sent.

        After a match, `match` is the stop string, the text before it has been returned, and
        `tokens` is the count of tokens needed. No further call is allowed.
        """
        self.tokens += 1
        return piece if self.tokens <= self._min_tokens else self._scan(piece)

    def end(self, rest: str) -> str:
        """The reply is over: takes the rest of the detokenizer's text. Returns all held text, or
        the part before a stop string."""
        text = self._scan(rest) if self.tokens > self._min_tokens else rest
        return text if self.matched else text + self._say(self._held)

    def release(self) -> str:
        """Returns all held text: what follows is a special token, which no stop string contains."""
        for stop in self._stops:
            stop.matched = 0
        return self._say(self._held)

    def _scan(self, piece: str) -> str:
        if not piece:
            return ""
        ends = [
            (end, -len(stop.text), stop.text)
            for stop in self._stops
            if (end := stop.read(piece)) is not None
        ]
        if ends:
            end, _, self.match = min(ends)
            text = self._say(self._held) + piece[:end]
            return text if self._include else text[: len(text) - len(self.match)]
        self._pieces.append(piece)
        self._held += len(piece)
        return self._say(self._held - max(stop.matched for stop in self._stops))

    def _say(self, count: int) -> str:
        """Removes and returns the first `count` held characters."""
        pieces = []
        self._held -= count
        while count:
            piece = self._pieces[0]
            begin = self._begin
            pieces.append(piece[begin : begin + count])
            count -= len(pieces[-1])
            self._begin += len(pieces[-1])
            if self._begin == len(piece):
                self._pieces.popleft()
                self._begin = 0
        return "".join(pieces)
