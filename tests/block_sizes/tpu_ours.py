"""What the child compiles through maxattn's own plan and kernels: what users run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from maxattn import masks
from maxattn.attention import run
from maxattn.block_sizes import BlockSizes
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.plan import Plan, plan
from maxattn.target import Target


def problem(
    case: dict, spec: Callable[..., Any], mesh: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function to compile, and its operands.

    Args:
        case: kind, kernel, batch, q_len, kv_len, heads, head_dim, dtype, role, mask, training; and
            sizes (as `BlockSizes.given()`: run exactly these), or config (overrides: what a plan
            makes of them).
        spec: makes an operand of a shape, dtype and axes.
        mesh: the mesh of the case.
    """
    b, t, s, n, h = (case[key] for key in ("batch", "q_len", "kv_len", "heads", "head_dim"))
    q = spec((b, t, n, h), case["dtype"], "data", "context", "tensor", None)
    sharded = "context" if case["role"] == "self" else None
    k = spec((b, s, n, h), case["dtype"], "data", sharded, "tensor", None)
    lengths = spec((b,), "int32", "data")
    decided = decide(case, b, t, s, n, h)

    def forward(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return run(decided, q, k, v, None, mask_of(case["mask"], lengths).bind(t, s, b, n), mesh)[0]

    def gradients(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        def loss(*x: Any) -> Any:
            return forward(*x, lengths).astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    return gradients if case["training"] else forward, (q, k, k, lengths)


def decide(case: dict, b: int, t: int, s: int, n: int, h: int) -> Plan:
    """Plan the call for a TPU, and put in the sizes of the case where it brings its own."""
    lengths = jax.ShapeDtypeStruct((b,), "int32")
    mask = mask_of(case["mask"], lengths).bind(t, s, b, n).form()
    call = Call(b, t, s, n, n, h, case["dtype"], mask, role=case["role"])
    both = [f"attention={case['kernel']}", f"cross_attention={case['kernel']}"]
    config = AttentionConfig.from_overrides(case.get("config") or both)
    target = Target.named(case["kind"], (("tokamax", "0.0.17"),))
    decided = plan(call, config, case.get("mesh"), target)
    if "sizes" not in case:
        return decided
    kernel: Any = decided.kernel
    sizes = BlockSizes(**case["sizes"])
    inference = None if case["training"] else sizes
    return replace(decided, kernel=replace(kernel, blocks=sizes, inference=inference))


def mask_of(name: str, lengths: Any) -> masks.Mask:
    """Return a mask by name: for the kernel it is segment ids, positions, both, or neither."""
    ids, window = masks.KeyPadding(lengths), masks.LocalWindow(700, 300, offset=0)
    return {
        "full": masks.Full(),
        "padding": ids,
        "window": window,
        "both": ids & window,
        "blocks": masks.BlockSlidingWindow(1560, 7),
    }[name]
