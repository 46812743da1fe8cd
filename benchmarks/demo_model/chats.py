"""Chats written for the demo model, without end and equal for equal seeds: small talk, plain facts,
tiny stories.

A model of a few million parameters cannot learn this from public chats of a few megabytes: the same
short, plain sentences in many orders, follow-up questions, and replies that end. Requests with
random words take them from a dictionary, so that the model learns to repeat a word that it hardly
knows. The sentences are in text files in this folder.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Chat = list[dict[str, str]]
Exchange = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ChatWords:
    nouns: list[str]
    verbs: list[str]
    adjectives: list[str]


def _blocks(name: str) -> list[str]:
    """The blocks of a text file, separated by blank lines."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").strip().split("\n\n")


def _parts(name: str) -> list[list[list[str]]]:
    """The lines of each part of each block; a line "--" is between parts."""
    return [[part.split("\n") for part in block.split("\n--\n")] for block in _blocks(name)]


def _titled(name: str) -> dict[str, str]:
    """The blocks of a file by the text before their colon."""
    return {title: text.strip() for title, text in (block.split(":", 1) for block in _blocks(name))}


SENTENCE_END = re.compile(r"(?<=\.)\s+")
TOPICS = {
    name: SENTENCE_END.split(" ".join(facts.split()))
    for name, facts in _titled("topics.txt").items()
}
"""A topic and its sentences. Any two or three of them, in any order, make a reply."""
REPLIES = {
    name: [line.replace("\\n", "\n") for line in text.split("\n")]
    for name, text in _titled("sentences.txt").items()
}
SMALL_TALK = _parts("small_talk.txt")
"""Questions, and the answers to any of them."""
REMEMBER = _parts("remember.txt")
"""The user's statement, the reply, the later question, its answer, and the words that fill the
gap."""
HARM = REPLIES["harm"]

SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "You are a small demo model. Be kind and short.",
    "Answer in plain English.",
)
OPEN = ("", "", "", "Sure! ", "Of course. ", "With pleasure. ", "Good question! ")
CLOSE = ("", "", "", " Would you like to know more?", " I hope this helps.", " Shall I go on?")
NO_MORE = "That is all I know about {}. You could ask me about {} instead."
WISHES = {
    "wanted to see the sea": "At last it lay there, wide and blue.",
    "was looking for a friend": "In the end the two of them laughed together and were friends.",
    "had lost an old key": "The key was under the very first stone.",
    "wanted to learn to sing": "By the evening everyone could hear a clear and happy song.",
    "could not fall asleep": "Soon there was a long yawn, and then deep sleep.",
    "dreamed of the stars": "That night the stars seemed closer than ever.",
}
SUMS: dict[str, Callable[[int, int], int]] = {
    "plus": int.__add__,
    "minus": int.__sub__,
    "times": int.__mul__,
}


def written_chats(words: ChatWords, seed: int) -> Iterator[Chat]:
    """Chats without end: one to about ten exchanges. In some, the user mentions a fact and asks for
    it later."""
    rng = random.Random(seed)
    while True:
        chat: Chat = []
        told, question = _remembered(rng) if rng.random() < 0.25 else (None, None)
        if told:
            _say(chat, *told)
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.25:
                _topic(chat, rng)
            elif kind < 0.33:
                _story(chat, rng)
            elif kind < 0.5:
                _say(chat, *(rng.choice(texts) for texts in rng.choice(SMALL_TALK)))
            else:
                _say(chat, *_any_request(words, rng))
        if question:
            _say(chat, *question)
        yield chat


def _say(chat: Chat, question: str, answer: str) -> None:
    chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _topic(chat: Chat, rng: random.Random) -> None:
    """A question about a topic and, half of the time, requests for more until all facts are
    told."""
    name = rng.choice(list(TOPICS))
    facts = list(TOPICS[name])
    rng.shuffle(facts)
    question = rng.choice(REPLIES["switch" if chat else "ask"]).format(name)
    go_on = rng.random() < 0.5
    while facts:
        count = rng.randint(2, 3)
        told, facts = facts[:count], facts[count:]
        _say(chat, question, rng.choice(OPEN) + " ".join(told) + rng.choice(CLOSE))
        if not go_on:
            return
        question = rng.choice(REPLIES["more"])
    _say(chat, question, NO_MORE.format(name, rng.choice(list(TOPICS))))


