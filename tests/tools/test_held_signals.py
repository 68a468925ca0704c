"""A signal that comes while a child is started acts once it can be named."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from maxattn.tools.cli import Terminated, _term_interrupts
from maxattn.tools.held_signals import held_signals


def test_a_signal_acts_at_the_end_of_the_block_where_its_child_is_known() -> None:
    child = None
    with _term_interrupts():
        with pytest.raises(Terminated), held_signals():
            signal.raise_signal(signal.SIGTERM)
            child = "started"
        assert child == "started"
        with pytest.raises(Terminated):  # the handler is back
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C act, as in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_too_and_the_first_of_two_signals_wins() -> None:
    reached = []
    with _term_interrupts(), pytest.raises(KeyboardInterrupt) as stopped, held_signals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        reached.append(1)
    assert reached and not isinstance(stopped.value, Terminated)


def test_without_a_signal_and_in_other_threads_nothing_changes() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ran = []

    def run() -> None:
        with held_signals():
            ran.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with held_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert ran == [before] and signal.getsignal(signal.SIGTERM) is before
