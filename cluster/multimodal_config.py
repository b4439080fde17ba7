"""``target.multimodal``: pictures in requests to a target that can see them."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from outrider.cluster.config_section import Section

TAKEN = "image"
"""What a prompt may hold beside text, by vLLM's name."""

_DOMAIN = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)")
"""A name that ends so is an address to whoever resolves it."""

_ENVELOPE_BYTES = 4096
"""Of a body, beside its pictures."""


class MultimodalConfig(Section):
    """Pictures in requests ([pictures.md](pictures.md)). Keys are vLLM's where vLLM has one."""

    limit_mm_per_prompt: dict[str, int] = Field({TAKEN: 1}, validate_default=True)
    """Most pictures in one prompt, of all its messages: ``{image: 2}``. Video and sound are not taken."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which pictures are fetched, e.g. ``images.example.com``, each written out. Empty: none is fetched, and
    pictures come as ``data:`` URLs in the request. Addresses that are not public are never reached, whatever a name
    says."""

    max_image_bytes: int = Field(4 << 20, ge=1024, le=1 << 28)
    """Of one picture as it comes: of a ``data:`` URL decoded, of a fetched file."""

    max_image_pixels: int = Field(1 << 24, ge=1024, le=1 << 27)
    """Of one picture, width times height. Looked at before it is decoded, which takes 3 to 4 bytes a pixel."""

    fetch_timeout_s: float = Field(5.0, gt=0, le=300)
    """Time in which a picture must have been fetched, looking up the name included."""

    @property
    def most_pictures(self) -> int:
        return self.limit_mm_per_prompt[TAKEN]

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _pictures_alone(cls, limits: dict[str, int]) -> dict[str, int]:
        if set(limits) != {TAKEN}:
            raise ValueError(f"must be {{{TAKEN}: N}} and nothing else: video and sound are not taken")
        if not 1 <= limits[TAKEN] <= 256:
            raise ValueError(f"{TAKEN} must be 1 to 256; to take no pictures leave target.multimodal out")
        return limits

    @field_validator("allowed_media_domains")
    @classmethod
    def _names(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if not _DOMAIN.fullmatch(domain) or _NUMBER.fullmatch(domain.rpartition(".")[2]):
                raise ValueError(
                    f"{domain!r} is no host's name; write one in lower case, without scheme, port, path or *, and no "
                    "address"
                )
        return domains

    def check_body(self, max_request_bytes: int) -> None:
        """Raises ValueError where the largest picture does not fit into a request as a ``data:`` URL."""
        needed = encoded_length(self.max_image_bytes) + _ENVELOPE_BYTES
        if needed > max_request_bytes:
            raise ValueError(
                f"target.multimodal.max_image_bytes: a picture of {self.max_image_bytes} bytes takes {needed} in a "
                f"request, and limits.max_request_bytes lets {max_request_bytes} in; raise that or lower this"
            )


def encoded_length(num_bytes: int) -> int:
    """Characters of base64."""
    return 4 * -(-num_bytes // 3)
