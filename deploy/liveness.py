"""Decides from Serve's answers whether an application has come up, has failed, or is gone.

Serve restarts a dead replica, and Ray a dead controller. A server ends only when that takes longer than it may.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from outrider.deploy.app import INGRESS, POOL, TARGET

ASK_EVERY_S = 5.0

GONE_PATIENCE_S = 90.0
"""Longest time in which Serve's controller does not answer, or does not know the application. Ray restarts a dead
controller within seconds, which then reads its state back."""

REPLACING_PATIENCE_S = 900.0
"""Longest time without a replica that serves: a new one loads its models first."""

MAX_REASON_CHARS = 600
UNSCHEDULED = "to be scheduled"
"""Part of Serve's message of a deployment for whose replicas Ray has no room."""

TRIES_AGAIN = "A replica failed to start with exception."
"""Begins Serve's message of a deployment whose replica it starts anew; the status alone does not tell."""

_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*(\w*(?:Error|Exception)): ", re.MULTILINE)
_FIELD = re.compile(r"(?:target|drafter|speculation|link|serving|openai)[.\w]*: ")


class ServerDied(Exception):
    """Says which part of a server has ended by itself."""


class ApplicationHealth:
    """Remembers when Serve last had the application, and when it last served."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._there_s = self._served_s = clock()
        self._said = "no answer"

    def note(self, is_there: bool, serves: bool, said: str) -> None:
        """Notes what Serve has answered.

        Args:
            is_there: The controller knows the application, which is not being deleted.
            serves: Each deployment that is needed has a running replica.
            said: The controller's messages, or why it could not be asked.
        """
        self._said = " ".join(said.split())[:300]
        if is_there:
            self._there_s = self._clock()
        if serves:
            self._served_s = self._clock()

    def failure(self) -> str | None:
        """Returns what has ended, or None."""
        now = self._clock()
        if (gone_s := now - self._there_s) > GONE_PATIENCE_S:
            return f"Serve has not had the application for {gone_s:.0f} s: {self._said}"
        if (idle_s := now - self._served_s) > REPLACING_PATIENCE_S:
            return f"the application has had no replica that serves for {idle_s:.0f} s: {self._said}"
        return None

    def keep_asking(self, ask: Callable[[], tuple[bool, bool, str]], stopped: threading.Event) -> None:
        """Asks Serve until stopped, on a thread of its own, since an answer may never come.

        Args:
            ask: Returns the arguments of ``note``; raises what Ray raises without an answer.
        """
        while not stopped.wait(ASK_EVERY_S):
            try:
                self.note(*ask())
            except Exception as error:  # noqa: BLE001 - any error means that there is no answer
                self.note(False, False, f"{type(error).__name__}: {error}")


def all_serve(app: ApplicationStatusOverview) -> bool:
    """Returns whether ingress and target have a running replica each, which is enough to serve without drafters."""
    return all(
        name in app.deployments and app.deployments[name].replica_states.get("RUNNING") for name in (INGRESS, TARGET)
    )


def has_come_up(app: ApplicationStatusOverview) -> bool:
    """Returns, at start-up, whether all deployments but the pool run. Replicas added by autoscaling do not count."""
    if app.status is ApplicationStatus.RUNNING or POOL not in app.deployments:
        return app.status is ApplicationStatus.RUNNING
    others = {each.status.name for name, each in app.deployments.items() if name != POOL}
    return all_serve(app) and others <= {"HEALTHY", "UPSCALING", "DOWNSCALING"}


def has_given_up(app: ApplicationStatusOverview) -> bool:
    """Returns, at start-up, whether a deployment other than the pool has failed."""
    failed = {name for name, each in app.deployments.items() if has_failed(each)}
    gave_up = app.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
    return bool(failed - {POOL}) or (gave_up and not failed)


def has_failed(deployment: DeploymentStatusOverview) -> bool:
    """Returns, at start-up, whether a replica has failed. The first failure counts, though Serve tries again: a wrong
    model or setting stays wrong."""
    return deployment.status.name in ("DEPLOY_FAILED", "UNHEALTHY") or deployment.message.startswith(TRIES_AGAIN)


def states(app: ApplicationStatusOverview | None) -> str:
    """Returns one line with the number of replicas of each deployment by state."""
    parts = []
    for name, each in app.deployments.items() if app is not None else ():
        counted = " ".join(f"{number} {state.lower()}" for state, number in each.replica_states.items())
        parts.append(f"{name} {counted or 'waits for its bundles'}")
    return ", ".join(parts) or "Ray Serve starts"


def explain_failure(app: ApplicationStatusOverview) -> str:
    """Returns Serve's message of the deployment that failed at start-up."""
    failed = ((name, each.message) for name, each in app.deployments.items() if name != POOL and has_failed(each))
    name, message = next(((name, message) for name, message in failed if message), ("serving", app.message))
    text = shortened(message)
    return text if _FIELD.match(text) else f"{name.lower()}: {text}"


def shortened(message: str) -> str:
    """Returns a message of Ray or Serve on one line, from its last exception on, cut to MAX_REASON_CHARS."""
    last = next(reversed(list(_EXCEPTION.finditer(message))), None)
    if last is not None:
        message = message[last.end() if last[1] == "ConfigError" else last.start(1) :]
    text = " ".join(message.split())
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]} …"
