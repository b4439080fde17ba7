"""Generate the Python stubs of every ``.proto`` below this directory: ``python protos/generate.py [--out DIR]``.

Without ``--out`` the stubs go beside their sources, which is what ``make protos`` does. Output depends only on the
sources and on the installed grpcio-tools.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO_ROOT = Path(__file__).resolve().parent


def sources() -> list[Path]:
    """The ``.proto`` files, relative to PROTO_ROOT."""
    return sorted(path.relative_to(PROTO_ROOT) for path in PROTO_ROOT.rglob("*.proto"))


def generate(out_dir: Path) -> None:
    """Write ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` below out_dir, in the layout of the sources.

    Raises RuntimeError when protoc refuses a source; protoc has then said why on stderr.
    """
    well_known = files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"--proto_path={PROTO_ROOT}",
        f"--proto_path={well_known}",
        f"--python_out={out_dir}",
        f"--pyi_out={out_dir}",
        f"--grpc_python_out={out_dir}",
        *map(str, sources()),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; its messages are above")


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the gRPC stubs")
    parser.add_argument("--out", type=Path, default=PROTO_ROOT, help="directory to write to (default: the source tree)")
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
