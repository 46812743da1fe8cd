"""Stored ids come back wherever the text is the same, and nowhere else."""

from __future__ import annotations

import hashlib
import random
from array import array

import pytest

from pensieve.runtime.conversations.transcript import (
    LONGEST_TITLE,
    MOST_TRIES,
    OTHERS,
    RecentTurns,
    StoredTurn,
    TextPieces,
    Transcript,
    characters,
    common_beginning,
    dialogue_keys,
    spliced,
    stored_tokens,
    title_of,
    tokens_inside,
)
from pensieve.runtime.text.tokenizer import ChatTemplate, Tokenizer
from pensieve.scheduler.turns.conversations import common_prefix

from ..odd_tokenizer import (
    PLAIN_TEMPLATE,
    TEMPLATE,
    TRIMMING_TEMPLATE,
    byte_by_byte,
    merging_tokenizer,
    spaced_tokenizer,
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def tokenizer(template=TEMPLATE):
    return Tokenizer(merging_tokenizer(), ChatTemplate(template, {}))


def turn_behind(parent, speaker, messages, reply, ids):
    """The turn that ends with this reply: its prompt is spliced as the server does it."""
    text = speaker.render_chat(messages)
    prompt = spliced(speaker, text, parent)
    prompt = speaker.encode_rendered(text) if prompt is None else prompt
    inside, reply_text = tokens_inside(speaker, ids, reply)
    whole = Transcript(
        (*messages, assistant(reply)),
        prompt + array("i", ids),
        text + reply_text,
        len(prompt) + inside,
    )
    return StoredTurn.behind(parent, whole)


@pytest.mark.parametrize("template", [TEMPLATE, PLAIN_TEMPLATE])
def test_a_whole_dialogue_keeps_every_id_that_was_generated(template):
    speaker = tokenizer(template)
    messages = []
    past = None
    log = array("i")
    for number in range(6):
        messages.append(user(f"hello world {number}. aaaa\n"))
        text = speaker.render_chat(messages)
        prompt = spliced(speaker, text, past)
        if past is not None:
            assert prompt[: len(log)] == log, "nothing of the history is tokenised again"
            assert prompt != speaker.encode_rendered(text)
            assert speaker.decode_all(prompt) == text
        reply = f" hello world aaaa{number}."
        past = turn_behind(past, speaker, messages, reply, byte_by_byte(reply))
        log = past.transcript().tokens
        messages.append(assistant(reply))


def test_a_text_that_differs_anywhere_is_not_touched():
    speaker = tokenizer()
    past = turn_behind(None, speaker, [user("hello")], "hello world", byte_by_byte("hello world"))
    for messages in (
        [user("hello!"), assistant("hello world"), user("x")],
        [user("hello"), assistant("hello world!"), user("x")],
        [user("hello"), assistant("hello worl"), user("x")],
        [user("hello"), user("x")],
        [assistant("hello world")],
    ):
        text = speaker.render_chat(messages)
        ids = spliced(speaker, text, past)
        assert ids is None or speaker.decode_all(ids) == text
        if messages[1:2] != [assistant("hello world!")]:
            assert ids is None


def test_a_template_that_changes_contents_costs_the_splice_not_the_prompt():
    speaker = tokenizer(TRIMMING_TEMPLATE)
    past = turn_behind(None, speaker, [user("hello")], " hello ", byte_by_byte(" hello "))
    assert (
        spliced(
            speaker, speaker.render_chat([user("hello"), assistant(" hello "), user("x")]), past
        )
        is None
    )
    past = turn_behind(None, speaker, [user("hello")], "hello", byte_by_byte("hello"))
    assert (
        spliced(speaker, speaker.render_chat([user("hello"), assistant("hello"), user("x")]), past)
        is not None
    )


def test_a_branch_is_spliced_up_to_where_it_parts():
    speaker = tokenizer()
    first = turn_behind(None, speaker, [user("hello")], "hello", byte_by_byte("hello"))
    messages = [user("hello"), assistant("hello"), user("more")]
    second = turn_behind(first, speaker, messages, "world", byte_by_byte("world"))
    text = speaker.render_chat([user("hello"), assistant("hello"), user("less")])
    ids = spliced(speaker, text, second)
    kept = first.transcript()
    assert ids[: kept.inside] == kept.tokens[: kept.inside] and speaker.decode_all(ids) == text


@pytest.mark.parametrize(
    ("reply", "delivered", "inside"),
    [
        ("hello world", "hello world", (11, "hello world")),
        ("hello worldSTOP", "hello world", (11, "hello world")),
        ("hello STOP", "hel", (3, "hel")),
        ("aé", "aé", (3, "aé")),
        ("aé", "a", (1, "a")),
        ("hello", "", (0, "")),
    ],
)
def test_ids_wholly_inside_the_delivered_text(reply, delivered, inside):
    assert tokens_inside(tokenizer(), byte_by_byte(reply), delivered) == inside


def test_what_is_known_of_a_prompt_are_the_ids_that_its_log_had_kv_of():
    def turn(inside):
        return StoredTurn.behind(None, Transcript((), array("i", [1, 2, 3, 4]), "", inside))

    prompts = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3], [1, 2, 9, 4], [9]]
    assert [stored_tokens(turn(0), array("i", prompt)) for prompt in prompts] == [3, 3, 3, 2, 0]
    assert stored_tokens(turn(OTHERS), array("i", prompts[0])) == 0, "ids of another tokenizer"
    assert stored_tokens(None, array("i", prompts[0])) == 0


