"""Install what the test of the page needs, Chromium and its driver, from Debian's packages: part of ``make test``.

Does nothing where both are there. Where they cannot be installed it says how to; the test is then skipped, or fails
where OUTRIDER_REQUIRE_BROWSER is set, as in continuous integration. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PACKAGES = ("chromium", "chromium-driver")
PROGRAMS = ("chromium", "chromedriver")
BY_HAND = f"sudo apt-get install --no-install-recommends {' '.join(PACKAGES)}"
REQUIRED = "OUTRIDER_REQUIRE_BROWSER"
APT_TIMEOUT_S = 600


def missing() -> list[str]:
    """Programs that are not on PATH."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


def install() -> str | None:
    """Returns why it could not be done, or None."""
    if shutil.which("apt-get") is None:
        return "there is no apt-get here"
    if os.geteuid() != 0:
        return "installing packages takes root"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        print(f"Chromium for the page's test: apt-get {arguments[0]}", flush=True)
        try:
            done = subprocess.run(
                [*apt, *arguments], env=environment, capture_output=True, text=True, timeout=APT_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {arguments[0]} took longer than {APT_TIMEOUT_S} s"
        # Old lists may do, so a failed update alone is no reason to give up.
        if done.returncode != 0 and arguments[0] == "install":
            return f"apt-get install failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return f"{', '.join(missing())} did not come with the packages" if missing() else None


def main() -> int:
    if not missing():
        return 0
    if (problem := install()) is None:
        return 0
    required = bool(os.environ.get(REQUIRED))
    consequence = "and it is required here" if required else "so the test of the page will be skipped"
    print(f"outrider: Chromium is not installed ({problem}), {consequence}. To install it: {BY_HAND}", file=sys.stderr)
    return int(required)


if __name__ == "__main__":
    sys.exit(main())
