"""docs/sizing.md: its figures follow from the shapes it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.cluster.config import DraftModelConfig, PoolScalingConfig
from outrider.deploy.preset import resolve_config

DOCS = Path(__file__).parents[2] / "docs"
PAGE, EMULATION = ((DOCS / name).read_text() for name in ("sizing.md", "emulation.md"))
GPU_GB, SHARE = 80, 0.9


def table(first: str) -> list[list[str]]:
    """The rows of the table whose heading begins with these words."""
    start = PAGE.index(f"| {first}")
    rows = re.match(r"(?:\|.*\n)+", PAGE[start:])
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


MODELS = {row[0]: [float(cell) for cell in row[1:]] for row in table("model | parameters")}


def test_weights_and_kv_follow_from_the_shapes() -> None:
    for name, (billions, weights_gb, layers, kv_heads, head_size, kv_bytes) in MODELS.items():
        assert weights_gb == pytest.approx(2 * billions), name
        assert kv_bytes == 2 * layers * kv_heads * head_size * 2, name


def test_what_is_left_for_kv_follows_from_them() -> None:
    rows = table("model | ranks")
    assert {row[0] for row in rows} == set(MODELS)
    for name, ranks, left_gb, tokens, sequences in rows:
        left = int(ranks) * GPU_GB * SHARE - MODELS[name][1]
        assert float(left_gb) == pytest.approx(left, abs=0.05), name
        assert int(tokens) == pytest.approx(left * 1e9 / MODELS[name][5], abs=1), name
        assert int(sequences) == int(tokens) // 16384, name


@pytest.mark.parametrize("preset", ["llama-70b", "llama-70b-pool", "llama-70b-pool-1b", "qwen3-32b", "qwen3-32b-pool"])
def test_the_models_and_ranks_are_the_presets(preset: str) -> None:
    config = resolve_config(preset)
    assert isinstance(config.drafter, DraftModelConfig)
    ranks = {row[0]: int(row[1]) for row in table("model | ranks")}
    assert f"`{preset}`" in PAGE
    for section in (config.target, config.drafter):
        assert ranks[section.model.split("/")[-1]] == section.tensor_parallel_size
        assert section.max_model_len == 16384


def test_the_default_number_of_targets_a_drafter_is_the_one_that_is_never_far_from_the_best() -> None:
    curve = re.findall(r"^\| (\w+-[\w.]+) \| \d+ \| (\d) \| (\d) \| [\d.]+ \| ([\d.]+) \|", EMULATION, re.M)
    by_pair: dict[tuple[str, str], dict[int, float]] = {}
    for pair, batch, targets, per_accelerator in curve:
        by_pair.setdefault((pair, batch), {})[int(targets)] = float(per_accelerator)
    assert [sorted(each) for each in by_pair.values()] == [[1, 2, 4, 8]] * 6
    shares = {number: min(each[number] / max(each.values()) for each in by_pair.values()) for number in (1, 2, 4, 8)}
    assert [number for number, share in shares.items() if share >= 0.97] == [
        PoolScalingConfig.model_fields["targets_per_drafter"].default
    ]


def test_ratios_are_those_of_the_emulation() -> None:
    over = {
        side: [float(re.sub(r"[*]|\(.*\)", "", cell)) for cell in row.strip("|").split("|")]
        for side, row in re.findall(r"^\| (in-process(?:-tp)?)\b[^|]*\(K\) (\|.*)$", EMULATION, re.M)
    }
    assert set(over) == {"in-process", "in-process-tp"}
    rows = table("pair | against")
    assert len(rows) == 6
    for index, row in enumerate(rows):
        pair, side = index // 2, ("in-process", "in-process-tp")[index % 2]
        ratios, per_accelerator = zip(*(cell.rstrip(")").split(" (") for cell in row[2:]), strict=True)
        assert [float(ratio) for ratio in ratios] == over[side][3 * pair : 3 * pair + 3], row
        target = 2 if pair == 2 else 4  # accelerators, and the drafter's beside them
        for ratio, each in zip(ratios, per_accelerator, strict=True):
            assert float(each) == pytest.approx(float(ratio) * target / (target + 1), abs=0.0101), row
