"""Runs one case within its time and says how it ended."""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import time
import traceback
from collections.abc import Iterator
from typing import Any

from jax._src import dispatch

from maxattn.errors import MaxattnError
from tests.fuzz.case import HEADER, Case, Names, Outcome, Wrong
from tests.fuzz.known import letter_of

LATEST = 200.0  # seconds on the clock, for a case that waits and does not compute


class TimeIsUp(BaseException):
    """No `except Exception` on the way may catch the end of a case's time."""


def run(case: Case) -> Outcome:
    """Run a case; what it prints and logs is kept from the terminal."""
    start = time.monotonic()
    with _quiet():
        kind, what, show = _outcome(case)
    letter = letter_of(case, what) if kind == "failed" else ""
    snippet = _snippet(case, what, show) if kind == "failed" else ""
    kind = "known" if letter else kind
    return Outcome(case.name, kind, what, snippet, letter, time.monotonic() - start)


def _outcome(case: Case) -> tuple[str, str, str]:
    names: Names = {"__name__": "case"}
    try:
        with time_limit(case.seconds):
            exec(compile(HEADER + case.source, case.name, "exec"), names)
    except MaxattnError as error:
        return _refusal(case, error, names)
    except TimeIsUp:
        return "failed", f"it takes more than {case.seconds:g} s of processor time, or waits", ""
    except (Exception, SystemExit) as error:
        if "check_finite: true" in str(error):  # a program ends in jax's error around ours
            dispatch.runtime_tokens.clear()  # jax would raise it again at the next barrier
            return "refused", "check_finite", ""
        return "failed", _foreign(error), ""
    return _checked(case, names)


def _checked(case: Case, names: Names) -> tuple[str, str, str]:
    try:
        case.check(names)
    except Wrong as wrong:
        return "failed", str(wrong), wrong.show
    return "right", "", ""


def _refusal(case: Case, error: MaxattnError, names: Names) -> tuple[str, str, str]:
    said = {key: str(getattr(error, key, "")).strip() for key in ("setting", "rule", "remedy")}
    if empty := [key for key, text in said.items() if not text]:
        return "failed", f"{type(error).__name__} without {empty[0]}: {error}", ""
    if case.never_refused:
        return "failed", f"refused, and it should run: {error}", ""
    try:
        case.refused(names)
    except Wrong as wrong:
        return "failed", str(wrong), wrong.show
    return "refused", f"{said['setting']}: {said['rule']}", ""


def _foreign(error: BaseException) -> str:
    """Name an error that is not maxattn's, and the last line of maxattn that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/maxattn/" in f.filename]
    inside = [f for f in frames if "site-packages" not in f.filename]
    place = (
        f" at {inside[-1].filename.split('/maxattn/')[-1]}:{inside[-1].lineno}" if inside else ""
    )
    text = " ".join(str(error).split())[:300]
    return f"foreign {type(error).__name__}{place}: {text}"


def _snippet(case: Case, what: str, show: str) -> str:
    comment = "\n".join(f"# {line}" for line in what.splitlines())
    return f"# {case.name}\n{comment}\n{HEADER}{case.source}\n{show}".rstrip() + "\n"


@contextlib.contextmanager
def time_limit(seconds: float, latest: float = LATEST) -> Iterator[None]:
    """End what runs inside after some seconds, where Python gets to run at all.

    Args:
        seconds: of processor time, so that programs beside it do not count.
        latest: seconds on the clock.
    """
    began, used = time.monotonic(), time.process_time()

    def look(*_: Any) -> None:
        left = seconds - (time.process_time() - used)
        if left <= 0 or time.monotonic() - began >= latest:
            raise TimeIsUp
        signal.setitimer(signal.ITIMER_REAL, max(0.2, left))

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep prints, logs and warnings from the terminal."""
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
