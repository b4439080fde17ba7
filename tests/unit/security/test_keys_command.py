"""``outrider keys``: the secret is shown once, the file has its hash, and what was there stays."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta

import pytest

from outrider.actors.serving.access.keys import load_keys
from outrider.deploy.cli import main


@pytest.fixture
def keys_file(tmp_path, monkeypatch):
    path = tmp_path / "private" / "keys.yaml"
    monkeypatch.setenv("OUTRIDER_KEYS_FILE", str(path))
    return path


def test_a_new_key_is_printed_once_and_kept_as_a_hash(keys_file, capsys):
    assert (
        main(["keys", "new", "ci", "--scopes", "generate,status", "--expires", "90d", "--requests-per-minute", "60"])
        == 0
    )
    out, err = capsys.readouterr()
    secret = out.strip()
    found = load_keys(keys_file).find(secret.encode())
    assert found is not None
    assert (found.name, found.scopes, found.requests_per_minute) == ("ci", ("generate", "status"), 60)
    left = found.expires - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < left <= timedelta(days=90)
    assert secret not in keys_file.read_text()
    assert secret not in err
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600


def test_a_key_is_added_behind_what_is_there_and_taken_out_alone(keys_file, capsys):
    main(["keys", "new", "one"])
    keys_file.write_text("# ours\n" + keys_file.read_text() + "# more of ours\n")
    keys_file.chmod(0o640)
    main(["keys", "new", "two"])
    main(["keys", "new", "three", "--concurrent-requests", "2"])
    assert [key.name for key in load_keys(keys_file).keys] == ["one", "two", "three"]
    assert main(["keys", "revoke", "two"]) == 0
    assert [key.name for key in load_keys(keys_file).keys] == ["one", "three"]
    assert "# ours" in keys_file.read_text()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o640
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one  generate  never expires",
        "three  generate  never expires  concurrent requests 2",
    ]


def test_a_name_is_taken_once(keys_file, capsys):
    main(["keys", "new", "ci"])
    before = keys_file.read_text()
    capsys.readouterr()
    assert main(["keys", "new", "ci"]) == 1
    assert "'ci' is in" in capsys.readouterr().err
    assert keys_file.read_text() == before
    assert main(["keys", "revoke", "nobody"]) == 1


@pytest.mark.parametrize(
    "wrong",
    [["a b"], ["-x"], ["ci", "--scopes", "root"], ["ci", "--expires", "soon"], ["ci", "--expires", "2001-01-01"],
     ["ci", "--requests-per-minute", "0"], ["ci", "--tokens-per-minute", "many"]],
)  # fmt: skip
def test_a_wrong_command_line_makes_no_key(keys_file, wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", *wrong])
    assert ended.value.code == 2
    assert not keys_file.exists()


def test_a_file_that_is_wrong_or_open_to_others_is_left_alone(keys_file, capsys):
    main(["keys", "new", "ci"])
    keys_file.chmod(0o644)
    assert main(["keys", "new", "cd"]) == 1
    assert "chmod 600" in capsys.readouterr().err
    keys_file.chmod(0o600)
    keys_file.write_text("- name: [")
    assert main(["keys", "new", "cd"]) == 1
    assert main(["keys", "revoke", "cd"]) == 1
    assert keys_file.read_text() == "- name: ["
