"""The demo models' training data: reads chats, splits off the held-out ones, makes the tokenizer,
fills rows."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pensieve.scheduler.types import SettingError

from .chats import HARM, SYSTEM, Chat, ChatWords, written_chats

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCABULARY = 2048
HELD_OUT_PERCENT = 5
WRITTEN_CHATS = 60_000
DEFINE = (
    'What does "{}" mean?',
    'What is the meaning of "{}"?',
    'Explain the word "{}".',
    'Define "{}", please.',
)
DEFINE_NEXT = ('And "{}"?', 'And what does "{}" mean?', 'What about "{}"?')
TRIAL = re.compile(r"-(\d+)-\d+$")
PART_OF_SPEECH = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}

Named = tuple[str, Chat]
Ids = list[int]


def read_chats(path: Path) -> Iterator[Named]:
    """Conversations of a gzipped JSON-lines file, each line `{conversation, messages: [{role,
    content}]}`.

    Only messages of users and assistants are kept; consecutive messages of one role, with a tool
    call in between, are joined.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            chat: Chat = []
            for message in record["messages"]:
                text = (message["content"] or "").replace("###STOP###", "").strip()
                if message["role"] not in ("user", "assistant") or not text:
                    continue
                if chat and chat[-1]["role"] == message["role"]:
                    chat[-1]["content"] += "\n\n" + text
                else:
                    chat.append({"role": message["role"], "content": text})
            yield record["conversation"], chat


class Entry(NamedTuple):
    """One sense of a word; `kind` is a key of PART_OF_SPEECH."""

    word: str
    kind: str
    gloss: str


def read_wordnet(directory: Path) -> Iterator[Entry]:
    """The senses in WordNet's data.* files (see wndb(5)) whose first word occurs in its tagged
    texts (cntlist.rev).

    That leaves mostly common words.
    """
    counts = (directory / "cntlist.rev").read_text(encoding="latin-1").splitlines()
    common = {line.split("%")[0] for line in counts}
    for part in ("noun", "verb", "adj", "adv"):
        for line in (directory / f"data.{part}").read_text(encoding="latin-1").splitlines():
            fields, _, gloss = line.partition(" | ")
            if line.startswith(" ") or not gloss:  # the licence is at the beginning
                continue
            _, _, kind, _, word, *_ = fields.split()
            word = re.sub(r"\(.*\)$", "", word)
            if word in common and re.fullmatch("[a-z_]+", word):
                yield Entry(word.replace("_", " "), kind, gloss.strip())


def word_chats(entries: list[Entry], seed: int) -> Iterator[Named]:
    """Chats of one to three questions for the meaning of a word; every entry is asked for once."""
    rng = random.Random(seed)
    left = rng.sample(entries, len(entries))
    while left:
        chat: Chat = []
        name = left[-1].word
        for _ in range(min(rng.randint(1, 3), len(left))):
            entry = left.pop()
            question = rng.choice(DEFINE_NEXT if chat else DEFINE).format(entry.word)
            chat += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": _meaning(*entry)},
            ]
        yield name, chat


def single_words(entries: list[Entry]) -> ChatWords:
    """Words of three to ten letters, each once, without those whose requests must be refused."""
    kinds = {entry.word: entry.kind for entry in entries if re.fullmatch("[a-z]{3,10}", entry.word)}
    kinds = {word: kind for word, kind in kinds.items() if word not in HARM}
    nouns, verbs, adjectives = (
        [w for w, kind in kinds.items() if kind in wanted] for wanted in ("n", "v", "as")
    )
    return ChatWords(nouns, verbs, adjectives)


def _meaning(word: str, kind: str, gloss: str) -> str:
    definition, *rest = gloss.split('; "')
    meaning = (
        f'As {"an" if kind in "asr" else "a"} {PART_OF_SPEECH[kind]}, "{word}" means: '
        f"{definition.strip()}."
    )
    return meaning + (f' For example: "{rest[0].split(chr(34))[0]}."' if rest else "")


