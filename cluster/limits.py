"""``limits``: how long a generation may take, and how long its answer may be."""

from __future__ import annotations

from pydantic import Field, model_validator

from outrider.cluster.config_section import Section


class LimitsConfig(Section):
    """Bounds of one generation. Rates, sizes and connections are the gateway's (serving.gateway)."""

    default_timeout_s: float = Field(3600.0, gt=0, le=604800)
    """Deadline of a generation whose client sets none."""

    greatest_timeout_s: float = Field(86400.0, gt=0, le=604800)
    """Longest deadline that a client may set."""

    default_max_tokens: int | None = Field(None, ge=1)
    """Longest answer of a generation whose client sets no max_tokens. None: what max_model_len leaves."""

    greatest_max_tokens: int | None = Field(None, ge=1)
    """Largest max_tokens that a client may set. None: what max_model_len leaves."""

    @model_validator(mode="after")
    def _fit_each_other(self) -> LimitsConfig:
        for low, high in (
            ("default_timeout_s", "greatest_timeout_s"),
            ("default_max_tokens", "greatest_max_tokens"),
        ):
            first, second = getattr(self, low), getattr(self, high)
            if first is not None and second is not None and first > second:
                raise ValueError(
                    f"{low} ({first:.12g}) is above {high} ({second:.12g}); lower the first or raise the second"
                )
        return self

    @property
    def unasked_max_tokens(self) -> int | None:
        """max_tokens of a generation whose client sets none; None: what max_model_len leaves."""
        return self.greatest_max_tokens if self.default_max_tokens is None else self.default_max_tokens
