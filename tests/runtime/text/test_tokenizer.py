"""Detokenizing keeps the text complete; stop strings are found at any division into tokens."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pensieve.runtime.text.tokenizer import (
    CONTEXT_TOKENS,
    REPLACEMENT,
    ChatTemplate,
    Detokenizer,
    StopMatcher,
    Tokenizer,
)
from pensieve.scheduler.types import ErrorKind, RequestError, SettingError

from ..fake_loop import FIRST_BYTE, TEMPLATE, byte_tokenizer, byte_tokens, save_tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 e\u0301 naïve — 😀😀 end"


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Like Llama 2's: words with a leading ▁, bytes for characters that the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "Hello", "world", "ü", "!"]
    vocabulary = {word: at for at, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def in_bytes(text: str) -> list[int]:
    """`sentencepiece_like`'s ids of a text, all of them bytes."""
    backend = sentencepiece_like()
    return [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def pieces(tokenizer: Tokenizer, tokens: list[int], context: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize(
    ("method", "given"),
    [("encode_rendered", "tea " * 400_000), ("decode_all", byte_tokens("tea ") * 400_000)],
)
def test_the_process_goes_on_while_a_long_text_is_encoded_or_decoded(
    method: str, given: object
) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    went_on = 0
    working = threading.Thread(target=getattr(tokenizer, method), args=(given,))
    working.start()
    while working.is_alive():
        time.sleep(0.001)
        went_on += 1
    assert went_on > 20, "hundreds of times, but for one or two if it stops meanwhile"


def test_a_character_of_several_tokens_is_said_whole() -> None:
    text_pieces = pieces(Tokenizer(byte_tokenizer()), byte_tokens(TEXT))
    assert "".join(text_pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in text_pieces)
    assert "世" in text_pieces and "👩" in text_pieces


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_join_to_the_full_decode(seed: int) -> None:
    """Random tokens, special ones among them, are mostly not UTF-8."""
    tokenizer = Tokenizer(byte_tokenizer())
    draw = random.Random(seed)
    odd = [FIRST_BYTE + byte for byte in (0xFF, 0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9)]
    tokens = [draw.choice(odd) if draw.random() < 0.7 else draw.randrange(260) for _ in range(200)]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_an_endless_run_of_broken_bytes_is_said_as_it_goes() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    tokens = [FIRST_BYTE + 0xFF] * 1000
    text_pieces = pieces(tokenizer, tokens)
    assert "".join(text_pieces) == REPLACEMENT * 1000
    assert sum(map(len, text_pieces[:500])) > 490


def test_ids_without_text_cost_no_memory() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    detokenizer = Detokenizer(Tokenizer(byte_tokenizer()))
    assert "".join(detokenizer.push(token) for token in [999] * 1000 + byte_tokens("a")) == "a"
    assert len(detokenizer._window) < 100


def test_sentencepiece_spaces_and_bytes() -> None:
    backend = sentencepiece_like()
    tokenizer = Tokenizer(backend)
    emoji = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀😃".encode()]
    words = [
        backend.token_to_id(word) for word in ("▁Hello", "▁world", "</s>", "▁", "▁Hello", "ü", "!")
    ]
    tokens = [*words, *emoji, *words, 1, *emoji]
    text_pieces = pieces(tokenizer, tokens)
    assert "".join(text_pieces) == tokenizer.decode(tokens)
    assert text_pieces[:2] == ["Hello", " world"]
    assert not any(REPLACEMENT in piece for piece in text_pieces)


def test_a_reply_that_begins_with_a_character_in_bytes() -> None:
    """After the reply's leading space, which has no text of its own there."""
    backend = sentencepiece_like()
    words = [
        backend.token_to_id("▁"),
        *(backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀é".encode()),
    ]
    assert pieces(Tokenizer(backend), words) == ["", "", "", "", "😀", "", "é", ""]


def test_a_reply_that_continues_its_prompt_keeps_its_leading_space() -> None:
    backend = sentencepiece_like()
    hello, world = (backend.token_to_id(word) for word in ("▁Hello", "▁world"))
    assert "".join(pieces(Tokenizer(backend), [world])) == "world"
    assert "".join(pieces(Tokenizer(backend), [world], context=(hello,))) == " world"


@pytest.mark.parametrize("prompt", ["今日は世界", "éa今日は世界", "今日は世界!", "a", "界"])
def test_a_reply_goes_on_behind_a_long_run_of_byte_tokens(prompt: str) -> None:
    """The prompt's last tokens may begin within a character. A decoder takes a run of bytes that
    begins so for broken, the reply's own characters included."""
    tokenizer = Tokenizer(sentencepiece_like())
    before, reply = in_bytes(prompt), in_bytes("今é")
    assert "".join(pieces(tokenizer, reply, tokenizer.context(before))) == "今é"
    behind = tokenizer.encode_behind(before, "今é")
    assert behind is not None and behind.tolist() == reply


def test_a_context_of_broken_bytes_stays_whole() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    broken = in_bytes("界")[1:] * 6
    assert tokenizer.context(broken) == broken[-CONTEXT_TOKENS:]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    text_pieces = pieces(Tokenizer(byte_tokenizer()), byte_tokens("a世")[:-1])
    assert text_pieces == ["a", "", "", REPLACEMENT]


def match(
    stops: list[str], text_pieces: list[str], **options: bool | int
) -> tuple[str, int | None]:
    matcher = StopMatcher(stops, **options)  # type: ignore[arg-type]
    text = ""
    for piece in text_pieces:
        text += matcher.push(piece)
        if matcher.matched:
            return text, matcher.tokens
    text += matcher.end("")
    return text, matcher.tokens if matcher.matched else None


@pytest.mark.parametrize(
    ("stops", "text_pieces", "expected"),
    [
        (["END"], ["abc", "END", "x"], ("abc", 2)),
        (["END"], ["abcE", "N", "Dxyz"], ("abc", 3)),
        (["END"], ["abE", "NE", "ND"], ("abEN", 3)),
        (["END"], ["abEN", ""], ("abEN", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", 4)),
        (["abcd", "bc"], ["abcd"], ("a", 1)),
        (["abcd", "bc"], ["a", "bc", "d"], ("a", 2)),
        (["b", "ab"], ["xab"], ("x", 1)),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ("one\ntwo", 3)),
    ],
)
def test_stop_strings(
    stops: list[str], text_pieces: list[str], expected: tuple[str, int | None]
) -> None:
    assert match(stops, text_pieces) == expected


def test_a_stop_string_may_stay_in_the_text() -> None:
    assert match(["END"], ["abcE", "NDxyz"], include=True) == ("abcEND", 2)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["stop"])
    assert [matcher.push(piece) for piece in ("a s", "t", "x", "sto")] == ["a ", "", "stx", ""]
    assert matcher.end("") == "sto"


def test_min_tokens_come_before_stop_strings() -> None:
    assert match(["x"], ["x", "x", "ax"], min_tokens=2) == ("xxa", 3)


def test_a_stop_string_can_be_completed_by_the_last_flush() -> None:
    matcher = StopMatcher([REPLACEMENT])
    assert matcher.push("a") == "a"
    assert matcher.end(REPLACEMENT) == "" and matcher.matched


@pytest.mark.parametrize("seed", range(20))
def test_the_outcome_does_not_depend_on_how_text_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", k=60))
    stops = ["".join(draw.choices("ab", k=draw.randrange(3, 8))) for _ in range(3)]
    cuts = sorted(draw.sample(range(1, 60), 20))
    text_pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, 60], strict=True)]
    assert match(stops, text_pieces)[0] == match(stops, list(text))[0] == match(stops, [text])[0]


