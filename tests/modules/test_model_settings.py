"""What single models need of the modules: no output projection, gates, a text without an output,
zero-centred norms, angles of each head and of part of a head. Against float64, with gradients, on
meshes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import maxattn as ma
from maxattn.sharding import place
from tests.modules.reference import attend, linear, params_of, randomise

RNG = np.random.default_rng(21)
B, T, S, C, N, H = 2, 12, 8, 24, 4, 8
X, TEXT = (RNG.standard_normal((B, n, C)).astype(np.float32) for n in (T, S))
ANGLES = RNG.uniform(0, 6, (B, T, N, H // 2))
PARTIAL = RNG.uniform(0, 6, (1, T, 1, H // 2 - 1))
CONFIG = ma.AttentionConfig(attention="dot_product", cross_attention="dot_product")


def table(angles: np.ndarray, style: str = "interleaved", partial: bool = False) -> ma.Rotary:
    cos, sin = np.cos(angles), np.sin(angles)
    return ma.Rotary(cos.astype(np.float32), sin.astype(np.float32), style, partial)


SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "heads_joined": ({"out_proj": False}, None),
    "gate_of_heads": ({"gate": "per_head", "bias": True}, None),
    "gate_of_channels": ({"gate": "per_channel", "kv_heads": 2}, None),
    "gated_heads_joined": ({"gate": "per_head", "out_proj": False, "out_dim": N * H}, None),
    "zero_centred_norms": ({"qk_norm": "zero_centred_rms_norm"}, table(ANGLES[:, :, :1])),
    "angles_of_heads": ({}, table(ANGLES)),
    "angles_of_heads_in_halves": ({}, table(ANGLES, "half")),
    "angles_of_a_part": ({}, table(PARTIAL[:, :, 0], "half", partial=True)),
}


def built(how: dict[str, Any], kind: Any = ma.FlaxAttention, mesh: Any = None) -> Any:
    made = {"heads": N, "dim_head": H, "config": CONFIG, "rngs": nnx.Rngs(0), "mesh": mesh}
    module = kind(C, **(made | how))
    randomise(module)
    return module


def turned(x: Any, rotary: ma.Rotary | None) -> Any:
    """Rotate pairs as complex numbers."""
    if rotary is None:
        return x
    cos, sin = (np.asarray(a, np.float64) for a in (rotary.cos, rotary.sin))
    cos, sin = (a if a.ndim == 4 else a.reshape(-1, x.shape[1], 1, a.shape[-1]) for a in (cos, sin))
    d = cos.shape[-1]
    of = (slice(0, 2 * d, 2), slice(1, 2 * d, 2))
    a, b = of if rotary.style == "interleaved" else (slice(0, d), slice(d, 2 * d))
    first, second = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return x.at[..., a].set(first).at[..., b].set(second)


def wanted(p: dict[str, Any], x: Any, text: Any, module: Any, rotary: Any) -> Any:
    """Write the module again, in float64."""

    def heads(name: str, of: Any) -> Any:
        y = linear(p[name], of)
        return y.reshape(*y.shape[:2], -1, H)

    def normed(name: str, y: Any) -> Any:
        if module.qk_norm is None:
            return y
        mean = jnp.mean(y * y, -1, keepdims=True)
        return y / jnp.sqrt(mean + module.eps) * (1 + p[name]["scale"])

    q, k, v = heads("to_q", x), heads("to_k", text), heads("to_v", text)
    q, k = normed("norm_q", q), normed("norm_k", k)
    out = attend(turned(q, rotary), turned(k, rotary), v, xp=jnp)
    if module.gate == "per_head":
        out = out * (2 / (1 + jnp.exp(-linear(p["to_gate_logits"], x))))[..., None]
    out = out.reshape(*out.shape[:2], -1)
    if module.gate == "per_channel":
        out = out / (1 + jnp.exp(-linear(p["to_gate"], x)))
    return linear(p["to_out"], out) if module.out_proj else out


def with_gradients(f: Any, *inputs: Any) -> Any:
    def loss(*inputs: Any) -> Any:
        y = f(*inputs)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, tuple(range(len(inputs))), True))(*inputs)
    return y, grads


def close(got: Any, want: Any) -> None:
    for mine, exactly in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.max(np.abs(np.asarray(exactly)))
        np.testing.assert_allclose(mine, exactly, rtol=0, atol=2e-5 * max(1.0, float(scale)))


def in_float64(module: Any, x: Any, text: Any, rotary: Any) -> Any:
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.float64(a)) for a in (x, text)]
        params = jax.tree.map(jnp.asarray, params_of(module))
        return with_gradients(lambda p, x, t: wanted(p, x, t, module, rotary), params, *exact)


@pytest.mark.parametrize("name", SETTINGS)
def test_self_attention(name: str) -> None:
    how, rotary = SETTINGS[name]
    module = built(how)
    graph, params = nnx.split(module)
    got = with_gradients(lambda p, x: nnx.merge(graph, p)(x, rotary_emb=rotary), params, X)
    y, (by_params, by_x, by_keys) = in_float64(module, X, X, rotary)
    mine = nnx.to_pure_dict(got[1][0])
    close((got[0], mine, got[1][1]), (y, by_params, by_x + by_keys))
    assert got[0].shape == (B, T, module.out_dim)


@pytest.mark.parametrize("name", ["heads_joined", "gate_of_heads", "gate_of_channels"])
def test_cross_attention(name: str) -> None:
    how, _ = SETTINGS[name]
    module = built(how, ma.CrossAttention)
    graph, params = nnx.split(module)
    got = with_gradients(lambda p, x, t: nnx.merge(graph, p)(x, t), params, X, TEXT)
    y, (by_params, by_x, by_text) = in_float64(module, X, TEXT, None)
    mine = nnx.to_pure_dict(got[1][0])
    close((got[0], mine, got[1][1:]), (y, by_params, (by_x, by_text)))


MESHES = {
    "tensor": ({"data": 2, "tensor": 2, "context": 2}, AxisType.Auto),
    "explicit": ({"fsdp": 2, "tensor": 4}, AxisType.Explicit),
}


def on_meshes() -> list[Any]:
    """Let every setting meet a mesh, in turn; in `make test-all` both."""
    return [
        pytest.param(name, mesh, marks=() if (i + j) % 2 else pytest.mark.slow)
        for i, name in enumerate(SETTINGS)
        for j, mesh in enumerate(MESHES)
    ]


@pytest.mark.parametrize(("name", "mesh"), on_meshes())
def test_on_a_mesh(name: str, mesh: str) -> None:
    how, rotary = SETTINGS[name]
    sizes, kind = MESHES[mesh]
    devices = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes))
    if mesh == "explicit":
        how = how | {"kv_heads": None}
    one = built(how)
    placed = built(how, mesh=devices)
    place(placed, devices)
    batch = "fsdp" if "fsdp" in sizes else "data"
    x = jax.device_put(X, NamedSharding(devices, PartitionSpec(batch)))
    y = jax.jit(lambda x: placed(x, rotary_emb=rotary))(x)
    np.testing.assert_allclose(y, one(X, rotary_emb=rotary), atol=1e-5)


def rounded_once(got: Any, y: Any, norm: Any, rotary: ma.Rotary) -> None:
    """Hold queries to half of a step of bfloat16 from what float64 makes of the projection y."""
    with jax.enable_x64(True):
        z = jnp.asarray(np.asarray(y, np.float64)).reshape(B, -1, N, H)
        scale = np.asarray(norm.scale.get_value(), np.float64)
        normed = z / jnp.sqrt(jnp.mean(z * z, -1, keepdims=True) + norm.epsilon) * scale
        want = np.asarray(turned(normed, rotary))
    _, exponent = np.frexp(want)
    steps = np.abs(np.asarray(got, np.float64) - want) / 2.0 ** (exponent - 8)
    assert got.dtype == jnp.bfloat16 and steps.max() < 0.501


def test_norm_and_angles_are_rounded_once() -> None:
    module = built({"qk_norm": "rms_norm", "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16})
    x, rotary = jnp.asarray(X, jnp.bfloat16), table(ANGLES[:, :, 0])
    queries, *_ = module._heads(x, *module._queries_and_keys(x, rotary, None))
    rounded_once(queries, module.to_q(x), module.norm_q, rotary)


def test_each_part_of_a_joint_sequence_is_rounded_once() -> None:
    how = {"qk_norm": "rms_norm", "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    module, rotary = built(how, ma.JointAttention), table(ANGLES)
    text, x = (jnp.asarray(a, jnp.bfloat16) for a in (TEXT[:, :5], X[:, 5:]))
    both = module._joint_heads(text, x, rotary)[1]
    mine, theirs = (table(part) for part in np.split(ANGLES, [5], 1))
    rounded_once(both[:, :5], module.add_q_proj(text), module.norm_added_q, mine)
    rounded_once(both[:, 5:], module.to_q(x), module.norm_q, theirs)


OF_BOTH = table(RNG.uniform(0, 6, (B, S + T, N, H // 2)), "half")


@pytest.mark.parametrize("how", [{"text_out": False}, {"out_proj": False}], ids=["no_text", "raw"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_joint_attention(how: dict[str, Any], kind: AxisType) -> None:
    """The last block of a model reads the picture alone: no weights for a text's output."""
    whole, module = (built(each, ma.JointAttention) for each in ({}, how))
    shared = {k: v for k, v in nnx.to_pure_dict(nnx.state(whole)).items() if hasattr(module, k)}
    nnx.update(module, shared)
    (picture, text), (want, want_text) = (m(X, TEXT, OF_BOTH) for m in (module, whole))
    if "text_out" in how:
        assert text is None and not hasattr(module, "to_add_out")
        np.testing.assert_allclose(picture, want, atol=1e-6)
    else:
        assert picture.shape == (B, T, N * H) and text.shape == (B, S, N * H)
        np.testing.assert_allclose(whole.to_out(picture), want, atol=1e-5)
        np.testing.assert_allclose(whole.to_add_out(text), want_text, atol=1e-5)
    devices = jax.make_mesh((2, 4), ("data", "tensor"), (kind,) * 2)
    place(module, devices)
    x, t = (jax.device_put(a, NamedSharding(devices, PartitionSpec("data"))) for a in (X, TEXT))
    with jax.set_mesh(devices):
        spread = jax.jit(lambda x, t: module(x, t, OF_BOTH))(x, t)
    close(spread, (picture, text))


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"gate": "per_head"}, {"to_gate_logits.weight", "to_gate_logits.bias"}),
        ({"gate": "per_channel"}, {"to_gate.weight"}),
        ({"gate": "per_channel", "bias": True}, {"to_gate.weight", "to_gate.bias"}),
        ({"out_proj": False}, set()),
    ],
)
def test_names_are_diffusers(how: dict[str, Any], names: set[str]) -> None:
    module = built(how)
    weights = ma.weights.to_diffusers(module)
    assert {name for name in weights if "gate" in name} == names
    assert any("to_out" in name for name in weights) == module.out_proj
    assert ma.weights.load_diffusers(built(how), weights) == ma.weights.Loaded()
