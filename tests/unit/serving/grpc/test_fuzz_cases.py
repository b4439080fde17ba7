"""The protobuf fuzzer's cases reach every RPC and every field, decodable and not, and come out the same again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz_bytes import MUTATIONS
from tests.fuzz_cases import GENERATIONS, MOST_TOKENS, RPCS, Case, case

SEED = 1
CASES = 1500


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [case(SEED, number) for number in range(CASES)]


def test_a_seed_gives_the_same_cases_in_any_order(cases: list[Case]) -> None:
    again = {number: case(SEED, number) for number in reversed(range(0, CASES, 100))}
    assert all(again[number] == cases[number] for number in again)
    assert case(SEED + 1, 0) != cases[0]


def test_every_rpc_is_called(cases: list[Case]) -> None:
    counts = Counter(each.path for each in cases)
    assert set(counts) == set(RPCS)
    assert min(counts.values()) > 10
    assert all(counts[path] > CASES // 4 for path in GENERATIONS)


def test_a_good_part_does_not_decode(cases: list[Case]) -> None:
    undecodable = sum(each.message is None for each in cases)
    assert 0.1 * CASES < undecodable < 0.3 * CASES


def test_every_field_of_a_request_is_set_now_and_then(cases: list[Case]) -> None:
    reached: set[str] = set()
    for each in cases:
        if each.message is not None:
            reached.update(field.full_name for field in fields_set(each.message))
    wanted = {field.full_name for rpc in RPCS.values() for field in rpc.input_type.fields}
    for part in ("SamplingParameters", "SpeculationParameters", "StructuredOutputs", "Chat", "ChatMessage", "TokenIds"):
        descriptor = RPCS[GENERATIONS[0]].input_type.file.message_types_by_name[part]
        wanted |= {field.full_name for field in descriptor.fields}
    assert wanted - reached == set()


def test_no_request_may_generate_for_long(cases: list[Case]) -> None:
    for each in cases:
        if each.path in GENERATIONS and each.message is not None:
            assert each.message.sampling.max_tokens <= MOST_TOKENS  # type: ignore[attr-defined]
            assert each.message.sampling.HasField("max_tokens")  # type: ignore[attr-defined]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_every_mutation_takes_the_empty_message_too(mutation: object) -> None:
    import random

    for data in (b"", b"\x1a\x01a", bytes(range(200))):
        for seed in range(20):
            assert isinstance(mutation(random.Random(seed), data), bytes)  # type: ignore[operator]


def fields_set(message: Message) -> Iterator[FieldDescriptor]:
    for field, value in message.ListFields():
        yield field
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            yield from fields_set(part)
