"""Samplers as tables: each makes a `Schedule` of coefficients, and one step function runs them all.

    from maxattn_examples.samplers import unipc, sample

    schedule = unipc(steps=50, shift=3.0)
    predict = lambda x, t: model(x, jnp.broadcast_to(t, x.shape[:1]), kv=kv)
    latents = sample(predict, noise, schedule)

`sample` documents the times and the sign of the prediction. `lcm` and `flow_lcm` re-noise: they
also need `keys_of(seed, rows)`, from which each sample's new noise is drawn.
"""

from .discrete import ddim, euler, lcm
from .flow import flow_euler, flow_lcm, unipc
from .schedule import Schedule, State, keys_of, sample, start, step

__all__ = [
    "Schedule",
    "State",
    "ddim",
    "euler",
    "flow_euler",
    "flow_lcm",
    "keys_of",
    "lcm",
    "sample",
    "start",
    "step",
    "unipc",
]
