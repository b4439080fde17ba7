"""Contrast of the page's colours, in both schemes, by WCAG 2.2: 4.5 for text, 3 for what else carries meaning."""

from __future__ import annotations

import re

import pytest

from tests.unit.serving.http.page_files import FILES

TEXT, MARK = 4.5, 3.0
ORIGINS = ("accepted", "recovered", "bonus", "plain", "unknown")

PAIRS = [
    *(("ink", surface, TEXT) for surface in ("page", "card", "field", "bad-card", *ORIGINS)),
    *(("soft", surface, TEXT) for surface in ("page", "card", "field")),
    *(("soft", origin, MARK) for origin in ORIGINS),  # the sign for a line break
    *((state, "page", TEXT) for state in ("good", "wait", "bad")),
    ("on-accent", "accent", TEXT),
    ("on-accent", "accent-hover", TEXT),
    ("accent", "card", MARK),
    ("accent", "page", MARK),
    ("bad", "card", MARK),
    ("line-strong", "field", MARK),
    ("line-strong", "card", MARK),
    *((f"{origin}-mark", surface, MARK) for origin in ORIGINS for surface in (origin, "card")),
]


def schemes() -> dict[str, dict[str, str]]:
    css = FILES["page.css"].decode()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    )
    return {"light": light, "dark": dark}


def luminance(colour: str) -> float:
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    colours = schemes()[scheme]
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01), "as WCAG has it"
    low = {
        f"{front} on {back}": round(found, 2)
        for front, back, needed in PAIRS
        if (found := contrast(colours[front], colours[back])) < needed
    }
    assert not low


def test_origins_differ_by_more_than_colour() -> None:
    """Each origin's text has a line of its own kind under it."""
    css = FILES["page.css"].decode()
    styles = [
        (found[1] if (found := re.search(r"text-decoration-style: (\w+)", rule)) else "solid")
        for origin in ORIGINS
        for rule in re.findall(rf"^\.token\.{origin} \{{(.*?)\}}", css, re.M)
    ]
    assert len(styles) == len(set(styles)) == len(ORIGINS)
