"""What proxies must know of ``serving``, and how it reaches them: one variable of their environment.

A proxy starts before any application does, so it cannot be told later. ``outrider serve`` sets the variable for the
cluster that it starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.keys import load_keys
from outrider.actors.serving.access.tls import Certificates, load_certificates, reloading_certificates
from outrider.cluster.config import ConfigError, ServingConfig
from outrider.cluster.config_section import Section

VARIABLE = "OUTRIDER_ACCESS"


class ProxyAccess(Section):
    """Of ServingConfig, what proxies need."""

    host: str
    keys_file: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None

    @classmethod
    def of(cls, serving: ServingConfig) -> ProxyAccess:
        found = {name: getattr(serving, name) for name in cls.model_fields}
        paths = {name: os.path.abspath(os.path.expanduser(path)) for name, path in found.items() if path}
        return cls(**{**found, **paths, "host": serving.host})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ProxyAccess | None:
        """None: the variable is not set. Raises ConfigError for one that is wrong."""
        text = environment.get(VARIABLE)
        if text is None:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise ConfigError(f"{VARIABLE}: {where}: {problem['msg']}; set what 'outrider serve' would") from None

    def environment(self) -> dict[str, str]:
        return {VARIABLE: self.model_dump_json(exclude_none=True)}

    def certificates(self, on_look: Callable[[Reloading[Certificates]], object]) -> Reloading[Certificates] | None:
        """on_look: see Reloading. Raises ConfigError."""
        if self.ssl_certfile is None or self.ssl_keyfile is None:
            return None
        return reloading_certificates(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs, on_look)


def check_access(serving: ServingConfig) -> None:
    """Read all that keys and TLS need, once. Raises ConfigError by field."""
    if serving.keys_file is not None:
        load_keys(serving.keys_file)
    if serving.ssl_certfile is not None and serving.ssl_keyfile is not None:
        load_certificates(serving.ssl_certfile, serving.ssl_keyfile, serving.ssl_ca_certs)


@functools.cache
def proxy_access() -> ProxyAccess | None:
    """Of this process, as it was started. Raises ConfigError."""
    return ProxyAccess.from_environment()
