"""The configuration of pictures, and which addresses they are never fetched from."""

import pytest

from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.pictures import is_public


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.5.5", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.2.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1",
        "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1",
        "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2002:a00:1::1", "2001:0:7f00:1::", "2001:db8::1", "64:ff9b:1::a00:1", "fec0::1", "3fff::1", "5f00::1",
        "168.63.129.16", "no address", "", "127.1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


def parsed(multimodal, **sections):
    target = {"model": "m", "multimodal": multimodal, **sections.pop("target", {})}
    return parse_config({"target": target, **sections}).target.multimodal


def test_defaults():
    config = parsed({})
    assert (config.most_pictures, config.allowed_media_domains) == (1, ())
    assert parse_config({"target": {"model": "m"}}).target.multimodal is None


@pytest.mark.parametrize(
    ("multimodal", "sections", "problem"),
    [
        ({"limit_mm_per_prompt": {"video": 1}}, {}, r"target.multimodal.limit_mm_per_prompt: must be \{image: N\}"),
        ({"limit_mm_per_prompt": {"image": 0}}, {}, "target.multimodal.limit_mm_per_prompt: image must be 1 to 256"),
        ({"allowed_media_domains": ["10.0.0.1"]}, {}, "target.multimodal.allowed_media_domains: .* no address"),
        ({"allowed_media_domains": ["0x7f.1"]}, {}, "no host's name"),
        ({"allowed_media_domains": ["https://a.org"]}, {}, "no host's name"),
        ({"allowed_media_domains": ["*.a.org"]}, {}, "no host's name"),
        ({"allowed_media_domains": ["A.org"]}, {}, "no host's name"),
        ({"allowed_media_domains": ["a.org:80"]}, {}, "no host's name"),
        ({"fetch_timeout_s": 0}, {}, "target.multimodal.fetch_timeout_s"),
        ({"max_image_bytes": 8 << 20}, {}, "target.multimodal.max_image_bytes: .* limits.max_request_bytes"),
        ({}, {"limits": {"max_request_bytes": 1 << 20}}, "target.multimodal.max_image_bytes: .* raise that or lower"),
        (
            {},
            {"drafter": {"method": "ngram", "placement": "co_located"}},
            "target.multimodal: .* not beside drafter.placement: co_located",
        ),
        ({}, {"target": {"pipeline_parallel_size": 2}}, "target.multimodal: .* pipeline_parallel_size"),
        (
            {},
            {"target": {"engine_args": {"language_model_only": True}}},
            "language_model_only: does not go with target.multimodal",
        ),
        ({}, {"target": {"engine_args": {"limit_mm_per_prompt": {"image": 1}}}}, "write target.multimodal"),
        ({}, {"target": {"engine_args": {"allowed_media_domains": ["a.org"]}}}, "write target.multimodal"),
        ({}, {"target": {"engine_args": {"allowed_local_media_path": "/"}}}, "any file beneath it"),
        (None, {"target": {"engine_args": {"mm_processor_cache_gb": 1}}}, "engine_args.mm_processor_cache_gb is about"),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(multimodal, sections, problem):
    with pytest.raises(ConfigError, match=problem):
        parsed(multimodal, **sections)


def test_arguments_about_them_are_passed_on_with_them():
    assert parsed({}, target={"engine_args": {"mm_processor_cache_gb": 1}}) is not None
