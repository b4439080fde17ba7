"""How many sequences the engine that generates text runs at once: what its KV cache would take decides."""

import pytest

from outrider.actors.vllm_adapter.offline_answers import Engine


def engine(**config):
    document = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        **config,
    }
    return Engine("model", document, "bfloat16", "cpu", 384, 16, (0,))


@pytest.mark.parametrize(("layers", "heads"), [(48, 8), (80, 16)])
def test_of_a_large_one_fewer_run_but_never_less_than_64(layers, heads):
    large = engine(num_hidden_layers=layers, num_attention_heads=64, num_key_value_heads=heads, hidden_size=8192)
    assert 64 <= large.at_once < 256
    assert large.at_once == 64 or large.kv_cache_bytes < (4 << 30) * 1.02