def matcher_twin(stops: list[str], text_pieces: list[str], include: bool) -> list[str]:
    """The text that each piece releases, computed from the whole text each time; the last piece
    completes a stop string."""
    text = ""
    done = 0
    outcome = []
    for piece in text_pieces:
        text += piece
        matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if matches:
            end, start = min(matches)
            return [*outcome, text[done : end if include else start]]
        beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
        held = max(len(beginning) for beginning in beginnings if text.endswith(beginning))
        outcome.append(text[done : len(text) - held])
        done = len(text) - held
    return [*outcome, text[done:]]


@pytest.mark.parametrize("seed", range(200))
def test_every_piece_is_said_as_soon_as_it_may_be(seed: int) -> None:
    draw = random.Random(seed)
    stops = [
        "".join(draw.choices("ab", k=draw.randrange(1, 12))) for _ in range(draw.randrange(1, 5))
    ]
    text_pieces = [
        "".join(draw.choices("ab", (3, 1), k=draw.randrange(5))) for _ in range(draw.randrange(30))
    ]
    include = bool(seed % 2)
    matcher = StopMatcher(stops, include)
    outcome = []
    for piece in text_pieces:
        outcome.append(matcher.push(piece))
        if matcher.matched:
            break
    else:
        outcome.append(matcher.end(""))
    assert outcome == matcher_twin(stops, text_pieces, include)


