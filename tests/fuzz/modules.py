"""The modules, called and differentiated, alone and inside NNX's transformations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.float64 import EPS, Bounded, compare, softmax
from tests.fuzz.masks import Sizes, Tree, draw_tree
from tests.fuzz.settings import POLICIES, config_text, draw_axes, draw_settings, mesh_text

SETUP = """\
from flax import nnx
rng = np.random.default_rng({seed})
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), {dtype!r})
layer = ma.{kind}({words}, config=config, dtype={dtype!r}, rngs=nnx.Rngs({seed}){mesh})
nnx.update(layer, jax.tree.map(
    lambda x: x + 0.2 * jnp.asarray(rng.standard_normal(x.shape), x.dtype),
    nnx.state(layer, nnx.Param)))
x, text, image = draw{x}, {text}, {image}
mask, bias = {mask}, {bias}
rotary = {rotary}
def run(layer, x):
    return {call}
"""
CALLS = {
    "FlaxAttention": "layer(x, rotary_emb=rotary, mask=mask, bias=bias)",
    "CrossAttention": "layer(x, text, rotary_emb=rotary, mask=mask, bias=bias,"
    " encoder_hidden_states_image=image)",
    "CrossAttention kv": "layer(x, kv=layer.compute_kv(text, image), rotary_emb=rotary, mask=mask,"
    " bias=bias)",
    "JointAttention": "jnp.concatenate([y.ravel() for y in layer(x, text, rotary_emb=rotary,"
    " mask=mask, bias=bias)])",
}
TRANSFORMS = (
    "", "", "run = nnx.jit(run)", "run = nnx.remat(run)", "run = nnx.jit(nnx.remat(run))",
    "run = ma.remat(run, ma.AttentionConfig(remat_policy={policy!r}))",
    "run = nnx.jit(ma.remat(run, ma.AttentionConfig(remat_policy={policy!r})))",
    "once = run\ndef run(layer, x):\n    return nnx.vmap(lambda y: once(layer, y))(x[None])[0]",
    "once = run\ndef run(layer, x):\n    step = lambda c, y: (c, once(layer, y))\n"
    "    along = (nnx.Carry, 0)\n"
    "    return nnx.scan(step, in_axes=along, out_axes=along)(0.0, x[None])[1][0]",
)  # fmt: skip
RUN = """\
out = run(layer, x)
way = draw(*out.shape)
loss = lambda layer, x: (run(layer, x).astype('float32') * way.astype('float32')).sum()
grads, dx = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(layer, x)
"""
NORMS = (None, "rms_norm", "layer_norm", "rms_norm_across_heads")
STEP = 1e-6
Params = Mapping[str, np.ndarray]


class Built(NamedTuple):
    """The arguments of a module and of its call."""

    kind: str
    sizes: Sizes  # T and S of the attention
    width: int
    text_width: int
    image: tuple[int, int] | None  # tokens and channels
    norm: str | None
    eps: float
    scale: float | None
    theta: float | None
    style: str
    tree: Tree | None
    bias: bool
    dtype: str


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a module, the arguments of its call and the transformation around it."""
    on_mesh = machine.devices > 1 and rng.random() < 0.25
    axes = draw_axes(rng, machine.devices) if on_mesh else None
    built = _draw_built(rng, machine, axes or {})
    settings = draw_settings(rng, machine, axes)
    if rng.random() < 0.7:
        settings["cross_attention"] = settings["attention"]
    call = rng.choice([name for name in CALLS if name.split()[0] == built.kind])
    how = rng.choice(TRANSFORMS).replace("{policy!r}", repr(rng.choice(POLICIES[1:])))
    setup = _setup(built, rng, call, on_mesh)
    source = f"{config_text(settings)}{mesh_text(axes)}{setup}{how}\n{RUN}"
    return Case(source, check_of(built), seconds=120)


def _draw_built(rng: Random, machine: Machine, axes: dict[str, int]) -> Built:
    kind = rng.choice(["FlaxAttention", "CrossAttention", "JointAttention"])
    tensor, batch = axes.get("tensor", 1), axes.get("data", 1) * axes.get("fsdp", 1)
    heads, kv = rng.choice([(2, 2), (4, 2), (2, 1), (3, 3)])
    t, s = rng.choice([8, 7, 16, 20]), rng.choice([3, 8, 12])
    of_kind = {"FlaxAttention": (t, t), "CrossAttention": (t, s), "JointAttention": (s + t, s + t)}
    batch, heads, kv = batch * rng.choice([1, 2]), heads * tensor, kv * tensor
    sizes = Sizes(batch, *of_kind[kind], heads, kv, rng.choice([6, 8, 16]))
    tree = draw_tree(rng, sizes, 2) if rng.random() < 0.5 else None
    image = (rng.choice([1, 5, 8]), 6) if kind == "CrossAttention" and rng.random() < 0.4 else None
    return Built(
        kind, sizes, rng.choice([8, 12]), rng.choice([8, 10]), image,
        rng.choice(NORMS), rng.choice([1e-5, 1e-6]), rng.choice([None, None, 0.7]),
        rng.choice([None, 1e4, 100.0]), rng.choice(["interleaved", "half"]),
        tree, rng.random() < 0.2, "bfloat16" if machine.platform == "gpu" else "float32",
    )  # fmt: skip


