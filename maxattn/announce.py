"""Log each plan once, and each change of block sizes once, when the kernel is compiled."""

from __future__ import annotations

import logging
from functools import partial
from math import prod
from typing import Any

import jax
from jax.interpreters import ad

from maxattn._plan import Plan
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.config.asked import Asked
from maxattn.config.rules import AXES, Role
from maxattn.jax_private.mesh import ambient_mesh
from maxattn.jax_private.vmapped import identity
from maxattn.masks.operands import SWAP
from maxattn.sharding import surrounding_manual_axes

MANY_HEADS = 64  # more than the heads of most models
log = logging.getLogger("maxattn")
_logged: set[Plan | str] = set()


def announce(plan: Plan) -> None:
    """Log a plan once, on process 0: as WARNING if it warns, or if what was named cannot run."""
    warns = plan.warns or (plan.fell_back and plan.fallback == "warn")
    _log_once(logging.WARNING if warns else logging.INFO, plan)


def warn_of_layout(call: Call) -> None:
    """Warn once of a call with so many heads and few tokens that the two may be swapped."""
    if call.heads >= MANY_HEADS and call.heads > call.q_len:
        _log_once(
            logging.WARNING,
            f"q has {call.q_len} tokens and {call.heads} heads: axes are [B, T, N, H], tokens"
            f" before heads. {SWAP[0].upper()}{SWAP[1:]}.",
        )


def warn_of_other_mesh(config: AttentionConfig, mesh: Any, role: Role) -> None:
    """Warn once if a call's mesh lacks the axis sizes that the config or its strategy needs."""
    there = {} if mesh is None else dict(mesh.shape)
    text = _other_mesh(config, there) or _unspread(config, there, Asked.of(config, role).strategy)
    _log_once(logging.WARNING, text)


def _other_mesh(config: AttentionConfig, there: dict[str, int]) -> str:
    sizes = {axis: ici * dcn for axis, (ici, dcn) in config.axis_parallelism().items()}
    asked = {axis: n for axis, n in sizes.items() if n > 1}
    if not there:  # -1 stands for all other devices: an axis of 2 and -1 counts as 2
        asked = {axis: abs(n) for axis, n in sizes.items() if abs(n) > 1}
    if all(there.get(axis, 1) == n for axis, n in asked.items()):
        return ""
    if not there:
        return _no_mesh(_sizes(asked))
    return f"The config asks for {_sizes(asked)}, but the call's mesh has {_sizes(there)}."


def _unspread(config: AttentionConfig, there: dict[str, int], strategy: str) -> str:
    """Return a warning if the config asks for a context axis that the call cannot use, else ""."""
    named = strategy not in ("auto", "none")
    sized = config.axis_parallelism().get("context", (1, 1)) != (1, 1)
    if there.get("context", 1) > 1:
        if not (named or sized) or "context" not in surrounding_manual_axes():
            return ""
        return (
            f"The config asks for {strategy if named else 'a context axis'}, but the context axis"
            " is manual in the surrounding shard_map: each device attends only to its own keys."
            " Remove context from the shard_map's axis_names, or call outside the shard_map."
        )
    devices = prod(there.values()) if there else jax.device_count()
    if not named or devices == 1:
        return ""
    if there:
        return (
            f"The config asks for {strategy}, which needs a context axis of several devices, but"
            f" the mesh has {_sizes(there)}. Set ici_context_parallelism."
        )
    return _no_mesh(strategy, "" if sized else "Set ici_context_parallelism. ")


def _no_mesh(wanted: str, first: str = "") -> str:
    ambient = ambient_mesh()
    if ambient is not None and ambient.size > 1:
        return (
            f"The config asks for {wanted}, but the surrounding mesh has"
            f" {_sizes(dict(ambient.shape))}: attention is split only over {', '.join(AXES)}."
            " Rename the mesh axes, or use config.make_mesh()."
        )
    return (
        f"The config asks for {wanted}, but this call has no mesh: attention is not split over"
        f" devices. {first}Pass mesh=config.make_mesh(), or call inside"
        " jax.set_mesh(config.make_mesh())."
    )


def _sizes(there: dict[str, int]) -> str:
    return ", ".join(f"{axis}={n}" for axis, n in there.items())


def say_when_compiled(x: jax.Array, text: str) -> jax.Array:
    """Return x; log a text once, on process 0, when the program that computes x is compiled.

    Before compilation it is unknown whether a forward is differentiated: under `jit`, `scan` or
    `remat`, jax first traces a function without its gradient, and may discard that trace.
    """
    return say_p.bind(x, text=text)[0] if text else x


def _log_once(level: int, text: Plan | str) -> None:
    # A text that the logging level suppresses is not marked as logged: it may be logged later.
    if not text or text in _logged or not log.isEnabledFor(level):
        return
    _logged.add(text)
    if jax.process_index() == 0:
        log.log(level, "%s", text)


say_p = identity(
    "say_when_compiled",
    batch=lambda args, axes, **text: (say_p.bind(*args, **text), axes),
    met=partial(_log_once, logging.INFO),
)
ad.primitive_jvps[say_p] = lambda args, tangents, **text: (say_p.bind(*args, **text), tangents)
