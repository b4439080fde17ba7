"""``target.multimodal``: pictures in requests to a target that can see them."""

from __future__ import annotations

from pydantic import Field, field_validator

from outrider.cluster.config_section import Section

TAKEN = "image"
"""What a prompt may hold beside text, by vLLM's name."""


class MultimodalConfig(Section):
    """Pictures in requests ([pictures.md](pictures.md)). Keys are vLLM's."""

    limit_mm_per_prompt: dict[str, int] = Field({TAKEN: 1}, validate_default=True)
    """Most pictures in one prompt, of all its messages: ``{image: 2}``. Video and sound are not taken."""

    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which pictures are fetched, e.g. ``images.example.com``, each written out. Redirects are not followed.
    Empty: none is fetched, and pictures come as ``data:`` URLs in the request."""

    @field_validator("limit_mm_per_prompt")
    @classmethod
    def _pictures_alone(cls, limits: dict[str, int]) -> dict[str, int]:
        if set(limits) != {TAKEN} or not 1 <= limits[TAKEN] <= 256:
            raise ValueError(f"must be {{{TAKEN}: N}} with N from 1 to 256; to take none remove target.multimodal")
        return limits
