"""What ``make setup`` makes of pip's settings and its installer's words; every fresh clone shows that it installs."""

from __future__ import annotations

import sys

import pytest

from outrider.deploy.setup_environment import main, requirements, uv_settings


def test_places_that_pip_looks_at_in_uvs_words() -> None:
    said = """:env:.disable-pip-version-check='1'
:env:.find-links='/opt/a /opt/b'
global.cert='/etc/ssl/certs/all.crt'
global.extra-index-url='\\nhttps://one.example/simple\\nfile:///two/simple'
global.find-links='/overridden'
global.index-url='https://three.example/simple'
install.index-url='https://four.example/simple'
download.index-url='https://five.example/simple'
"""
    assert uv_settings(said) == {
        "SSL_CERT_FILE": "/etc/ssl/certs/all.crt",
        "UV_DEFAULT_INDEX": "https://four.example/simple",
        "UV_FIND_LINKS": "/opt/a,/opt/b",
        "UV_INDEX": "https://one.example/simple file:///two/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_a_pip_that_was_told_nothing_leaves_uv_its_defaults() -> None:
    assert uv_settings("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_an_image_gets_a_copy_without_development_tools() -> None:
    assert requirements("cpu", serving=True) == [".[cpu,otel]"]
    assert requirements("gpu", serving=False) == ["--editable", ".[gpu,dev]"]


def test_no_environment_is_made_where_ray_could_start_no_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["setup_environment.py"])
    monkeypatch.setattr(sys, "prefix", "/home/me/my models/.venv")
    monkeypatch.setattr(sys, "executable", "/home/me/my models/.venv/bin/python")
    assert main() == 1
    assert "make VENV=" in capsys.readouterr().err
