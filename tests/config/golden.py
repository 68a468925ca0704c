"""Compares messages with the golden texts of the group `config`."""

from __future__ import annotations

from pathlib import Path

from tests.golden_text import check_golden

HERE = Path(__file__).parent


def check(name: str, message: str) -> None:
    """Fail unless the message is the golden one, letter for letter."""
    check_golden(f"config/{name}", message)
