"""Completions and chats by OpenAI's client, with the fields that Outrider adds."""

PROMPT = "Once upon a time there was a request"
MESSAGES = [{"role": "user", "content": PROMPT}]
MODEL = "tiny"


def complete(client, **changes):
    extra = {"return_token_ids": True, **changes.pop("extra", {})}
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, **changes}
    return client.completions.create(**options, extra_body=extra)


def chat(client, **changes):
    extra = {"return_token_ids": True, **changes.pop("extra", {})}
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, **changes}
    return client.chat.completions.create(**options, extra_body=extra)


def acceptance(answer):
    return answer.metrics["speculative_decoding"]


def num_draft_tokens(answer):
    return acceptance(answer)["num_draft_tokens"]
