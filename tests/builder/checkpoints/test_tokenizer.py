"""tokenizer.json made from vocab.json and merges.txt, as OPT and GPT-2 style checkpoints have
them."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.tokenizer import copy_tokenizer
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
TEXT = "The  quick brown fox's tail — naïve, déjà vu 👋\n\tjumped."


@pytest.fixture
def checkpoint(tmp_path):
    """A small byte-level BPE vocabulary with OPT's ids for the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tokenizer.model.save(str(directory))
    return directory


def open_tokenizer(checkpoint, tmp_path, opt):
    engine = tmp_path / "engine"
    engine.mkdir()
    assert copy_tokenizer(checkpoint, engine, opt)
    return Tokenizer.from_file(str(engine / "tokenizer.json"))


def test_opt_begins_with_its_end_token_and_round_trips(checkpoint, tmp_path):
    tokenizer = open_tokenizer(checkpoint, tmp_path, opt=True)
    ids = tokenizer.encode(TEXT).ids
    assert ids[0] == 2 and 2 not in ids[1:]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("a</s>b").ids.count(2) == 2


@pytest.mark.parametrize("add_bos", [False, True])
def test_it_equals_what_transformers_makes_of_the_same_files(add_bos, checkpoint, tmp_path):
    tokens = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": add_bos}
    (checkpoint / "special_tokens_map.json").write_text(json.dumps(tokens))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = GPT2Tokenizer.from_pretrained(checkpoint)
    ours = open_tokenizer(checkpoint, tmp_path, opt=True)
    for text in (TEXT, " leading", "</s>", "a<pad>b", ""):
        assert ours.encode(text).ids == theirs.encode(text)


def test_without_opt_nothing_is_put_in_front_unless_asked(checkpoint, tmp_path):
    assert open_tokenizer(checkpoint, tmp_path, opt=False).encode("fox").ids[0] != 2


def test_settings_of_the_checkpoint_win(checkpoint, tmp_path):
    settings = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": True}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_tokenizer(checkpoint, tmp_path, opt=False).encode("fox").ids[0] == 0


def test_a_tokenizer_json_is_taken_as_it_is(checkpoint, tmp_path):
    Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(str(checkpoint / "tokenizer.json"))
    assert open_tokenizer(checkpoint, tmp_path, opt=True).encode("x").ids == [0]


WORDS = {"x": 0, "<a>": 1, "</s>": 2}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
IN_JSON = AddedToken("<a>", special=True)


