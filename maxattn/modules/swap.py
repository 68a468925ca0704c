"""`swap`: maxattn inside a whole NNX model of somebody else; its parameters stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from maxattn.config import AttentionConfig
from maxattn.config.asked import checked_config
from maxattn.errors import InputError
from maxattn.modules import checks
from maxattn.modules.adapters import AttentionFn, attention_fn
from maxattn.modules.attention_op import exchange, is_attention_op, why_op_stays
from maxattn.modules.base import AttentionBase
from maxattn.modules.mha_rope import bound_rope, why_unread


@dataclass(frozen=True)
class Swapped:
    """Say what became of one attention of a model.

    Args:
        path: where it is, as "blocks.3.attn".
        kind: its class.
        swapped: whether it attends with maxattn now.
        why: the reason: how it is governed, or why it was left.
    """

    path: str
    kind: str
    swapped: bool
    why: str


@dataclass(frozen=True)
class SwapTable:
    """List every attention that `swap` met; prints as a table."""

    rows: tuple[Swapped, ...]

    @property
    def swapped(self) -> tuple[Swapped, ...]:
        """Those that attend with maxattn now."""
        return tuple(row for row in self.rows if row.swapped)

    @property
    def left(self) -> tuple[Swapped, ...]:
        """Those that were left as they are."""
        return tuple(row for row in self.rows if not row.swapped)

    def __str__(self) -> str:
        head = f"{len(self.swapped)} of {len(self.rows)} attentions swapped"
        cells = [(r.path, r.kind, "swapped" if r.swapped else "left", r.why) for r in self.rows]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
        columns = ([c.ljust(w) for c, w in zip(row, widths, strict=False)] for row in cells)
        lines = ("  ".join([*each, row[3]]) for each, row in zip(columns, cells, strict=True))
        return "\n".join([head, *(f"  {line}" for line in lines)])


def swap(
    model: nnx.Module, config: AttentionConfig | None = None, mesh: jax.sharding.Mesh | None = None
) -> SwapTable:
    """Let every `nnx.MultiHeadAttention` and every MaxDiffusion module attend with maxattn.

    Parameters, their names and the model's own code stay as they are: only the function that
    attends is exchanged, so a checkpoint of the model loads before and after. Calling it again with
    another config exchanges it again. The rope of `nnx.dot_product_attention_with_rope` is kept.
    Of MaxDiffusion's NNX modules it exchanges `apply_attention` of their `NNXAttentionOp`, which
    it knows by its name and attributes.

    Args:
        model: any NNX module; stacked layers (`nnx.scan`, `nnx.vmap`) too.
        config: which kernel and parallelism; default `AttentionConfig()`.
        mesh: devices to spread over; default none.

    Returns:
        A table of what was swapped, and why the rest was left.

    Raises:
        ConfigError, MeshError, InputError: `config` is no config, `mesh` no mesh, or `model` no NNX
            module.

    >>> model = nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0))
    >>> print(ma.swap(model, ma.AttentionConfig(attention="dot_product")))
    1 of 1 attentions swapped
      the model itself  MultiHeadAttention  swapped  attention: dot_product
    """
    checked_config(config)
    checks.mesh(mesh)
    if not isinstance(model, nnx.Module):
        rule = "swap takes an NNX module"
        raise InputError("model", type(model).__name__, rule, "pass an nnx.Module")
    found = [_swap_one(*each, config, mesh) for each in _attentions(model)]
    return SwapTable(tuple(found))


def _swap_one(
    path: str, module: Any, holder: Any, config: AttentionConfig | None, mesh: Any
) -> Swapped:
    where, kind, is_op = path or "the model itself", type(module).__name__, is_attention_op(module)
    if reason := why_op_stays(module, holder) if is_op else _reason_to_leave(module):
        return Swapped(where, kind, False, reason)
    if is_op:
        role, more = exchange(module, holder, config, mesh)
    else:
        # Only the width of its keys says what a module attends to before it is called.
        role = "self" if module.in_features == module.in_kv_features else "cross"
        fn = module.attention_fn
        rope = fn.rope if isinstance(fn, AttentionFn) else bound_rope(fn)
        module.attention_fn = attention_fn(config, mesh, role=role, rope=rope)
        more = "" if rope is None else ", after its rope"
    key = "attention" if role == "self" else "cross_attention"
    return Swapped(where, kind, True, f"{key}: {getattr(config or AttentionConfig(), key)}{more}")


def _attentions(model: nnx.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, module, its holder) of all that looks like attention, parents first."""
    # Paths mix names and numbers, which do not compare.
    found = sorted(
        nnx.iter_modules(model), key=lambda item: [(isinstance(p, str), p) for p in item[0]]
    )
    at = dict(found)
    for path, module in found:
        named = "attention" in type(module).__name__.lower()
        inner = (child for path, child in nnx.iter_modules(module) if path)
        # A module that is called attention counts where it has no attention module inside.
        if _is_attention(module) or (named and not any(map(_is_attention, inner))):
            yield ".".join(map(str, path)), module, at.get(path[:-1]) if path else None


def _is_attention(module: Any) -> bool:
    return isinstance(module, nnx.MultiHeadAttention | AttentionBase) or is_attention_op(module)


def _reason_to_leave(module: Any) -> str | None:
    if isinstance(module, AttentionBase):
        return "maxattn's own module: it has a config"
    if not isinstance(module, nnx.MultiHeadAttention):
        return "no nnx.MultiHeadAttention: call maxattn.attention in it"
    if module.dropout_rate > 0.0 and not module.deterministic:
        remedy = "set 0.0, or deterministic=True"
        return f"dropout_rate={module.dropout_rate}: no kernel drops probabilities ({remedy})"
    fn = module.attention_fn
    if fn is nnx.dot_product_attention or isinstance(fn, AttentionFn) or bound_rope(fn) is not None:
        return None
    return f"its attention_fn is {why_unread(fn)}"