def test_items_without_tokens_had_no_kv():
    items = StoredTurn.behind(None, Transcript((user("a"),), array("i"), "", 0))
    assert stored_tokens(items, array("i", [1, 2])) == 0


def test_a_stop_string_inside_a_token_leaves_the_rest_of_its_text_to_the_tokenizer():
    speaker = tokenizer()
    hello = speaker.encode_rendered("hello").tolist()
    world = speaker.encode_rendered(" world").tolist()
    assert len(hello) == len(world) == 1
    assert tokens_inside(speaker, hello + world, "hello wo") == (1, "hello")
    past = turn_behind(None, speaker, [user("x")], "hello wo", hello + world)
    text = speaker.render_chat([user("x"), assistant("hello wo"), user("y")])
    assert speaker.decode_all(spliced(speaker, text, past)) == text


def test_ids_without_text_at_the_end_are_the_templates_affair():
    speaker = tokenizer()
    done = speaker.encode_rendered("<|done|>").tolist()
    assert tokens_inside(speaker, [*byte_by_byte("hello"), *done], "hello") == (5, "hello")
    past = turn_behind(None, speaker, [user("x")], "hello", [*byte_by_byte("hello"), *done])
    text = speaker.render_chat([user("x"), assistant("hello"), user("y")])
    ids = spliced(speaker, text, past)
    assert ids[: len(past.transcript().tokens)] == past.transcript().tokens
    assert ids.tolist().count(done[0]) == 3


def test_a_tokenizer_that_puts_a_space_in_front_goes_on_without_it():
    speaker = Tokenizer(spaced_tokenizer())
    before = speaker.encode("hello: a")
    for rest in (" abba", "abba", "\nuser: ab", "  a"):
        ids = speaker.encode_behind(before, rest)
        assert ids is not None and speaker.decode([*before, *ids]) == "hello: a" + rest, rest


def test_a_completion_goes_on_behind_a_space_of_its_own():
    """Decoded alone, as a reply in a chat is, it has none: the ids would not be found, and a lone
    space came twice."""
    speaker = Tokenizer(spaced_tokenizer())
    prompt = "hello: a"
    reply = speaker.encode("b").tolist()
    before = speaker.encode(prompt)
    delivered = speaker.decode([*before, *reply])[len(prompt) :]
    assert delivered == " b"
    inside, text = tokens_inside(speaker, reply, delivered, before)
    assert (inside, text) == (len(reply), " b")
    past = StoredTurn.behind(
        None, Transcript((), before + array("i", reply), prompt + text, len(before) + inside)
    )
    assert speaker.decode(spliced(speaker, "hello: a b and", past)) == "hello: a b and"


