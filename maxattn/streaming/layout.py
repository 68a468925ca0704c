"""The slot of each frame in a cache, and the cache's sharding over a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxattn.errors import InputError, MeshError, did_you_mean
from maxattn.sharding import MeshShape, spec_of

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from maxattn.streaming.stream import Stream

POSITIONS = ("absolute", "slots", "slots_with_sink")
CONTEXT = ("heads", "tokens")


@dataclass(frozen=True)
class CacheLayout:
    """The slots of a cache, and their sharding over a mesh; both are known before tracing.

    Args:
        stream: the blocks, the window and the sink.
        frames: number of slots, each for the keys and values of one frame.
        positions, context: as for `KVCache.empty`.
        mesh: (axis, size) of the mesh.
    """

    stream: Stream
    frames: int
    positions: str = "absolute"
    mesh: MeshShape = ()
    context: str = "heads"

    def __post_init__(self) -> None:
        for setting, names in (("positions", POSITIONS), ("context", CONTEXT)):
            if (value := getattr(self, setting)) not in names:
                remedy = did_you_mean(str(value), names) or f"leave it out for {names[0]!r}"
                rule = f"it must be one of {', '.join(names)}"
                raise InputError(setting, repr(value), rule, remedy)
        if self.positions == "slots" and self.sink:
            rule = (
                f"with sink={self.sink}, positions by slot change the distances from the sink to"
                " later frames"
            )
            remedy = "set positions='absolute', or 'slots_with_sink' if the model was trained so"
            raise InputError("positions", self.positions, rule, remedy)

    # ---- slots -----------------------------------------------------------------------------------

    @property
    def sink(self) -> int:
        """Number of slots whose frame is never replaced."""
        return 0 if self.stream.window is None else self.stream.sink

    @property
    def is_roped(self) -> bool:
        """Whether keys are kept rotated."""
        return self.positions == "absolute"

    def places(self, end: Int[Array, "..."]) -> Int[Array, "... F"]:
        """Return the place in the window of each slot's frame; `end` is after the last frame."""
        end, ring = jnp.asarray(end)[..., None], self.frames - self.sink
        slot = jnp.arange(self.frames).reshape((1,) * (end.ndim - 1) + (-1,))
        oldest = (end - self.sink) % ring
        turned = self.sink + (slot - self.sink - oldest) % ring
        rolled = (end > self.frames) & (slot >= self.sink)
        return jnp.where(rolled, turned, slot)

    def turned(self, x: Float[Array, "L B S K H"], behind: int) -> Float[Array, "L B S K H"]:
        """Move frames after the sink to the slots that they would have `behind` frames later."""
        slots = self._by_slot(x)
        ring = jnp.roll(slots[:, :, :, self.sink :], behind, axis=3)
        return slots.at[:, :, :, self.sink :].set(ring).reshape(x.shape)

    def joined(self, a: Array, b: Array) -> Array:
        """Append the slots of `b` to the slots of `a`."""
        both = jnp.concatenate([self._by_slot(a), self._by_slot(b)], axis=3)
        return both.reshape(*a.shape[:2], -1, *a.shape[3:])

    def _by_slot(self, x: Array) -> Array:
        """Split axis 2 into [devices, slots, tokens]: a device has some tokens of every slot."""
        layers, batch, _, *heads = x.shape
        return x.reshape(layers, batch, self.token_ways, -1, self.tokens, *heads)

    # ---- the mesh --------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return dict(self.mesh).get("context", 1)

    @property
    def token_ways(self) -> int:
        """Number of devices that a frame's tokens are split over."""
        return self.ranks if self.context == "tokens" else 1

    @property
    def head_ways(self) -> int:
        """Number of devices that the heads are split over."""
        return dict(self.mesh).get("tensor", 1) * self.ranks // self.token_ways

    @property
    def tokens(self) -> int:
        """Number of a frame's tokens that one device keeps."""
        return self.stream.tokens_per_frame // self.token_ways

    def spec(self, letters: str) -> PartitionSpec:
        """Return an array's sharding by its axes' letters; F has the tokens of frames or slots."""
        axes = dict(zip(letters, spec_of(letters, self.mesh), strict=True))
        context = ("context",) if self.ranks > 1 else ()
        heads = tuple(a for a in ("tensor",) if a in dict(self.mesh))
        # Modules split heads over tensor; context splits the heads of a tensor rank further, so
        # that no head moves to another tensor rank.
        of_heads = heads if self.context == "tokens" else (*heads, *context)
        of_tokens = context if self.context == "tokens" else ()
        axes |= {"N": of_heads or None, "K": of_heads or None, "F": of_tokens or None}
        return PartitionSpec(*(axes[c] for c in letters))

    def zeros(self, shape: tuple[int, ...], dtype: str, letters: str, mesh: Any) -> Any:
        """Make zeros that are sharded from the start: no device ever has all of them."""
        if mesh is None:
            return jnp.zeros(shape, dtype)
        spec = self.spec(letters)
        where = NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec
        return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=where)()

    def check_sizes(self, batch: int, kv_heads: int) -> None:
        """Refuse sizes that do not divide over the mesh."""
        sizes = dict(self.mesh)
        ways = sizes.get("data", 1) * sizes.get("fsdp", 1)
        if batch % ways:
            rule = f"the batch must divide over the {ways} devices of data and fsdp"
            raise MeshError("batch", batch, rule, f"give a multiple of {ways}")
        if kv_heads % self.head_ways:
            over = "tensor" if self.context == "tokens" else "context and tensor"
            rule = f"key heads must divide over the {self.head_ways} devices of {over}"
            tokens = ", or context='tokens'" if self.context == "heads" and self.ranks > 1 else ""
            raise MeshError("kv_heads", kv_heads, rule, f"use fewer devices{tokens}")
        per_frame = self.stream.tokens_per_frame
        if per_frame % self.token_ways:
            rule = f"the tokens of a frame must divide over the {self.ranks} devices of context"
            remedy = "use a context axis that divides them, or context='heads'"
            raise MeshError("tokens_per_frame", per_frame, rule, remedy)
