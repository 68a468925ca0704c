"""Draws that share programs are jax's own, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import draws


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (draws.SIZES[0] + 1,)])
@pytest.mark.parametrize(("name", "bounds"), [("_normal", ()), ("_truncated_normal", (-2, 2))])
def test_first_numbers_of_a_longer_draw(
    name: str, bounds: tuple[int, ...], shape: tuple[int, ...], dtype: str
) -> None:
    draw, how = getattr(draws.HOME, name), {"shape": shape, "dtype": jnp.dtype(dtype)}
    got, want = (f(jax.random.key(3), *bounds, **how) for f in (draw, draw.__wrapped__))
    assert (got.aval, got.sharding, got.committed) == (want.aval, want.sharding, want.committed)
    np.testing.assert_array_equal(got, want)


def test_draws_inside_of_a_program_and_on_a_mesh_are_left_to_jax() -> None:
    key = jax.random.key(0)
    assert jax.jit(lambda key: jax.random.normal(key, (3,)))(key).shape == (3,)
    mesh = jax.make_mesh((8,), ("data",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    drawn = jax.random.normal(jax.device_put(key, here), (3,))
    assert drawn.sharding.device_set == set(jax.devices())
