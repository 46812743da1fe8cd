"""Chats written for the demo model, endless and always the same for a seed: small talk, plain facts, tiny stories.

They give a model of a few million parameters what public chats of a few megabytes cannot: the same short, plain
sentences in many orders, follow-up questions, and replies that end.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from .demo_requests import Words, any_request, remembered

Chat = list[dict[str, str]]

SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "You are a small demo model. Be kind and short.",
    "Answer in plain English.",
)
# A topic and its sentences. Any two or three of them, in any order, make a reply.
TOPICS_TEXT = """
the sea: The sea covers more than two thirds of the surface of the Earth. Its water is salty because rivers have
carried minerals into it for a very long time. The tides rise and fall because the Moon and the Sun pull on the water.
Most of its living things are too small to be seen without a microscope. Deep down it is dark, cold and quiet.

the Moon: The Moon goes around the Earth in about twenty-seven days. It always shows us the same side. It has no air,
so its sky is black even during the day. People first walked on it in 1969. Its light is sunlight that the grey ground
sends back to us.

the Sun: The Sun is a star, and the only one close enough to warm us. Its light needs a little more than eight minutes
to reach the Earth. Deep inside, hydrogen turns into helium and gives off energy. It is so large that a million Earths
would fit inside.

rain: Rain begins when water vapour cools high in the air and forms small drops. When the drops become too heavy, they
fall. It fills rivers and lakes and waters the fields. After a shower you can sometimes see a rainbow on the side away
from the Sun.

snow: Snow is made of small ice crystals that grow inside cold clouds. Most snow crystals have six sides. A thick
layer of snow keeps the ground below it from freezing hard. Fresh snow makes everything quiet because it swallows
sound.

trees: Trees take in water through their roots and sunlight through their leaves. Each year they grow a new ring of
wood under the bark. Many trees drop their leaves in autumn to save water in winter. They give shade, fruit, wood and
a home to many birds. Some of them live for more than a thousand years.

cats: Cats are quiet hunters that see very well at night. They sleep for more than half of the day. A cat purrs when
it is content, and sometimes when it needs comfort. They clean their fur with a rough tongue. Most cats like a warm
place, a regular meal and a little play.

dogs: Dogs have lived with people for many thousands of years. They can smell things that we would never notice. A dog
needs walks, food, training and company every day. Some dogs guard sheep, and others help people who cannot see. They
learn best when they are rewarded at the right moment.

birds: Birds have feathers, light bones and a very good sense of direction. Many of them fly to warmer countries
before the winter comes. They sing to find a partner and to keep others away from their nest. Not all birds can fly,
but all of them lay eggs.

bees: Bees carry pollen from flower to flower, and so many plants depend on them. A hive has one queen and thousands
of workers. They tell each other where the flowers are with a small dance. Bees make honey to have food in winter.

horses: Horses can run soon after they are born. They live in groups and watch each other closely. For a long time
they pulled ploughs, carts and carriages. A calm voice and slow movements help to win the trust of a horse.

whales: Whales live in the sea, but they breathe air as we do. The blue whale is the largest animal that has ever
lived. Some whales sing songs that travel for many miles under water. They feed their young with milk.

bread: Bread is made from flour, water, salt and often yeast. The yeast makes small bubbles, and so the dough rises.
Let the dough rest in a warm place until it is twice as large. Then bake it in a hot oven until the crust is brown. It
smells best when it is fresh.

tea: Tea is made by pouring hot water over the leaves of the tea plant. Green tea and black tea come from the same
plant. Use water that is just below boiling for green tea. Let it stand for three minutes, then take out the leaves.

coffee: Coffee is made from the roasted seeds of a small tree. It keeps many people awake because it contains
caffeine. Grind the beans just before you need them. A cup in the late evening can make it hard to sleep.

soup: For a simple soup, cut some onions, carrots and potatoes. Cook them in a little oil first, because this gives
more taste. Add water and salt and let everything cook for half an hour. At the end, add some fresh herbs.

