"""Independent versions of the modules: dense, in numpy float64, or in jax for autodiff."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma


def params_of(module: nnx.Module, dtype: Any = np.float64) -> dict[str, Any]:
    """Return a module's parameters as nested dicts of numpy arrays."""
    pure = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    return jax.tree.map(lambda a: np.asarray(a).astype(dtype), pure)


def randomise(module: Any, seed: int = 0) -> Any:
    """Give every parameter random values: scales of 1 and biases of 0 would hide mistakes."""
    rng = np.random.default_rng(seed)
    for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        value = np.asarray(param.get_value(), np.float32)
        noise = 0.3 * rng.standard_normal(value.shape)
        param.set_value((value + noise).astype(param.get_value().dtype))
    return module


@nnx.jit
def compiled(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module as one program, which compiles faster than its separate operations."""
    return module(*args, **kwargs)


def linear(p: dict[str, Any], x: Any) -> Any:
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def norm(m: Any, p: dict[str, Any] | None, x: Any, heads: int, xp: Any = np) -> Any:
    """Norm as module m does, and split heads: [B, T, N*H] -> [B, T, N, H]."""
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    if p is None:
        return x.reshape(split)
    x = x if m.qk_norm == "rms_norm_across_heads" else x.reshape(split)
    if m.qk_norm == "layer_norm":
        x = x - xp.mean(x, axis=-1, keepdims=True)
    x = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + m.eps)
    x = x * (1 + p["scale"] if m.qk_norm == "zero_centred_rms_norm" else p["scale"])
    return (x + p["bias"] if "bias" in p else x).reshape(split)


def turn(x: Any, rotary: ma.Rotary | None, xp: Any = np) -> Any:
    """Rotate pairs of channels, as complex numbers, by cos + i sin."""
    if rotary is None:
        return x
    turns = np.asarray(rotary.cos, np.float64) + 1j * np.asarray(rotary.sin, np.float64)
    turns = turns if turns.ndim == 4 else turns.reshape(-1, x.shape[1], 1, turns.shape[-1])
    d = turns.shape[-1]
    is_half = rotary.style == "half"
    a, b = (
        (x[..., :d], x[..., d : 2 * d]) if is_half else (x[..., : 2 * d : 2], x[..., 1 : 2 * d : 2])
    )
    z = (a + 1j * b) * turns
    parts = [z.real, z.imag]
    y = xp.concatenate(parts, -1) if is_half else xp.stack(parts, -1).reshape(*x.shape[:3], -1)
    return xp.concatenate([y, x[..., 2 * d :]], -1)


def attend(
    q: Any,
    k: Any,
    v: Any,
    allowed: Any = None,
    bias: Any = None,
    scale: float | None = None,
    xp: Any = np,
) -> Any:
    """Attend densely: query head n reads key head n // (N / K); a query without keys gives 0."""
    share = q.shape[2] // k.shape[2]
    k, v = xp.repeat(k, share, axis=2), xp.repeat(v, share, axis=2)
    s = xp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    allowed = xp.ones(s.shape, bool) if allowed is None else xp.broadcast_to(allowed, s.shape)
    top = xp.max(xp.where(allowed, s, -1e30), axis=-1, keepdims=True)
    e = xp.where(allowed, xp.exp(xp.where(allowed, s, top) - top), 0.0)
    total = xp.sum(e, axis=-1, keepdims=True)
    return xp.einsum("bnts,bsnh->btnh", e / xp.where(total > 0, total, 1.0), v)


def called(
    p: dict[str, Any],
    m: Any,
    x: Any,
    text: Any = None,
    image: Any = None,
    *,
    rotary: Any = None,
    rotary_k: Any = None,
    allowed: Any = None,
    bias: Any = None,
    xp: Any = np,
) -> Any:
    """Call self-attention, or with a text cross-attention, with the parameters p of module m.

    Args:
        rotary_k: of the keys; default that of the queries in self-attention.
        allowed: the allowed pairs, as a bool array.
    """

    def heads(of: Any, names: tuple[str, str], n: int) -> Any:
        return norm(m, p.get(names[1]), linear(p[names[0]], of), n, xp)

    source = x if text is None else text
    rotary_k = rotary if rotary_k is None and text is None else rotary_k
    q = turn(heads(x, ("to_q", "norm_q"), m.heads), rotary, xp)
    k = turn(heads(source, ("to_k", "norm_k"), m.kv_heads), rotary_k, xp)
    out = attend(q, k, heads(source, ("to_v", ""), m.kv_heads), allowed, bias, m.scale, xp)
    if image is not None:
        k = heads(image, ("add_k_proj", "norm_added_k"), m.kv_heads)
        out = out + attend(q, k, heads(image, ("add_v_proj", ""), m.kv_heads), scale=m.scale, xp=xp)
    if m.gate == "per_head":
        out = out * (2 / (1 + xp.exp(-linear(p["to_gate_logits"], x))))[..., None]
    out = out.reshape(*out.shape[:2], -1)
    if m.gate == "per_channel":
        out = out / (1 + xp.exp(-linear(p["to_gate"], x)))
    return linear(p["to_out"], out) if m.out_proj else out


def check_gradients(module: Any, call: Any, inputs: tuple[np.ndarray, ...], **how: Any) -> None:
    """Compare output, and gradients of parameters and inputs, with autodiff in float64.

    Args:
        call: a function of a module and its inputs.
        how: keyword arguments of `called`.
    """

    def with_gradients(f: Any, *of: Any) -> Any:
        def loss(*of: Any) -> Any:
            y = f(*of)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), y

        return jax.jit(jax.value_and_grad(loss, tuple(range(len(of))), has_aux=True))(*of)

    graph, state = nnx.split(module)
    got = with_gradients(lambda s, *of: call(nnx.merge(graph, s), *of), state, *inputs)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params_of(module), *inputs))
        want = with_gradients(lambda p, *of: called(p, module, *of, **how, xp=jnp), *exact)
    (_, y), (by_params, *by_inputs) = got
    mine = y, nnx.to_pure_dict(by_params), by_inputs
    (_, y), (by_params, *by_inputs) = want
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves((y, by_params, by_inputs)), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * scale)
