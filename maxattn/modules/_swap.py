"""`swap`: make the attention modules of a whole NNX model attend with maxattn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.dtypes import canonicalize_dtype

from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.config.asked import checked_config
from maxattn.errors import InputError
from maxattn.masks.operands import DTYPES
from maxattn.modules import checks
from maxattn.modules.adapters import AttentionFn, attention_fn
from maxattn.modules.attention_op import exchange, is_attention_op, why_op_stays
from maxattn.modules.base import AttentionBase
from maxattn.modules.mha_rope import bound_rope, why_unread


@dataclass(frozen=True)
class Swapped:
    """One attention module that `swap` found in a model.

    Args:
        path: the module's path in the model, such as "blocks.3.attn".
        kind: the name of the module's class.
        swapped: whether the module attends with maxattn.
        why: the setting that chooses the kernel, or the reason why the module was not swapped.
    """

    path: str
    kind: str
    swapped: bool
    why: str


@dataclass(frozen=True)
class SwapTable:
    """All attention modules that `swap` found in a model; prints as a table."""

    rows: tuple[Swapped, ...]

    @property
    def swapped(self) -> tuple[Swapped, ...]:
        """Return the modules that attend with maxattn."""
        return tuple(row for row in self.rows if row.swapped)

    @property
    def left(self) -> tuple[Swapped, ...]:
        """Return the modules that were not swapped."""
        return tuple(row for row in self.rows if not row.swapped)

    def __str__(self) -> str:
        head = f"{len(self.swapped)} of {len(self.rows)} attentions swapped"
        cells = [(r.path, r.kind, "swapped" if r.swapped else "left", r.why) for r in self.rows]
        widths = [max((len(row[i]) for row in cells), default=0) for i in range(3)]
        columns = ([c.ljust(w) for c, w in zip(row, widths, strict=False)] for row in cells)
        lines = ("  ".join([*each, row[3]]) for each, row in zip(columns, cells, strict=True))
        return "\n".join([head, *(f"  {line}" for line in lines)])


@answers_names
def swap(
    model: nnx.Module, config: AttentionConfig | None = None, mesh: jax.sharding.Mesh | None = None
) -> SwapTable:
    """Make every `nnx.MultiHeadAttention` and MaxDiffusion module of a model attend with maxattn.

    Only the attention function is replaced, in place. Parameters, their names and the model's
    code stay, so a checkpoint loads before and after. A second call with another config replaces
    the function again. The rope of `nnx.dot_product_attention_with_rope` is kept. In
    MaxDiffusion's NNX modules, `swap` replaces `apply_attention` of their `NNXAttentionOp`, which
    it finds by name and attributes.

    Args:
        model: any NNX module; its layers may be stacked (`nnx.scan`, `nnx.vmap`).
        config: kernel and parallelism; default `AttentionConfig()`.
        mesh: device mesh that the calls are sharded over; default none.

    Returns:
        A table of the modules that were swapped, and of those that were not, with the reason.

    Raises:
        ConfigError, MeshError, InputError: if `config`, `mesh` or `model` has the wrong type.

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
        # Before a call, only the width of the keys shows whether a module is cross-attention.
        role = "self" if module.in_features == module.in_kv_features else "cross"
        fn = module.attention_fn
        rope = fn.rope if isinstance(fn, AttentionFn) else bound_rope(fn)
        module.attention_fn = attention_fn(config, mesh, role=role, rope=rope)
        more = "" if rope is None else ", after its rope"
    key = "attention" if role == "self" else "cross_attention"
    return Swapped(where, kind, True, f"{key}: {getattr(config or AttentionConfig(), key)}{more}")


def _attentions(model: nnx.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, module, its parent) of all attention modules, parents first."""
    # Paths mix names and numbers, which cannot be compared.
    found = sorted(
        nnx.iter_modules(model), key=lambda item: [(isinstance(p, str), p) for p in item[0]]
    )
    at = dict(found)
    for path, module in found:
        named = "attention" in type(module).__name__.lower()
        inner = (child for path, child in nnx.iter_modules(module) if path)
        # A class with attention in its name counts if no attention module is inside it.
        if _is_attention(module) or (named and not any(map(_is_attention, inner))):
            yield ".".join(map(str, path)), module, at.get(path[:-1]) if path else None


def _is_attention(module: Any) -> bool:
    return isinstance(module, nnx.MultiHeadAttention | AttentionBase) or is_attention_op(module)


def _reason_to_leave(module: Any) -> str | None:
    if isinstance(module, AttentionBase):
        return "a module of maxattn, which has its own config"
    if not isinstance(module, nnx.MultiHeadAttention):
        return "not an nnx.MultiHeadAttention: call maxattn.attention in its code"
    if module.dropout_rate > 0.0 and not module.deterministic:
        remedy = "set 0.0, or deterministic=True"
        return f"dropout_rate={module.dropout_rate}: no kernel drops probabilities ({remedy})"
    by_default = "param_dtype" if module.dtype is None else "dtype"
    dtype = canonicalize_dtype(getattr(module, by_default))
    if dtype.name not in DTYPES:
        return (
            f"{by_default}={dtype}: kernels compute in {', '.join(DTYPES)} (set dtype=jnp.float32)"
        )
    fn = module.attention_fn
    if fn is nnx.dot_product_attention or isinstance(fn, AttentionFn) or bound_rope(fn) is not None:
        return None
    return f"its attention_fn is {why_unread(fn)}"
