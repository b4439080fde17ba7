"""What serves: versions and start time, as the public API has them."""

from __future__ import annotations

import platform

from cluster.link.frame import PROTOCOL_VERSION
from cluster.versions import VLLM, installed_version
from outrider.v1 import generation_pb2 as pb


def server_info_message(started_unix_s: float) -> pb.GetServerInfoResponse:
    response = pb.GetServerInfoResponse(
        outrider_version=installed_version("outrider"),
        vllm_version=installed_version(*VLLM),
        ray_version=installed_version("ray"),
        torch_version=installed_version("torch"),
        python_version=platform.python_version(),
        link_protocol_version=PROTOCOL_VERSION,
        api=pb.DESCRIPTOR.package,
    )
    response.start_time.FromNanoseconds(int(started_unix_s * 1e9))
    return response
