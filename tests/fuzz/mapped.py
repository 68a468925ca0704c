"""Attention under vmap, lax.map and scan: some operands mapped along some axis, others shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.calls import NAMES, call_text, given_of, hold_one
from tests.fuzz.case import Case, Machine, Names
from tests.fuzz.float64 import Held, attend
from tests.fuzz.operands import Operands

BOTH = """\
dout, dlse = jnp.stack([dout, draw(dout.shape, 1.0)]), jnp.stack([dlse, dlse * 2])
(out, lse), pull = jax.vjp(call, q, k, v, bias)
dq, dk, dv, dbias = pull((dout, dlse))
"""
SCANS = (
    "call = jax.vmap(call, in_axes={axes})",
    "call = jax.jit(jax.vmap(call, in_axes={axes}))",
    "call = jax.vmap(jax.checkpoint(call), in_axes={axes})",
    "call = jax.vmap(jax.jit(call), in_axes={axes})",
    "one = call\ncall = lambda *x: jax.lax.map(lambda y: one(*y), x)",
    "one = call\ncall = lambda *x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x)[1]",
    "one = jax.checkpoint(call)\n"
    "call = lambda *x: jax.lax.scan(lambda c, y: (c, one(*y)), 0, x)[1]",
)
Axes = tuple[int | None, ...]


def draw_mapped(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a call that is mapped over two versions of its operands."""
    from tests.fuzz.categories.transforms import case_of, small

    operands, settings, text, on_mesh = small(rng, machine)
    how = rng.choice(SCANS)
    axes = _axes(rng, operands) if "in_axes" in how else _all(operands)
    lines = [
        f"{n} = {_stacked(n, axis)}"
        for n, axis in zip("qkv", axes, strict=False)
        if axis is not None
    ]
    if axes[3] is not None:
        lines.append("bias = jnp.stack([bias, bias * 0.5])")
    source = text + "\n".join(lines) + "\n" + call_text(operands, on_mesh) + how.format(axes=axes)
    case = case_of(seed, operands, settings, f"{source}\n{BOTH}", how)
    facts = {**case.facts, "axes": str(axes)}
    return replace(case, check=_check_of(operands, axes), facts=facts)


def _stacked(name: str, axis: int) -> str:
    return f"jnp.stack([{name}, draw({name}.shape)], axis={axis})"


def _all(operands: Operands) -> Axes:
    return (0, 0, 0, None if operands.bias is None else 0)


def _axes(rng: Random, operands: Operands) -> Axes:
    """Draw the mapped axis of q, k and v, at least one; a bias is mapped along its first."""
    bias = rng.choice([0, None]) if operands.bias is not None else None
    drawn = tuple(rng.choice([0, 0, None, 1, 4]) for _ in "qkv")
    return (*(drawn if any(x is not None for x in drawn) else (0, None, None)), bias)


def _check_of(operands: Operands, axes: Axes) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        each = [attend(given_of(operands, _version(names, axes, i))) for i in range(2)]
        mapped = dict(zip(("dq", "dk", "dv", "dbias"), axes, strict=True)) | {"out": 0, "lse": 0}
        for name in NAMES:
            if names.get(name) is not None:
                _hold(operands, name, names[name], [held[name] for held in each], mapped[name])

    return check


def _version(names: Names, axes: Axes, i: int) -> Names:
    """Return the operands of one of the mapped calls."""
    along = dict(zip(("q", "k", "v", "bias"), axes, strict=True)) | {"dout": 0, "dlse": 0}
    return {
        n: x if axis is None else np.take(np.asarray(x), i, axis)
        for n, axis in along.items()
        for x in (names[n],)
    }


def _hold(operands: Operands, name: str, got: Any, each: list[Held], axis: int | None) -> None:
    """Hold a result of every version, or the sum of what they say of a shared operand."""
    got = np.asarray(got, np.float64)
    if axis is None:
        total = Held(*(sum(parts) for parts in zip(*each, strict=True)))
        return hold_one(operands, name, got.reshape(total.want.shape), total)
    for i, held in enumerate(each):
        hold_one(operands, name, np.take(got, i, axis).reshape(held.want.shape), held)
    return None
