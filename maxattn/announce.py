"""What is logged: each plan once, and each change of block sizes once, when the kernel that it is of is compiled."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from maxattn.config import AttentionConfig
from maxattn.plan import Plan

log = logging.getLogger("maxattn")
_announced: set[Plan] = set()
_said: set[str] = set()


def announce(plan: Plan) -> None:
    """Log a plan the first time it is met, on process 0 alone: a warning where it is not what the user named."""
    level = logging.WARNING if plan.fell_back and plan.fallback == "warn" else logging.INFO
    # A plan met before logging was set up is not spent: it is logged once somebody listens.
    if not log.isEnabledFor(level) or plan in _announced:
        return
    _announced.add(plan)
    if jax.process_index() == 0:
        log.log(level, "%s", plan.explain())


def warn_of_other_mesh(config: AttentionConfig, mesh: Any) -> None:
    """Warn once where a call has no mesh or another one than its config asks for: settings alone make none."""
    text = _other_mesh(config, {} if mesh is None else dict(mesh.shape))
    if not text or text in _said or not log.isEnabledFor(logging.WARNING):
        return
    _said.add(text)
    if jax.process_index() == 0:
        log.warning("%s", text)


def _other_mesh(config: AttentionConfig, there: dict[str, int]) -> str:
    sizes = {axis: ici * dcn for axis, (ici, dcn) in config.axis_parallelism().items()}
    asked = {axis: n for axis, n in sizes.items() if n > 1}
    if not there:  # of an axis whose other size is open (-1) the one that is named counts
        asked = {axis: abs(n) for axis, n in sizes.items() if abs(n) > 1}
    if all(there.get(axis, 1) == n for axis, n in asked.items()):
        return ""
    wanted = ", ".join(f"{axis}={n}" for axis, n in asked.items())
    if not there:
        return (
            f"The config asks for {wanted}, and this call has no mesh: attention is not spread over devices. "
            "Pass mesh=config.make_mesh(), or call inside jax.set_mesh(config.make_mesh())."
        )
    given = ", ".join(f"{axis}={n}" for axis, n in there.items())
    return f"The config asks for {wanted}, and the mesh has {given}: the mesh counts."


def say_when_compiled(x: jax.Array, text: str) -> jax.Array:
    """Return x, and log a text once where what computes it is compiled, on process 0 alone.

    Whether a forward is differentiated shows only then: a function under `jit`, `scan` or `remat` is traced without
    its gradient first, and that trace is thrown away.
    """
    return say_p.bind(x, text=text) if text else x


def _say(text: str) -> None:
    if text in _said or not log.isEnabledFor(logging.INFO):
        return
    _said.add(text)
    if jax.process_index() == 0:
        log.info("%s", text)


def _evaluate(x: Any, *, text: str) -> Any:
    _say(text)
    return x


def _lower(context: Any, x: Any, *, text: str) -> Any:
    return [_evaluate(x, text=text)]


def _batch(args: Any, axes: Any, *, text: str) -> Any:
    return say_p.bind(*args, text=text), axes[0]


def _differentiate(primals: Any, tangents: Any, *, text: str) -> Any:
    return say_p.bind(*primals, text=text), tangents[0]


# An operation that computes nothing and leaves nothing in the program: its lowering is its effect.
say_p = Primitive("say_when_compiled")
say_p.def_impl(_evaluate)
say_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(say_p, _lower)
batching.primitive_batchers[say_p] = _batch
ad.primitive_jvps[say_p] = _differentiate