def test_random_branches_put_together_are_what_was_committed():
    draw = random.Random(5)
    turns = [None]
    for _ in range(300):
        parent = draw.choice(turns)
        before = parent.transcript() if parent is not None else Transcript((), array("i"), "", 0)
        kept, text_kept = (
            draw.randrange(len(before.tokens) + 1),
            draw.randrange(len(before.text) + 1),
        )
        whole = Transcript(
            (*before.messages, user("x")),
            before.tokens[:kept]
            + array("i", [draw.randrange(3) for _ in range(draw.randrange(5))]),
            before.text[:text_kept] + "".join(draw.choice("abc") for _ in range(draw.randrange(5))),
            draw.randrange(9),
        )
        turns.append(StoredTurn.behind(parent, whole))
        assert turns[-1].transcript() == whole


@pytest.mark.parametrize("compared", [1, 3, 1 << 14])
def test_the_common_prefix_of_texts_and_text_pieces_are_those_of_plain_strings(
    compared, monkeypatch
):
    monkeypatch.setattr("pensieve.scheduler.turns.conversations.COMPARED", compared)
    draw = random.Random(7)
    for _ in range(500):
        left = "".join(draw.choice("ab") for _ in range(draw.randrange(12)))
        right = left[: draw.randrange(13)] + draw.choice(("", "a", "b"))
        plain = 0
        while plain < min(len(left), len(right)) and left[plain] == right[plain]:
            plain += 1
        assert common_prefix(left, right) == common_prefix(right, left) == plain
    pieces = TextPieces()
    text = ""
    for _ in range(500):
        kept = draw.randrange(len(text) + 1)
        piece = draw.choice(("", "x", "yz", "long piece"))
        pieces.replace_behind(kept, piece)
        text = text[:kept] + piece
        assert str(pieces) == text


TURNS = 5000


def letters(text):
    """A token for each sign."""
    return array("i", map(ord, text))


def long_dialogue():
    """Its last turn, all messages and all of its text."""
    past = None
    messages = []
    length = 0
    for number in range(TURNS):
        exchange = (user(f"question {number}?"), assistant(f"answer {number}."))
        text = "".join(message["content"] for message in exchange)
        past = StoredTurn(past, exchange, length, letters(text), length, text, length + len(text))
        messages = [*messages, *exchange]
        length = length + len(text)
    return past, messages, "".join(message["content"] for message in messages)


class Watched(str):
    """Counts its characters that are compared or copied."""

    seen = 0

    def startswith(self, beginning, *place):
        Watched.seen += len(beginning)
        return super().startswith(beginning, *place)

    def __getitem__(self, at):
        part = super().__getitem__(at)
        Watched.seen += len(part)
        return part


class Refusing:
    """A tokenizer that cannot begin behind more than so many tokens."""

    def __init__(self, most):
        self.most = most
        self.tried = []

    def encode_behind(self, before, text):
        self.tried.append(len(before))
        return None if len(before) > self.most else letters(text)


def lineage_texts(past):
    """[(length of the whole text, turn)], the latest first."""
    return [(turn.text_kept + len(turn.text), turn) for turn in past.lineage()]


@pytest.mark.parametrize("same", [0, 1, 2], ids=["nothing", "half", "all"])
def test_a_long_dialogue_is_looked_through_once(same, monkeypatch):
    """However much of its text is still what it was: a template may change the first line of
    all."""
    past, _, text = long_dialogue()
    put_together = []
    transcript = StoredTurn.transcript
    monkeypatch.setattr(
        StoredTurn, "transcript", lambda turn: put_together.append(turn) or transcript(turn)
    )
    cut = len(text) * same // 2
    watched = Watched(text[:cut] + "X" + text[cut:])
    Watched.seen = 0
    ids = spliced(Refusing(len(text)), watched, past)
    fitting = next((length for length, _ in lineage_texts(past) if length <= cut), 0)
    assert (ids is None) == (same == 0)
    if ids is not None:
        assert "".join(map(chr, ids)) == watched and put_together == [
            turn for length, turn in lineage_texts(past) if length == fitting
        ]
    assert Watched.seen < 3 * len(text) and len(put_together) <= 1