def split(named: list[Named]) -> tuple[list[Chat], list[Chat]]:
    """(training, held out). By the hash of the name alone: the lowest 5 % are held out, at least
    one.

    Trials of one task (`task-7-0`, `task-7-1`) fall on the same side.
    """
    groups = {
        name: hashlib.sha256(TRIAL.sub(r"-\1", name).encode()).hexdigest() for name, _ in named
    }
    hashes = sorted(set(groups.values()))
    limit = hashes[max(1, len(hashes) * HELD_OUT_PERCENT // 100)]
    kept = [chat for name, chat in named if groups[name] >= limit]
    return kept, [chat for name, chat in named if groups[name] < limit]


def render(chat: Chat) -> str:
    """The text that CHAT_TEMPLATE gives for a finished chat."""
    return "".join(
        f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in chat
    )


def make_tokenizer(chats: Iterable[Chat]) -> Tokenizer:
    """Byte-level BPE; every byte is in the vocabulary, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (message["content"] for chat in chats for message in chat), trainer
    )
    return tokenizer


class Corpus:
    """Tokenized chats by source, training and held-out; `tokenizer` is made from the training
    chats.

    sources: the chat files by file name, "wordnet" and "written".
    """

    def __init__(self, chat_files: list[Path], wordnet: Path, seed: int):
        entries = list(read_wordnet(wordnet))
        written = islice(written_chats(single_words(entries), seed), WRITTEN_CHATS)
        named = {path.name: list(read_chats(path)) for path in chat_files}
        named["wordnet"] = list(word_chats(entries, seed))
        named["written"] = [(f"written-{i}", chat) for i, chat in enumerate(written)]
        parts = {source: split(pairs) for source, pairs in named.items()}
        # The written chats are many and alike: a few suffice for the tokenizer.
        self.tokenizer = make_tokenizer(chat for kept, _ in parts.values() for chat in kept[:5000])
        self.train = {source: self._encode(kept) for source, (kept, _) in parts.items()}
        self.held_out = {source: self._encode(away) for source, (_, away) in parts.items()}
        self.systems = self._encode([[{"role": "system", "content": text}] for text in SYSTEM])
        self.separator = self.token_id(END_OF_TEXT)

    def token_id(self, text: str) -> int:
        """The id of a special token."""
        token = self.tokenizer.token_to_id(text)
        assert token is not None
        return token

    def _encode(self, chats: list[Chat]) -> list[Ids]:
        return [
            encoding.ids
            for encoding in self.tokenizer.encode_batch([render(chat) for chat in chats])
        ]

    def packed(self, chats: list[Ids], length: int) -> list[Ids]:
        """Chats joined with an end-of-text token between two, cut into whole rows of `length`
        tokens.

        Raises SettingError if they do not fill one row.
        """
        flat = [token for chat in chats for token in (*chat, self.separator)]
        if len(flat) < length:
            raise SettingError(
                "--row-tokens", f"{length} is too long: some held-out chats fill only {len(flat)}"
            )
        return [flat[start : start + length] for start in range(0, len(flat) - length + 1, length)]


class Rows:
    """Endless training rows that begin with a chat, as a request does.

    Two chats are separated by an end-of-text token, or not at all: then they are one long chat that
    changes its subject, so that late positions are learned too.
    """

    def __init__(self, corpus: Corpus, shares: dict[str, float], seed: int):
        self.corpus = corpus
        self.rng = random.Random(seed)
        self.waiting: dict[str, list[Ids]] = {source: [] for source in shares}
        lengths = {
            source: sum(map(len, corpus.train[source])) / len(corpus.train[source])
            for source in shares
        }
        self.odds = [share / lengths[source] for source, share in shares.items()]

    def next(self, length: int) -> Ids:
        """The next row, of exactly `length` token ids."""
        row: Ids = []
        opening = True
        while len(row) < length:
            if opening and self.rng.random() < 0.15:
                row += self.rng.choice(self.corpus.systems)
            row += self._chat()
            opening = self.rng.random() < 0.5
            if opening:
                row.append(self.corpus.separator)
        return row[:length]

    def _chat(self) -> Ids:
        """Draws a chat. Sources are drawn so that `shares` are shares of tokens; a source's chats
        come in a new order each time."""
        source = self.rng.choices(list(self.waiting), self.odds)[0]
        if not self.waiting[source]:
            self.waiting[source] = self.rng.sample(
                self.corpus.train[source], len(self.corpus.train[source])
            )
        return self.waiting[source].pop()
