"""Pictures of strangers: what is told of one by its URL alone, and which addresses one is never fetched from. Pure."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from outrider.cluster.multimodal_config import MultimodalConfig, encoded_length

KINDS = ("PNG", "JPEG", "WEBP", "GIF")
"""Formats that are taken, by Pillow's names: what OpenAI takes."""

MAX_URL_CHARS = 4096
"""Of one that is not data: itself."""

_DATA = re.compile(r"data:image/(?:png|jpe?g|webp|gif);base64,", re.IGNORECASE)
_HTTP = re.compile(r"https?://[!-~]+", re.IGNORECASE)
_SEND_DATA = "send the picture itself, as data:image/png;base64,… (png, jpeg, webp or gif)"
_PORTS = {"http": 80, "https": 443}
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # a large cloud's own services
        "64:ff9b:1::/48",  # a site's own translation to IPv4, RFC 8215
        "fec0::/10",  # site-local, long given up
        "3fff::/20",  # documentation, RFC 9637
        "5f00::/16",  # segment routing, RFC 9602
    )
]
"""What ipaddress takes for global."""

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class PictureError(ValueError):
    """A picture that is not taken. Says nothing of this server, nor of what was fetched."""

    def __init__(self, problem: str, fix: str = _SEND_DATA) -> None:
        super().__init__(f"{problem}; {fix}")
        self.problem, self.fix = problem, fix


def check_url(url: str, config: MultimodalConfig) -> None:
    """Raises PictureError for one that is not to be opened."""
    if url[:5].lower() == "data:":
        match = _DATA.match(url)
        if match is None:
            raise PictureError("is no picture in base64")
        if len(url) - match.end() > encoded_length(config.max_image_bytes):
            raise too_many_bytes(config)
        return
    if not _HTTP.match(url):
        raise PictureError("is neither a data: nor an http(s): URL")
    if not config.allowed_media_domains:
        raise PictureError("is a URL, and no pictures are fetched here")
    if len(url) > MAX_URL_CHARS or not _HTTP.fullmatch(url) or "\\" in url:
        raise PictureError(f"is no URL of printable ASCII with {MAX_URL_CHARS} characters at most", "write it out")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise PictureError("is no URL", "write it out") from None
    if "@" in parts.netloc:
        raise PictureError("holds a user's name or password", "send a URL that needs none")
    if host not in config.allowed_media_domains:
        raise PictureError("is of a host that pictures are not fetched from")
    if port not in (None, _PORTS[parts.scheme]):
        raise PictureError("names a port of its own", "send a URL of http's or https's own port")


def too_many_bytes(config: MultimodalConfig) -> PictureError:
    return PictureError(f"has more than {config.max_image_bytes} bytes", "send a smaller picture")


def too_many_pixels(config: MultimodalConfig) -> PictureError:
    return PictureError(f"has more than {config.max_image_pixels} pixels", "send a smaller picture")


def unreadable() -> PictureError:
    return PictureError(f"cannot be read as {', '.join(KINDS)}", "send a whole picture of one of these formats")


def not_fetched() -> PictureError:
    """The same whatever was the matter: it would tell what there is behind a name."""
    return PictureError("could not be fetched")


def is_public(address: str) -> bool:
    """Whether an IP address is one that anybody may reach: not this machine, its network, or its cloud's."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
        if ip in _NAT64 or not int(ip) >> 32:  # the latter: IPv4-compatible, long given up
            inner.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        if any(each is not None for each in inner):
            return all(is_public(str(each)) for each in inner if each is not None)
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _NOT_PUBLIC)
