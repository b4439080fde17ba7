"""Which room may import which. An import against the order, a lazy one too, makes two rooms one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "actors": "outrider.actors",
    "cluster": "outrider.cluster",
    "deploy": "outrider.deploy",
    "protos/outrider": "outrider",
}

MAY_IMPORT: dict[str, set[str]] = {
    "v1": set(),
    "cluster": set(),
    "actors.request_ids": set(),
    "actors.observability": {"actors.request_ids", "cluster"},
    "actors.verification": {"actors.observability", "cluster"},
    "actors.round": {"actors.verification", "actors.observability", "cluster"},
    "actors.drafter": {
        "actors.shared_actor",
        "actors.learning",
        "actors.verification",
        "actors.observability",
        "cluster",
    },
    "actors.shared_actor": {"cluster"},
    "actors.learning": {"actors.shared_actor", "actors.observability", "cluster"},
    "actors.replica_calls": {"actors.request_ids"},
    "actors.openai_calls": {"actors.replica_calls"},
    "actors.request_checks": {"actors.replica_calls", "cluster"},
    "actors.request_costs": {"actors.replica_calls", "actors.openai_calls", "actors.request_checks", "cluster"},
    "actors.request_constraints": {"actors.replica_calls"},
}
"""By room: the rooms it may import, besides itself. A room is a package, or a module that stands between packages."""

_CALLS = {
    "actors.replica_calls",
    "actors.openai_calls",
    "actors.request_checks",
    "actors.request_costs",
    "actors.request_ids",
    "actors.request_constraints",
}
_ENGINE = {*_CALLS, "actors.drafter", "actors.round", *MAY_IMPORT["actors.round"]}
_SERVING = {*_CALLS, "actors.round", "actors.observability", "cluster", "v1"}
MAY_IMPORT |= {
    "actors.vllm_seam": _ENGINE,
    # What both fronts have in common, which the fronts in turn are made of; a front never imports a later one.
    "actors.serving": _SERVING,
    "actors.serving.access": {"actors.serving", *_SERVING},
    "actors.serving.grpc": {"actors.serving", "actors.serving.access", *_SERVING},
    "actors.serving.routing": {"actors.serving", *_SERVING},
    "actors.serving.openai": {"actors.serving", "actors.serving.access", "actors.vllm_seam", *_SERVING},
    "actors.serving.http": {
        "actors.serving",
        "actors.serving.access",
        "actors.serving.grpc",
        "actors.serving.openai",
        *_SERVING,
    },
    "actors.serving.replica": {
        "actors.serving",
        "actors.serving.openai",
        "actors.vllm_seam",
        "actors.learning",
        *_ENGINE,
        *_SERVING,
    },
    "actors.serving.drafter_pool": {"actors.serving", "actors.drafter", *_SERVING},
}
MAY_IMPORT["actors.serve_seam"] = {room for room in MAY_IMPORT if room.startswith("actors.serving")} | _SERVING
# The clients know the public API alone: whoever installs them to call a server needs nothing of what serves.
MAY_IMPORT["deploy.client"] = {"v1"}
MAY_IMPORT["deploy"] = set(MAY_IMPORT)
MAY_IMPORT["outrider"] = {"v1"}

ROOMS = sorted(MAY_IMPORT, key=len, reverse=True)

EXCEPTIONS = {
    (
        "outrider",
        "deploy.client",
    ): "the public names of the clients, imported on first use",
    (
        "actors/serving/replica.py",
        "actors.serve_seam",
    ): "a patch on the log it runs under; it lies with the others",
    ("actors/serving/drafter_pool.py", "actors.serve_seam"): "likewise",
    ("actors/drafter/load.py", "actors.vllm_seam"): "puts a drafter together, lazily: only draft models need vLLM",
}
"""By room or file, and room that it imports: why it may."""


def room_of(module: str) -> str | None:
    """None for what is not ours."""
    if module == "outrider":
        return "outrider"
    name = module.removeprefix("outrider.")
    if name == module:
        return None
    return next((room for room in ROOMS if name == room or name.startswith(f"{room}.")), name)


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and module of every import, wherever it stands."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
            # `from package import module` is an import of the module.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


@dataclass(frozen=True)
class Offence:
    path: str
    line: int
    room: str
    imported_room: str
    imported: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.room} may not import {self.imported_room} ({self.imported})"

    @property
    def exception(self) -> tuple[str, str] | None:
        return next(
            (key for place in (self.room, self.path) if (key := (place, self.imported_room)) in EXCEPTIONS), None
        )


def offences(path: str, module: str, source: str, is_package: bool = False) -> Iterator[Offence]:
    """Exceptions among them."""
    own = room_of(module)
    assert own is not None
    for line, imported in imports(source, module, is_package):
        room = room_of(imported)
        if room is not None and room != own and room not in MAY_IMPORT.get(own, set()):
            yield Offence(path, line, own, room, imported)


def modules() -> Iterator[tuple[str, str, bool]]:
    for folder, name in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = list(file.relative_to(ROOT / folder).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            yield str(file.relative_to(ROOT)), ".".join([name, *parts[: -1 if is_package else None]]), is_package


def test_every_module_is_in_a_room() -> None:
    strangers = {module for _, module, _ in modules() if room_of(module) not in MAY_IMPORT}
    assert strangers <= {"outrider.actors"}


@pytest.fixture(scope="module")
def found() -> list[Offence]:
    return [
        offence
        for path, module, is_package in modules()
        for offence in offences(path, module, (ROOT / path).read_text(), is_package)
    ]


def test_arrows_point_one_way(found: list[Offence]) -> None:
    assert [str(offence) for offence in found if offence.exception is None] == []


def test_every_exception_is_needed(found: list[Offence]) -> None:
    assert {offence.exception for offence in found} - {None} == EXCEPTIONS.keys()


def test_the_order_has_no_way_back() -> None:
    def reachable(room: str) -> set[str]:
        seen: set[str] = set()
        pending = [room]
        while pending:
            for other in MAY_IMPORT[pending.pop()] - seen:
                seen.add(other)
                pending.append(other)
        return seen

    order = {room: allowed - {room} for room, allowed in MAY_IMPORT.items()}
    assert [room for room in order if any(room in reachable(other) for other in order[room])] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("outrider.cluster.link.codec", "from outrider.actors.round.length import LengthController"),
        ("outrider.actors.serving.replica", "def f():\n    from outrider.actors.serving import running, grpc"),
        ("outrider.actors.serving.openai.serving", "import outrider.actors.serving.http.body"),
        ("outrider.actors.serving.grpc.servicer", "from outrider.actors.serve_seam.broadcast import broadcast"),
        ("outrider.actors.serving.grpc.servicer", "from ..http import body"),
        ("outrider.deploy.client.handle", "from outrider.actors.serving.failures import cause_of"),
        ("outrider.actors.drafter.loop", "from outrider.actors.round.round import Round"),
    ],
)
def test_an_import_against_the_order_is_named(module: str, source: str) -> None:
    assert len(list(offences("some/file.py", module, source))) == 1