@pytest.fixture
def with_json(tmp_path):
    """A checkpoint with a tokenizer.json, and a function that writes the added tokens of its
    tokenizer_config.json."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="x"))
    tokenizer.add_tokens([IN_JSON])
    directory = tmp_path / "with_json"
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))

    def configure(added):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return directory

    return configure


@pytest.mark.parametrize(
    "added",
    [
        {},
        {"1": {"content": "<a>", "special": True, **FLAGS}},
        {"1": {"content": "<a>", "special": False, **FLAGS}},
        {"2": {"content": "</s>", "special": True, **FLAGS}},
        {
            "4": {"content": "<b>", "special": False},
            "3": {"content": "<c>", "special": True, **FLAGS},
        },
    ],
)
def test_tokens_that_only_the_settings_name_are_added_as_by_transformers(
    added, with_json, tmp_path
):
    checkpoint = with_json(added)
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours = open_tokenizer(checkpoint, tmp_path, opt=False)
    assert repr(ours.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)
    assert ours.encode("x<b>x<c></s>").ids == theirs.encode("x<b>x<c></s>")


@pytest.mark.parametrize(
    "added, named",
    [
        ({"9": {"content": "<b>"}}, "'<b>' has id 9"),
        ({"1": {"content": "<b>"}}, "'<b>' has id 1"),
        ({"3": "<b>"}, "cannot be read"),
        (["<b>"], "cannot be read"),
    ],
)
def test_tokens_that_cannot_be_added_as_the_settings_say_are_refused(
    added, named, with_json, tmp_path
):
    with pytest.raises(SettingError, match=r"--checkpoint: .*tokenizer_config\.json") as error:
        open_tokenizer(with_json(added), tmp_path, opt=False)
    assert named in str(error.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    "roles",
    [
        {"eos_token": "</s>", "bos_token": "<a>"},
        {
            "pad_token": {
                "__type": "AddedToken",
                "content": "</s>",
                **FLAGS,
                "lstrip": True,
                "rstrip": True,
            }
        },
        {"additional_special_tokens": ["</s>"]},
        {"extra_special_tokens": ["</s>"]},
        {
            "eos_token": "</s>",
            "some_token": {"id": 3},
            "image_token": {"content": "<a>"},
        },  # no entry marks it as a token
        {"eos_token": "</s>", "image_token": {"__type": "AddedToken", "content": "<a>", **FLAGS}},
    ],
)
def test_tokens_with_a_role_are_not_cut_up(name, roles, with_json, tmp_path):
    checkpoint = with_json({})
    (checkpoint / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    if name == "special_tokens_map.json":  # this file has no types
        roles = {role: _without_type(value) for role, value in roles.items()}
    (checkpoint / name).write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles})
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours = open_tokenizer(checkpoint, tmp_path, opt=False)
    assert repr(ours.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)
    assert (
        ours.encode("x</s> x<a>").ids == theirs.encode("x</s> x<a>")
        and 2 in ours.encode("x</s> x").ids
    )


def test_a_token_with_a_role_is_special_whatever_its_description_says(with_json, tmp_path):
    checkpoint = with_json({"2": {"content": "</s>", "special": False, **FLAGS}})
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "</s>"}))
    theirs = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    ours = open_tokenizer(checkpoint, tmp_path, opt=False)
    assert repr(ours.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)


def test_a_role_whose_token_the_model_does_not_have_adds_none(with_json, tmp_path):
    """transformers makes one behind the vocabulary; the model has no embedding for it."""
    checkpoint = with_json({})
    (checkpoint / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    assert open_tokenizer(checkpoint, tmp_path, opt=False).get_vocab_size() == len(WORDS)


def _without_type(value):
    return (
        {key: one for key, one in value.items() if key != "__type"}
        if isinstance(value, dict)
        else value
    )


ADDED = {"content": "<|im_end|>", "special": True}


@pytest.mark.parametrize(
    "name, value, named",
    [
        ("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"}, "Qwen2Tokenizer"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"320": ADDED}}, "<|im_end|>"),
        ("tokenizer_config.json", {"additional_special_tokens": ["<|im_end|>"]}, "<|im_end|>"),
        ("special_tokens_map.json", {"additional_special_tokens": [ADDED]}, "<|im_end|>"),
        (
            "tokenizer_config.json",
            {"eos_token": ADDED, "added_tokens_decoder": {"320": ADDED}},
            "<|im_end|>",
        ),
        ("added_tokens.json", {"<|im_end|>": 320}, "<|im_end|>"),
        ("added_tokens.json", {"<unk>": 3, "[PAD]": 320}, "[PAD]"),
    ],
)
def test_what_would_be_tokenised_otherwise_is_refused(name, value, named, checkpoint, tmp_path):
    """Another class cuts numbers and accents elsewhere; without its added tokens a dialogue's marks
    are cut up."""
    (checkpoint / name).write_text(json.dumps(value))
    with pytest.raises(SettingError, match=r"--checkpoint: .*save_pretrained") as error:
        open_tokenizer(checkpoint, tmp_path, opt=False)
    assert named in str(error.value)


def test_added_tokens_that_are_known_by_their_role_change_nothing(checkpoint, tmp_path):
    roles = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokens = {"1": {"content": "<pad>", "special": True}, "2": {"content": "</s>", "special": True}}
    settings = {"tokenizer_class": "GPT2TokenizerFast", "added_tokens_decoder": tokens, **roles}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_tokenizer(checkpoint, tmp_path, opt=True).encode("a<pad>b</s>").ids.count(2) == 2


def test_the_chat_template_for_tools_comes_along(tmp_path):
    """transformers saves templates with names of their own in a directory."""
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    before = build_engine(tmp_path / "checkpoint", tmp_path / "engine").manifest.fingerprint
    name = Path("additional_chat_templates", "tool_use.jinja")
    (tmp_path / "checkpoint" / name).parent.mkdir()
    (tmp_path / "checkpoint" / name).write_text("{{ tools }}")
    assert build_engine(tmp_path / "checkpoint", tmp_path / "engine").manifest.fingerprint != before
    assert (tmp_path / "engine" / name).read_text() == "{{ tools }}"
    assert build_engine(tmp_path / "checkpoint", tmp_path / "engine").outcome == "reused"
    (tmp_path / "engine" / name).unlink()
    assert build_engine(tmp_path / "checkpoint", tmp_path / "engine").outcome == "replaced"


@pytest.mark.parametrize("content", [None, b"", b"\xff"])
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "generation_config.json"]
)
def test_a_file_of_the_checkpoint_that_cannot_be_read_is_named(name, content, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    tiny_checkpoint("llama", checkpoint)
    if name == "vocab.json":
        (checkpoint / "merges.txt").write_text("")
    elif name != "tokenizer.json":
        Tokenizer(models.WordLevel({"x": 0}, unk_token="x")).save(
            str(checkpoint / "tokenizer.json")
        )
    at = checkpoint / name
    at.unlink(missing_ok=True)
    at.mkdir() if content is None else at.write_bytes(content)
    with pytest.raises(
        SettingError, match=f"^--checkpoint: {at}( and .*|, or .*,)? cannot be read"
    ):
        build_engine(checkpoint, tmp_path / "engine")


def test_without_any_files_there_is_no_tokenizer(tmp_path):
    assert not copy_tokenizer(tmp_path, tmp_path, opt=True)
