"""``outrider versions``: what a drafter that learns has come to, and the way back to a former version.

Listing takes a key with the scope ``status``, going back one with ``admin``. Exit status: 0 listed, or went back; 1 the
server does not answer, its drafter does not learn, or it refuses.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from outrider.actors.learning.history import REPLACED
from outrider.deploy.cli import fail
from outrider.deploy.cli.connection import add_connection_arguments, tls_of
from outrider.deploy.client.sync_client import DEFAULT_ADDRESS, OutriderClient, OutriderError
from outrider.deploy.top import GainView, LearningView, VersionView, gain_of, learning_of_status
from outrider.v1 import generation_pb2 as pb

_BEFORE = -1
_TEXTS = ("recent", "past", "general")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="ADDRESS", nargs="?", default=DEFAULT_ADDRESS,
                        help="gRPC address of the server (default: %(default)s)")  # fmt: skip
    parser.add_argument("--back", metavar="N", nargs="?", type=_number, const=_BEFORE,
                        help="have version N serve again (default: the one that served before); "
                             "what was learned since is forgotten")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    add_connection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        tls = tls_of(args)
    except ValueError as error:
        return fail(str(error), status=2)
    try:
        with OutriderClient(args.address, credentials=None if tls is None else tls.credentials()) as client:
            status = client.status()
            if (learning := learning_of_status(status)) is None:
                return fail("versions: no drafter of this server learns, or its trainer has not been heard of yet")
            if args.back is None:
                _show(status.learning, learning, as_json=args.json)
                return 0
            number = _before(learning) if args.back == _BEFORE else args.back
            if number is None:
                return fail(
                    "--back: no version before the one that serves is kept; name one, as outrider versions shows"
                )
            serving = client.revert_drafter(number)
    except OutriderError as error:
        return fail(f"versions: {error}")
    if args.json:
        print(json.dumps({"version": number, "serving": serving}), flush=True)
    else:
        print(f"version {number} serves again, as version {serving}", flush=True)
    return 0


def learning_lines(learning: LearningView, most: int | None = None) -> list[str]:
    """A heading, and a line a version, the latest first. most: versions."""
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted(learning.refused.items()))
    serving = "learning" if learning.serving is None else f"learning · version {learning.serving} serves"
    heading = serving + (f" · kept out: {refused}" if refused else "")
    return [heading, *(f"  {_line(version)}" for version in learning.versions[::-1][:most])]


def _line(version: VersionView) -> str:
    known = [f"{shown(version.gains[texts])} {texts}" for texts in _TEXTS if texts in version.gains]
    said = ", ".join(known)
    if version.again is not None:
        said = f"{version.again} again" + (f" ({said})" if said else "")
    if (since := version.gains.get("since")) is not None:
        said += f"; {shown(since)} since"
    return f"{version.number:<6} {version.state:<10} {said}".rstrip()


def shown(gain: GainView) -> str:
    return f"{gain.mean:+.3f}" + (f" ± {gain.margin:.3f}" if gain.margin is not None else "")


def _show(message: pb.DrafterLearning, learning: LearningView, *, as_json: bool) -> None:
    last = message.last_comparison
    comparison = {"reason": last.reason, **{t: gain_of(getattr(last, t)) for t in _TEXTS if last.HasField(t)}}
    if as_json:
        about = {"drafting": message.drafting, "steps": message.steps, "tokens": message.tokens}
        document = {**about, **asdict(learning), "last_comparison": None}
        if message.HasField("last_comparison"):
            document["last_comparison"] = {
                key: asdict(value) if isinstance(value, GainView) else value for key, value in comparison.items()
            }
        print(json.dumps(document), flush=True)
        return
    heading, *lines = learning_lines(learning)
    print(f"{heading} · {message.steps} steps, {message.tokens} tokens of answers")
    for line, version in zip(lines, learning.versions[::-1], strict=True):
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(version.began_unix_s))
        gone = "" if version.kept else " (not kept)"
        print(f"{line}  [{began}, step {version.step}]{gone}")
    if message.HasField("last_comparison"):
        gains = ", ".join(f"{shown(gain)} {texts}" for texts, gain in comparison.items() if isinstance(gain, GainView))
        print(f"last comparison: {last.reason}" + (f", {gains}" if gains else ""), flush=True)


def _before(learning: LearningView) -> int | None:
    """The latest that is kept, was good until a better one came, and is not the one that serves by another number."""
    serving = next((version for version in learning.versions if version.number == learning.serving), None)
    if serving is None:
        return None
    same = {serving.number, serving.again} - {None}
    others = (
        version.number
        for version in learning.versions[::-1]
        if version.kept and version.state == REPLACED and not {version.number, version.again} & same
    )
    return next(others, None)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no version's number")
    return int(text)
