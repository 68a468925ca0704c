"""What both kernels of `tpu_flash` ask of the mask: where a step is, and which pairs it allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes.sizes import LANES
from maxattn.kernels.splash.calls import Blocks, Setup
from maxattn.kernels.transposed.steps import Steps


class Operand(NamedTuple):
    """Hold an array that a kernel reads, under a name, and how its blocks are laid out."""

    name: str
    array: Array
    spec: Any


class KernelForm(NamedTuple):
    """Hold what a kernel's code depends on.

    Args:
        blocks: queries and keys of a tile, and keys computed at once.
        count: steps of a row of tiles where they are listed, else 0.
        code: tells from codes of queries and indexes of keys which pairs attend, or None.
        columns: blocks of keys where segment ids mark tiles, else 0.
    """

    blocks: Blocks
    count: int
    code: Callable[..., Any] | None
    columns: int

    @staticmethod
    def of(setup: Setup, steps: Steps | None, blocks: Blocks) -> KernelForm:
        """Read off the mask."""
        columns = 0 if setup.ids is None else setup.padded[1] // blocks[1]
        return KernelForm(blocks, 0 if steps is None else steps.count, setup.code, columns)

    @property
    def masks(self) -> bool:
        """Whether some tiles evaluate the mask."""
        return self.code is not None or bool(self.columns)

    def parts(self) -> list[slice]:
        """Divide the keys of a tile into those computed at once; the last may be fewer."""
        _, block_kv, compute = self.blocks
        return [slice(n, min(n + compute, block_kv)) for n in range(0, block_kv, compute)]


def listed_block(count: int, row: Any, step: Any, block: Any = None, mark: Any = None) -> Any:
    """Return the block of a step: of its list, or its number where nothing is listed."""
    return step if block is None else block[row * count + step]


def allowed(shape: tuple[int, ...], read: Any, form: KernelForm, keys: slice, block: Any) -> Array:
    """Evaluate the mask for some keys of a block, [keys, block_q].

    Args:
        shape: of the result.
        read: the kernel's operands by name.
        form: of the kernel.
        keys: of the block.
        block: number of the block of keys.
    """
    found = None
    if form.code is not None:
        index = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (
            block * form.blocks[1] + keys.start
        )
        found = form.code(jnp.broadcast_to(read["codes"][...], shape), index)
    if form.columns:
        lanes = jnp.broadcast_to(read["kv_ids"][:, keys], (LANES, shape[0])).T
        same = jnp.broadcast_to(lanes[:, :1], shape) == read["q_ids"][...]
        found = same if found is None else found & same
    assert found is not None
    return found