class Watched(str):
    """Counts its characters that are read, compared or copied, and characters that are put before
    it."""

    seen = 0

    def __getitem__(self, at: Any) -> Watched:
        part = Watched(super().__getitem__(at))
        Watched.seen += max(1, len(part))
        return part

    def __radd__(self, before: str) -> str:
        Watched.seen += len(before) + len(self)
        return str(before) + str(self)

    def startswith(self, beginning: Any, *place: int) -> bool:
        Watched.seen += len(beginning)
        return super().startswith(beginning, *place)

    def find(self, part: str, start: int = 0, *end: int) -> int:
        at = super().find(part, start, *end)
        Watched.seen += (at if at >= 0 else len(self)) - start + len(part)
        return at


def fibonacci_text(length: int) -> str:
    """Every beginning of it comes again as late as can be."""
    before, text = "b", "a"
    while len(text) < length:
        before, text = text, text + before
    return text[:length]


LONG = 100_000


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["a" * LONG + "b"], "a" * LONG),
        (["a" * (LONG // 2) + "b"], "a" * LONG),
        (["a" * 1000 + "b", "a" * 1000 + "c"], ("a" * 1000 + "d") * 100),
        ([fibonacci_text(LONG - 10) + "c"], fibonacci_text(LONG)),
    ],
    ids=["all is held", "half is held", "held and said", "borders"],
)
@pytest.mark.parametrize("piece", [1, 7, LONG - 3])
def test_stop_strings_take_time_in_proportion_to_the_text(
    stops: list[str], text: str, piece: int
) -> None:
    matcher = StopMatcher([Watched(stop) for stop in stops])
    length = len(text)
    Watched.seen = 0
    text_pieces = [matcher.push(Watched(text[at : at + piece])) for at in range(0, length, piece)]
    assert "".join(text_pieces) + matcher.end("") == text and not matcher.matched
    assert Watched.seen < 12 * length * len(stops)


def test_load_reads_the_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path))
    assert tokenizer.encode("hi").tolist() == [1, *byte_tokens("hi")]
    prompt = tokenizer.encode_rendered(
        tokenizer.render_chat([{"role": "user", "content": "<b>hi</b>"}])
    )
    assert prompt.tolist() == [1, *byte_tokens("user: <b>hi</b>\nassistant: ")]
    assert tokenizer.decode([*prompt, 2]) == "user: <b>hi</b>\nassistant: "


def test_a_template_file_comes_before_the_configured_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ eos_token }}")
    tokenizer = Tokenizer.load(tmp_path)
    prompt = tokenizer.encode_rendered(tokenizer.render_chat([{"role": "user", "content": "é<"}]))
    assert prompt.tolist() == [*byte_tokens('[{"role": "user", "content": "é<"}]'), 2]


