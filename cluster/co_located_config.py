"""The ``drafter`` section with ``placement: co_located``: what runs inside the target's engine.

Keys are handed to vLLM as they are written: what is not written is left to vLLM's own default, and only keys that would
break what Outrider promises are refused, with the reason. Every method that vLLM has a name for is known here, those
that Outrider does not run with why not.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from outrider.cluster.config_section import Section

Method = Literal["draft_model", "ngram", "suffix", "eagle", "eagle3", "mtp", "medusa", "dflash", "dspark", "ngram_gpu"]

CO_LOCATED_METHODS: tuple[str, ...] = get_args(Method)
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
"""Method -> why it is refused. Names that end with MTP_ALIAS are refused for one reason."""

MTP_ALIAS = "_mtp"
"""How vLLM's names for mtp end that say the target's architecture as well."""

REFUSED_KEYS = {
    "tensor_parallel_size": "write draft_tensor_parallel_size, as in vLLM",
    "draft_model_config": "vLLM makes it from model",
    "draft_parallel_config": "vLLM makes it from draft_tensor_parallel_size",
    "target_model_config": "vLLM makes it from the target section",
    "target_parallel_config": "vLLM makes it from the target section",
    "synthetic_acceptance_rates": "synthetic acceptance changes the answers' distribution; it is for measuring vLLM",
    "synthetic_acceptance_length": "synthetic acceptance changes the answers' distribution; it is for measuring vLLM",
}
"""Keys of vLLM's that are not taken, and why."""

_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "prompt_lookup_min": ("ngram", "ngram_gpu"),
    "prompt_lookup_max": ("ngram", "ngram_gpu"),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_spec_factor": ("suffix",),
    "suffix_decoding_min_token_prob": ("suffix",),
    "use_heterogeneous_vocab": ("draft_model",),
    "index_share_for_mtp_iteration": ("mtp",),
    "dspark_draft_topk": ("dspark",),
    "enable_adaptive_verification": ("dspark",),
}
"""Keys that vLLM ignores, or refuses at start-up, with other methods."""


class CoLocatedConfig(Section):
    """Drafting inside the target's engine, on its ranks and in its KV cache: vLLM's own proposers and sampler. Keys are
    those of vLLM's ``speculative_config``, passed on as they are; left out, vLLM's default holds."""

    placement: Literal["co_located"]
    """``co_located``."""

    method: Method
    """Which of vLLM's drafters. ``dspark`` and ``ngram_gpu``: GPU builds only."""

    model: str | None = Field(None, min_length=1)
    """Checkpoint of the draft model or heads, directory or hub id. mtp: None, the layers are in the target's."""

    draft_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks of the draft model: 1, or as many as the target has. None: the target's."""

    quantization: str | None = None
    """How the draft model's weights are quantised, by vLLM's name."""

    max_model_len: int | None = Field(None, ge=1)
    """Longest text that is drafted for, in tokens."""

    revision: str | None = None
    """Branch, tag or commit of ``model``."""

    code_revision: str | None = None
    """Likewise, of the code that comes with ``model``."""

    enforce_eager: bool | None = None
    """For the draft model; None: as the target."""

    parallel_drafting: bool | None = None
    """All drafts in one pass of a model trained for it."""

    disable_padded_drafter_batch: bool | None = None
    """Batches of uneven lengths for the drafter instead of padded ones."""

    disable_eagle_block_drop: bool | None = None
    """Reuse the last prefix-cache block as well: vLLM's experiment on what that costs in acceptance."""

    use_local_argmax_reduction: bool | None = None
    """Greedy drafts from a maximum on each rank instead of gathered logits."""

    use_heterogeneous_vocab: bool | None = None
    """draft_model: allow another vocabulary, and draft from the tokens both know."""

    prompt_lookup_min: int | None = Field(None, ge=1)
    """ngram: shortest n-gram that counts as a match."""

    prompt_lookup_max: int | None = Field(None, ge=1)
    """ngram: longest n-gram looked for."""

    suffix_decoding_max_tree_depth: int | None = Field(None, ge=1)
    """suffix: most tokens of match and draft together."""

    suffix_decoding_max_cached_requests: int | None = Field(None, ge=0)
    """suffix: answers remembered for other requests of this replica."""

    suffix_decoding_max_spec_factor: float | None = Field(None, ge=0, allow_inf_nan=False)
    """suffix: tokens drafted at most for each token that matches."""

    suffix_decoding_min_token_prob: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """suffix: least estimated probability of a draft."""

    moe_backend: str | None = None
    """Of the draft model; None: the target's."""

    attention_backend: str | None = None
    """Of the draft model, by vLLM's name."""

    kv_cache_dtype: str | None = None
    """Of the draft model; None: the target's."""

    draft_load_config: dict[str, Any] | None = None
    """How the draft model is loaded, vLLM's LoadConfig as a mapping."""

    rejection_sample_method: Literal["standard", "block"] | None = None
    """``block``: verify the drafts as a block (vLLM's V2 model runner only, so GPU builds). vLLM's ``synthetic`` is
    refused: it changes the answers' distribution."""

    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    """Whether drafts are the likeliest tokens, or drawn."""

    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """``[first, last, K]`` of batch sizes: another K for each range."""

    index_share_for_mtp_iteration: bool | None = None
    """mtp: reuse the first step's sparse indices."""

    enable_adaptive_verification: bool | None = None
    """dspark: size the verification by the drafter's confidence."""

    dspark_draft_topk: int | None = Field(None, ge=1)
    """dspark: candidates of the Markov projection."""

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks of its own: none."""
        return 0

    @property
    def cores(self) -> None:
        """It runs on the target's."""
        return

    @model_validator(mode="before")
    @classmethod
    def _refused_keys(cls, data: Any) -> Any:
        for key, reason in REFUSED_KEYS.items():
            if isinstance(data, dict) and data.get(key) is not None:
                raise ValueError(f"{key}: {reason}")
        if isinstance(data, dict) and data.get("rejection_sample_method") == "synthetic":
            raise ValueError(f"rejection_sample_method: {REFUSED_KEYS['synthetic_acceptance_rates']}; write standard")
        return data

    @model_validator(mode="after")
    def _fits_the_method(self) -> CoLocatedConfig:
        if self.method in MODEL_METHODS and self.model is None:
            raise ValueError(f"model: required, but missing: method {self.method} has weights of its own")
        if self.method in ("ngram", "ngram_gpu", "suffix") and self.model is not None:
            raise ValueError(f"model: method {self.method} has no model; leave it out")
        for key, methods in _ONLY_FOR.items():
            if getattr(self, key) is not None and self.method not in methods:
                raise ValueError(f"{key}: only for method {' or '.join(methods)}; leave it out")
        if (low := self.prompt_lookup_min or 0) > (high := self.prompt_lookup_max or low):
            raise ValueError(f"prompt_lookup_min ({low}) is above prompt_lookup_max ({high}); swap or equal them")
        return self

    def speculative_config(self, num_speculative_tokens: int) -> dict[str, Any]:
        """What vLLM takes as ``speculative_config``: the keys that were given a value."""
        keys = self.model_dump(exclude={"placement"}, exclude_none=True)
        return {**keys, "num_speculative_tokens": num_speculative_tokens}
