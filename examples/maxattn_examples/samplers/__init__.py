"""Samplers as tables: each makes a `Schedule` of coefficients, and one step runs them all.

    from maxattn_examples.samplers import flow_euler, unipc, euler, ddim, sample

    schedule = unipc.schedule(steps=50, shift=3.0)
    predict = lambda x, t: model(x, jnp.broadcast_to(t, x.shape[:1]), kv=kv)
    latents = sample(predict, noise, schedule)

`lcm` and `flow_lcm` re-noise: they also take `keys_of(seed, rows)`, from which each sample's new
noise is drawn. `read.read(folder, "flow")` makes the sampler that a folder in diffusers' format
asks for.
"""

from . import ddim, euler, flow_euler, flow_lcm, lcm, unipc
from .noise import keys_of
from .schedule import Schedule, State, sample, start, step

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
