"""Fetching and decoding pictures: a real server on this machine, which is let pass for a public one where a test needs
an answer of its."""

import asyncio
import io
import socket
import struct

import aiohttp
import pytest
from aiohttp import web
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media.audio import AudioMediaIO
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY
from vllm.multimodal.media.image import ImageMediaIO

from outrider.actors.vllm_seam import pictures
from outrider.cluster.multimodal_config import MultimodalConfig
from outrider.cluster.pictures import PictureError
from tests.tiny_pictures import data_url, picture, png_header

CONFIG = MultimodalConfig(allowed_media_domains=("localhost",), max_image_bytes=1 << 14, max_image_pixels=1 << 13)
PNG = picture(1)


@pytest.fixture
def passes_for_public(monkeypatch):
    monkeypatch.setattr(pictures, "is_public", lambda address: True)


async def asked(path, config=CONFIG):
    """What fetching a path gives, and the paths that the server was asked for."""
    seen = []
    over = asyncio.Event()

    async def answer(request):
        seen.append(request.path)
        match request.path:
            case "/redirect":
                raise web.HTTPFound("/picture")
            case "/missing":
                raise web.HTTPNotFound()
            case "/long":
                return web.Response(body=bytes(1 << 15))
            case "/endless":
                response = web.StreamResponse()
                await response.prepare(request)
                while True:
                    await response.write(bytes(1 << 12))
            case "/slow":
                await over.wait()
        return web.Response(body=PNG)

    server = web.Server(answer)
    runner = web.ServerRunner(server, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        return await pictures.fetched(f"http://localhost:{port}{path}", config), seen
    except PictureError as error:
        return error.problem, seen
    finally:
        over.set()
        await runner.cleanup()


def test_a_picture_is_fetched(passes_for_public):
    assert asyncio.run(asked("/picture")) == (PNG, ["/picture"])


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/redirect", "could not be fetched"),
        ("/missing", "could not be fetched"),
        ("/slow", "could not be fetched"),
        ("/long", "has more than 16384 bytes"),
        ("/endless", "has more than 16384 bytes"),
    ],
)
def test_what_is_not_taken_from_a_host(passes_for_public, path, problem):
    config = CONFIG.model_copy(update={"fetch_timeout_s": 2.0}) if path == "/slow" else CONFIG
    assert asyncio.run(asked(path, config)) == (problem, [path])


def test_this_machine_is_not_asked_by_any_name():
    assert asyncio.run(asked("/picture")) == ("could not be fetched", [])


def test_a_url_that_the_client_cannot_read_is_not_asked():
    with pytest.raises(PictureError, match="could not be fetched"):
        asyncio.run(pictures.fetched("http://[localhost/", CONFIG))


def test_another_host_is_not_asked(passes_for_public):
    config = MultimodalConfig(allowed_media_domains=("pictures.example.com",))
    assert asyncio.run(asked("/picture", config)) == ("could not be fetched", [])


def resolved(monkeypatch, *answers):
    """A resolver that gives these, one after the other."""
    given = iter(answers)
    asked_for = []

    async def resolve(self, host, port=0, family=socket.AF_INET):
        asked_for.append(host)
        return [
            {"hostname": host, "host": each, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}
            for each in next(given)
        ]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    return asked_for


def test_a_name_with_one_private_address_among_its_own_is_not_asked(monkeypatch):
    resolved(monkeypatch, ["8.8.8.8", "127.0.0.1"])
    assert asyncio.run(asked("/picture")) == ("could not be fetched", [])


def test_a_name_is_resolved_once_and_what_was_looked_at_is_connected_to(monkeypatch):
    """A name may be given another address by the second time."""
    looked_at = []
    monkeypatch.setattr(pictures, "is_public", lambda address: looked_at.append(address) or True)
    asked_for = resolved(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
    assert asyncio.run(asked("/picture")) == (PNG, ["/picture"])
    assert (asked_for, looked_at) == (["localhost"], ["127.0.0.1"])


def test_no_proxy_is_asked(passes_for_public, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert asyncio.run(asked("/picture")) == (PNG, ["/picture"])
        with pytest.raises(BlockingIOError):
            proxy.accept()


def loaded(url, config=CONFIG, media_io=None):
    pictures.take_pictures(config)
    connector = MEDIA_CONNECTOR_REGISTRY.load(pictures.NAME, allowed_media_domains=[])
    pictures.FIELDS.set({url: "messages.7.content.3.image_url"})
    return asyncio.run(connector.load_from_url_async(url, media_io or ImageMediaIO()))


def test_a_picture_is_decoded():
    assert loaded(data_url(PNG)).size == (64, 64)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (picture(1, 128, 65), "has more than 8192 pixels"),
        (png_header(40_000, 40_000), "has more than 8192 pixels"),
        (bytes((1 << 14) + 1), "has more than 16384 bytes"),
        (PNG[:60], "cannot be read"),
        (b"", "cannot be read"),
        (picture(1, kind="BMP"), "cannot be read"),
    ],
)
def test_what_is_not_decoded_is_refused_by_its_field(content, problem):
    with pytest.raises(VLLMValidationError, match=problem) as caught:
        loaded(data_url(content))
    assert caught.value.parameter == "messages.7.content.3.image_url"


def of_two_formats(width, height):
    """JPEG by its beginning, and FLI by what the first of JPEG's segments holds: another reader, another size."""
    jpeg = picture(1, 8, 8, kind="JPEG")
    both = bytearray(b"\xff\xd8\xff\xe9\x11\xaf" + bytes(0x11AF - 2))
    struct.pack_into("<HHHHHH", both, 6, 1, width, height, 8, 3, 0)
    struct.pack_into("<IHH", both, 128, 22, 0xF1FA, 1)
    struct.pack_into("<IH", both, 144, 6, 13)
    return bytes(both) + jpeg[2:]


def test_a_file_of_two_formats_is_decoded_as_what_it_was_looked_at_as():
    file = of_two_formats(4000, 3000)
    assert Image.open(io.BytesIO(file), formats=["FLI"]).size == (4000, 3000)
    assert loaded(data_url(file)).size == (8, 8)


def test_another_readers_format_is_refused_even_where_vllm_would_take_it(monkeypatch):
    pictures.take_pictures(CONFIG)
    monkeypatch.setattr(pictures, "take_pictures", lambda config: None)
    monkeypatch.setattr("vllm.multimodal.image.ALLOWED_IMAGE_FORMATS", ("FLI", "JPEG"))
    with pytest.raises(VLLMValidationError, match="cannot be read"):
        loaded(data_url(of_two_formats(40, 30)))


def test_a_picture_that_is_too_large_is_not_decoded(monkeypatch):
    def decode(*args):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageMediaIO, "load_bytes", decode)
    with pytest.raises(VLLMValidationError, match="has more than 8192 pixels"):
        loaded(data_url(picture(1, 128, 65)))


def test_nothing_else_is_loaded_and_nothing_without_the_section():
    for config, media_io in ((CONFIG, AudioMediaIO()), (None, None)):
        with pytest.raises(VLLMValidationError, match="nothing that this deployment takes"):
            loaded(data_url(PNG), config, media_io)