music: Music is made of rhythm, melody and harmony. A slow song can calm us, and a fast one can wake us up. People in
every part of the world make music together. To learn an instrument, practise a little every day. Listening closely is
the first step.

books: Books let us share the thoughts of people who lived long ago. A good story makes us forget the time. Reading a
few pages each evening is a pleasant habit. Libraries lend books to everyone. If a book does not please you, it is
fine to put it away.

sleep: Sleep gives the body and the mind time to recover. Most adults need between seven and nine hours each night. It
helps to go to bed at the same time every day. A dark, cool and quiet room makes it easier to fall asleep. Try to put
away your phone an hour before you go to bed.

exercise: Regular exercise keeps the heart strong and lifts the mood. A walk of thirty minutes each day is a good
start. Choose something that you enjoy, because then you will keep doing it. Rest days are important too.

learning: We learn best in small steps and with short breaks. Try to explain what you have learned in your own words.
Mistakes show us what to practise next. It helps to come back to a lesson after a day or two. Ask questions when
something is not clear.

friendship: A good friend listens and tells the truth in a kind way. Friendship grows when people spend time together.
Small things matter, such as a message or a cup of tea. When friends disagree, a calm talk often helps.

work: Good work begins with a clear goal. Write down the three most important tasks of the day. Begin with the one
that matters most. Take short breaks, because a tired mind makes mistakes.

money: A simple budget shows where your money goes. Try to save a small part of your income every month. Pay back
expensive debts first. Wait a day before you buy something that you did not plan to buy.

travel: Travel lets us see how other people live. Pack less than you think you need. Learn a few words of the language
before you go. It is a good idea to keep a copy of your papers. Leave some time without any plan.

trains: Trains carry many people with little energy. Their steel wheels roll on steel rails, so there is not much
friction. The first railways were built to move coal and stone. From a train window you can watch the country go by.

bicycles: A bicycle turns almost all of your effort into motion. Keep the tyres full of air and the chain clean. A
helmet and good lights make riding safer. Short ways in a city are often quickest by bicycle.

computers: Computers follow simple instructions very quickly. Everything in them is stored as numbers. The processor
does the work, and the memory keeps what is needed at the moment. Save your work often and keep a second copy. Turning
a computer off and on again solves a surprising number of problems.

language models: A language model reads text in small pieces that are called tokens. It learns which token is likely
to come next. For each token it keeps keys and values, so that it need not read everything again. It can be wrong, so
important things should be checked. Larger models have seen more text and make fewer mistakes.

caching: A cache keeps the results of earlier work close at hand. When the same thing is needed again, it does not
have to be computed. A cache is small, so something has to leave when it is full. The hard question is what to keep.

mathematics: Mathematics is the study of numbers, shapes and patterns. A proof shows that something must always be
true. Many ideas that seemed useless at first became important later. Drawing a picture often helps to understand a
problem.

history: History is the story of what people did and why they did it. We know the past from letters, buildings, tools
and stories. Different people remember the same event in different ways. Knowing the past helps us to understand the
present.

gardens: A garden needs light, water, good soil and patience. Water the plants early in the morning. Herbs and salad
are easy to grow, even in a pot. Leave a wild corner for insects and birds. In autumn you can plant bulbs for the
spring.

mountains: Mountains rise where parts of the crust of the Earth push against each other. The air becomes thinner and
colder as you climb. Weather in the mountains can change in a few minutes. Take warm clothes, water and a map with
you.

rivers: Rivers begin as small streams in hills and mountains. They carry sand and stones and slowly shape the land.
Many cities were built beside a river because of the water and the trade. Near the sea a river becomes wide and slow.

winter: In winter the days are short and the nights are long. Some animals sleep through the cold months. Warm clothes
in several layers work better than one thick coat. It is a good season for books, soup and long talks.