def _setup(built: Built, rng: Random, call: str, on_mesh: bool) -> str:
    """Format the module, its inputs and its call as Python."""
    s, is_joint, image = built.sizes, built.kind == "JointAttention", built.image
    t, other = (s.t - 3, 3) if is_joint else (s.t, s.s)
    seed = rng.randrange(10**6)
    words: dict[str, Any] = {"query_dim": built.width, "heads": s.n, "kv_heads": s.k}
    words |= {"dim_head": s.h, "qk_norm": built.norm, "eps": built.eps, "scale": built.scale}
    words |= {"bias": rng.random() < 0.5, "out_bias": rng.random() < 0.5}
    if built.kind == "CrossAttention":
        words |= {"cross_attention_dim": built.text_width}
    if image or is_joint:
        words |= {"added_kv_proj_dim": image[1] if image else built.text_width}
    rotary = f"ma.rope_1d({s.h}, {s.t}, {built.theta}, style={built.style!r})"
    return SETUP.format(
        seed=seed, dtype=built.dtype, kind=built.kind,
        words=", ".join(f"{key}={value!r}" for key, value in words.items()),
        mesh=", mesh=mesh" if on_mesh else "", x=(s.b, t, built.width),
        text="None" if built.kind == "FlaxAttention" else f"draw{(s.b, other, built.text_width)}",
        image=f"draw{(s.b, *image)}" if image else "None",
        mask=built.tree.text() if built.tree else "None",
        bias=f"draw{(1, s.n, s.t, s.s)}" if built.bias else "None",
        rotary=rotary if built.theta else "None",
        call=CALLS[call],
    )  # fmt: skip


def check_of(built: Built) -> Check:
    """Return the check of a module's output, and of its gradients along random directions."""
    # A module may be off by some roundings after each other, of its largest number.
    loose = (200 if built.dtype == "float32" else 12) * EPS[built.dtype]

    def check(names: Names) -> None:
        given: Names = {
            n: None if names[n] is None else np.asarray(names[n], np.float64)
            for n in ("text", "image", "bias")
        }
        compare_layer(names, lambda values: reference(built, values, given), built.dtype, loose)

    return check


def compare_layer(
    names: Names, run: Callable[[dict[str, np.ndarray]], np.ndarray], dtype: str, loose: float
) -> None:
    """Compare a layer's output, and its gradients along random directions, with float64.

    Args:
        names: `layer`, the input `x`, the output `out`, its cotangent `way`, and `grads` and `dx`.
        run: computes the output from the parameters and x.
        dtype: of the layer.
        loose: the relative error.
    """
    values = numbers_of(nnx.state(names["layer"], nnx.Param))
    values["x"] = np.asarray(names["x"], np.float64)
    way, want = np.asarray(names["way"], np.float64), run(values)
    bound = np.full(want.shape, loose * max(float(abs(want).max(initial=0)), 1.0))
    compare("out", names["out"], Bounded(want, bound), dtype, 1.0)
    rng, grads = np.random.default_rng(0), numbers_of(names["grads"])
    grads["x"] = np.asarray(names["dx"], np.float64)
    for name, start in values.items():
        ahead = rng.standard_normal(start.shape)
        plus, minus = (
            float((run(values | {name: start + step * ahead}) * way).sum())
            for step in (STEP, -STEP)
        )
        slope = (plus - minus) / (2 * STEP)
        compare_slope(name, grads.get(name), ahead, slope, way, dtype, loose)