def test_a_tokenizer_that_can_begin_nowhere_is_not_asked_at_every_turn():
    past, _, text = long_dialogue()
    lengths = [length for length, _ in lineage_texts(past)]
    for most, tries in (
        (lengths[0], 1),
        (lengths[2], 3),
        (lengths[MOST_TRIES], MOST_TRIES),
        (0, MOST_TRIES),
    ):
        tokenizer = Refusing(most)
        ids = spliced(tokenizer, text + "and", past)
        assert tokenizer.tried == lengths[:tries] and (ids is None) == (
            most < lengths[MOST_TRIES - 1]
        )


def spliced_twin(tokenizer, text, turn):
    """Turn by turn, each put together."""
    for past in turn.lineage():
        whole = past.transcript()
        if whole.inside > 0 and text.startswith(whole.text):
            stored = whole.tokens[: whole.inside]
            return stored + tokenizer.encode_behind(stored, text[len(whole.text) :])
    return None


def test_the_stored_text_that_is_found_is_that_of_the_latest_turn_that_fits():
    """Texts are cut and grow anew from turn to turn; some stand for no tokens."""
    draw = random.Random(9)
    fitting = 0
    for _ in range(2000):
        past = None
        whole = ""
        for _ in range(draw.randrange(1, 7)):
            kept = draw.choice((len(whole), draw.randrange(len(whole) + 1)))
            added = "".join(draw.choices("ab", k=draw.randrange(4)))
            whole = whole[:kept] + added
            inside = draw.choice((-1, 0, len(whole), len(whole)))
            past = StoredTurn(past, (), kept, letters(added), kept, added, inside)
        text = whole[: draw.randrange(len(whole) + 1)] + "".join(
            draw.choices("ab", k=draw.randrange(4))
        )
        expected = spliced_twin(Refusing(99), text, past)
        assert spliced(Refusing(99), text, past) == expected
        fitting += expected is not None
    assert 200 < fitting < 1800


class WatchedMessage(dict):
    compared = 0

    def __eq__(self, other):
        WatchedMessage.compared += 1
        return super().__eq__(other)

    __hash__ = None


