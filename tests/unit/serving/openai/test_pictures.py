"""Pictures at the door: which are let in, and how the others are named."""

import pytest

from outrider.actors.replica_calls import RequestError
from outrider.actors.serving.openai.door import to_openai_request
from outrider.actors.serving.openai.pictures import pictures
from outrider.actors.serving.routing.request_profile import profile
from outrider.cluster.multimodal_config import MultimodalConfig

CONFIG = MultimodalConfig(
    limit_mm_per_prompt={"image": 2}, allowed_media_domains=("pictures.example.com",), max_image_bytes=1024
)
PNG = "data:image/png;base64,"


def part(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, *parts]}]


def request(messages, config=CONFIG, endpoint="chat"):
    body = {"messages": messages}
    return to_openai_request(endpoint, body, {}, num_speculative_tokens=4, request_id="r", multimodal=config)


def refusal(*args, **kwargs):
    with pytest.raises(RequestError) as caught:
        request(*args, **kwargs)
    return caught.value


def test_a_text_with_none_is_a_text():
    assert request(said({"type": "text", "text": "a", "image_url": None})).body["messages"]


def test_which_there_are_and_where():
    messages = [{"role": "system", "content": "Be brief."}, *said(part(PNG + "AAAA"), part(PNG + "BBBB"))]
    found = pictures("chat", request(messages).body)
    assert found == {
        PNG + "AAAA": "messages.1.content.1.image_url",
        PNG + "BBBB": "messages.1.content.2.image_url",
    }


def test_a_hint_of_openais_is_taken_and_dropped():
    assert request(said(part(PNG + "AAAA", detail="low"))).body["messages"][0]["content"][1] == part(PNG + "AAAA")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (PNG + "A" * 1372, "more than 1024 bytes"),
        ("data:image/svg+xml;base64,AAAA", "no picture in base64"),
        ("data:image/png,AAAA", "no picture in base64"),
        ("file:///etc/passwd", "neither"),
        ("ftp://pictures.example.com/a", "neither"),
        ("//pictures.example.com/a", "neither"),
        ("http://other.example.com/a", "a host that"),
        ("https://pictures.example.com.other.org/a", "a host that"),
        ("https://pictures.example.com@other.org/a", "name or password"),
        ("https://other.org\\@pictures.example.com/a", "no URL of printable ASCII"),
        ("https://pictures.example.com/a b", "no URL of printable ASCII"),
        ("https://pictures.example.com:port/a", "no URL"),
        ("https://pictures.example.com:80/a", "a port of its own"),
        ("http://pictures.example.com:6379/a", "a port of its own"),
        ("https://[::1/a", "no URL"),
        ("https://" + "a" * 5000, "4096 characters"),
        ("http://127.0.0.1/a", "a host that"),
        ("http://[::ffff:127.0.0.1]/a", "a host that"),
        ("http://2130706433/a", "a host that"),
    ],
)
def test_a_url_that_is_not_opened(url, problem):
    error = refusal(said(part(PNG + "AAAA"), part(url)))
    assert error.field == "messages.0.content.2.image_url"
    assert problem in error.problem
    assert "pictures.example.com" not in str(error)


@pytest.mark.parametrize(
    "url", [PNG + "A" * 1368, PNG.upper() + "AAAA", "https://pictures.example.com/a?b=c", "HTTP://PICTURES.example.com"]
)
def test_a_url_that_is(url):
    request(said(part(url)))


def test_nothing_is_fetched_unless_hosts_are_named():
    error = refusal(said(part("https://pictures.example.com/a")), MultimodalConfig())
    assert error.problem == "is a URL, and no pictures are fetched here"
    assert "data:image/png;base64" in error.fix


def test_more_than_the_limit_in_all_messages_together():
    error = refusal([*said(part(PNG), part(PNG)), *said(part(PNG))])
    assert error.field == "messages.1.content.1.image_url"
    assert "at most 2" in error.fix


def test_a_deployment_without_them():
    error = refusal(said(part(PNG + "AAAA")), None)
    assert (error.field, error.fix) == ("messages.0.content.1.image_url", "send text alone")


def test_they_are_not_tokenised():
    with pytest.raises(RequestError, match=r"messages\.0\.content\.1\.image_url"):
        request(said(part(PNG + "AAAA")), endpoint="tokenize")


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": "data:"},
        {"type": "input_image", "image_url": {"url": PNG}},
        {"type": "text", "text": "a", "image_url": {"url": PNG}},
        {"image_url": {"url": PNG}},
    ],
)
def test_a_part_of_another_shape(wrong):
    assert refusal(said(wrong)).field == "messages.0.content.1.image_url"


def test_a_picture_counts_as_some_hundred_tokens_however_long_its_url():
    url = PNG + "A" * 1000
    tokens = [request(said(*parts)).prompt_tokens for parts in ((), (part(url),), (part(PNG + "A"),))]
    assert tokens[1] == tokens[2] == tokens[0] + 512
    assert profile([request(said(part(url)))]).prompt_tokens == tokens[1]


def test_prompts_with_other_pictures_share_no_prefix():
    def fingerprint(url):
        return profile([request(said(part(url)))]).fingerprint

    same, other = fingerprint(PNG + "AAAA"), fingerprint(PNG + "BBBB")
    assert same == fingerprint(PNG + "AAAA")
    assert same[0] != other[0]


def response(*parts, role="user", config=CONFIG):
    body = {"input": [{"role": role, "content": [{"type": "input_text", "text": "What is this?"}, *parts]}]}
    return to_openai_request("responses", body, {}, num_speculative_tokens=4, request_id="r", multimodal=config)


def shown(url):
    return {"type": "input_image", "image_url": url, "detail": "high"}


def test_a_response_s_pictures():
    asked = response(shown(PNG + "AAAA"))
    assert asked.body["input"][0]["content"] == [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": PNG + "AAAA", "detail": "auto"},
    ]
    assert pictures("responses", asked.body) == {PNG + "AAAA": "input.0.content.1.image_url"}
    assert asked.prompt_tokens == request(said(part(PNG + "AAAA"))).prompt_tokens
    assert profile([asked]).prompt_tokens == asked.prompt_tokens


@pytest.mark.parametrize(
    ("parts", "role", "config", "field"),
    [
        ([shown("file:///etc/passwd")], "user", CONFIG, "input.0.content.1.image_url"),
        ([shown(PNG)] * 3, "user", CONFIG, "input.0.content.3.image_url"),
        ([shown(PNG)], "user", None, "input.0.content.1.image_url"),
        ([{"type": "input_image"}], "user", CONFIG, "input.0.content.1.image_url"),
        ([{"type": "input_image", "file_id": "f"}], "user", CONFIG, "input.0.content.1.file_id"),
        ([shown(PNG)], "assistant", CONFIG, "input.0.content.1.type"),
        ([part(PNG)], "user", CONFIG, "input.0.content.1.type"),
    ],
)
def test_a_response_s_picture_that_is_refused(parts, role, config, field):
    with pytest.raises(RequestError) as caught:
        response(*parts, role=role, config=config)
    assert caught.value.field == field
