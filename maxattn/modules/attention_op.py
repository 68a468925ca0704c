"""MaxDiffusion's attention op, found by name and attributes: MaxDiffusion is not imported.

The NNX modules of MaxDiffusion (Wan, LTX-2, Flux.2, Z-Image) project, norm and rotate, and pass q,
k and v to `apply_attention` of an `NNXAttentionOp`, a module without parameters. `swap` replaces
`apply_attention` on the instance.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import masks
from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.config.numbers import is_number
from maxattn.modules.heads import merge_heads, split_heads

NAME, METHOD = "NNXAttentionOp", "apply_attention"
NEEDED = ("heads", "dim_head", "scale", "dtype")
ARGUMENTS = ("query", "key", "value", "attention_mask")
# Settings that the config of maxattn replaces, or that do not change results.
DECIDED_HERE = {
    "attention_kernel", "axis_names_kv", "axis_names_q", "dpa_layer", "flash_block_sizes",
    "flash_min_seq_length", "float32_qk_product", "mask_padding_tokens", "mesh", "quant",
    "residual_checkpoint_name", "split_head_dim", "ulysses_attention_chunks", "ulysses_shards",
    "use_base2_exp", "use_experimental_scheduler", "use_memory_efficient_attention",
}  # fmt: skip


@dataclass(frozen=True)
class OpAttention:
    """The `apply_attention` of an op, as a hashable value: equal modules share a trace."""

    # config, mesh, role: as in `maxattn.attention`
    config: AttentionConfig | None
    mesh: jax.sharding.Mesh | None
    role: Literal["self", "cross"]
    heads: int  # N
    scale: float  # multiplies the scores
    dtype: str  # name of the computation dtype, which is promoted to the dtype of the values

    def __call__(
        self, query: Array, key: Array, value: Array, attention_mask: Array | None = None
    ) -> Float[Array, "B T NH"]:
        """Attend, with the arguments that MaxDiffusion passes to its op.

        Args:
            query: [B, T, N*H] or [B, N, T, H].
            key, value: [B, S, N*H] or [B, N, S, H].
            attention_mask: [B, S], nonzero for a key that is not padding.

        Raises:
            InputError: if shapes or dtypes of the operands do not match.
        """
        dtype = jnp.promote_types(self.dtype, value.dtype)
        q, k, v = (self._split(x).astype(dtype) for x in (query, key, value))
        mask = None if attention_mask is None else masks.KeyPadding(attention_mask.astype(bool))
        how: dict[str, Any] = {"config": self.config, "mesh": self.mesh, "role": self.role}
        return merge_heads(attention(q, k, v, mask=mask, scale=self.scale, **how))

    def _split(self, x: Array) -> Float[Array, "B L N H"]:
        return x.swapaxes(1, 2) if x.ndim == 4 else split_heads(x, self.heads)


def is_attention_op(module: nnx.Module) -> bool:
    """Check whether a module is, or extends, the attention op, by its name and its method."""
    named = any(kind.__name__ == NAME for kind in type(module).__mro__)
    return named and callable(getattr(type(module), METHOD, None))


def why_op_stays(op: Any, holder: Any) -> str | None:
    """Return the unsupported setting of an op or of its parent module, None if there is none."""
    settings = {name: value for name, value in vars(op).items() if not name.startswith("_")}
    if lacking := [name for name in NEEDED if name not in settings]:
        return f"it has no {', '.join(lacking)}, which an {NAME} of MaxDiffusion has"
    for name in ("heads", "dim_head"):
        value = getattr(op, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: it must be an integer of at least 1"
    if not is_number(op.scale) or op.scale <= 0:
        return f"scale={op.scale!r}: it must be a positive number"
    parameters = list(inspect.signature(getattr(type(op), METHOD)).parameters)[1:]
    if odd := [name for name in parameters if name not in ARGUMENTS]:
        return f"its {METHOD} takes {odd[0]}, which maxattn does not know"
    for name in sorted(settings.keys() - {*NEEDED, *DECIDED_HERE, METHOD}):
        if settings[name] is not None and settings[name] is not False:
            return f"{name}={settings[name]!r}: maxattn does not know this setting"
    kernel, least = _own_rule(holder)
    if kernel == "dot_product" and least is not None:
        attends = f"{type(holder).__name__} computes attention itself if its attention_kernel is"
        return f"{attends} dot_product: build it with attention_kernel='flash'"
    return None


def exchange(op: Any, holder: Any, config: AttentionConfig | None, mesh: Any) -> tuple[str, str]:
    """Make an op attend with maxattn; return its role, and text to append to its table row."""
    names = getattr(op, "axis_names_q", None) or ()
    role = "cross" if any("cross" in str(name) for name in names) else "self"
    dtype = jnp.dtype(op.dtype).name
    setattr(op, METHOD, OpAttention(config, mesh, role, op.heads, float(op.scale), dtype))
    kept = getattr(op, "residual_checkpoint_name", None)
    kernel, least = _own_rule(holder)
    more = f", from flash_min_seq_length={least} tokens on" if kernel is not None and least else ""
    more += f", and remat names attn_out and attn_lse in place of {kept}" if kept else ""
    return role, more


def _own_rule(holder: Any) -> tuple[Any, Any]:
    """Return the parent's kernel, and the length below which the parent itself attends."""
    return getattr(holder, "attention_kernel", None), getattr(holder, "flash_min_seq_length", None)
