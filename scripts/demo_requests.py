"""Requests about any word, with plain answers that repeat it, and things to remember: more chats for the demo model.

The words come from a dictionary, so that the model learns to take up a word that it hardly knows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Exchange = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Words:
    nouns: list[str]
    verbs: list[str]
    adjectives: list[str]


HOW = (
    "How do I {}?",
    "How can I {}?",
    "How should I {}?",
    "What is the best way to {}?",
    "Can you help me to {}?",
    "I want to {}.",
    "I need to {}. What should I do?",
    "Please teach me how to {}.",
    "How does one {}?",
    "I would like to {}.",
)
HOW_OPEN = (
    "To {}, begin with a small first step.",
    "If you want to {}, take your time and start simply.",
    "The best way to {} is to begin with what you have.",
    "It is not hard to {} once you have tried it a few times.",
    "To {}, you need some patience and a clear plan.",
)
HOW_ON = (
    "Look at how others do it, and ask when something is not clear.",
    "Gather what you need before you begin.",
    "Do one thing after the other, and check the result.",
    "If it does not work the first time, try again tomorrow.",
    "A little practice every day is better than a lot once a month.",
    "Write down what worked, so that it is easier the next time.",
)
TIPS = ("Give me some tips for {}.", "Do you have any tips for {}?", "What should I know about {}?", "Advice for {}?")
TIPS_OPEN = ("Here are three tips for {}:", "These three things help with {}:", "Sure! My advice for {}:")
TIP = (
    "Prepare well and begin early.",
    "Keep it simple.",
    "Ask someone with experience.",
    "Take breaks when you are tired.",
    "Learn from small mistakes.",
    "Be patient and stay calm.",
    "Read a little about it first.",
    "Enjoy it!",
)
RECOMMEND = (
    "Can you recommend a good {}?",
    "Which {} should I choose?",
    "I am looking for a good {}.",
    "What {} would you choose?",
    "How do I find a good {}?",
    "What makes a good {}?",
)
RECOMMENDED = (
    "A good {} is one that suits you. Compare two or three before you decide.",
    "That depends on what you need the {} for. What matters most to you?",
    "I would choose a {} that is simple and well made.",
    "Ask a friend who knows about such things. A good {} is often not the most expensive one.",
)
OPINION = ("What do you think about {}?", "Do you like {}?", "I like {}.", "I often think about {}.", "{} is great!")
OPINIONS = (
    "I am only a small model, but {} sounds interesting to me. What do you like about it?",
    "Interesting! What comes to your mind first when you think of {}?",
    "I have read only a little about {}. Please tell me more!",
    "People see {} in different ways. How do you see it?",
)
EXPLAIN = ("Explain {} briefly.", "Tell me about {}.", "What can you tell me about {}?", "I have a question about {}.")
EXPLAINED = (
    "I know only a little about {}. It is best to look it up in a good book.",
    "There is much to say about {}. What would you like to know first?",
    "I am a small model, and I am not sure about {}. I can tell you about simple things such as rain, bread or cats.",
)
WHY = ("Why is the {0} {1}?", "Why is my {0} so {1}?", "Do you know why the {0} is {1}?", "Why is a {0} {1}?")
WHY_ANSWER = (
    "There may be several reasons why the {0} is {1}. I am not sure which one is the most important.",
    "The {0} is {1} for more than one reason. Some of them are simple, and some are not well known.",
    "That is a good question. I do not know exactly why the {0} is {1}.",
)
PROBLEM = (
    "My {0} is {1}.",
    "My {0} is {1}. What can I do?",
    "What should I do if my {0} is {1}?",
    "Help, my {0} is {1}!",
)
PROBLEM_ANSWER = (
    "I am sorry that your {0} is {1}. Try the simplest thing first, and ask for help if nothing changes.",
    "If your {0} is {1}, find out when it began. Then change one thing at a time.",
    "That sounds annoying. How long has your {0} been {1}?",
)
POEM = (
    "Write a poem about {}.",
    "Write a short poem about {}.",
    "A poem about {}, please.",
    "Write me a verse about {}.",
)
COUPLETS = (
    "The morning comes, the air is clear,\nI think of {}, and it feels near.",
    "When all the world is still and deep,\nI dream of {} in my sleep.",
    "The day is long, the road is wide,\nWith {} walking at my side.",
    "The wind is soft, the night is blue,\nI speak of {}, my friend, to you.",
    "The years go by, the rivers run,\nAnd {} shines like morning sun.",
)
SUMS: dict[str, Callable[[int, int], int]] = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}

HARM = (
    "kill",
    "murder",
    "hurt",
    "poison",
    "rob",
    "steal",
    "bomb",
    "shoot",
    "stab",
    "torture",
    "strangle",
    "rape",
    "harm",
)
HARM_ANSWER = (
    "I am sorry, but I cannot help with that.",
    "I cannot help with that. If someone is in danger, please call for help.",
    "I am sorry that you think about that. Please talk to someone you trust.",
)
VICTIMS = (
    "myself",
    "someone",
    "a man",
    "a woman",
    "my neighbour",
    "a child",
    "people",
    "an animal",
    "my friend",
    "him",
)

# What the user says, the reply, the later question, its answer, and what can stand in the gap.
REMEMBER = (
    (
        ("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I am {}."),
        ("Nice to meet you, {}!", "Hello, {}! How can I help you today?"),
        ("What is my name?", "Do you remember my name?", "Who am I?"),
        "Your name is {}.",
        "Anna Ben Carla David Emma Felix Grace Henry Ida Jack Julia Karl Laura Lily Lucas Maria Max Mia Nora Oliver "
        "Paul Peter Rosa Ruth Sam Sara Simon Sophie Thomas Tom Victor Alice Bob Eve Robert Helen Frank Claire",
    ),
    (
        ("My favourite colour is {}.", "I love the colour {}.", "The colour I like most is {}."),
        ("{} is a beautiful colour.", "I see, you like {}. I will remember that."),
        ("What is my favourite colour?", "Which colour do I like most?", "Do you remember my favourite colour?"),
        "Your favourite colour is {}.",
        "red blue green yellow orange purple brown black white grey pink gold silver",
    ),
    (
        ("I live in {}.", "I come from {}.", "My home is in {}."),
        ("{} must be an interesting place.", "How nice! Do you like {}?"),
        ("Where do I live?", "Do you remember where I live?", "What is my home town?"),
        "You live in {}.",
        "Paris London Berlin Rome Madrid Vienna Prague Oslo Lisbon Dublin Athens Warsaw Boston Chicago Tokyo Cairo",
    ),
    (
        ("I have a dog called {}.", "My dog is called {}.", "The name of my dog is {}."),
        ("{} is a good name for a dog.", "Please give {} a treat from me!"),
        ("What is my dog called?", "What is the name of my dog?", "Do you remember my dog?"),
        "Your dog is called {}.",
        "Rex Bella Max Luna Rocky Daisy Buddy Molly Charlie Lucky Coco Milo Ruby Toby Sunny Pepper",
    ),
)


def any_request(words: Words, rng: random.Random) -> Exchange:
    """A question or remark about random words, and its answer."""
    noun, adjective = rng.choice(words.nouns), rng.choice(words.adjectives)
    match rng.randrange(10):
        case 0 | 1:
            return _how(_action(words, rng), rng)
        case 2:
            thing = rng.choice((_thing(words, rng), f"{_article(noun)} {noun}"))
            listed = "".join(f"\n{i}. {tip}" for i, tip in enumerate(rng.sample(TIP, 3), 1))
            return rng.choice(TIPS).format(thing), rng.choice(TIPS_OPEN).format(thing) + listed
        case 3:
            return _same(RECOMMEND, RECOMMENDED, rng, rng.choice((noun, noun, f"{adjective} {noun}")))
        case 4:
            return _same(OPINION, OPINIONS, rng, _thing(words, rng))
        case 5:
            return _same(EXPLAIN, EXPLAINED, rng, _thing(words, rng))
        case 6:
            questions, answers = rng.choice(((WHY, WHY_ANSWER), (PROBLEM, PROBLEM_ANSWER)))
            return _same(questions, answers, rng, noun, adjective)
        case 7:
            thing = _thing(words, rng)
            return rng.choice(POEM).format(thing), "\n".join(rng.sample(COUPLETS, 2)).format(*[thing] * 2)
        case 8 if rng.random() < 0.3:
            return rng.choice(HOW).format(f"{rng.choice(HARM)} {rng.choice(VICTIMS)}"), rng.choice(HARM_ANSWER)
        case _:
            name, a, b = rng.choice(list(SUMS)), rng.randint(0, 30), rng.randint(0, 10)
            a = max(a, b)  # no negative results
            return f"What is {a} {name} {b}?", f"{a} {name} {b} is {SUMS[name](a, b)}."


def remembered(rng: random.Random) -> tuple[Exchange, Exchange]:
    """Something the user tells, and the exchange later in the chat that asks for it."""
    tell, reply, ask, answer, values = rng.choice(REMEMBER)
    value = rng.choice(values.split())
    reply_text = rng.choice(reply).format(value)
    return (rng.choice(tell).format(value), reply_text[0].upper() + reply_text[1:]), (
        rng.choice(ask),
        answer.format(value),
    )


def _same(questions: tuple[str, ...], answers: tuple[str, ...], rng: random.Random, *gaps: str) -> Exchange:
    return rng.choice(questions).format(*gaps), rng.choice(answers).format(*gaps)


def _thing(words: Words, rng: random.Random) -> str:
    noun = rng.choice(words.nouns)
    return rng.choice((noun, noun, f"{rng.choice(words.adjectives)} {noun}", f"the {noun}"))


def _action(words: Words, rng: random.Random) -> str:
    verb, noun, adjective = rng.choice(words.verbs), rng.choice(words.nouns), rng.choice(words.adjectives)
    described = f"{_article(adjective)} {adjective} {noun}"
    return rng.choice((verb, *(f"{verb} {thing}" for thing in (noun, f"the {noun}", f"my {noun}", described))))


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _how(action: str, rng: random.Random) -> Exchange:
    answer = [rng.choice(HOW_OPEN).format(action), *rng.sample(HOW_ON, rng.randint(1, 2))]
    return rng.choice(HOW).format(action), " ".join(answer)