def numbers_of(state: Any) -> dict[str, np.ndarray]:
    """Return every array of a state by its dotted path, in float64."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
    return {".".join(str(k.key) for k in path): np.asarray(x, np.float64) for path, x in leaves}


def compare_slope(
    name: str, grad: Any, ahead: Any, want: float, way: Any, dtype: str, loose: float
) -> None:
    """Compare sum(gradient * ahead) with the difference of the reference.

    Args:
        name: of the array that was moved.
        grad: its gradient.
        ahead: the direction in which it was moved.
        want: the difference of the reference.
        way: the cotangent of the output.
        dtype: of the module.
        loose: its relative error.
    """
    if grad is None or grad.shape != ahead.shape:
        raise Wrong(f"the gradient of {name} is {None if grad is None else grad.shape}")
    got = float((grad * ahead).sum())
    # A gradient that is 0, such as that of to_k's bias, is a sum of roundings all the same.
    rounded = 0.0 if dtype == "float32" else 0.05 * float(np.sqrt((way**2).sum()))
    size = float(np.sqrt((grad**2).sum())) + abs(want) + 1.0 + rounded
    if not abs(got - want) <= 3 * loose * size:
        line = f"print({name!r}, 'gradient along a way {got:.6g}, expected {want:.6g}')"
        raise Wrong(f"the gradient of {name} along a way is {got:.6g}, expected {want:.6g}", line)


# ---- the modules in float64 ----------------------------------------------------------------------


def reference(built: Built, p: Params, given: Names) -> np.ndarray:
    """Compute a module on `p["x"]`; for joint attention on picture and text, concatenated."""
    s, x, text, image = built.sizes, p["x"], given["text"], given["image"]
    allowed = built.tree.allowed(s) if built.tree else np.ones((1, 1, 1, 1), bool)

    def project(layer: str, norm: str, tokens: Any, heads: int) -> np.ndarray:
        return _normed(built, p, norm, linear(p, layer, tokens), heads)

    if built.kind == "JointAttention":  # the text's tokens come first
        layers = (
            ("add_q_proj", "norm_added_q", "to_q", "norm_q", s.n),
            ("add_k_proj", "norm_added_k", "to_k", "norm_k", s.k),
            ("add_v_proj", "", "to_v", "", s.k),
        )
        q, k, v = (
            np.concatenate([project(added, na, text, n), project(own, no, x, n)], axis=1)
            for added, na, own, no, n in layers
        )
        out = _attend(built, _rotated(built, q), _rotated(built, k), v, allowed, given["bias"])
        n = text.shape[1]
        picture, words = linear(p, "to_out", out[:, n:]), linear(p, "to_add_out", out[:, :n])
        return np.concatenate([picture.ravel(), words.ravel()])
    keys = x if text is None else text
    q, k = project("to_q", "norm_q", x, s.n), project("to_k", "norm_k", keys, s.k)
    k = _rotated(built, k) if text is None else k  # the keys of a text have no positions
    v = project("to_v", "", keys, s.k)
    q = _rotated(built, q)
    out = _attend(built, q, k, v, allowed, given["bias"])
    if image is not None:
        k = project("add_k_proj", "norm_added_k", image, s.k)
        every = np.ones((1, 1, 1, 1), bool)
        out = out + _attend(built, q, k, project("add_v_proj", "", image, s.k), every, None)
    return linear(p, "to_out", out)


def linear(p: Params, name: str, x: Any) -> np.ndarray:
    return x @ p[f"{name}.kernel"] + p.get(f"{name}.bias", 0.0)


def _normed(built: Built, p: Params, norm: str, y: np.ndarray, heads: int) -> np.ndarray:
    """Split channels into heads, [B, T, heads, H], and apply the norm if there is one."""

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + built.eps) * p[f"{norm}.scale"]

    if built.norm == "rms_norm_across_heads" and norm:
        y = rms(y)
    y = y.reshape(*y.shape[:2], heads, built.sizes.h)
    if built.norm == "rms_norm" and norm:
        return rms(y)
    if built.norm == "layer_norm" and norm:
        return rms(y - y.mean(-1, keepdims=True)) + p[f"{norm}.bias"]
    return y


def _rotated(built: Built, x: np.ndarray) -> np.ndarray:
    return x if built.theta is None else rotated(x, np.arange(x.shape[1]), built.theta, built.style)


def rotated(x: np.ndarray, positions: np.ndarray, theta: float, style: str) -> np.ndarray:
    """Rotate pairs of channels of [..., T, N, H] by t * theta ** (-2 i / H), as complex numbers."""
    h = x.shape[-1]
    turn = np.exp(1j * positions[:, None] * theta ** (-2 * np.arange(h // 2) / h))[:, None]
    if style == "half":
        z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def _attend(built: Built, q: Any, k: Any, v: Any, allowed: Any, bias: Any) -> np.ndarray:
    """Return attention, [B, T, N * H]."""
    s = built.sizes
    k, v = (np.repeat(x, s.n // s.k, axis=2) for x in (k, v))
    # [B,T,N,H], [B,S,N,H] -> [B,N,T,S]
    x = np.einsum("btnh,bsnh->bnts", q, k) * (s.h**-0.5 if built.scale is None else built.scale)
    x = x if bias is None else x + bias
    out = np.einsum("bnts,bsnh->btnh", softmax(x, np.broadcast_to(allowed, x.shape))[0], v)
    return out.reshape(*out.shape[:2], -1)