def _story(chat: Chat, rng: random.Random) -> None:
    hero, (wish, end) = rng.choice(REPLIES["heroes"]), rng.choice(list(WISHES.items()))
    sentences = (
        f"Once upon a time there was a {hero} who lived {rng.choice(REPLIES['places'])}.",
        f"The {hero} {wish}.",
        f"One day the {hero} met {(helper := rng.choice(REPLIES['helpers']))}.",
        rng.choice(REPLIES["advice"]).format(
            helper.replace("an ", "the ", 1).replace("a ", "the ", 1)
        ),
        f"So the {hero} set out, and it was not easy.",
        end,
        rng.choice(REPLIES["endings"]),
    )
    _say(chat, rng.choice(REPLIES["story ask"]).format(hero), " ".join(sentences))


def _remembered(rng: random.Random) -> tuple[Exchange, Exchange]:
    """A fact that the user mentions, and the exchange later in the chat that asks for it."""
    tell, reply, ask, (answer,), (values,) = rng.choice(REMEMBER)
    value = rng.choice(values.split())
    reply_text = rng.choice(reply).format(value)
    return (rng.choice(tell).format(value), reply_text[0].upper() + reply_text[1:]), (
        rng.choice(ask),
        answer.format(value),
    )


def _any_request(words: ChatWords, rng: random.Random) -> Exchange:
    """A question or remark about random words, and its answer."""
    noun, adjective = rng.choice(words.nouns), rng.choice(words.adjectives)
    match rng.randrange(10):
        case 0 | 1:
            return _how(_action(words, rng), rng)
        case 2:
            thing = rng.choice((_thing(words, rng), f"{_article(noun)} {noun}"))
            listed = "".join(
                f"\n{i}. {tip}" for i, tip in enumerate(rng.sample(REPLIES["tip"], 3), 1)
            )
            return rng.choice(REPLIES["tips"]).format(thing), rng.choice(
                REPLIES["tips open"]
            ).format(thing) + listed
        case 3:
            return _same(
                "recommend", "recommended", rng, rng.choice((noun, noun, f"{adjective} {noun}"))
            )
        case 4:
            return _same("opinion", "opinions", rng, _thing(words, rng))
        case 5:
            return _same("explain", "explained", rng, _thing(words, rng))
        case 6:
            about = rng.choice(("why", "problem"))
            return _same(about, f"{about} answer", rng, noun, adjective)
        case 7:
            thing = _thing(words, rng)
            question = rng.choice(REPLIES["poem"]).format(thing)
            couplets = rng.sample(REPLIES["couplets"], 2)
            return question, "\n".join(couplets).format(thing, thing)
        case 8 if rng.random() < 0.3:
            question = rng.choice(REPLIES["how"]).format(
                f"{rng.choice(HARM)} {rng.choice(REPLIES['victims'])}"
            )
            return question, rng.choice(REPLIES["harm answer"])
        case _:
            name = rng.choice(list(SUMS))
            a = rng.randint(0, 30)
            b = rng.randint(0, 10)
            a = max(a, b)  # no negative results
            return f"What is {a} {name} {b}?", f"{a} {name} {b} is {SUMS[name](a, b)}."


def _same(questions: str, answers: str, rng: random.Random, *gaps: str) -> Exchange:
    return rng.choice(REPLIES[questions]).format(*gaps), rng.choice(REPLIES[answers]).format(*gaps)


def _thing(words: ChatWords, rng: random.Random) -> str:
    noun = rng.choice(words.nouns)
    return rng.choice((noun, noun, f"{rng.choice(words.adjectives)} {noun}", f"the {noun}"))


def _action(words: ChatWords, rng: random.Random) -> str:
    verb, noun, adjective = (
        rng.choice(words.verbs),
        rng.choice(words.nouns),
        rng.choice(words.adjectives),
    )
    described = f"{_article(adjective)} {adjective} {noun}"
    return rng.choice(
        (verb, *(f"{verb} {thing}" for thing in (noun, f"the {noun}", f"my {noun}", described)))
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _how(action: str, rng: random.Random) -> Exchange:
    answer = [
        rng.choice(REPLIES["how open"]).format(action),
        *rng.sample(REPLIES["how on"], rng.randint(1, 2)),
    ]
    return rng.choice(REPLIES["how"]).format(action), " ".join(answer)
