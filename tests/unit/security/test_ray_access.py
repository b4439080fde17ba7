"""What a start-up says and does about Ray's token and its TLS."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

import pytest

from outrider.cluster.config import ConfigError
from outrider.deploy import ray_access
from outrider.deploy.server import cluster_of_its_own


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    """An environment in which Ray would use TLS."""
    files = {name: tmp_path / f"{name.lower()}.pem" for name in ray_access.TLS_FILES}
    for file in files.values():
        file.write_text("pem")
        file.chmod(0o600)
    return {"RAY_USE_TLS": "1", **{name: str(file) for name, file in files.items()}}


def test_the_dashboard_of_a_cluster_of_its_own_is_asked_for_on_this_machine_alone() -> None:
    """What then listens, tests/security/test_drain.py looks up on a running server."""
    options = cluster_of_its_own(2)
    assert options["include_dashboard"]
    assert ip_address(options["dashboard_host"]).is_loopback
    assert options["address"] == "local", "no cluster that happens to run here is taken for it"


@pytest.mark.parametrize("environment", [{}, {"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"}])
def test_what_ray_knows_is_let_be(environment: dict[str, str], tls: dict[str, str]) -> None:
    ray_access.check(environment)
    ray_access.check({**environment, **tls})
    ray_access.check({**environment, "RAY_USE_TLS": "0"})


def test_a_mode_that_ray_would_ignore_is_refused() -> None:
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE: 'off' is neither token nor disabled"):
        ray_access.check({"RAY_AUTH_MODE": "off"})


def test_a_token_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH: .*nowhere cannot be read"):
        ray_access.check({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("name", ray_access.TLS_FILES)
def test_tls_by_halves_is_refused(tls: dict[str, str], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: RAY_USE_TLS is on and this is not set"):
        ray_access.check({**tls, name: ""})
    with pytest.raises(ConfigError, match=f"^{name}: /nowhere cannot be read"):
        ray_access.check({**tls, name: "/nowhere"})


def test_a_key_that_others_can_read_is_refused(tls: dict[str, str]) -> None:
    Path(tls["RAY_TLS_SERVER_KEY"]).chmod(0o640)
    with pytest.raises(ConfigError, match=r"RAY_TLS_SERVER_KEY: .* can be read by other users; chmod 600"):
        ray_access.check(tls)


@pytest.mark.parametrize("mode", [None, "disabled", "DISABLED"])
@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_cluster_without_a_token_is_told_loudly(mode: str | None, address: str | None) -> None:
    environment = {} if mode is None else {"RAY_AUTH_MODE": mode}
    (warning,) = ray_access.warnings(environment, address)
    for word in ("WITHOUT A TOKEN", "runs code", "RAY_AUTH_MODE", address or "every interface", "docs/security.md"):
        assert word in warning


def test_with_a_token_nothing_is_told() -> None:
    assert not list(ray_access.warnings({"RAY_AUTH_MODE": "token"}, None))


def test_the_token_s_file_is_for_its_owner(tmp_path: Path) -> None:
    """Ray writes it with the modes of any file."""
    file = tmp_path / "auth_token"
    file.write_text("secret")
    file.chmod(0o644)
    environment = {"RAY_AUTH_TOKEN_PATH": str(file)}
    said = ray_access.keep_token_private(environment)
    assert said is not None
    assert "secret" not in said
    assert file.stat().st_mode & 0o777 == 0o600
    assert ray_access.keep_token_private(environment) is None


def test_a_token_in_the_environment_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ray_access.keep_token_private({"RAY_AUTH_TOKEN": "t"}) is None
    assert ray_access.token_file({}) == tmp_path / ".ray" / "auth_token"
    assert ray_access.keep_token_private({}) is None
