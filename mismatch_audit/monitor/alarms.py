"""Actions about alarms: a command or a webhook, tried until it succeeds or is given up.

Delivery is at least once: a watch killed between an action's success and the note of it acts again
after its restart. Every try carries the alarm's id (AUDIT_ALARM_ID, Idempotency-Key), by which the
receiver can tell. While the watch lives, an alarm acts once.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from kernel_contracts.errors import InputError
from mismatch_audit.monitor.watch_state import Alarm, Delivery, WatchState

ATTEMPTS = 8
FIRST_WAIT, LONGEST_WAIT = 1.0, 300.0
"""Seconds. Waits double: 1, 2, 4, ... and eight tries take some two minutes."""

TIMEOUT = 15.0
TOKEN_VARIABLE = "AUDIT_WEBHOOK_TOKEN"
_SHOWN = 200


@dataclass(frozen=True)
class Action:
    """run: raises `Refused` where another try cannot help, any other error where it may."""

    name: str
    run: Callable[[Alarm], None]


class Refused(Exception):
    """The receiver said no for good."""


def command(text: str) -> Action:
    """A command without a shell. The alarm is JSON on its stdin, and in AUDIT_ALARM_ID,
    AUDIT_CLAUSE, AUDIT_SLICE, AUDIT_ACTION. Exit 0 is success. Raises InputError for an empty
    or unbalanced text."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"not a command: {error}", where="--on-alarm") from None
    if not words:
        raise InputError("an empty command", where="--on-alarm")

    def run(alarm: Alarm) -> None:
        environment = {
            **os.environ,
            "AUDIT_ALARM_ID": alarm.id,
            "AUDIT_CLAUSE": alarm.clause,
            "AUDIT_SLICE": alarm.slice,
            "AUDIT_ACTION": str(alarm.payload.get("action", "")),
        }
        try:
            done = subprocess.run(
                words, input=json.dumps(alarm.payload), text=True, env=environment, check=False,
                capture_output=True, timeout=4 * TIMEOUT,
            )  # fmt: skip
        except FileNotFoundError:
            raise Refused(f"no command {words[0]}") from None
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-_SHOWN:]}")

    return Action(f"command {words[0]}", run)


def webhook(url: str) -> Action:
    """POST of the alarm as JSON; 2xx is success, 5xx, 408 and 429 are tried again. A bearer token
    is taken from AUDIT_WEBHOOK_TOKEN. Raises InputError for a URL that is not http(s)."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("not an http(s) URL", where="--webhook")

    def run(alarm: Alarm) -> None:
        import httpx

        headers = {"Idempotency-Key": alarm.id}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        try:
            answer = httpx.post(
                url, json=alarm.payload, headers=headers, timeout=TIMEOUT, follow_redirects=False
            )
        except httpx.HTTPError as error:  # its text may hold the URL, and that a secret
            raise RuntimeError(type(error).__name__) from None
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            raise RuntimeError(f"HTTP {answer.status_code}")
        if not answer.is_success:
            raise Refused(f"HTTP {answer.status_code}")

    return Action(f"webhook {parts.hostname}", run)


def named_once(actions: Sequence[Action]) -> dict[str, Action]:
    """By name; equal names are numbered."""
    found: dict[str, Action] = {}
    for one in actions:
        name, number = one.name, 1
        while name in found:
            number += 1
            name = f"{one.name} ({number})"
        found[name] = one
    return found


def deliver_due(
    state: WatchState,
    actions: dict[str, Action],
    *,
    now: Callable[[], float] = time.time,
    first_wait: float = FIRST_WAIT,
) -> int:
    """Try every delivery that is due; gives how many succeeded. An alarm's action that this watch
    was not given (another --on-alarm before) stays pending."""
    succeeded = 0
    for one in state.deliveries():
        action = actions.get(one.action)
        if one.status != "pending" or action is None or one.due > now():
            continue
        tried = replace(one, attempts=one.attempts + 1)
        try:
            action.run(one.alarm)
        except Refused as error:
            state.set_delivery(replace(tried, status="failed", note=str(error)))
        except Exception as error:
            state.set_delivery(_again(tried, str(error)[:_SHOWN], now(), first_wait))
        else:
            state.set_delivery(replace(tried, status="done", note=""))
            succeeded += 1
    return succeeded


def _again(tried: Delivery, note: str, now: float, first_wait: float) -> Delivery:
    if tried.attempts >= ATTEMPTS:
        return replace(tried, status="failed", note=note)
    wait = min(LONGEST_WAIT, first_wait * 2 ** (tried.attempts - 1))
    return replace(tried, due=now + wait * random.uniform(0.8, 1.2), note=note)


def next_due(state: WatchState, actions: dict[str, Action]) -> float | None:
    """Unix time of the next try; None where nothing is pending."""
    due = [d.due for d in state.deliveries() if d.status == "pending" and d.action in actions]
    return min(due, default=None)
