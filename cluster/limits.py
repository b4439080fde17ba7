"""What one caller, and all of them together, may take of a server: times, numbers and sizes, each a key of ``limits``.

The proxies hold callers to most of them, in front of every application of theirs, so they get them through their
environment (to_environment, from_environment); where nobody set it, as on a cluster that was started by other means,
the defaults hold.
"""

from __future__ import annotations

import os

from pydantic import Field, ValidationError, model_validator

from outrider.cluster.config_section import ConfigError, Section

LIMITS_VARIABLE = "OUTRIDER_LIMITS"
"""In the environment of Serve's proxies: these limits as JSON."""


class LimitsConfig(Section):
    """What callers may take, each and together. All of it is checked at the door."""

    receive_timeout_s: float = Field(30.0, gt=0, le=3600)
    """Time for a request to come in: for a TLS handshake, for a connection's first bytes and an HTTP header, for a
    body, and for the message of a gRPC call. Who is later gets 408 or DEADLINE_EXCEEDED, or is hung up on."""

    unread_timeout_s: float = Field(30.0, gt=0, le=3600)
    """Time in which a reader must read something of what waits for it. Who stands still for longer loses the request
    and its place (SLOW_READER; over HTTP the connection)."""

    max_unread_bytes: int = Field(8 << 20, ge=1 << 16)
    """Of one gRPC answer: what its reader may have before it for a moment. It must become less within
    unread_timeout_s, and four times as much is never kept, the largest message not counted."""

    connection_idle_timeout_s: float = Field(300.0, ge=1, le=86400)
    """A connection without a request for so long is closed. Clients open a new one by themselves."""

    control_timeout_s: float = Field(5.0, gt=0, le=300)
    """Time for calls beside generations (status, health, tokenising, aborting): for their turn, and then for an
    answer."""

    default_timeout_s: float = Field(3600.0, gt=0, le=604800)
    """Deadline of a generation whose caller sets none."""

    greatest_timeout_s: float = Field(86400.0, gt=0, le=604800)
    """Longest deadline that a caller may set."""

    max_connections: int = Field(2048, ge=1, le=1_000_000)
    """Connections to the gRPC port of a proxy, and as many to its HTTP port. The newest are hung up on, over HTTP with
    a 503."""

    max_connections_per_peer: int | None = Field(None, ge=1)
    """Of these, from one address (of IPv6: one network of 64 bits). None: half of max_connections. Behind a load
    balancer, from which all come, it is to be as large as max_connections."""

    max_streams_per_connection: int = Field(512, ge=1, le=100000)
    """gRPC calls at once on one connection. Clients hold back what is more."""

    max_awaited_requests: int = Field(256, ge=1)
    """Requests of which a proxy has not got all yet. Beyond this one of whoever (key; address, without one) has most
    is given up, the one that has been awaited longest, so that a newcomer, whose request is on its way, is served."""

    max_awaited_bytes: int = Field(64 << 20, ge=1 << 20)
    """Likewise, in bytes: of HTTP bodies that are on their way, and of answers that nobody has read yet."""

    max_watch_streams: int = Field(256, ge=1)
    """``Health/Watch`` streams at once in a proxy."""

    max_watch_streams_per_peer: int | None = Field(None, ge=1)
    """Of these, from one address, as for max_connections_per_peer. None: half of max_watch_streams."""

    max_control_calls_per_s: float = Field(20.0, gt=0, le=10000)
    """Health checks a second that a proxy passes on, and as many other calls for status, info and pages; aborts, and
    calls to tokenise, four times as many. More wait for their turn, callers by turns, up to control_timeout_s, and are
    refused then."""

    max_tokenize_calls: int = Field(1, ge=1)
    """Calls to tokenise and detokenise that a proxy has running at once. A replica has one thread for these and for
    the prompts of generations, which wait behind so many of them at most, and what is left of one whose caller has
    gone. More calls wait as above, max_awaited_bytes of them at most."""

    refused_seconds_per_minute: float | None = Field(None, ge=0, le=3600)
    """What a caller may have refused, in seconds of the server's time: of a key, or of an address (of IPv6: one network
    of 64 bits) where no key is shown. A call that ends by its own fault costs 2 ms, 10 ms more for each MiB that came
    of it, and the time that it took behind the proxy, 2 s at most. Who has used up a minute's worth is refused before
    anything is read (REFUSED_TOO_OFTEN, 429) until some of it is back, which takes a minute at most. None: 3 where
    keys are asked for (serving.keys_file). Elsewhere nothing is charged, as with 0: addresses alone do not tell a
    client with a bug from those who share its address, as all do behind a load balancer."""

    max_header_bytes: int = Field(16 << 10, ge=1024, le=1 << 20)
    """Longest header of an HTTP request, its first line included, in bytes. Longer ones get 431."""

    max_request_bytes: int = Field(8 << 20, ge=1024, le=1 << 30)
    """Longest HTTP body and longest gRPC message, decompressed, in bytes."""

    max_request_values: int = Field(1 << 18, ge=1024)
    """Most values in one request: members of lists and objects, token ids; a text, a list or an object counts as
    eight. Bounds what a small body makes of memory, and the time that reading it takes."""

    max_sequences: int = Field(1024, ge=1)
    """Answers that an ingress has running and waiting at once: each of a request's ``n`` and of its prompts counts.
    A request beyond it is refused like one that finds the queue full; one for more than all of them, by its field."""

    max_tokens_in_flight: int = Field(8 << 20, ge=1)
    """Likewise in tokens, of prompts (text is estimated) and longest answers that were asked for. A request for more
    than eight ninths of them counts for these: it gets in when little else is there. A token counts once more for each
    of the likeliest ones that ``logprobs`` or ``prompt_logprobs`` ask for with it, and each of ``allowed_token_ids``
    for one in each answer."""

    max_logprobs: int = Field(1 << 15, ge=1 << 13)
    """Log-probabilities of one request that come at once: of a prompt's tokens, and of answers that are not streamed.
    Each token has its own and those of the likeliest ones asked for. They are put together while all other answers of
    the replica wait, in 10 to 25 µs each."""

    default_max_tokens: int | None = Field(None, ge=1)
    """Longest answer of a generation whose caller sets no max_tokens. None: what max_model_len leaves."""

    greatest_max_tokens: int | None = Field(None, ge=1)
    """Largest max_tokens that a caller may set. None: what max_model_len leaves."""

    max_stop_strings: int = Field(16, ge=1)
    """Stop strings of one request; OpenAI's endpoints take 4 in any case."""

    max_stop_string_chars: int = Field(1024, ge=1)
    """Characters of one stop string."""

    max_bad_words: int = Field(256, ge=1)
    """Bad words of one request."""

    max_bad_word_chars: int = Field(256, ge=1)
    """Characters of one bad word: each is tokenised while others wait."""

    max_listed_token_ids: int = Field(1024, ge=1)
    """``stop_token_ids``, and tokens in ``logit_bias``, of one request."""

    max_tokenize_chars: int = Field(1 << 19, ge=1024)
    """Characters of one call to tokenise, counted as for max_prompt_chars, an eighth where the tokens' texts are asked
    for: half a second or so of a processor, for which prompts wait to be tokenised, and 75 MiB for a moment. Texts
    longer than max_model_len tokens can spell are refused besides."""

    max_prompt_chars: int = Field(1 << 21, ge=1024)
    """Characters of one generation's prompts together, roles, names, tools and documents among them, or half their
    bytes in UTF-8 where these are more: two seconds or so for which other prompts wait to be tokenised."""

    max_detokenize_ids: int = Field(131072, ge=1)
    """Token ids of one call to detokenise."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names that browsers may call this server by, e.g. ``chat.example.com`` or ``*.example.com``; ``*``: any.
    Addresses, names without a dot and names that no stranger can register (``.internal``, ``.local`` …) need no entry:
    this is what keeps other people's pages from reaching the server under a name of theirs."""

    allowed_origins: tuple[str, ...] = ()
    """Pages of other origins that may send requests, e.g. ``https://chat.example.com``; ``*``: any. Pages that this
    server serves, under the name in their request's Host, need no entry."""

    @model_validator(mode="after")
    def _fit_each_other(self) -> LimitsConfig:
        for low, high in (
            ("default_timeout_s", "greatest_timeout_s"),
            ("max_connections_per_peer", "max_connections"),
            ("max_watch_streams_per_peer", "max_watch_streams"),
            ("default_max_tokens", "greatest_max_tokens"),
        ):
            first, second = getattr(self, low), getattr(self, high)
            if first is not None and second is not None and first > second:
                raise ValueError(
                    f"{low} ({first:.12g}) is above {high} ({second:.12g}); lower the first or raise the second"
                )
        return self

    @property
    def most_connections_per_peer(self) -> int:
        if self.max_connections_per_peer is None:
            return max(1, self.max_connections // 2)
        return self.max_connections_per_peer

    @property
    def most_watch_streams_per_peer(self) -> int:
        if self.max_watch_streams_per_peer is None:
            return max(1, self.max_watch_streams // 2)
        return self.max_watch_streams_per_peer

    @property
    def unasked_max_tokens(self) -> int | None:
        """Of a generation whose caller sets none; None: what max_model_len leaves."""
        return self.greatest_max_tokens if self.default_max_tokens is None else self.default_max_tokens

    def to_environment(self) -> dict[str, str]:
        """For processes that run Serve's proxies."""
        return {LIMITS_VARIABLE: self.model_dump_json()}


def are_told() -> bool:
    """Whether this process was told of limits: those of an application here may be others otherwise."""
    return LIMITS_VARIABLE in os.environ


def from_environment() -> LimitsConfig:
    """Of this process. Raises ConfigError for a variable that holds no limits."""
    try:
        return LimitsConfig.model_validate_json(os.environ.get(LIMITS_VARIABLE, "{}"))
    except ValidationError as error:
        raise ConfigError(f"{LIMITS_VARIABLE}: {error.errors()[0]['msg']}; set it as outrider serve does") from None
