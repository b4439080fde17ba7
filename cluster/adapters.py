"""A LoRA adapter's files against the model that it is to change: read before anything loads them.

vLLM takes an adapter by its modules' names alone, and copies its weights into buffers of the model's sizes: one that
was made for a smaller model fits in, and answers nonsense. So shapes are compared here, with those of the checkpoint's
own files where these can be read. No weight is read, only the headers of the files.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Shapes = Mapping[str, tuple[int, ...]]

_LORA = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_OF_EMBEDDINGS = ".lora_embedding_"
_LAYER = re.compile(r"layers\.\d+\..+")


class AdapterError(ValueError):
    """An adapter that cannot be served: what is wrong, and what to do."""


def check_adapter(path: str, max_lora_rank: int, base: Shapes | None) -> None:
    """base: see base_shapes. Raises AdapterError."""
    directory = Path(path)
    if not directory.is_dir():
        raise AdapterError(f"{path} is no directory; give one with {CONFIG} and {WEIGHTS}")
    check_rank(_config(directory), max_lora_rank)
    check_shapes(_shapes(directory / WEIGHTS), base)


def check_rank(config: Mapping[str, Any], max_lora_rank: int) -> None:
    """config: decoded adapter_config.json. Raises AdapterError."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"{CONFIG} says peft_type {kind!r}, and LORA adapters are served; give one of these")
    pattern = config.get("rank_pattern") or {}
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else [pattern])]
    if not all(isinstance(rank, int) and rank >= 1 for rank in ranks):
        raise AdapterError(f"{CONFIG} has no rank r of 1 or more; save the adapter anew")
    if max(ranks) > max_lora_rank:
        raise AdapterError(
            f"its rank is {max(ranks)}, above target.engine_args.max_lora_rank ({max_lora_rank}); raise that or give "
            "an adapter of a lower rank"
        )


def check_shapes(adapter: Shapes, base: Shapes | None) -> None:
    """adapter: of its tensors, by their names. Raises AdapterError for what was made for another model."""
    sides: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in adapter.items():
        if (match := _LORA.fullmatch(name)) is not None:
            sides[match["module"]][match["side"]] = shape
    if not sides and not any(_OF_EMBEDDINGS in name for name in adapter):
        raise AdapterError(f"{WEIGHTS} holds no lora_A and lora_B weights; save the adapter anew with PEFT")
    for module, found in sides.items():
        if set(found) != {"A", "B"}:
            raise AdapterError(f"{WEIGHTS} holds one of lora_A and lora_B of {module} alone; save the adapter anew")
    if base is None:
        return
    known = _by_layer(base)
    for module, found in sides.items():
        if ".experts" in module:  # PEFT and checkpoints each have several ways to write these
            continue
        place = _place(module)
        shapes = known.get(place) or known.get("embed_tokens" if place == "lm_head" else "")  # one matrix, where tied
        if shapes is None:
            raise AdapterError(
                f"it changes {module}, which target.model does not have: it was made for another model; give an "
                "adapter of this one"
            )
        made_for = (found["B"][0], found["A"][-1])
        if made_for not in shapes and None not in shapes:
            wanted = " or ".join(str(list(shape or ())) for shape in shapes)
            raise AdapterError(
                f"it was made for a {module} of shape {list(made_for)}, target.model's is {wanted}: it is of another "
                "model; give an adapter of this one"
            )


def base_shapes(model: str) -> Shapes | None:
    """Of a local checkpoint's tensors, () of those that are not stored as they are; None where there are none to
    read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        shapes.update(_shapes(path))
    return shapes or None


def _config(directory: Path) -> dict[str, Any]:
    try:
        document = json.loads((directory / CONFIG).read_text())
    except OSError as error:
        raise AdapterError(
            f"{directory / CONFIG} cannot be read ({error.strerror}); give a directory that PEFT has written"
        ) from None
    except ValueError as error:
        raise AdapterError(f"{directory / CONFIG} is not JSON ({error}); store the adapter anew") from None
    if not isinstance(document, dict):
        raise AdapterError(f"{directory / CONFIG} holds no JSON object; store the adapter anew")
    return document


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            # Integers hold several weights each, or none.
            return {
                name: tuple(each.get_shape()) if each.get_dtype().startswith(("F", "BF")) else ()
                for name, each in slices.items()
            }
    except FileNotFoundError:
        raise AdapterError(
            f"{path} is missing; give a directory that PEFT has written, with safe_serialization"
        ) from None
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} is not whole ({error}); store it anew") from None


def _by_layer(base: Shapes) -> dict[str, set[tuple[int, ...] | None]]:
    """Shapes of weights by _place. None where a module's weights are stored otherwise, as quantised ones are."""
    known: dict[str, set[tuple[int, ...] | None]] = defaultdict(set)
    for name, shape in base.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and len(shape) == 2:
            known[_place(module)].add(shape)
        elif not shape or parameter not in ("weight", "bias"):
            known[_place(module)].add(None)
    return known


def _place(module: str) -> str:
    """A module's name without what stands before its layers, which differs between a model and the same one inside
    another."""
    match = _LAYER.search(module)
    return module.rpartition(".")[2] if match is None else match[0]
