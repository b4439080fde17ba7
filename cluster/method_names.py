"""Every speculation method that vLLM has a name for: where Outrider runs it, or why not at all."""

from __future__ import annotations

REMOTE_METHODS = ("draft_model", "ngram", "suffix")
"""In a drafter actor: what needs tokens only."""

CO_LOCATED_METHODS = (
    "draft_model",
    "ngram",
    "suffix",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "dflash",
    "dspark",
    "ngram_gpu",
)
"""Inside the target's engine, by vLLM's own code."""

GPU_ONLY_METHODS = {
    "ngram_gpu": "vLLM's n-gram search on the GPU has no CPU kernels; use ngram",
    "dspark": "only vLLM's V2 model runner drafts with it, and that one needs Triton; use dflash",
}
"""Method -> why vLLM's CPU build does not run it."""

MODEL_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "dflash")
"""Need a checkpoint of their own (``model``); mtp and dspark find theirs in the target's where none is given."""

REFUSED_METHODS = {
    "mlp_speculator": (
        "vLLM has kept the name but neither loads such checkpoints nor has a drafter for them (vllm#47825): it would "
        "end at start-up; use medusa or eagle3 heads for the same target"
    ),
    "extract_hidden_states": (
        "writes hidden states to disk for training heads and drafts nothing; run it with vLLM itself"
    ),
    "custom_class": "is how Outrider's own drafters plug into vLLM; leave it to Outrider and name the method you want",
}
"""Method -> why it is refused. The aliases of mtp by architecture are added below."""

_MTP_ALIASES = (
    "deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp",
    "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "qwen3_5_mtp",
    "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp", "bailing_hybrid_mtp", "kimi_k3_mtp",
    "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp", "gemma4_mtp", "inkling_mtp", "glm5_next_mtp",
)  # fmt: skip

REFUSED_METHODS.update(dict.fromkeys(_MTP_ALIASES, "vLLM has replaced this name; write method: mtp"))
