"""Bodies of every shape: each becomes a message or a refusal that says why, never another exception."""

from __future__ import annotations

import random
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.http.body import check_values
from outrider.actors.serving.http.routes import to_message, to_token_ids
from outrider.v1 import generation_pb2 as pb

NUMBERS: list[Any] = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 0.5, 1e300]
TEXTS: list[Any] = ["", "x", "1", "-0", "1e3", "NaN", "Infinity", "VERIFICATION_BLOCK", "é🙂", "\u0000"]
LISTS: list[Any] = [[], [[]], [None], [1, "x", {}]]
OBJECTS: list[Any] = [{}, {"": 1}, {"1": 2}, {"@type": "x"}, {"ids": [1]}]
VALUES: list[Any] = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


def some_body(chance: random.Random, message: Descriptor, depth: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for field in message.fields:
        if chance.random() < 0.7:
            continue
        value = chance.choice(VALUES)
        if field.message_type is not None and chance.random() < 0.7 and depth < 4:
            value = some_body(chance, field.message_type, depth + 1)
            if field.is_repeated and chance.random() < 0.8:
                value = [value, chance.choice(VALUES)]
        body[chance.choice((field.name, field.json_name))] = value
    if chance.random() < 0.1:
        body[chance.choice(("", "unknown", "[ext]", "__class__"))] = chance.choice(VALUES)
    return body


@pytest.mark.parametrize("seed", range(4))
def test_every_body_is_taken_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    refusals = []
    for _ in range(1000):
        body = some_body(chance, pb.GenerateStreamRequest.DESCRIPTOR)
        check_values(body)
        try:
            to_message(body, pb.GenerateStreamRequest())
        except RequestError as error:
            refusals.append(error.problem)
    assert 20 < len(refusals) < 980, "both happen"
    assert all(problem and "\n" not in problem for problem in refusals)


def test_every_list_of_ids_is_taken_or_refused() -> None:
    taken = 0
    for value in VALUES:
        try:
            ids = to_token_ids({"token_ids": value})
        except RequestError:
            continue
        assert all(isinstance(token_id, int) for token_id in ids)
        taken += 1
    assert taken == 1, "the empty list"
