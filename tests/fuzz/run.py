"""Run one case within its time limit, and classify the result."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import dispatch

from maxattn.errors import MaxattnError
from maxattn.target import installed
from tests.fuzz.case import HEADER, Case, Check, Machine, Names, Outcome, Wrong

SETTINGS = ("jax_numpy_rank_promotion", "jax_enable_x64")
LATEST = 200.0  # seconds on the clock, for a case that waits and does not compute
# Faults that are known and not yet mended are counted apart: (letter, and patterns of the case's
# name, of its source and of the fault). What comes back after the entry is gone is a failure.
KNOWN: tuple[tuple[str, str, str, str], ...] = ()
# Most of a case's time is compiling small programs: these leave out what makes them fast.
ON_CPU = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def run(case: Case) -> Outcome:
    """Run a case without its output and logs on the terminal."""
    start = time.monotonic()
    with _quiet(), _settings_kept():
        kind, what, show = _outcome(case)
    letter = snippet = ""
    if kind == "failed":
        comment = "\n".join(f"# {line}" for line in what.splitlines())
        snippet = f"# {case.name}\n{comment}\n{HEADER}{case.source}\n{show}".rstrip() + "\n"
        texts = (case.name, case.source, what)
        letters = (x for x, *fault in KNOWN if all(map(re.search, fault, texts)))
        letter = next(letters, "")
    kind = "known" if letter else kind
    return Outcome(case.name, kind, what, snippet, letter, time.monotonic() - start)


def _outcome(case: Case) -> tuple[str, str, str]:
    """Return the kind, the fault or the refusal, and Python that reproduces it."""
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
    return _checked(case.check, names, "right")


def _refusal(case: Case, error: MaxattnError, names: Names) -> tuple[str, str, str]:
    texts = {key: str(getattr(error, key, "")).strip() for key in ("setting", "rule", "remedy")}
    if empty := [key for key, text in texts.items() if not text]:
        return "failed", f"{type(error).__name__} without {empty[0]}: {error}", ""
    if case.never_refused:
        return "failed", f"refused, and it should run: {error}", ""
    return _checked(case.refused, names, "refused", f"{texts['setting']}: {texts['rule']}")


def _checked(check: Check, names: Names, kind: str, what: str = "") -> tuple[str, str, str]:
    try:
        check(names)
    except Wrong as wrong:
        return "failed", str(wrong), wrong.show
    except Exception as error:
        return "failed", f"its check ends in {error!r}", ""
    return kind, what, ""


def _foreign(error: BaseException) -> str:
    """Describe an error that is not maxattn's, with the last line of maxattn in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/maxattn/" in f.filename]
    inside = [f for f in frames if "site-packages" not in f.filename][-1:]
    place = "".join(f" at {f.filename.split('/maxattn/')[-1]}:{f.lineno}" for f in inside)
    return f"foreign {type(error).__name__}{place}: {' '.join(str(error).split())[:300]}"


class TimeIsUp(BaseException):
    """Raised when a case's time is up; no `except Exception` catches it."""


@contextlib.contextmanager
def time_limit(seconds: float, latest: float = LATEST) -> Iterator[None]:
    """Interrupt the code inside after some seconds, as soon as Python code runs.

    Args:
        seconds: of processor time, so that other programs do not count.
        latest: seconds of wall time.
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
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Restore the values of jax.config that a case changes."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def set_up() -> Machine:
    """Choose the devices before jax starts, and describe them."""
    flags = os.environ.get("XLA_FLAGS", "")
    has_gpu = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or not has_gpu:
        added = [f for f in ON_CPU if f.partition("=")[0] not in flags]
        os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ["MAXATTN_CACHE"] = os.devnull
    return describe()


def describe() -> Machine:
    """Return the platform, devices and packages of this process."""
    packages = tuple(name for name, _ in installed())
    return Machine(jax.default_backend(), jax.device_count(), packages)