spring: In spring the days grow longer and the ground becomes warm. The trees put out new leaves, and the birds build
their nests. It is a good time to clean the house and to plan a garden. A walk after the rain smells of earth and
flowers.

light: Light travels faster than anything else that we know. White light is a mixture of all colours. A shadow appears
where something stands in its way. Plants use light to make sugar from water and air.

water: Water freezes at zero degrees and boils at one hundred degrees Celsius. Ice floats because it is lighter than
water. All living things that we know need water. It moves from the sea to the clouds and back again.

cities: Cities bring many people and ideas together. A good city has parks, schools, safe streets and places to meet.
Most people in the world live in cities today. Quiet corners can be found even in the busiest town.
"""
SENTENCE_END = re.compile(r"(?<=\.)\s+")
TOPICS = {
    name: SENTENCE_END.split(" ".join(facts.split()))
    for name, facts in (text.split(":", 1) for text in TOPICS_TEXT.strip().split("\n\n"))
}
ASK = (
    "Tell me about {}.",
    "Tell me something about {}.",
    "Can you tell me about {}?",
    "What do you know about {}?",
    "What can you say about {}?",
    "Please explain {} to me.",
    "I would like to know more about {}.",
    "I am interested in {}.",
    "Let us talk about {}.",
    "Give me a few facts about {}.",
)
SWITCH = ("And what about {}?", "Now tell me about {}.", "What about {}?", "How about {}?", *ASK[:3])
OPEN = ("", "", "", "Sure! ", "Of course. ", "With pleasure. ", "Good question! ")
CLOSE = ("", "", "", " Would you like to know more?", " I hope this helps.", " Shall I go on?")
MORE = ("Tell me more.", "Go on.", "Please go on.", "What else?", "Yes, please.", "Can you tell me more?", "And then?")
NO_MORE = "That is all I know about {}. You could ask me about {} instead."

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hi", "Hi there!", "Hey", "Good morning!", "Good evening.", "hello", "Hello, how can you help me?"),
        (
            "Hello! How can I help you today?",
            "Hi! What would you like to talk about?",
            "Hello! It is nice to meet you. What can I do for you?",
            "Hi there! Ask me anything you like.",
        ),
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?"),
        (
            "I am doing well, thank you. How are you?",
            "Very well, thank you for asking. What can I do for you?",
            "I am fine, thank you. How can I help you today?",
        ),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a human?"),
        (
            "I am a very small language model made to try out Pensieve. I like short and simple answers.",
            "I am the demo model of Pensieve. I am small, so please do not trust my facts too much.",
            "I am a small computer program that has learned to chat. My answers are often simple and sometimes wrong.",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "What do you know?", "What should I ask you?"),
        (
            "I can talk about simple things such as the sea, cats, bread or music. I can also tell a short story.",
            "I can answer simple questions, explain words and tell small stories. Just ask!",
            "You can ask me about animals, food, the weather or daily life. I will do my best.",
        ),
    ),
    (
        ("Thank you!", "Thanks.", "Thanks a lot!", "Great, thank you.", "That was helpful.", "Very good."),
        (
            "You are welcome!",
            "You are welcome! Is there anything else I can do for you?",
            "I am glad that I could help.",
            "My pleasure. Let me know if you have another question.",
        ),
    ),
    (
        ("Goodbye!", "Bye", "See you later.", "Good night.", "I have to go now."),
        ("Goodbye! Have a nice day.", "See you soon!", "Goodbye, and thank you for the chat.", "Take care!"),
    ),
    (
        ("I am sad.", "I feel tired.", "I had a bad day.", "I am not feeling well.", "I feel lonely."),
        (
            "I am sorry to hear that. Would you like to talk about it?",
            "That sounds hard. Be kind to yourself today, and try to get some rest.",
            "I am sorry. A short walk or a talk with a friend may help a little.",
        ),
    ),
    (
        ("I am happy.", "I had a good day.", "Today is my birthday!", "I feel great.", "I passed my exam!"),
        (
            "That is wonderful! What was the best part?",
            "I am happy to hear that. Enjoy the moment!",
            "How nice! Thank you for telling me.",
        ),
    ),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?", "Say something funny."),
        (
            "Why did the computer go to the doctor? Because it had caught a virus.",
            "What did the big chimney say to the small chimney? You are too young to smoke.",
            "Why was the book of numbers so sad? It had too many problems.",
            "What do you call a sleeping clock? Out of time.",
        ),
    ),
    (
        ("What should I do today?", "I am bored.", "Give me an idea.", "What can I do this evening?"),
        (
            "You could take a walk and look for something that you have never noticed before.",
            "How about cooking something simple, such as a soup, and calling a friend?",
            "You could read a few pages of a book or listen to some music.",
        ),
    ),
)
STORY_ASK = ("Tell me a story.", "Tell me a story about a {}.", "Can you tell me a short story?", "A story, please.")
HEROES = ("fox", "girl", "boy", "farmer", "mouse", "sailor", "king", "bear", "baker", "robot", "rabbit", "teacher")
PLACES = ("in a small village", "at the edge of a forest", "near the sea", "in a big city", "on a high mountain")
WISHES = {
    "wanted to see the sea": "At last it lay there, wide and blue.",
    "was looking for a friend": "In the end the two of them laughed together and were friends.",
    "had lost an old key": "The key was under the very first stone.",
    "wanted to learn to sing": "By the evening everyone could hear a clear and happy song.",
    "could not fall asleep": "Soon there was a long yawn, and then deep sleep.",
    "dreamed of the stars": "That night the stars seemed closer than ever.",
}
HELPERS = ("an old owl", "a kind stranger", "a small bird", "a wise woman", "a tired traveller", "a quiet child")
ADVICE = (
    '"Go slowly, and look around you," said {}.',
    '"You already have all that you need," said {}.',
    '"Ask for help, and you will find the way," said {}.',
    '"Do not give up so soon," said {}.',
)
ENDINGS = ("And that is the end of the story.", "From that day on, everything was a little easier.", "The end.")


def written_chats(words: Words, seed: int) -> Iterator[Chat]:
    """Chats without end: one to about ten exchanges. In some, the user tells something and asks for it later."""
    rng = random.Random(seed)
    while True:
        chat: Chat = []
        told, asked = remembered(rng) if rng.random() < 0.25 else (None, None)
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
                _say(chat, *any_request(words, rng))
        if asked:
            _say(chat, *asked)
        yield chat


def _say(chat: Chat, question: str, answer: str) -> None:
    chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _topic(chat: Chat, rng: random.Random) -> None:
    """A question about a topic and, half of the time, requests for more until nothing is left to say."""
    name = rng.choice(list(TOPICS))
    facts = list(TOPICS[name])
    rng.shuffle(facts)
    question = rng.choice(SWITCH if chat else ASK).format(name)
    go_on = rng.random() < 0.5
    while facts:
        count = rng.randint(2, 3)
        told, facts = facts[:count], facts[count:]
        _say(chat, question, rng.choice(OPEN) + " ".join(told) + rng.choice(CLOSE))
        if not go_on:
            return
        question = rng.choice(MORE)
    _say(chat, question, NO_MORE.format(name, rng.choice(list(TOPICS))))


def _story(chat: Chat, rng: random.Random) -> None:
    hero, (wish, end) = rng.choice(HEROES), rng.choice(list(WISHES.items()))
    sentences = (
        f"Once upon a time there was a {hero} who lived {rng.choice(PLACES)}.",
        f"The {hero} {wish}.",
        f"One day the {hero} met {(helper := rng.choice(HELPERS))}.",
        rng.choice(ADVICE).format(helper.replace("an ", "the ", 1).replace("a ", "the ", 1)),
        f"So the {hero} set out, and it was not easy.",
        end,
        rng.choice(ENDINGS),
    )
    _say(chat, rng.choice(STORY_ASK).format(hero), " ".join(sentences))
