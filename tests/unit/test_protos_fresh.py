"""The stubs in the tree are what the sources give, and the sources keep the promises the API makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from outrider.v1 import generation_pb2 as pb

PROTOS = Path(__file__).resolve().parents[2] / "protos"


def stubs(root: Path) -> dict[str, bytes]:
    found = [path for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py") for path in root.rglob(pattern)]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_the_stubs_are_what_the_sources_give(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", "--out", tmp_path], check=True)
    generated, in_tree = stubs(tmp_path), stubs(PROTOS)
    assert generated, "nothing was generated"
    stale = [name for name in sorted(generated.keys() | in_tree.keys()) if generated.get(name) != in_tree.get(name)]
    assert not stale, f"run 'make protos' and commit the result; stale: {', '.join(stale)}"


def test_both_ways_to_generate_take_the_same_fields() -> None:
    def fields(message: Descriptor) -> list[tuple[str, int, int, bool]]:
        return [(field.name, field.number, field.type, field.has_presence) for field in message.fields]

    assert fields(pb.GenerateRequest.DESCRIPTOR) == fields(pb.GenerateStreamRequest.DESCRIPTOR)


@pytest.mark.parametrize("message", [pb.SamplingParameters, pb.SpeculationParameters, pb.GenerateRequest])
def test_every_scalar_of_a_request_tells_unset_from_zero(message: type[Message]) -> None:
    scalars: list[FieldDescriptor] = [field for field in message.DESCRIPTOR.fields if not field.is_repeated]
    assert [field.name for field in scalars if not field.has_presence] == []
