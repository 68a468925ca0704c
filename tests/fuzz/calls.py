"""Calls of attention, on one device and on meshes, compared with float64."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.float64 import SLACK, Bounded, Given, attend, compare
from tests.fuzz.masks import Sizes
from tests.fuzz.operands import HEADS, LENGTHS, Operands, draw_operands
from tests.fuzz.settings import Axes, config_text, draw_axes, draw_settings, mesh_text

# Where the program is compiled, it ends in `check_finite`'s refusal while it runs.
WAIT = "jax.block_until_ready(out)\njax.effects_barrier()\n"
RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias")
FORWARD = "out, lse = call(q, k, v, bias)\n"
BOTH = """\
(out, lse), pull = jax.vjp(call, q, k, v, bias)
dq, dk, dv, dbias = pull((dout, dlse))
"""


class Call(NamedTuple):
    """A drawn call: its operands, the settings of its config, and the axes of its mesh."""

    operands: Operands
    settings: dict[str, Any]
    axes: Axes | None = None

    def words(self) -> str:
        """Format the keyword arguments of the call, without mask and bias."""
        scale = self.operands.scale
        words = "config=config, return_lse=True" + (f", scale={scale}" if scale is not None else "")
        return words + (", mesh=mesh" if self.axes is not None else "")

    def text(self) -> str:
        """Format operands, config and mesh, and a function `call` that returns out and lse.

        If the config has `check_finite`, NaN in hidden keys is refused.
        """
        finite = {"check_finite": True} if self.operands.hidden else {}
        config = config_text(self.settings | finite) + mesh_text(self.axes)
        call = f"ma.attention(q, k, v, mask=mask, bias=bias, {self.words()})"
        return f"{self.operands.text()}{config}def call(q, k, v, bias):\n    return {call}\n"


def draw_alone(rng: Random, machine: Machine) -> Case:
    """Draw a call on one device, forward alone or with all gradients."""
    call = Call(draw_operands(rng, machine), draw_settings(rng, machine))
    run = BOTH if rng.random() < 0.75 else FORWARD
    return Case(call.text() + run + WAIT, check_of(call.operands))


def draw_on_mesh(rng: Random, machine: Machine) -> Case:
    """Draw a call over a mesh of the available devices."""
    axes = draw_axes(rng, machine.devices)
    operands = draw_operands(rng, machine, draw_mesh_sizes(rng, axes))
    call = Call(operands, draw_settings(rng, machine, axes), axes)
    run = BOTH if rng.random() < 0.7 else FORWARD
    return Case(call.text() + run + WAIT, check_of(operands), seconds=120)


def draw_small(rng: Random, machine: Machine) -> Call:
    """Draw a small call without NaN, one in three on a mesh."""
    on_mesh = machine.devices > 1 and rng.random() < 0.35
    axes = draw_axes(rng, machine.devices) if on_mesh else None
    lengths = rng.choice([(8, 8), (16, 16), (7, 7), (17, 31), (32, 32), (3, 40)])
    sizes = Sizes(rng.choice([1, 2]), *lengths, *rng.choice(HEADS), rng.choice([4, 8, 16, 33]))
    sizes = sizes if axes is None else draw_mesh_sizes(rng, axes)
    operands = draw_operands(rng, machine, sizes)._replace(hidden="")
    return Call(operands, draw_settings(rng, machine, axes), axes)


def draw_mesh_sizes(rng: Random, axes: Axes) -> Sizes:
    """Draw sizes that mostly divide over the axes."""
    batch = axes.get("data", 1) * axes.get("fsdp", 1)
    batch = rng.choice([batch, batch, batch, 2 * batch, batch + 1]) if batch < 4 else batch
    heads = axes.get("tensor", 1) * rng.choice([1, 2, 3])
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    t, s = rng.choice(LENGTHS[:13]), rng.choice(LENGTHS[:13])
    s = t if rng.random() < 0.7 else s
    return Sizes(batch, t, s, heads, kv_heads, rng.choice([2, 8, 8, 16, 33]))


def check_of(operands: Operands) -> Check:
    """Return the check of all results of a call."""

    def check(names: Names) -> None:
        if operands.hidden:
            raise Wrong(f"{operands.hidden} in hidden keys is not refused")
        want = attend(given_of(operands, names))
        for name in RESULTS:
            if names.get(name) is not None:
                compare_one(operands, name, names[name], want[name])

    return check


def given_of(operands: Operands, names: Names) -> Given:
    """Return the operands of a case in float64."""
    q, k, v, dout, dlse = (
        np.asarray(names[n], np.float64) for n in ("q", "k", "v", "dout", "dlse")
    )
    s, bias = operands.sizes, names["bias"]
    pairs = operands.tree.allowed(s) if operands.tree else np.ones((1, 1, 1, 1), bool)
    allowed = np.broadcast_to(pairs, (s.b, s.n, s.t, s.s))
    scale = s.h**-0.5 if operands.scale is None else operands.scale
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    return Given(q, k, v, allowed, bias, scale, dout, dlse, operands.dtype, operands.bias_dtype)


def compare_one(operands: Operands, name: str, got: Any, want: Bounded) -> None:
    """Compare one result; sum the reference's gradient of a bias over broadcast axes."""
    dtype = {"lse": "float32", "dbias": operands.bias_dtype}.get(name, operands.dtype)
    got = np.asarray(got, np.float64)
    got = got.reshape((1,) * (4 - got.ndim) + got.shape) if name == "dbias" else got
    compare(name, got, want, dtype, SLACK[operands.dtype])
