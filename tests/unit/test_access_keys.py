"""The file of API keys, and ``outrider keys``, which writes it."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outrider.cluster.config_section import ConfigError
from outrider.deploy.cli import main
from outrider.deploy.gateway.files import render_keys
from outrider.deploy.keys import hash_of, load_keys

HASH = "sha256:" + "ab" * 32


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "private" / "keys.yaml"
    monkeypatch.setenv("OUTRIDER_KEYS_FILE", str(path))
    return path


def test_a_new_key_is_printed_once_and_kept_as_a_hash(file, capsys) -> None:
    assert main(["keys", "new", "ci", "--expires", "90", "--requests-per-minute", "60"]) == 0
    out, err = capsys.readouterr()
    secret = out.strip()
    (key,) = load_keys("keys_file", file)
    assert (key.name, key.hash, key.requests_per_minute) == ("ci", hash_of(secret), 60)
    left = key.expires - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < left <= timedelta(days=90)
    assert secret not in file.read_text() + err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_revoke(file, capsys) -> None:
    for name in ("one", "two", "three"):
        main(["keys", "new", name])
    file.chmod(0o640)
    assert main(["keys", "revoke", "two"]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o640, "who may read it stays"
    assert [key.name for key in load_keys("keys_file", file)] == ["one", "three"]
    assert main(["keys", "revoke", "two"]) == 1


def test_a_name_is_taken_once(file, capsys) -> None:
    main(["keys", "new", "ci"])
    before = file.read_text()
    assert main(["keys", "new", "ci"]) == 1
    assert "'ci' is in" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.parametrize("wrong", [["ci", "--expires", "soon"], ["ci", "--expires", "0"], ["ci", "--scopes", "admin"]])
def test_a_wrong_command_line_makes_no_key(file, wrong) -> None:
    with pytest.raises(SystemExit):
        main(["keys", "new", *wrong])
    assert not file.exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- name: [", "is no valid YAML"),
        ("name: a", "Input should be a valid list"),
        (f"- {{name: a, hash: '{HASH}', scopes: [generate]}}", "0.scopes: Extra inputs"),
        ("- {name: a, hash: outrider_secret}", "0.hash: String should match"),
        (f"- {{name: a, hash: '{HASH}', expires: soon}}", "0.expires: "),
        ("- a", ": 0: "),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: b, hash: '{HASH}'}}", "a hash occurs twice"),
        (f"- {{name: a, name: b, hash: '{HASH}'}}", "is no valid YAML"),
    ],
)
def test_a_file_that_is_wrong_is_left_alone(file, capsys, text, problem) -> None:
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(0o600)
    assert main(["keys", "new", "ci"]) == 1
    assert problem in (said := capsys.readouterr().err)
    assert "outrider_secret" not in said
    assert file.read_text() == text


def test_a_file_that_others_may_read_is_refused(file, capsys) -> None:
    main(["keys", "new", "ci"])
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"keys_file: .*; run: chmod 600 "):
        load_keys("keys_file", file)
    assert main(["keys", "revoke", "ci"]) == 1


def test_the_gateways_map(file) -> None:
    file.parent.mkdir()
    file.write_text(f"- {{name: a, hash: '{HASH}', expires: 2027-01-01, requests_per_minute: 9}}\n")
    file.chmod(0o600)
    assert render_keys(file) == f"{'AB' * 32} 1798761600:9\n"
