"""The file of keys: what is in it, what is refused, and when it is read again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from outrider.actors.serving.access import files
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.keys import (
    MOST_KEYS,
    Key,
    KeyRing,
    as_entry,
    hash_of,
    load_keys,
    new_secret,
    parse_keys,
)
from outrider.actors.serving.access.process import reloading_keys
from outrider.cluster.config_section import ConfigError
from tests.clock import Clock

HANG_GUARD_S = 60.0
SECRET = new_secret()
HASH = hash_of(SECRET.encode())
ENTRY = f"- name: ci\n  hash: {HASH}\n  scopes: [generate]\n"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_found_by_its_hash_and_nothing_else_is():
    ring = KeyRing(parse_keys(ENTRY))
    found = ring.find(SECRET.encode())
    assert found is not None
    assert found.name == "ci"
    for wrong in (b"", SECRET[:-1].encode(), HASH.encode(), b"ci", SECRET.encode() + b"\0"):
        assert ring.find(wrong) is None


def test_secrets_are_long_and_never_the_same():
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(SECRET) == len("outrider_") + 43


def test_an_entry_written_is_the_entry_read():
    full = Key(
        name="full",
        hash=HASH,
        scopes=("generate", "admin"),
        expires=datetime(2031, 5, 1, 12, tzinfo=UTC),
        requests_per_minute=60,
        concurrent_requests=2,
        tokens_per_minute=10_000,
        learn=False,
    )
    small = Key(name="small", hash=hash_of(b"other"), scopes=("status",))
    assert parse_keys(as_entry(full) + as_entry(small)) == [full, small]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2031-05-01", datetime(2031, 5, 1, tzinfo=UTC)),
        ("'2031-05-01'", datetime(2031, 5, 1, tzinfo=UTC)),
        ("2031-05-01T12:00:00Z", datetime(2031, 5, 1, 12, tzinfo=UTC)),
        ("2031-05-01T12:00:00+02:00", datetime(2031, 5, 1, 10, tzinfo=UTC)),
    ],
)
def test_when_a_key_expires(written, meant):
    (key,) = parse_keys(f"{ENTRY}  expires: {written}\n")
    assert key.expires == meant
    assert not key.is_expired(meant - timedelta(microseconds=1))
    assert key.is_expired(meant)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- name: [", "is no YAML at line"),
        (f"{ENTRY}  name: cd\n", r"has a key twice in one entry at line \d; keep one of them"),
        ("name: ci", "is no list of keys"),
        ("- ci", "entry 1 is no mapping"),
        (ENTRY.replace("ci", "a b"), "entry 1: name: is missing or no name"),
        (ENTRY.replace("ci", "'-'"), "entry 1: name"),
        (ENTRY.replace(HASH, SECRET), r"entry 1 \(ci\): hash: is missing or no hash"),
        (
            ENTRY.replace("generate", "root"),
            r"entry 1 \(ci\): scopes: is missing or unknown; list one or more of generate",
        ),
        (ENTRY.replace("[generate]", "[]"), r"entry 1 \(ci\): scopes"),
        (ENTRY + "  expires: tomorrow\n", r"entry 1 \(ci\): expires: is no time"),
        (ENTRY + "  expires: 2031-05-01T12:00:00\n", r"entry 1 \(ci\): expires: is no time with its zone"),
        (ENTRY + "  requests_per_minute: 0\n", r"entry 1 \(ci\): requests_per_minute: .*greater"),
        (ENTRY + "  secret: x\n", r"entry 1 \(ci\): secret"),
        (ENTRY + ENTRY, "entries 1 and 2 have the same name 'ci'; remove one"),
        (ENTRY + ENTRY.replace("ci", "other"), "entries 1 and 2 have the same hash; remove one"),
    ],
    ids=range(15),  # the texts hold a hash of this process's own, and every worker must collect the same
)
def test_a_mistake_is_told_by_entry_and_field_and_never_with_the_secret(text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        parse_keys(text)
    assert SECRET not in str(caught.value)
    assert HASH not in str(caught.value)


def test_so_many_keys_are_too_many():
    entries = "".join(as_entry(Key(name=f"k{n}", hash=hash_of(b"%d" % n), scopes=("generate",))) for n in range(2))
    assert len(parse_keys(entries)) == 2
    with pytest.raises(ConfigError, match=f"keep {MOST_KEYS} at most"):
        parse_keys("- {}\n" * (MOST_KEYS + 1))


def test_an_empty_file_lets_nobody_in(tmp_path):
    assert load_keys(write(tmp_path / "keys.yaml", "# nobody yet\n")).find(SECRET.encode()) is None


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o644, 0o666, 0o777])
def test_a_file_that_others_may_read_or_change_is_refused_with_the_fix(tmp_path, mode):
    path = write(tmp_path / "keys.yaml", ENTRY, mode)
    with pytest.raises(ConfigError, match=rf"serving.keys_file: .*mode {mode:04o}.*run: chmod 600 {path}"):
        load_keys(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_its_owner_and_group_may_read_it(tmp_path, mode):
    assert load_keys(write(tmp_path / "keys.yaml", ENTRY, mode)).keys


def test_a_file_that_is_not_there_or_is_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"serving.keys_file: .*no such file"):
        load_keys(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"serving.keys_file: "):
        load_keys(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="is no text"):
        load_keys(tmp_path / "binary")


def reloading(path: Path, clock: Clock) -> Reloading[KeyRing]:
    return Reloading([path], lambda: load_keys(path), clock=clock)


def test_a_change_is_seen_at_the_next_look_and_not_before(tmp_path):
    path, clock = write(tmp_path / "keys.yaml", ENTRY), Clock(100.0)
    keys = reloading(path, clock)
    write(path, "")
    assert keys.current().find(SECRET.encode())
    clock.now += 1
    assert keys.current().find(SECRET.encode()) is None
    assert (keys.failures, keys.problem) == (0, None)


def test_what_cannot_be_used_leaves_the_old_keys_and_says_so_until_it_is_mended(tmp_path, caplog):
    path, clock = write(tmp_path / "keys.yaml", ENTRY), Clock(100.0)
    keys = reloading(path, clock)
    for number, spoil in enumerate(
        (lambda: write(path, ENTRY + ENTRY), lambda: path.chmod(0o666), path.unlink, lambda: write(path, "- [")), 1
    ):
        spoil()
        clock.now += 1
        assert keys.current().find(SECRET.encode())
        assert keys.failures == number
        assert keys.problem is not None
        clock.now += 1
        keys.current()
        assert keys.failures == number, "told once"
    write(path, ENTRY.replace("ci", "renamed"))
    clock.now += 1
    assert [key.name for key in keys.current().keys] == ["renamed"]
    assert keys.problem is None
    told = [record for record in caplog.records if "not reloaded" in record.getMessage()]
    assert len(told) == 4


def test_a_file_replaced_by_renaming_is_a_change(tmp_path):
    path, clock = write(tmp_path / "keys.yaml", ENTRY), Clock(100.0)
    keys = reloading(path, clock)
    found = path.stat()
    fresh = write(tmp_path / "fresh", ENTRY.replace("ci", "cj"))
    os.utime(fresh, ns=(found.st_mtime_ns, found.st_mtime_ns))
    fresh.replace(path)
    clock.now += 1
    assert [key.name for key in keys.current().keys] == ["cj"]


def replace(path: Path, text: str) -> None:
    """In one change."""
    write(path.with_name("fresh"), text).replace(path)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_the_old_keys_are_answered_from_while_new_ones_are_read(tmp_path):
    path = write(tmp_path / "keys.yaml", ENTRY)
    reading, go_on, loads = threading.Event(), threading.Event(), []

    def load() -> KeyRing:
        loads.append(threading.current_thread())
        if len(loads) > 1:
            reading.set()
            assert go_on.wait(HANG_GUARD_S)
        return load_keys(path)

    keys = Reloading([path], load, look_every_s=0.01)
    keys.watch()
    replace(path, "")
    assert reading.wait(HANG_GUARD_S)
    assert keys.current().find(SECRET.encode())
    go_on.set()
    until(lambda: keys.current().find(SECRET.encode()) is None)
    assert threading.current_thread() not in loads[1:]


def test_a_servers_keys_are_read_before_anybody_asks(tmp_path):
    """Else the first call after a revocation would still be let in, however late it comes."""
    path = write(tmp_path / "keys.yaml", ENTRY)
    looked = threading.Event()
    keys = reloading_keys(str(path), lambda files: looked.set())
    replace(path, "")
    assert looked.wait(HANG_GUARD_S)
    assert keys.current().find(SECRET.encode()) is None


def test_a_file_that_breaks_the_reading_is_not_the_last_one_that_is_read(tmp_path):
    path = write(tmp_path / "keys.yaml", ENTRY)
    faults = []

    def load() -> KeyRing:
        if faults:
            raise faults.pop()
        return load_keys(path)

    keys = Reloading([path], load, look_every_s=0.01)
    keys.watch()
    faults.append(RecursionError(SECRET))
    replace(path, ENTRY + "# more\n")
    until(lambda: keys.failures == 1)
    assert keys.problem == "RecursionError"
    assert keys.current().find(SECRET.encode())
    replace(path, "")
    until(lambda: keys.current().find(SECRET.encode()) is None)


def test_what_is_told_of_a_look_may_fail_and_the_next_one_comes(tmp_path):
    path = write(tmp_path / "keys.yaml", ENTRY)
    told = []

    def on_look(files: Reloading[KeyRing]) -> None:
        told.append(files.problem)
        raise RuntimeError

    keys = Reloading([path], lambda: load_keys(path), look_every_s=0.01, on_look=on_look)
    keys.watch()
    replace(path, "no list")
    until(lambda: len(told) == 1)
    assert told[0] is not None
    replace(path, "")
    until(lambda: keys.current().find(SECRET.encode()) is None)


def test_a_look_may_fail_and_the_next_one_comes(tmp_path, monkeypatch):
    path = write(tmp_path / "keys.yaml", ENTRY)
    keys = Reloading([path], lambda: load_keys(path), look_every_s=0.01)
    faults = [RuntimeError(), OSError()]
    look = files._signature_of
    monkeypatch.setattr(files, "_signature_of", lambda path: look(path) if not faults else throw(faults.pop()))
    keys.watch()
    replace(path, "")
    until(lambda: keys.current().find(SECRET.encode()) is None)


def throw(error: Exception) -> None:
    raise error


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML without libyaml")
def test_keys_are_read_by_libyaml_which_takes_a_fifth_of_the_time(monkeypatch):
    monkeypatch.setattr(yaml.SafeLoader, "get_single_data", None)
    assert [key.name for key in parse_keys(ENTRY)] == ["ci"]
