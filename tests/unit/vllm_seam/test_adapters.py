"""Which adapters a replica has, who may name them, and when their memory is free."""

import asyncio
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.actors.replica_calls import RequestError
from outrider.actors.vllm_seam.adapters import Adapters
from outrider.cluster.adapters import AdapterError
from outrider.cluster.config import ConfigError, LoraConfig


class Engine:
    """Notes what it is told; refuses adapters of these names."""

    def __init__(self, *refuses):
        self.loaded, self.refuses, self.given = {}, refuses, []

    async def add_lora(self, request):
        await asyncio.sleep(0)
        if request.lora_name in self.refuses:
            raise RuntimeError("add_lora failed:\nTraceback ...\n  ValueError: vLLM does not support DoRA.")
        self.loaded[request.lora_int_id] = request.lora_name
        self.given.append(request.lora_int_id)
        return True

    async def remove_lora(self, number):
        return self.loaded.pop(number, None) is not None


def stored(path, value=0.0):
    path.mkdir(exist_ok=True)
    weights = {f"model.layers.0.mlp.up_proj.lora_{side}.weight": np.full((4, 4), value, "float32") for side in "AB"}
    save_file(weights, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    return str(path)


@pytest.fixture
def paths(tmp_path):
    return {name: stored(tmp_path / name) for name in "abc"}


def made(paths, configured="", engine=None, **section):
    listed = [{"name": name, "path": paths[name]} for name in configured]
    engine = engine or Engine()
    return Adapters(engine, "no checkpoint", LoraConfig(adapters=listed, load_from="/", **section)), engine


async def test_those_of_the_configuration_are_there_once_they_are_loaded(paths):
    adapters, engine = made(paths, "ab")
    with pytest.raises(RequestError, match="adapter: 'a' is not known: there are no adapters"):
        adapters.find("a")
    await adapters.load_configured()
    assert adapters.names == ["a", "b"]
    assert adapters.find("b").lora_path == paths["b"]
    assert adapters.find(None) is None
    with pytest.raises(RequestError, match="adapter: 'z' is not known here; send one of 'a', 'b', or leave it out"):
        adapters.find("z")
    assert list(engine.loaded.values()) == ["a", "b"]


async def test_one_that_vllm_does_not_take_stops_the_start_by_its_name(paths):
    adapters, _ = made(paths, "ab", Engine("b"))
    with pytest.raises(ConfigError, match=r"target.lora.adapters: b: vLLM does not take it: .*does not support DoRA"):
        await adapters.load_configured()
    assert adapters.names == ["a"]


async def test_no_number_is_used_twice(paths):
    """A number is how the ranks know an adapter."""
    adapters, engine = made(paths)
    for _ in range(3):
        await adapters.load("a", paths["a"])
        assert await adapters.unload("a")
    assert len(set(engine.given)) == 3
    assert not engine.loaded
    assert not await adapters.unload("a")


async def test_a_name_is_one_adapter_s(paths):
    adapters, engine = made(paths)
    await asyncio.gather(adapters.load("a", paths["a"]), adapters.load("a", paths["a"]))
    assert len(engine.given) == 1, "loaded already"
    with pytest.raises(AdapterError, match="another is called 'a'; unload it first"):
        await adapters.load("a", paths["b"])


async def test_no_more_than_there_is_memory_for(paths):
    adapters, _ = made(paths, max_loras=2)
    await adapters.load("a", paths["a"])
    await adapters.load("b", paths["b"])
    with pytest.raises(AdapterError, match=r"2 adapters are loaded, which is all that target.lora.max_loras lets be"):
        await adapters.load("c", paths["c"])


async def test_one_in_use_keeps_its_memory_and_loses_its_name(paths):
    adapters, engine = made(paths, max_loras=1)
    await adapters.load("a", paths["a"])
    found = adapters.find("a")
    with adapters.using(found):
        with adapters.using(found):
            assert await adapters.unload("a")
            with pytest.raises(RequestError, match="'a' is not known"):
                adapters.find("a")
            with pytest.raises(RequestError, match="'a' is not known"), adapters.using(found):
                pass
        assert engine.loaded, "one is still running"
        with pytest.raises(AdapterError, match="1 adapters are loaded, 1 of them for running requests alone"):
            await adapters.load("b", paths["b"])
    await adapters.load("b", paths["b"])
    assert list(engine.loaded.values()) == ["b"]


async def test_other_weights_in_the_same_place_are_refused(paths, tmp_path):
    """vLLM keeps the first ones' prompts cached under name and path."""
    adapters, _ = made(paths)
    await adapters.load("a", paths["a"])
    await adapters.unload("a")
    await adapters.load("a", paths["a"])
    await adapters.unload("a")
    stored(tmp_path / "a", value=1.0)
    with pytest.raises(AdapterError, match="held other weights when it was loaded before"):
        await adapters.load("a", paths["a"])


async def test_a_request_without_one_holds_nothing(paths):
    adapters, _ = made(paths)
    with adapters.using(None):
        pass
