"""`swap` in modules that resemble MaxDiffusion's, found by name and attributes only.

The classes are written here; test_swap_maxdiffusion_source.py uses MaxDiffusion's own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import InputError
from maxattn.modules.attention_op import OpAttention
from tests.golden_text import check_golden
from tests.modules.test_swap import BLOCKWISE, check_same

B, T, S, N, H = 2, 8, 5, 4, 8


class NNXAttentionOp(nnx.Module):
    """Dense attention in float32 with the settings of MaxDiffusion's op of this name."""

    def __init__(self, role: str = "self", scale: float = 0.3, **more: Any) -> None:
        self.heads, self.dim_head, self.scale, self.dtype = N, H, scale, jnp.float32
        self.axis_names_q = ("batch", f"activation_{role}_attn_heads", "length", "channels")
        self.mesh = self.quant = self.flash_block_sizes = None
        self.attention_kernel, self.mask_padding_tokens = "dot_product", True
        for name, value in more.items():
            setattr(self, name, value)

    def apply_attention(self, query, key, value, attention_mask=None):
        q, k, v = (x.reshape(B, -1, N, H) if x.ndim == 3 else x.swapaxes(1, 2)
                   for x in (query, key, value))  # fmt: skip
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * self.scale
        keep = jnp.ones((1, 1)) if attention_mask is None else attention_mask
        scores = jnp.where(keep[:, None, None] != 0, scores, -1e30)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        return out.reshape(B, -1, N * H)


class Held(nnx.Module):
    """Project, rotate queries and keys in self-attention, attend, and project."""

    def __init__(self, rngs: nnx.Rngs, role: str = "self", as_axis: bool = False) -> None:
        self.q, self.k, self.v, self.out = (nnx.Linear(N * H, N * H, rngs=rngs) for _ in range(4))
        self.attention_op = NNXAttentionOp(role)
        self.as_axis = as_axis

    def __call__(self, x: jax.Array, keys: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        q, k, v = self.q(x), self.k(keys), self.v(keys)
        if self.as_axis:
            q, k, v = (y.reshape(B, -1, N, H).swapaxes(1, 2) for y in (q, k, v))
        return self.out(self.attention_op.apply_attention(q, k, v, attention_mask=mask))


class Model(nnx.Module):
    def __init__(self) -> None:
        self.one = Held(nnx.Rngs(0))
        self.stacked = nnx.vmap(lambda key: Held(nnx.Rngs(key), "cross", as_axis=True))(
            jax.random.split(jax.random.key(7), 2)
        )

    def __call__(self, x: jax.Array, text: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.one(x, x)
        step = nnx.scan(
            lambda x, layer: x + layer(x, text, mask), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return step(x, self.stacked)


X = jax.random.normal(jax.random.key(0), (B, T, N * H))
TEXT = jax.random.normal(jax.random.key(1), (B, S, N * H))
MASK = (jnp.arange(S) < jnp.array([[S], [3]])).astype(jnp.int32)


@nnx.jit
def run(model: Model) -> Any:
    """Return a scalar of the output, and its gradients."""
    return nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(X, TEXT, MASK)) * jnp.arange(N * H)))(
        model
    )


MESHED = ma.AttentionConfig(
    context_parallel="ulysses", ici_data_parallelism=2, ici_context_parallelism=4
)


def test_outputs_gradients_and_parameters_are_those_of_before():
    """On one device and on eight."""
    model = Model()
    before = run(model)
    params = [id(leaf) for _, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param)]
    for config, mesh in ((BLOCKWISE, None), (MESHED, MESHED.make_mesh())):
        table = ma.swap(model, config, mesh=mesh)
        assert [(row.path, row.kind) for row in table.swapped] == [
            ("one.attention_op", "NNXAttentionOp"), ("stacked.attention_op", "NNXAttentionOp"),
        ]  # fmt: skip
        assert not table.left
        now = [id(leaf) for _, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Param)]
        assert now == params and params
        assert "batched_alike" in str(jax.make_jaxpr(lambda x: model.one(x, x))(X)), (
            "maxattn attends"
        )
        check_same(run(model), before)


def test_the_axis_names_give_the_role_and_swap_exchanges_again():
    model = Model()
    ma.swap(model)
    ma.swap(model, BLOCKWISE)
    first, second = (each.attention_op.apply_attention for each in (model.one, model.stacked))
    assert isinstance(first, OpAttention) and isinstance(second, OpAttention)
    assert (first.role, second.role) == ("self", "cross")
    assert first.config == second.config == BLOCKWISE and first.scale == 0.3


def test_a_swapped_op() -> None:
    """Wider values widen its dtype, a query without keys gives 0, other masks are refused."""
    op = NNXAttentionOp()
    op.dtype = jnp.bfloat16
    ma.swap(op)
    low = X.astype(jnp.bfloat16)
    assert op.apply_attention(low, low, X).dtype == jnp.float32
    assert op.apply_attention(X, X, low).dtype == jnp.bfloat16
    nothing = op.apply_attention(X, TEXT, TEXT, attention_mask=jnp.zeros((B, S), jnp.int32))
    assert not np.asarray(nothing).any()
    with pytest.raises(InputError, match="KeyPadding"):
        op.apply_attention(X, TEXT, TEXT, attention_mask=jnp.ones((B, S + 1)))


class Taught(NNXAttentionOp):
    def apply_attention(self, query, key, value, attention_mask=None, is_causal=False):
        return super().apply_attention(query, key, value, attention_mask)


class ByItself(nnx.Module):
    """A module that calls its op only from a least length on, and never for dot_product."""

    def __init__(self, kernel: str, least: int = 0) -> None:
        self.attention_kernel, self.flash_min_seq_length = kernel, least
        self.attention_op = NNXAttentionOp()


class Odd(nnx.Module):
    """Ops of every kind that `swap` skips, and modules that are no ops."""

    def __init__(self) -> None:
        self.aged = NNXAttentionOp()
        del self.aged.scale
        self.capped = NNXAttentionOp(softcap=30.0)
        self.dense = ByItself("dot_product")
        self.flash = ByItself("flash", 4096)
        self.headless = NNXAttentionOp(heads=0)
        self.named = NNXAttentionOp("cross", residual_checkpoint_name="cross_attn")
        self.taught = Taught()
        self.unset = NNXAttentionOp(softcap=None, causal=False)
        self.unscaled = NNXAttentionOp(scale=-1.0)


def test_what_has_no_equal_is_left_and_says_why():
    model = Odd()
    table = ma.swap(model, ma.AttentionConfig(attention="dot_product"))
    check_golden("modules/swap_maxdiffusion", str(table))
    swapped = {row.path for row in table.swapped}
    assert swapped == {"flash.attention_op", "named", "unset"}
    assert "apply_attention" not in vars(model.capped)
