"""Samplers as tables: each makes a `Schedule` of coefficients, and one step runs them all.

    from samplers import flow_euler, unipc, euler, ddim, sample

    schedule = unipc.schedule(steps=50, shift=3.0)
    predict = lambda x, t: model(x, jnp.broadcast_to(t, x.shape[:1]), kv=kv)
    latents = sample(predict, noise, schedule)

`read.read(folder, "flow")` makes the sampler that a folder in diffusers' format asks for.
"""

from . import ddim, euler, flow_euler, unipc
from .schedule import Schedule, State, sample, start, step

__all__ = ["Schedule", "State", "ddim", "euler", "flow_euler", "sample", "start", "step", "unipc"]
