"""Pictures on their way into vLLM: its MediaConnector, kept to a deployment's limits and to public addresses.

vLLM itself fetches from anywhere unless it is given domains, follows redirects, and connects to whatever a name
resolves to. Here nothing is fetched but from the domains of the configuration, each name is resolved once, all of its
addresses must be public, and the connection goes to one of these; redirects are not followed, no proxy is asked, and
what comes is read up to a limit. A picture's size is looked at before it is decoded.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import aiohttp
import pybase64
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal import image as vllm_image
from vllm.multimodal.image import open_image
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from yarl import URL

from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.cluster.multimodal_config import TAKEN, MultimodalConfig
from outrider.cluster.pictures import (
    KINDS,
    PictureError,
    check_url,
    is_public,
    not_fetched,
    too_many_bytes,
    too_many_pixels,
    unreadable,
)

logger = logging.getLogger("ray.serve.outrider.openai")

NAME = "outrider"
"""Of the connector, in vLLM's registry."""

FIELDS: ContextVar[Mapping[str, str]] = ContextVar("URL of each picture in this task's request -> its field")

_CHUNK_BYTES = 1 << 16
_SEVERAL_JPEGS = "MPO"
"""Pillow's name of a JPEG file that holds more than one picture; the first counts."""

_DECODERS = ThreadPoolExecutor(4, "pictures")
"""So that slow pictures hold up nothing but pictures, and few are in memory half decoded."""


def take_pictures(config: MultimodalConfig | None) -> None:
    """From now on vLLM's renderers in this process load media as config says; None: not at all.

    No other format's reader is tried, in vLLM either: a file may be of two formats, with another size in each.
    """
    vllm_image.ALLOWED_IMAGE_FORMATS = KINDS
    MEDIA_CONNECTOR_REGISTRY.name2class[NAME] = partial(PictureConnector, config)
    os.environ["VLLM_MEDIA_CONNECTOR"] = NAME


def check_pictures(config: OutriderConfig, model_config: Any) -> None:
    """Raises ConfigError where the target cannot take what the configuration says. model_config: vLLM's."""
    multimodal = config.target.multimodal
    if multimodal is None:
        return
    named = f"target.multimodal: target.model ({model_config.architecture})"
    if not model_config.is_multimodal_model:
        raise ConfigError(f"{named} takes text alone; remove the section")
    supported = MULTIMODAL_REGISTRY.create_processor(model_config).info.supported_mm_limits
    most = supported.get(TAKEN, 0)
    if most == 0:
        raise ConfigError(f"{named} takes no pictures, but {', '.join(supported)}; remove the section")
    if most is not None and most < multimodal.most_pictures:
        raise ConfigError(
            f"target.multimodal.limit_mm_per_prompt: target.model ({model_config.architecture}) takes {most} a prompt; "
            f"set {TAKEN} to that or less"
        )


class PictureConnector(MediaConnector):
    """Loads pictures, and nothing else."""

    def __init__(self, config: MultimodalConfig | None, *args: Any, **kwargs: Any) -> None:
        """config: None: nothing is loaded. args, kwargs: MediaConnector's."""
        super().__init__(*args, **kwargs)
        self._config = config

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> NoReturn:
        raise NotImplementedError("media are loaded asynchronously here")

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Raises VLLMValidationError, with the field of the request that the URL is in."""
        loop = asyncio.get_running_loop()
        try:
            if self._config is None or not isinstance(media_io, ImageMediaIO):
                raise PictureError("is nothing that this deployment takes", "send text")
            check_url(url, self._config)
            if url[:5].lower() == "data:":
                return await loop.run_in_executor(_DECODERS, self._decoded, url, media_io)
            content = await fetched(url, self._config)
            return await loop.run_in_executor(_DECODERS, self._loaded, content, media_io)
        except PictureError as error:
            field = FIELDS.get({}).get(url, "messages")
            raise VLLMValidationError(f"{field}: {error}", parameter=field) from None

    def _decoded(self, url: str, media_io: ImageMediaIO) -> Any:
        return self._load(lambda limited: self._load_data_url(url, limited), media_io)

    def _loaded(self, content: bytes, media_io: ImageMediaIO) -> Any:
        return self._load(lambda limited: limited.load_bytes(content), media_io)

    def _load(self, load: Any, media_io: ImageMediaIO) -> Any:
        assert self._config is not None
        try:
            found = load(_Limited(media_io, self._config))
        except PictureError:
            raise
        except Exception as error:  # noqa: BLE001 - a torn file leads readers of formats to whatever they raise
            logger.info("a picture cannot be read: %s: %s", type(error).__name__, error)
            raise unreadable() from None
        return found


class _Limited:
    """An ImageMediaIO that looks at a picture before it decodes it."""

    def __init__(self, media_io: ImageMediaIO, config: MultimodalConfig) -> None:
        self._media_io, self._config = media_io, config

    def load_base64(self, media_type: str, data: str) -> Any:
        return self.load_bytes(pybase64.b64decode(data, validate=True))

    def load_bytes(self, content: bytes) -> Any:
        if len(content) > self._config.max_image_bytes:
            raise too_many_bytes(self._config)
        try:
            with open_image(io.BytesIO(content)) as image:  # reads its header, as the decoder does
                format_name, (width, height) = image.format, image.size
        except Image.DecompressionBombError:
            raise too_many_pixels(self._config) from None
        if format_name not in (*KINDS, _SEVERAL_JPEGS):
            raise unreadable()
        if width * height > self._config.max_image_pixels:
            raise too_many_pixels(self._config)
        return self._media_io.load_bytes(content)


class PublicResolver(AbstractResolver):
    """Resolves names, and refuses those that have an address which is not public: the connection goes to one of the
    addresses that were looked at."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        if not found or not all(is_public(each["host"]) for each in found):
            raise not_fetched()
        return found

    async def close(self) -> None:
        await self._resolver.close()


async def fetched(url: str, config: MultimodalConfig) -> bytes:
    """Raises PictureError."""
    try:
        place = URL(url)
    except ValueError:
        raise not_fetched() from None
    if place.raw_host not in config.allowed_media_domains:  # as the client that is to connect reads it
        raise not_fetched()
    connector = aiohttp.TCPConnector(resolver=PublicResolver(), use_dns_cache=False, force_close=True)
    session = aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=config.fetch_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        headers={"user-agent": "outrider", "accept": "image/*", "accept-encoding": "identity"},
    )
    try:
        async with session, session.get(place, allow_redirects=False) as response:
            if response.status != 200:
                raise not_fetched()
            content = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                content += chunk
                if len(content) > config.max_image_bytes:
                    raise too_many_bytes(config)
            return bytes(content)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        if isinstance(error, PictureError):
            raise
        logger.info("a picture could not be fetched: %s: %s", type(error).__name__, error)
        raise not_fetched() from None