def test_one_of_several_configured_templates(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.load(tmp_path).render_chat([]) == "yes"


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("in_files", [False, True])
def test_tools_are_told_by_the_template_that_is_made_for_them(
    in_files: bool, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    templates = {"default": "plain", "tool_use": "{{ tools[0].function.name }}"}
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(templates["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
            templates["tool_use"]
        )
    else:
        named = [{"name": name, "template": source} for name, source in templates.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    speaker = Tokenizer.load(tmp_path)
    assert [speaker.render_chat([], tools=tools) for tools in (TOOLS, [], None)] == [
        "f",
        "plain",
        "plain",
    ]
    assert Tokenizer.load(tmp_path, "ours").render_chat([], tools=TOOLS) == "ours"
    assert not speaker.ignores_tools and Tokenizer.load(tmp_path, "ours").ignores_tools


@pytest.mark.parametrize(
    ("source", "ignores"),
    [
        ("{% for message in messages %}{{ message.content }}{% endfor %}", True),
        ("{{ messages[0].tools }}{# tools #}{{ 'tools' }}", True),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", False),
        ("{% if tools is not defined %}{% set tools = none %}{% endif %}{{ tools }}", False),
        ("{% set tools = tools or [] %}{% for tool in tools %}{{ tool }}{% endfor %}", False),
        ("{% macro told() %}{{ tools }}{% endmacro %}{{ told() }}", False),
    ],
)
def test_a_template_that_ignores_tools_is_recognised(
    source: str, ignores: bool, tmp_path: Path
) -> None:
    assert Tokenizer.load(save_tokenizer(tmp_path), source).ignores_tools is ignores


@pytest.mark.parametrize(
    "config, expected",
    [
        ({}, "</s><s>"),
        ({"bos_token": "<unk>", "sep_token": "<unk>"}, "</s><s><unk>"),
        ({"bos_token": "<unk>", "added_tokens_decoder": {}}, "<unk>"),
    ],
)
def test_special_tokens_are_named_where_transformers_looks(
    config: dict[str, object], expected: str, tmp_path: Path
) -> None:
    """In the older of the two files unless the newer one lists all tokens."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ sep_token }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert Tokenizer.load(tmp_path).render_chat([]) == expected


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "é<!"),
        (
            "{{ tools | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}",
            '[{"a":"é","b":1}]',
        ),
        ("{{ tools | tojson(true) }}", '[{"b": 1, "a": "\\u00e9"}]'),
        ("{{ tools | tojson(indent=1) }}", '[\n {\n  "b": 1,\n  "a": "é"\n }\n]'),
        ("{{ documents is none }}", "True"),
        ("{{ bos_token }}{{ think_token }}{{ boi_token }}{{ add_bos_token }}", "<s></s><pad>"),
    ],
)
def test_a_template_finds_what_transformers_gives_it(
    source: str, expected: str, tmp_path: Path
) -> None:
    save_tokenizer(tmp_path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "think_token": "</s>",
        "add_bos_token": True,
        "extra_special_tokens": {"boi_token": "<pad>"},
        "chat_template": source,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages, tools = [{"role": "user", "content": "é<"}], [{"b": 1, "a": "é"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert (
        theirs.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
        == expected
    )
    assert Tokenizer.load(tmp_path).render_chat(messages, tools=tools) == expected


def test_a_template_can_refuse_and_cannot_escape() -> None:
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    with pytest.raises(RequestError, match="no strangers here") as refused:
        template.render([{"role": "stranger", "content": "x"}])
    assert (refused.value.kind, refused.value.subject) == (ErrorKind.INVALID, "messages")
    with pytest.raises(RequestError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {}).render([])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role + m.tool_calls }}{% endfor %}",  # text and a list
        "{% for m in messages %}{% for k, v in m.role | items %}{{ k }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.role | int // 0 }}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_messages_that_a_template_stumbles_over_are_their_sender_s_fault(source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as refused:
        ChatTemplate(source, {}).render([{"role": "assistant", "content": "", "tool_calls": []}])
    assert refused.value.kind == ErrorKind.INVALID


@pytest.mark.parametrize(
    "file, content",
    [
        ("tokenizer.json", b'{"broken'),
        ("tokenizer_config.json", b'{"broken'),
        ("tokenizer_config.json", b"[]"),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% if %}"),
    ],
)
def test_a_file_that_is_damaged_is_a_wrong_setting(
    tmp_path: Path, file: str, content: bytes
) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(SettingError, match=r"--engine.*(cannot be read|does not parse)"):
        Tokenizer.load(tmp_path)


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(SettingError, match="does not parse"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(RequestError, match=r"no chat template.*--chat-template FILE"):
        Tokenizer(byte_tokenizer()).render_chat([])
