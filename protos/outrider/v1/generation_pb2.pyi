import datetime

from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verification(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_UNSPECIFIED: _ClassVar[Verification]
    VERIFICATION_REJECTION: _ClassVar[Verification]
    VERIFICATION_BLOCK: _ClassVar[Verification]
    VERIFICATION_COUPLED: _ClassVar[Verification]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ACCEPTED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_RECOVERED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class DrafterVersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_VERSION_STATE_UNSPECIFIED: _ClassVar[DrafterVersionState]
    DRAFTER_VERSION_STATE_SERVES: _ClassVar[DrafterVersionState]
    DRAFTER_VERSION_STATE_REPLACED: _ClassVar[DrafterVersionState]
    DRAFTER_VERSION_STATE_WITHDRAWN: _ClassVar[DrafterVersionState]
    DRAFTER_VERSION_STATE_REVERTED: _ClassVar[DrafterVersionState]

class LinkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_STATE_UNSPECIFIED: _ClassVar[LinkState]
    LINK_STATE_CONNECTING: _ClassVar[LinkState]
    LINK_STATE_UP: _ClassVar[LinkState]
    LINK_STATE_DOWN: _ClassVar[LinkState]
VERIFICATION_UNSPECIFIED: Verification
VERIFICATION_REJECTION: Verification
VERIFICATION_BLOCK: Verification
VERIFICATION_COUPLED: Verification
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_ACCEPTED: TokenOrigin
TOKEN_ORIGIN_RECOVERED: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
DRAFTER_VERSION_STATE_UNSPECIFIED: DrafterVersionState
DRAFTER_VERSION_STATE_SERVES: DrafterVersionState
DRAFTER_VERSION_STATE_REPLACED: DrafterVersionState
DRAFTER_VERSION_STATE_WITHDRAWN: DrafterVersionState
DRAFTER_VERSION_STATE_REVERTED: DrafterVersionState
LINK_STATE_UNSPECIFIED: LinkState
LINK_STATE_CONNECTING: LinkState
LINK_STATE_UP: LinkState
LINK_STATE_DOWN: LinkState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "apply_chat_template", "sampling", "speculation", "timeout_ms", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    APPLY_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    apply_chat_template: bool
    sampling: SamplingParameters
    speculation: SpeculationParameters
    timeout_ms: int
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., apply_chat_template: _Optional[bool] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParameters, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class GenerateStreamRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "apply_chat_template", "sampling", "speculation", "timeout_ms", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    APPLY_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    apply_chat_template: bool
    sampling: SamplingParameters
    speculation: SpeculationParameters
    timeout_ms: int
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., apply_chat_template: _Optional[bool] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParameters, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: _struct_pb2.Struct
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "stop", "stop_token_ids", "logit_bias", "n", "logprobs", "prompt_logprobs", "allowed_token_ids", "bad_words", "structured_outputs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias: _containers.ScalarMap[int, float]
    n: int
    logprobs: int
    prompt_logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    structured_outputs: StructuredOutputs
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., ignore_eos: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., skip_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "json_object", "regex", "grammar", "choice")
    JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choices
    def __init__(self, json: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class SpeculationParameters(_message.Message):
    __slots__ = ("enabled", "num_speculative_tokens", "verification")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    num_speculative_tokens: int
    verification: Verification
    def __init__(self, enabled: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., verification: _Optional[_Union[Verification, str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "finish_reason", "stop_reason", "usage", "metrics", "completions", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    metrics: GenerationMetrics
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., metrics: _Optional[_Union[GenerationMetrics, _Mapping]] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "metrics", "origins")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    stop_reason: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    metrics: GenerationMetrics
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., metrics: _Optional[_Union[GenerationMetrics, _Mapping]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class GenerateStreamResponse(_message.Message):
    __slots__ = ("request_id", "text_delta", "token_ids", "finish_reason", "stop_reason", "usage", "metrics", "index", "logprobs", "prompt_logprobs", "origins", "num_rounds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_DELTA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text_delta: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    metrics: GenerationMetrics
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    origins: _containers.RepeatedScalarFieldContainer[TokenOrigin]
    num_rounds: int
    def __init__(self, request_id: _Optional[str] = ..., text_delta: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., metrics: _Optional[_Union[GenerationMetrics, _Mapping]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., origins: _Optional[_Iterable[_Union[TokenOrigin, str]]] = ..., num_rounds: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GenerationMetrics(_message.Message):
    __slots__ = ("speculative_decoding", "timing")
    SPECULATIVE_DECODING_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    speculative_decoding: SpeculativeDecodingMetrics
    timing: RequestTiming
    def __init__(self, speculative_decoding: _Optional[_Union[SpeculativeDecodingMetrics, _Mapping]] = ..., timing: _Optional[_Union[RequestTiming, _Mapping]] = ...) -> None: ...

class RequestTiming(_message.Message):
    __slots__ = ("queue_time_s", "prefill_time_s", "decode_time_s", "e2e_latency_s")
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    E2E_LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    queue_time_s: float
    prefill_time_s: float
    decode_time_s: float
    e2e_latency_s: float
    def __init__(self, queue_time_s: _Optional[float] = ..., prefill_time_s: _Optional[float] = ..., decode_time_s: _Optional[float] = ..., e2e_latency_s: _Optional[float] = ...) -> None: ...

class SpeculativeDecodingMetrics(_message.Message):
    __slots__ = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram")
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortRequestResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens", "return_token_strs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    return_token_strs: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ..., return_token_strs: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "count", "max_model_len", "token_strs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    count: int
    max_model_len: int
    token_strs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ..., max_model_len: _Optional[int] = ..., token_strs: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "max_model_len", "vocab_size", "dtype", "architecture", "tokenizer", "has_chat_template", "eos_token_ids", "verifications", "default_verification", "methods", "num_speculative_tokens", "tool_call_parser", "reasoning_parser")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_VERIFICATION_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_model_len: int
    vocab_size: int
    dtype: str
    architecture: str
    tokenizer: str
    has_chat_template: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    verifications: _containers.RepeatedScalarFieldContainer[Verification]
    default_verification: Verification
    methods: _containers.RepeatedScalarFieldContainer[str]
    num_speculative_tokens: int
    tool_call_parser: str
    reasoning_parser: str
    def __init__(self, model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., architecture: _Optional[str] = ..., tokenizer: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., verifications: _Optional[_Iterable[_Union[Verification, str]]] = ..., default_verification: _Optional[_Union[Verification, str]] = ..., methods: _Optional[_Iterable[str]] = ..., num_speculative_tokens: _Optional[int] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("outrider_version", "vllm_version", "ray_version", "torch_version", "python_version", "start_time", "link_protocol_version", "api")
    OUTRIDER_VERSION_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    RAY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    LINK_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    outrider_version: str
    vllm_version: str
    ray_version: str
    torch_version: str
    python_version: str
    start_time: _timestamp_pb2.Timestamp
    link_protocol_version: int
    api: str
    def __init__(self, outrider_version: _Optional[str] = ..., vllm_version: _Optional[str] = ..., ray_version: _Optional[str] = ..., torch_version: _Optional[str] = ..., python_version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., link_protocol_version: _Optional[int] = ..., api: _Optional[str] = ...) -> None: ...

class GetServerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerStatusResponse(_message.Message):
    __slots__ = ("model", "methods", "speculation_up", "num_speculative_tokens", "link", "rounds", "target", "drafter", "adapters", "learning")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_UP_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    model: str
    methods: _containers.RepeatedScalarFieldContainer[str]
    speculation_up: bool
    num_speculative_tokens: int
    link: LinkStatus
    rounds: RoundStatistics
    target: EngineStatus
    drafter: EngineStatus
    adapters: _containers.RepeatedScalarFieldContainer[str]
    learning: DrafterLearning
    def __init__(self, model: _Optional[str] = ..., methods: _Optional[_Iterable[str]] = ..., speculation_up: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., link: _Optional[_Union[LinkStatus, _Mapping]] = ..., rounds: _Optional[_Union[RoundStatistics, _Mapping]] = ..., target: _Optional[_Union[EngineStatus, _Mapping]] = ..., drafter: _Optional[_Union[EngineStatus, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., learning: _Optional[_Union[DrafterLearning, _Mapping]] = ...) -> None: ...

class RevertDrafterRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class RevertDrafterResponse(_message.Message):
    __slots__ = ("serving",)
    SERVING_FIELD_NUMBER: _ClassVar[int]
    serving: int
    def __init__(self, serving: _Optional[int] = ...) -> None: ...

class DrafterLearning(_message.Message):
    __slots__ = ("drafting", "serving", "steps", "tokens", "refused", "last_comparison", "versions")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LAST_COMPARISON_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    drafting: int
    serving: int
    steps: int
    tokens: int
    refused: _containers.ScalarMap[str, int]
    last_comparison: GateVerdict
    versions: _containers.RepeatedCompositeFieldContainer[DrafterVersion]
    def __init__(self, drafting: _Optional[int] = ..., serving: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., last_comparison: _Optional[_Union[GateVerdict, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[DrafterVersion, _Mapping]]] = ...) -> None: ...

class DrafterVersion(_message.Message):
    __slots__ = ("number", "state", "kept", "again", "step", "began_at", "verdict", "since")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BEGAN_AT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: DrafterVersionState
    kept: bool
    again: int
    step: int
    began_at: _timestamp_pb2.Timestamp
    verdict: GateVerdict
    since: GateDifference
    def __init__(self, number: _Optional[int] = ..., state: _Optional[_Union[DrafterVersionState, str]] = ..., kept: _Optional[bool] = ..., again: _Optional[int] = ..., step: _Optional[int] = ..., began_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., verdict: _Optional[_Union[GateVerdict, _Mapping]] = ..., since: _Optional[_Union[GateDifference, _Mapping]] = ...) -> None: ...

class GateVerdict(_message.Message):
    __slots__ = ("reason", "recent", "past", "general")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    GENERAL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    recent: GateDifference
    past: GateDifference
    general: GateDifference
    def __init__(self, reason: _Optional[str] = ..., recent: _Optional[_Union[GateDifference, _Mapping]] = ..., past: _Optional[_Union[GateDifference, _Mapping]] = ..., general: _Optional[_Union[GateDifference, _Mapping]] = ...) -> None: ...

class GateDifference(_message.Message):
    __slots__ = ("mean", "margin", "texts")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    mean: float
    margin: float
    texts: int
    def __init__(self, mean: _Optional[float] = ..., margin: _Optional[float] = ..., texts: _Optional[int] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("state", "epoch", "reconnects", "drafter", "rtt_us", "last_error", "backend")
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    RTT_US_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    state: LinkState
    epoch: int
    reconnects: int
    drafter: str
    rtt_us: float
    last_error: str
    backend: str
    def __init__(self, state: _Optional[_Union[LinkState, str]] = ..., epoch: _Optional[int] = ..., reconnects: _Optional[int] = ..., drafter: _Optional[str] = ..., rtt_us: _Optional[float] = ..., last_error: _Optional[str] = ..., backend: _Optional[str] = ...) -> None: ...

class LengthDecisions(_message.Message):
    __slots__ = ("speculating", "switches", "chosen_lengths", "probes", "step_fixed_ms", "step_per_token_ms", "step_uneven_ms", "draft_step_ms", "origins", "acceptance_by_position", "expected_rate", "expected_plain_rate")
    class ChosenLengthsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class OriginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SPECULATING_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIXED_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_PER_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_UNEVEN_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_RATE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PLAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    speculating: bool
    switches: int
    chosen_lengths: _containers.ScalarMap[int, int]
    probes: int
    step_fixed_ms: float
    step_per_token_ms: float
    step_uneven_ms: float
    draft_step_ms: float
    origins: _containers.ScalarMap[str, float]
    acceptance_by_position: _containers.RepeatedScalarFieldContainer[float]
    expected_rate: float
    expected_plain_rate: float
    def __init__(self, speculating: _Optional[bool] = ..., switches: _Optional[int] = ..., chosen_lengths: _Optional[_Mapping[int, int]] = ..., probes: _Optional[int] = ..., step_fixed_ms: _Optional[float] = ..., step_per_token_ms: _Optional[float] = ..., step_uneven_ms: _Optional[float] = ..., draft_step_ms: _Optional[float] = ..., origins: _Optional[_Mapping[str, float]] = ..., acceptance_by_position: _Optional[_Iterable[float]] = ..., expected_rate: _Optional[float] = ..., expected_plain_rate: _Optional[float] = ...) -> None: ...

class RoundStatistics(_message.Message):
    __slots__ = ("rounds", "drafted_rounds", "drafted", "accepted", "mean_acceptance_length", "acceptance_rate", "late_rounds", "dropped_proposals", "median", "refused_proposals", "proposals", "proposal_bytes", "main_line_hits", "side_branch_hits", "misses", "draft_step_ms", "lengths", "foreseen", "path_rounds", "path_rows", "path_tokens")
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    LATE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAIN_LINE_HITS_FIELD_NUMBER: _ClassVar[int]
    SIDE_BRANCH_HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    FORESEEN_FIELD_NUMBER: _ClassVar[int]
    PATH_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PATH_ROWS_FIELD_NUMBER: _ClassVar[int]
    PATH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rounds: int
    drafted_rounds: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    acceptance_rate: float
    late_rounds: int
    dropped_proposals: int
    median: RoundTime
    refused_proposals: int
    proposals: int
    proposal_bytes: int
    main_line_hits: int
    side_branch_hits: int
    misses: int
    draft_step_ms: float
    lengths: LengthDecisions
    foreseen: int
    path_rounds: int
    path_rows: int
    path_tokens: int
    def __init__(self, rounds: _Optional[int] = ..., drafted_rounds: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., acceptance_rate: _Optional[float] = ..., late_rounds: _Optional[int] = ..., dropped_proposals: _Optional[int] = ..., median: _Optional[_Union[RoundTime, _Mapping]] = ..., refused_proposals: _Optional[int] = ..., proposals: _Optional[int] = ..., proposal_bytes: _Optional[int] = ..., main_line_hits: _Optional[int] = ..., side_branch_hits: _Optional[int] = ..., misses: _Optional[int] = ..., draft_step_ms: _Optional[float] = ..., lengths: _Optional[_Union[LengthDecisions, _Mapping]] = ..., foreseen: _Optional[int] = ..., path_rounds: _Optional[int] = ..., path_rows: _Optional[int] = ..., path_tokens: _Optional[int] = ...) -> None: ...

class RoundTime(_message.Message):
    __slots__ = ("period_ms", "target_ms", "draft_ms", "wait_ms", "other_ms", "samples")
    PERIOD_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OTHER_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    period_ms: float
    target_ms: float
    draft_ms: float
    wait_ms: float
    other_ms: float
    samples: int
    def __init__(self, period_ms: _Optional[float] = ..., target_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ..., other_ms: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("running", "waiting", "kv_cache_usage", "preemptions")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_cache_usage: float
    preemptions: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., preemptions: _Optional[int] = ...) -> None: ...
