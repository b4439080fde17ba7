"""LoRA adapters: their files against the target's, before anything loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.cluster.adapters import AdapterError, base_shapes, check_adapter, check_shapes
from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy.models.check import check_adapters

BASE = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 32),
}
Q, DOWN = "base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.down_proj"
ADAPTER = {
    f"{Q}.lora_A.weight": (4, 8),
    f"{Q}.lora_B.weight": (16, 4),
    f"{DOWN}.lora_A.weight": (4, 32),
    f"{DOWN}.lora_B.weight": (8, 4),
}


def store(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> None:
    save_file({name: np.zeros(shape, dtype) for name, shape in shapes.items()}, path)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    store(path / "model.safetensors", BASE)
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    store(path / "adapter_model.safetensors", ADAPTER)
    write_config(path)
    return path


def write_config(adapter: Path, **changes: Any) -> None:
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **changes}))


def test_a_drafter_s_adapter_is_held_against_the_draft_model(target: Path, adapter: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    store(drafter / "model.safetensors", {**BASE, "model.layers.0.self_attn.q_proj.weight": (16, 4)})
    listed = [{"name": "mine", "path": str(adapter)}]
    config = parse_config(
        {
            "target": {"model": str(target), "lora_modules": listed},
            "drafter": {"method": "draft_model", "model": str(drafter), "lora_modules": listed},
        }
    )
    with pytest.raises(ConfigError, match=r"^drafter.lora_modules: mine: .*drafter.model's is \[16, 4\]"):
        check_adapters(config)


def test_an_adapter_of_the_target_passes(target: Path, adapter: Path) -> None:
    check_adapter(str(adapter), 8, base_shapes(str(target)))
    listed = [{"name": "a", "path": str(adapter)}]
    check_adapters(parse_config({"target": {"model": str(target), "lora_modules": listed}}))


def test_a_start_up_refuses_an_adapter_by_its_name(target: Path, adapter: Path) -> None:
    write_config(adapter, r=32)
    listed = [{"name": "mine", "path": str(adapter)}]
    with pytest.raises(ConfigError, match=r"^target.lora_modules: mine: its rank is 32, above .*max_lora_rank \(16\)"):
        check_adapters(parse_config({"target": {"model": str(target), "lora_modules": listed}}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": 9}, "its rank is 9, above target.engine_args.max_lora_rank (8)"),
        ({"rank_pattern": {"q_proj": 64}}, "its rank is 64"),
        ({"r": None}, "has no rank r of 1 or more"),
        ({"r": 0}, "has no rank r of 1 or more"),
        ({"peft_type": "IA3"}, "says peft_type 'IA3'"),
    ],
)
def test_a_rank_that_there_is_no_room_for_is_refused(adapter: Path, config: Any, message: str) -> None:
    write_config(adapter, **config)
    with pytest.raises(AdapterError, match=re.escape(message)):
        check_adapter(str(adapter), 8, None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_config.json", None, "adapter_config.json cannot be read (No such file or directory)"),
        ("adapter_config.json", b"{", "adapter_config.json is not JSON"),
        ("adapter_config.json", b"[]", "holds no JSON object"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors is missing"),
        ("adapter_model.safetensors", b"torn", "adapter_model.safetensors is not whole"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(adapter: Path, name: str, content: Any, message: str) -> None:
    if content is None:
        (adapter / name).unlink()
    else:
        (adapter / name).write_bytes(content)
    with pytest.raises(AdapterError, match=re.escape(message)):
        check_adapter(str(adapter), 8, None)


def test_what_is_no_directory_is_refused() -> None:
    with pytest.raises(AdapterError, match="org/adapter is no directory"):
        check_adapter("org/adapter", 8, None)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({f"{Q}.lora_A.weight": (4, 4)}, "self_attn.q_proj of shape [16, 4], target.model's is [16, 8]"),
        ({f"{Q}.lora_B.weight": (12, 4)}, "self_attn.q_proj of shape [12, 8], target.model's is [16, 8]"),
        (
            {
                "model.layers.1.mlp.down_proj.lora_A.weight": (4, 32),
                "model.layers.1.mlp.down_proj.lora_B.weight": (8, 4),
            },
            "changes model.layers.1.mlp.down_proj, which target.model does not have",
        ),
        (
            {"model.layers.0.mlp.up_proj.lora_A.weight": (4, 8)},
            "one of lora_A and lora_B of model.layers.0.mlp.up_proj",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused_by_its_module(shapes: Any, message: str) -> None:
    """vLLM would copy a smaller one's weights into buffers of the target's, and say nothing."""
    with pytest.raises(AdapterError, match=re.escape(message)):
        check_shapes({**ADAPTER, **shapes}, BASE)


def test_weights_without_any_adapter_are_refused() -> None:
    with pytest.raises(AdapterError, match="holds no lora_A and lora_B weights"):
        check_shapes(BASE, BASE)


def test_a_target_inside_another_model_and_one_head_for_both_ends_are_known() -> None:
    inside = {f"model.language_model.{name.removeprefix('model.')}": shape for name, shape in BASE.items()}
    check_shapes(ADAPTER, inside)
    head = {"base_model.model.lm_head.lora_A.weight": (4, 8), "base_model.model.lm_head.lora_B.weight": (10, 4)}
    check_shapes({**ADAPTER, **head}, BASE)


def test_a_quantised_target_s_shapes_are_not_compared(tmp_path: Path) -> None:
    """Its integers hold several weights each."""
    store(tmp_path / "model.safetensors", {"model.layers.0.self_attn.q_proj.qweight": (2, 16)}, "int32")
    store(tmp_path / "other.safetensors", {"model.layers.0.mlp.down_proj.weight": (64, 1)}, "uint8")
    check_shapes(ADAPTER, base_shapes(str(tmp_path)))


def test_a_hub_id_s_shapes_are_not_known() -> None:
    assert base_shapes("org/model") is None
