"""Norm and rotary embedding in one kernel: interpreted, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.modules.norm_rope import NormRopeRow, triton
from maxattn.modules.norm_rope.fused import Work, _fused_fwd, on_shard
from maxattn.modules.norm_rope.triton_row import TritonRow
from tests.jaxprs import of_primitive

RNG = np.random.default_rng(5)
EPS = 1e-6
# heads, head dim, norm, style, batch, tokens, tables of each example, bias of the projection
CASES: dict[str, tuple[Any, ...]] = {
    "across-interleaved-1536": (12, 128, "across", "interleaved", 2, 3, False, True),
    "across-half-5120": (40, 128, "across", "half", 1, 3, False, True),
    "head-interleaved-512": (8, 64, "head", "interleaved", 2, 3, True, False),
    "head-half-1536": (24, 64, "head", "half", 2, 3, True, True),
    "across-no_rotary-odd_heads": (5, 64, "across", None, 2, 3, False, True),
    "no_norm-interleaved-wide_heads": (3, 256, None, "interleaved", 2, 3, False, False),
    # So many channels a thread that nothing is held and no row read ahead.
    "across-interleaved-832": (13, 64, "across", "interleaved", 2, 20, False, True),
    "head-half-1792": (7, 256, "head", "half", 2, 5, False, True),
}


def made(
    case: tuple[Any, ...],
) -> tuple[NormRopeRow, dict[str, np.ndarray], dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    n, h, norm, style, b, t, own, bias = case
    arrays = {name: RNG.standard_normal((b, t, n, h)) for name in ("x", "dy")}
    vectors = {"bias": RNG.standard_normal((n, h))} if bias else {}
    if norm:
        vectors["scale"] = 1 + 0.3 * RNG.standard_normal((n, h))
    angles = RNG.uniform(0, 6, (b if own else 1, t, h // 2))
    return (
        NormRopeRow(n, h, norm, EPS, style),
        arrays,
        vectors,
        (np.cos(angles), np.sin(angles)) if style else (),
    )


def exact(row: NormRopeRow, x: Any, vectors: dict[str, Any], tables: Any) -> Any:
    """Norm and turn pairs as complex numbers, in the dtype of x."""
    z = x + vectors.get("bias", 0.0)
    if row.norm:
        z = z / jnp.sqrt(
            jnp.mean(z * z, (2, 3) if row.norm == "across" else 3, keepdims=True) + row.eps
        )
    z = z * vectors.get("scale", 1.0)
    if not row.style:
        return z
    last = row.style == "interleaved"
    pairs = (
        z.reshape(*z.shape[:3], -1, 2)
        if last
        else jnp.moveaxis(z.reshape(*z.shape[:3], 2, -1), 3, 4)
    )
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (tables[0] + 1j * tables[1])[:, :, None]
    return jnp.stack((turned.real, turned.imag), -1 if last else 3).reshape(z.shape)


def error(got: Any, want: Any) -> float:
    want = np.asarray(want, np.float64)
    return float(np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want)))


def with_gradients(f: Any, inputs: tuple[Any, ...], dy: Any) -> tuple[Any, Any]:
    """Return a function's result and the gradients of all its inputs, as one program."""

    @jax.jit
    def both(inputs: Any, dy: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(f, *inputs)
        return y, pull(dy)

    return both(inputs, dy)


def float32(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


# Of two that norm each head and have tables of each example, the smaller.
LONGER = dict.fromkeys(("head-half-1536", "across-interleaved-1536"), pytest.mark.slow)


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[n], id=n, marks=LONGER.get(n, ())) for n in CASES]
)
def test_result_and_gradients(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    row, arrays, vectors, tables = made(case)
    # Few programs, so that one has several rows, and not all as many.
    monkeypatch.setattr(TritonRow, "programs", max(2, len(arrays["x"][0]) - 1))

    def fused(x: Any, vectors: Any, tables: Any) -> Any:
        return on_shard(Work(row, "interpreted"), x, vectors, tables)

    inputs, dy = (arrays["x"], vectors, tables), arrays["dy"]
    got, got_gradients = with_gradients(fused, float32(inputs), float32(dy))
    with jax.enable_x64(True):
        want, gradients = with_gradients(lambda *of: exact(row, *of), inputs, dy)
    assert error(got, want) < 1e-6
    errors = jax.tree.map(error, got_gradients, gradients)
    assert all(e < 2e-6 for e in jax.tree.leaves(errors)), errors


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_rounded_once(dtype: Any) -> None:
    row, arrays, vectors, tables = made(CASES["across-interleaved-1536"])
    x, v, t = jnp.asarray(arrays["x"], dtype), float32(vectors), float32(tables)
    y = on_shard(Work(row, "interpreted"), x, v, t)
    whole = on_shard(Work(row, "interpreted"), x.astype(jnp.float32), v, t)
    half = 0.5 * float(
        jnp.finfo(dtype).eps
    )  # of the distance to the next number, at most; two programs differ a little
    np.testing.assert_allclose(np.asarray(y, np.float32), whole, rtol=1.01 * half, atol=1e-7)


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_vectors_are_read_as_they_are(style: str) -> None:
    """A scale that all heads share, and dtypes of their own: so are the gradients."""
    row, arrays, vectors, tables = made((8, 64, "head", style, 2, 3, True, True))
    given = {
        "bias": jnp.asarray(vectors["bias"], jnp.bfloat16),
        "scale": jnp.asarray(vectors["scale"][:1], jnp.float32),
    }
    exactly = {name: np.asarray(v, np.float64) for name, v in given.items()}
    x, dy, t = float32((arrays["x"], arrays["dy"], tables))

    def fused(v: Any) -> Any:
        return on_shard(Work(row, "interpreted"), x, v, t)

    _, (got,) = with_gradients(fused, (given,), dy)
    with jax.enable_x64(True):
        by_formula = partial(exact, row, arrays["x"], tables=tables)
        _, (want,) = with_gradients(by_formula, (exactly,), arrays["dy"])
    assert {name: (v.shape, v.dtype) for name, v in got.items()} == {
        n: (v.shape, v.dtype) for n, v in given.items()
    }
    assert error(got["bias"], want["bias"]) < 4e-3 and error(got["scale"], want["scale"]) < 2e-6


@pytest.mark.parametrize(("norm", "kept"), [("across", True), ("head", False), (None, False)])
def test_the_forward_keeps_what_spans_heads(norm: str | None, kept: bool) -> None:
    row, x = (
        NormRopeRow(4, 16, norm, EPS, None),
        jnp.asarray(RNG.standard_normal((6, 4, 16)), jnp.float32),
    )
    _, r = triton.forward(row, x, {}, (), keep=True, interpret=True)
    assert triton.forward(row, x, {}, (), interpret=True)[1] is None and (r is not None) == kept
    assert (_fused_fwd(Work(row, "interpreted"), x, {}, ())[1][1] is not None) == kept
    if r is not None:
        np.testing.assert_allclose(r, np.mean(np.asarray(x) ** 2, (1, 2)) ** -0.5, rtol=1e-5)


def test_programs_are_not_more_than_rows() -> None:
    row, x = NormRopeRow(12, 128, "across", EPS, None), jnp.zeros((7, 12, 128))
    jaxpr = jax.make_jaxpr(lambda x, r: triton.backward(row, x, x, r, {}, (), interpret=True))(
        x, x[:, 0, 0]
    )
    (call,) = of_primitive(jaxpr.jaxpr, "pallas_call")
    assert call.params["grid_mapping"].grid == (7,) and TritonRow.of(row).programs > 7