@pytest.mark.parametrize("edited", [0, TURNS // 2, TURNS, 2 * TURNS - 1, 2 * TURNS])
def test_each_message_of_a_long_dialogue_is_compared_once(edited):
    past, messages, _ = long_dialogue()
    sent = [WatchedMessage(message) for message in messages]
    sent[edited : edited + 1] = [WatchedMessage(user("something else"))]
    WatchedMessage.compared = 0
    common = common_beginning(past, sent)
    turns = list(past.lineage())[::-1]
    assert common is (turns[edited // 2 - 1] if edited >= 2 else None)
    assert WatchedMessage.compared <= 2 * TURNS


def test_recent_turns_of_a_long_dialogue_are_found_with_each_message_hashed_once(monkeypatch):
    past, messages, text = long_dialogue()
    recent = RecentTurns()
    hashed = []
    sha256 = hashlib.sha256
    recent.add(dialogue_keys("me", messages), past)
    monkeypatch.setattr("hashlib.sha256", lambda data: hashed.append(len(data)) or sha256(data))
    assert recent.find(dialogue_keys("me", [*messages, user("new")])) is past
    assert (
        recent.find(dialogue_keys("me", [*messages[:7], user("new")])) is list(past.lineage())[-3]
    )
    assert sum(hashed) < 2 * len(text) + 200 * len(messages)


def plain_turn(parent, messages, tokens=10):
    text = "".join(message["content"] for message in messages)
    return StoredTurn.behind(
        parent, Transcript(tuple(messages), array("i", range(tokens)), text, tokens)
    )


def test_recent_turns_are_found_by_their_longest_beginning_and_by_nobody_else():
    recent = RecentTurns()
    short = [user("a"), assistant("b")]
    long = [*short, user("c"), assistant("d")]
    first = plain_turn(None, short)
    second = plain_turn(first, long, 20)
    recent.add(dialogue_keys("me", short), first)
    recent.add(dialogue_keys("me", long), second)
    assert recent.find(dialogue_keys("me", [*long, user("e")])) is second
    assert recent.find(dialogue_keys("me", [*short, user("other")])) is first
    assert recent.find(dialogue_keys("me", [user("a"), assistant("B"), user("c")])) is None
    assert recent.find(dialogue_keys("you", [*long, user("e")])) is None
    again = plain_turn(first, long, 25)
    recent.add(dialogue_keys("me", long), again)
    assert recent.find(dialogue_keys("me", [*long, user("e")])) is again


def test_recent_turns_are_bounded_and_the_oldest_go_first_leaves_before_roots():
    recent = RecentTurns(most_tokens=1000)
    dialogues = [[user(str(number)), assistant("x")] for number in range(20)]
    for dialogue in dialogues:
        recent.add(dialogue_keys("", dialogue), plain_turn(None, dialogue, 100))
    assert [recent.find(dialogue_keys("", dialogue)) is not None for dialogue in dialogues] == [
        False
    ] * 10 + [True] * 10
    root = recent.find(dialogue_keys("", dialogues[10]))
    longer = [*dialogues[10], user("y"), assistant("z")]
    recent.add(dialogue_keys("", longer), plain_turn(root, longer, 300))
    assert (
        recent.find(dialogue_keys("", dialogues[10])) is root
        and recent.find(dialogue_keys("", longer)) is not root
    )
    for number in range(30, 37):
        dialogue = [user(str(number)), assistant("x")]
        recent.add(dialogue_keys("", dialogue), plain_turn(None, dialogue, 100))
    assert recent.find(dialogue_keys("", dialogues[10])) is root
    assert recent._tokens == sum(weight for _, weight in recent._turns.values()) == 1000


def test_recent_turns_count_messages_that_the_template_leaves_out():
    recent = RecentTurns(most_tokens=1000)
    dialogues = [
        [user(f"{number}"), assistant("x") | {"reasoning_content": "t" * 1600}]
        for number in range(4)
    ]
    for dialogue in dialogues:
        recent.add(dialogue_keys("", dialogue), plain_turn(None, dialogue, 100))
    assert [recent.find(dialogue_keys("", dialogue)) is not None for dialogue in dialogues] == [
        False,
        False,
        True,
        True,
    ]
    longer = [*dialogues[3], user("y"), assistant("z")]
    past = recent.find(dialogue_keys("", longer))
    recent.add(dialogue_keys("", longer), plain_turn(past, longer, 300))
    assert recent.find(dialogue_keys("", dialogues[2])) is None
    assert recent._tokens == sum(weight for _, weight in recent._turns.values()) <= 1000


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("four", 4),
        ({"role": "user", "content": None}, 8 + 15 + 8),
        ([{"a": ["b", "cd"]}, {"a": {"e": 1.5}}], 5 * 8 + 6 + 8),
        ((), 8),
    ],
)
def test_characters_are_those_of_all_texts_and_keys_and_some_for_the_rest(value, count):
    assert characters(value) == count


def test_a_title_is_one_line_of_the_first_text_of_the_user():
    parts = [{"type": "image_url"}, {"type": "text", "text": "What is\nthis?"}]
    for messages, text, title in (
        (
            [
                {"role": "system", "content": "Be brief."},
                user("  Tell me\n of tea. "),
                assistant("Yes."),
            ],
            "",
            "Tell me of tea.",
        ),
        ([user(parts)], "", "What is this?"),
        ([user("x " * 500)], "", ("x " * (LONGEST_TITLE // 2))[: LONGEST_TITLE - 1].rstrip() + "…"),
        ([], "A plain prompt.", "A plain prompt."),
        ([{"role": "system", "content": "Be brief."}], "Be brief.", None),
        ([user("")], "", None),
    ):
        assert title_of(Transcript(tuple(messages), array("i"), text, 0)) == title
