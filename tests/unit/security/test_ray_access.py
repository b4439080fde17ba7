"""What a start-up says and does about Ray's token."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.deploy import ray_access


def test_the_token_s_file_is_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray writes it with the modes of any file."""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("secret")
    file.chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {"RAY_AUTH_MODE": "token"}
    (said,) = ray_access.secured(environment, None)
    assert "secret" not in said
    assert file.stat().st_mode & 0o777 == 0o600
    assert not list(ray_access.secured(environment, None))
    assert not list(ray_access.secured({**environment, "RAY_AUTH_TOKEN": "t"}, None))
