"""Replies can follow the JSON schemas of Pydantic's types. What cannot be enforced is named."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import ipaddress
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from pensieve.runtime.frontend.grammar_check import GrammarChecker
from pensieve.runtime.step.grammar import json_grammar

from ..fake_loop import EOS, save_tokenizer


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


class Tree(pydantic.BaseModel):
    value: int
    children: list[Tree] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


ANIMAL = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
EVEN = Annotated[int, pydantic.Field(ge=1, le=10, multiple_of=2)]
LETTERS = Annotated[str, pydantic.Field(pattern=r"^[a-z]+$")]
REMARKS: dict[Any, tuple[str, ...]] = {
    bytes: ("format.binary",),
    Path: ("format.path",),
    set[int]: ("uniqueItems",),
    frozenset[str]: ("uniqueItems",),
    pydantic.SecretStr: ("format.password",),
    pydantic.Base64Str: ("format.base64",),
    re.Pattern: ("format.regex",),
}
WHOLE = [
    *(int, float, str, bool, int | None, decimal.Decimal, uuid.UUID, Any),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(Colour, Literal["a", 1], Tree, ANIMAL, EVEN, LETTERS, pydantic.Json),
    *(list[int], tuple[int, str], tuple[int, ...], collections.deque[int]),
    *(dict[str, int], dict[int, str], int | str),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, pydantic.AnyUrl, pydantic.HttpUrl),
]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    directory = save_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")))
    yield GrammarChecker(directory, 260, (EOS, 0))


@pytest.mark.parametrize(
    ("kind", "remarks"), [*REMARKS.items(), *((kind, ()) for kind in WHOLE)], ids=str
)
def test_a_type_can_be_followed(
    checker: GrammarChecker, kind: Any, remarks: tuple[str, ...]
) -> None:
    model = pydantic.create_model("Arguments", value=(kind, ...))
    check = checker.begin_check(json_grammar(model.model_json_schema()), "tools", "owner")
    assert check.result(60) == remarks
