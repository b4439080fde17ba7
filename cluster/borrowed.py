"""Names of another project that ours leans on, as a table that can be held against what is installed.

What we subclass, patch or call beyond a project's public API may be renamed with its next version. A call then fails
late, in the middle of a request; an override that nobody calls any more, a module's global that nobody looks up, or an
attribute that nobody reads never fails. So each name is looked for once, at start-up, in the process that uses it: that
takes milliseconds, and imports nothing that is not imported there anyway.

The tables are ``outrider.actors.vllm_seam.leans_on`` and ``outrider.cluster.link.leans_on``.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from outrider.cluster.config_section import ConfigError
from outrider.cluster.installed import installed_version


@dataclass(frozen=True)
class Project:
    """Whose names they are."""

    name: str
    packages: tuple[str, ...]
    """One of which is installed."""

    written_for: str
    """The versions that begin like this."""

    @property
    def installed(self) -> str:
        return installed_version(*self.packages)


@dataclass(frozen=True)
class Borrowed:
    """One name, and what has to be true of it."""

    name: str
    """``module:Name`` or ``module:Class.attribute``. An attribute may be a class's own, a declared field, or one that
    some method of the class assigns."""

    why: str
    takes: tuple[str, ...] = ()
    """Parameters by which we call it, or fields with which we construct it. It may take more."""

    exactly: tuple[str, ...] | None = None
    """All of its parameters but self: those of ours in its place, which whoever calls it gives."""

    read_by: tuple[str, ...] = ()
    """Functions that look it up, by its name: what we put there has an effect as long as they do."""

    also: tuple[str, ...] = ()
    """More attributes that it must have, like the name's own last part."""

    value: str | None = None
    """What it must be equal to, where we repeat it."""

    def names(self) -> Iterator[str]:
        yield self.name
        for attribute in self.also:
            yield f"{self.name}{'.' if ':' in self.name else ':'}{attribute}"


_ROW = re.compile(
    r"(?P<name>[\w.:]*\w)(?P<parameters>\(.*?\))?(?: \[(?P<also>.*?)\])?(?: < (?P<readers>\S[^<]*?))?: (?P<why>\S.*)"
)


def rows(text: str) -> tuple[Borrowed, ...]:
    """A table as text, a row a name::

        module:Class.method(parameter, ...) [also, also] < read_by, read_by: why

    Name and why are in each. Parameters that end with ``...`` are those that it takes, others are exactly its own. A
    row goes on in lines that are indented. Raises ValueError for what is no row.
    """
    found = []
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        if (row := _ROW.fullmatch(line)) is None:
            raise ValueError(f"no row of a table: {line!r}")
        parameters, also, read_by = (_split(row[part]) for part in ("parameters", "also", "readers"))
        more = parameters[-1:] == ("...",)
        exactly = parameters if row["parameters"] is not None and not more else None
        found.append(Borrowed(row["name"], row["why"], parameters[:-1] if more else (), exactly, read_by, also))
    return tuple(found)


def _split(listed: str | None) -> tuple[str, ...]:
    return tuple(part for part in (listed or "").strip("()").split(", ") if part)


@dataclass(frozen=True)
class Table:
    """What one of our processes leans on."""

    project: Project
    used_by: str
    names: tuple[Borrowed, ...]

    def check(self) -> None:
        """Raises ConfigError naming what is missing, the version that is installed and the one that this is for."""
        if problems := self.problems():
            project = self.project
            raise ConfigError(
                f"{project.name.lower()}: {', and '.join(problems)} ({project.name} {project.installed} is installed, "
                f"{self.used_by} was written for {project.written_for}); install {project.name} {project.written_for}"
            )

    def problems(self) -> list[str]:
        return [problem for borrowed in self.names for problem in _problems(borrowed)]


def _problems(borrowed: Borrowed) -> Iterator[str]:
    try:
        for name in borrowed.names():
            found = _find(name)
            if name == borrowed.name:
                yield from _differences(borrowed, found)
        for reader in borrowed.read_by:
            if not _mentions(_code(_find(reader)), borrowed.name.replace(":", ".").rpartition(".")[2]):
                yield f"{_dotted(reader)} no longer looks up {_dotted(borrowed.name)}"
    except _Missing as missing:
        yield f"{missing} does not exist"


class _Missing(LookupError):
    """The name, dotted."""


def _find(name: str) -> Any:
    """What the name stands for; None for an attribute that only instances have. Raises _Missing."""
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise _Missing(module_name) from None
        raise
    parts = path.split(".") if path else []
    for index, part in enumerate(parts):
        if hasattr(found, part):
            found = getattr(found, part)
        elif index == len(parts) - 1 and inspect.isclass(found) and _instances_have(found, part):
            return None
        else:
            raise _Missing(_dotted(name))
    return found


def _dotted(name: str) -> str:
    return name.replace(":", ".")


def _instances_have(kind: type, attribute: str) -> bool:
    """Declared as a field, or assigned by one of the class's methods."""
    for base in kind.__mro__:
        if attribute in inspect.get_annotations(base):
            return True
        first = base.__dict__.get("__init__")  # which assigns most of them
        for member in (first, *base.__dict__.values()):
            code = _code(member)
            if code is not None and attribute in code.co_names and attribute in _assigned(code):
                return True
    return False


@functools.cache
def _assigned(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")


def _code(member: Any) -> CodeType | None:
    """Of a function, whatever decorates it."""
    member = getattr(member, "__func__", member)
    return getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None


def _mentions(code: CodeType | None, name: str) -> bool:
    """Whether a function, or one inside it, looks the name up: as a global, an attribute, or by getattr."""
    if code is None:
        return False
    if name in code.co_names or name in code.co_consts:
        return True
    return any(_mentions(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _differences(borrowed: Borrowed, found: Any) -> Iterator[str]:
    if borrowed.value is not None and found != borrowed.value:
        yield f"{_dotted(borrowed.name)} is {found!r} in place of {borrowed.value!r}"
    if not borrowed.takes and borrowed.exactly is None:
        return
    parameters = list(inspect.signature(found).parameters.values())
    names = [parameter.name for parameter in parameters if parameter.name != "self"]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if lacking := [name for name in borrowed.takes if name not in names and not takes_any]:
        yield f"{_dotted(borrowed.name)} takes no {_listed(lacking)}"
    if borrowed.exactly is not None and tuple(names) != borrowed.exactly:
        yield f"{_dotted(borrowed.name)} takes ({_listed(names)}) in place of ({_listed(borrowed.exactly)})"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
