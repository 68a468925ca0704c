"""A call small enough to tune here, the cache's entries for it, and a broken kernel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from shlex import split
from typing import Any, ClassVar

import jax.numpy as jnp

import maxattn as ma
from maxattn.kernels.base import Inputs, Kernel, Lines, Result
from maxattn.tools.model_shapes import changed, read

BLOCKWISE = split(
    "attention=dot_product use_memory_efficient_attention=true --shape 1,300,300,2,8 --dtype f32"
)
CONFIG = ma.AttentionConfig(attention="dot_product", use_memory_efficient_attention=True)


def measurements(path: Path) -> list[dict]:
    return json.loads(path.read_text())["measurements"]


def small_call(text: str = "1,300,300,2,8") -> ma.Call:
    return changed(read(text), None, "f32", None, None).call()


def plan_here() -> ma.Plan:
    return ma.plan(small_call(), CONFIG)


class CompilerError(Exception):
    """An exception class that no library of Python raises."""


@dataclass(frozen=True)
class Broken(Kernel):
    """A kernel whose forward works, and whose backward fails to compile."""

    name: ClassVar[str] = "broken"
    scale: float = 1.0

    @staticmethod
    def build(call: Any, config: Any, target: Any) -> Broken:
        """Store the scale."""
        return Broken(call.scale)

    def forward(self, inputs: Inputs) -> Result:
        """Return the first value for every query, which is fast but useless."""
        out = jnp.broadcast_to(inputs.v[:, :1], inputs.q.shape)
        return Result(out, jnp.zeros(inputs.q.shape[:3], jnp.float32).swapaxes(1, 2))

    def backward(self, inputs: Inputs, rows: Any) -> Any:
        """Fail as a compiler does."""
        raise CompilerError(f"no registers for head dim {inputs.q.shape[-1]}\nand more lines")

    def lines(self, call: Any) -> Lines:
        """Return the kernel's name."""
        return Lines("broken", "none")
