"""What calls of attention share: the Python that differentiates, and the check against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.fuzz.case import Names, Wrong
from tests.fuzz.float64 import SLACK, Given, Held, attend, hold
from tests.fuzz.operands import Operands

# Where the program is compiled, it ends in `check_finite`'s refusal while it runs.
WAIT = "jax.block_until_ready(out)\njax.effects_barrier()\n"
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
FORWARD = "out, lse = call(q, k, v, bias)\n"
BOTH = """\
(out, lse), pull = jax.vjp(call, q, k, v, bias)
dq, dk, dv, dbias = pull((dout, dlse))
"""


def call_text(operands: Operands, mesh: bool = False) -> str:
    """Write a function `call(q, k, v, bias)` that returns out and lse."""
    words = ["mask=mask", "bias=bias", "config=config", "return_lse=True"]
    words += [f"scale={operands.scale}"] if operands.scale is not None else []
    words += ["mesh=mesh"] if mesh else []
    return f"def call(q, k, v, bias):\n    return ma.attention(q, k, v, {', '.join(words)})\n"


def config_text(settings: Mapping[str, Any], hidden: str = "") -> str:
    """Write the config; NaN in hidden keys is refused where the config asks for it."""
    settings = {**settings, "check_finite": True} if hidden else settings
    words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return f"config = ma.AttentionConfig({words})\n"


def given_of(operands: Operands, names: Names) -> Given:
    """Read the operands that a case made, in float64."""
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


def check_of(operands: Operands) -> Callable[[Names], None]:
    """Return the check of everything that a case computed."""

    def check(names: Names) -> None:
        if operands.hidden:
            raise Wrong(f"{operands.hidden} in hidden keys is not refused")
        held = attend(given_of(operands, names))
        for name in NAMES:
            if names.get(name) is not None:
                hold_one(operands, name, _flat(names, name), held[name])

    return check


def hold_one(operands: Operands, name: str, got: Any, held: Held) -> None:
    """Hold one result of a call to its bound."""
    hold(name, got, held, dtype_of(operands, name), SLACK[operands.dtype])


def _flat(names: Names, name: str) -> Any:
    """A bias's gradient has the bias's axes; the reference has four."""
    value = np.asarray(names[name], np.float64)
    return value.reshape((1,) * (4 - value.ndim) + value.shape) if name == "dbias" else value


def dtype_of(operands: Operands, name: str) -> str:
    """Return the dtype of one result."""
    return {"lse": "float32", "dbias": operands.bias_dtype}.get(name, operands.dtype)


def facts_of(operands: Operands, **more: Any) -> dict[str, Any]:
    """Say what known faults are told apart by."""
    mask = operands.tree.text() if operands.tree else ""
    bias = operands.bias_kind if operands.bias is not None else ""
    seen = {"mask": mask, "hidden": operands.hidden, "bias": bias, "values": operands.values}
    return seen | more
