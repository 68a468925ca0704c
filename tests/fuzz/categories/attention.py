"""Attention on one device: kernels x masks x biases x dtypes x sizes x odd values."""

from __future__ import annotations

from random import Random

from tests.fuzz.calls import BOTH, FORWARD, WAIT, call_text, check_of, config_text, facts_of
from tests.fuzz.case import Case, Machine
from tests.fuzz.kernels import draw_settings
from tests.fuzz.operands import draw_operands


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a call, forward alone or with all gradients."""
    operands, settings = draw_operands(rng, machine), draw_settings(rng, machine)
    run = BOTH if rng.random() < 0.75 else FORWARD
    config = config_text(settings, operands.hidden)
    source = operands.text() + config + call_text(operands) + run + WAIT
    facts = facts_of(operands, kernel=settings["attention"])
    return Case("attention", seed, source, check_of(operands), facts=facts)
