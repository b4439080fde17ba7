"""What is said on stderr while something lasts: lines in a log, a bar on a terminal."""

import io
import os
import pty
import re

from outrider.deploy.progress import Progress

MB = 1_000_000


def test_without_a_terminal_counts_are_lines_and_not_one_for_each_call():
    screen = io.StringIO()
    progress = Progress(screen)
    with progress.counting(900 * MB, 300 * MB) as counted:
        for done in range(300, 400):
            counted("tiny: part 2 of 3", done * MB)
        counted("tiny: part 3 of 3", 600 * MB)
    progress.say("ready")
    lines = [line.partition("] ")[2] for line in screen.getvalue().splitlines()]
    assert lines == ["tiny: part 2 of 3, 300 of 900 MB", "tiny: part 3 of 3, 600 of 900 MB", "ready"]


def test_on_a_terminal_a_bar_shows_amount_and_step_and_is_gone_afterwards(monkeypatch):
    for name in ("LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, theirs = pty.openpty()
    with open(theirs, "w") as screen:
        progress = Progress(screen)
        with progress.counting(900 * MB, 300 * MB) as counted:
            counted("tiny: part 2 of 3 [first]", 600 * MB)
        progress.say("ready")
        shown = b""
        while b"ready" not in shown:
            shown += os.read(terminal, 4096)
    os.close(terminal)
    out = shown.decode()
    bar, _, after = out.rpartition("\x1b[2K")
    assert "tiny: part 2 of 3 [first]" in bar
    assert "600.0/900.0 MB" in bar
    assert "ready" in after
    assert "part 2" not in after
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l"), "the cursor is shown again"


def test_on_a_narrow_terminal_it_is_still_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    with Progress(screen).counting(1117 * MB) as counted:
        counted("Qwen2.5-Coder-1.5B-Instruct: part 17 of 22", 900 * MB)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()))
    assert [line for line in lines if "Qwen" in line and "0.9/1.1 GB" in line], lines
    assert not [line for line in lines if line.strip() == "GB"]
