"""`AttentionConfig`: every setting of attention.

`load.py` reads it from YAML, and `maxattn.decide` makes a plan from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from maxattn.config import rules
from maxattn.config.rules import AXES, Fallback, NotNegative, Positive, PositiveOrRest, Role
from maxattn.config.section import Section
from maxattn.errors import ConfigError, InputError, did_you_mean

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from maxattn.config.load import Overrides
    from maxattn.config.maxdiffusion import Imported


class FlashBlockSizes(Section):
    """Tile sizes of the flash kernels in tokens; the kernel chooses the unset ones."""

    block_q: Positive | None = None
    """Query tokens per tile, forward."""
    block_kv: Positive | None = None
    """Key tokens fetched per tile, forward."""
    block_kv_compute: Positive | None = None
    """Key tokens computed at once, forward; divides block_kv."""
    block_q_dkv: Positive | None = None
    """Query tokens per tile in the backward of K and V (of Q too when fused); divides block_q."""
    block_kv_dkv: Positive | None = None
    """Key tokens fetched per tile in the backward of K and V; divides block_kv."""
    block_kv_dkv_compute: Positive | None = None
    """Key tokens computed at once in the backward of K and V; divides block_kv_dkv."""
    block_q_dq: Positive | None = None
    """Query tokens per tile in the separate backward of Q; divides block_q."""
    block_kv_dq: Positive | None = None
    """Key tokens per tile in the separate backward of Q; divides block_kv."""
    use_fused_bwd_kernel: bool | None = None
    """Compute dQ, dK and dV in one kernel: usually faster, but stores a partial dQ per KV block."""

    __hash__ = Section.__hash__  # type checkers do not see the inherited one


class AttentionConfig(Section):
    """Every setting of attention; `maxattn config` explains each key.

    Raises:
        ConfigErrors: with every wrong key and value at once.

    Example:
        >>> import maxattn as ma
        >>> config = ma.AttentionConfig(attention="ring", ici_context_parallelism=4)
        >>> config.kernel_for("self"), config.strategy_for("self")
        ('auto', 'ring')
        >>> sorted(config.changed)
        ['attention', 'ici_context_parallelism']
        >>> config.replace(attention="rign")
        Traceback (most recent call last):
        maxattn.config.errors.ConfigErrors: attention: rign
          rule    it must be one of auto, dot_product, flash, ...
          remedy  did you mean 'ring'?
    """

    attention: rules.Attention = "auto"
    """Kernel of self-attention, or a context strategy with the best kernel inside it."""
    attention_kernel: rules.KernelName | None = None
    """Kernel inside a context strategy; unset: the kernel that `attention` names, or the best."""
    cross_attention: rules.KernelName = "auto"
    """Kernel of cross-attention: its K and V are short and replicated, so it takes no strategy."""
    context_parallel: rules.Strategy = "auto"
    """Context strategy of self-attention, for a context axis of more than one device."""
    flash_block_sizes: FlashBlockSizes = FlashBlockSizes()
    """Tile sizes of the flash kernels."""
    flash_min_seq_length: NotNegative = 0
    """If a call has fewer queries than this, dot_product runs instead of a flash kernel."""
    mask_padding_tokens: bool = True
    """Mask the padding that the caller's mask names; false is faster, but attends to padding."""
    split_head_dim: bool = True
    """Keep batch and heads as two axes in dot_product, or merge them; results are equal."""
    float32_qk_product: bool = False
    """Cast Q and K to float32 before their product; false keeps their dtype and sums in float32."""
    use_memory_efficient_attention: bool = False
    """Run dot_product blockwise: memory grows linearly with the length, not quadratically."""
    query_chunk_size: Positive | None = None
    """Queries per block of memory-efficient dot_product; unset: by length and mask."""
    key_chunk_size: Positive | None = None
    """Keys per block of memory-efficient dot_product; unset: 16384, or fewer by the mask."""
    hardware: rules.Hardware | None = None
    """Platform that plans are for, and that must be present; unset: this machine's platform."""

    mesh_axes: rules.Axes = AXES
    """Axes of the device mesh, outermost first."""
    ici_data_parallelism: PositiveOrRest = -1
    """Devices per slice that split the batch; -1 takes the remaining devices."""
    ici_fsdp_parallelism: PositiveOrRest = 1
    """Devices per slice that split the batch and the parameters."""
    ici_context_parallelism: PositiveOrRest = 1
    """Devices per slice that split the sequence."""
    ici_tensor_parallelism: PositiveOrRest = 1
    """Devices per slice that split the heads."""
    dcn_data_parallelism: PositiveOrRest = -1
    """Slices that split the batch; -1 takes the remaining slices."""
    dcn_fsdp_parallelism: PositiveOrRest = 1
    """Slices that split the batch and the parameters."""
    dcn_context_parallelism: PositiveOrRest = 1
    """Slices that split the sequence."""
    dcn_tensor_parallelism: PositiveOrRest = 1
    """Slices that split the heads."""
    ici_fsdp_batch_parallelism: PositiveOrRest | None = None
    """GPU spelling: if set, it sizes the fsdp axis, and ici_fsdp_parallelism the context axis."""
    attention_sharding_uniform: bool = True
    """False: if no strategy is named, self-attention splits its heads over context (ulysses)."""

    use_base2_exp: bool = False
    """Compute the softmax with exp2, in kernels that support it."""
    use_experimental_scheduler: bool = False
    """Use the TPU compiler's experimental scheduler, in kernels that support it."""
    ulysses_shards: PositiveOrRest = -1
    """Devices of the context axis that exchange heads in ulysses_ring; -1: maxattn chooses."""
    ring_direction: rules.RingDirection = "auto"
    """How K and V go round a ring: one_way, or both_ways (half of the heads each); auto chooses."""
    ulysses_attention_chunks: Positive = 1
    """Groups of heads that ulysses exchanges one after the other, to overlap with compute."""
    deterministic: bool = False
    """Use only kernels whose backward is bitwise reproducible; refuse the others."""
    check_finite: bool = False
    """Refuse NaN and infinity in the operands of each call; for debugging."""
    remat_policy: rules.RematPolicy = "NONE"
    """What a training step recomputes in the backward pass."""
    fallback: Fallback | None = None
    """If kernel or strategy cannot run: error, warn or allow another; unset: see `fallback_for`."""

    enable_jax_named_scopes: bool = False
    """Name the phases of attention in profiles."""
    enable_profiler: bool = False
    """Record a profile of some training steps."""
    profiler_steps: Positive = 3
    """Number of training steps in the profile."""
    skip_first_n_steps_for_profiler: NotNegative = 5
    """Number of training steps before the profile."""

    __hash__ = Section.__hash__  # type checkers do not see the inherited one

    @model_validator(mode="before")
    @classmethod
    def _empty_block_sizes(cls, data: Any) -> Any:
        # `flash_block_sizes:` with all of its lines commented out reads as null.
        if isinstance(data, dict) and data.get("flash_block_sizes", ...) is None:
            return {key: value for key, value in data.items() if key != "flash_block_sizes"}
        return data

    @classmethod
    def settled(cls, values: Mapping[str, Any], given: Set[str]) -> Mapping[str, Any]:
        """Set an unset data axis to 1 if another axis takes the remaining devices."""
        return rules.data_defaults(values, given)

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Yield an error for each pair of keys that contradict each other."""
        return rules.contradictions(values)

    def kernel_for(self, role: Role) -> str:
        """Return the configured kernel for "self" or "cross"; "auto" leaves the choice open."""
        if _checked(role) == "cross":
            return self.cross_attention
        named = rules.kernel_and_strategy(self.attention)[0]
        return named if named != "auto" else self.attention_kernel or "auto"

    def strategy_for(self, role: Role) -> str:
        """Return the configured context strategy for "self"; "auto" leaves the choice open.

        The strategy for "cross" is always "none".
        """
        if _checked(role) == "cross":
            return "none"
        named = rules.kernel_and_strategy(self.attention)[1]
        return named if named != "auto" else self.context_parallel

    def fallback_for(self, role: Role) -> Fallback:
        """Return `fallback` or its default: the reaction if kernel or strategy cannot run.

        The default is "error" if the config names a kernel or strategy for this role ("self" or
        "cross"), else "warn".
        """
        if self.fallback is not None:
            return self.fallback
        named = self.kernel_for(role) != "auto" or self.strategy_for(role) not in ("auto", "none")
        return "error" if named else "warn"

    def spelling_note(self) -> str | None:
        """Return a note if `attention` names a kernel and a strategy in one word, else None."""
        if self.attention not in rules.FOREIGN:
            return None
        kernel, strategy = rules.kernel_and_strategy(self.attention)
        return f"attention: {self.attention} is read as {strategy} with {kernel} inside"

    def axis_parallelism(self) -> dict[str, tuple[int, int]]:
        """Return (devices in a slice, slices) for each axis; -1 takes the remaining ones."""
        ici, dcn = (rules.axis_sizes(self.__dict__, kind) for kind in ("ici", "dcn"))
        return {axis: (ici[axis], dcn[axis]) for axis in self.mesh_axes}

    def axis_mapping_note(self) -> str | None:
        """Return a note on the axes that `ici_fsdp_batch_parallelism` sets; None if it is unset."""
        if self.ici_fsdp_batch_parallelism is None:
            return None
        return (
            f"ici_fsdp_batch_parallelism={self.ici_fsdp_batch_parallelism} sets the fsdp axis, "
            f"ici_fsdp_parallelism={self.ici_fsdp_parallelism} sets the context axis"
        )

    def make_mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Build the device mesh of `mesh_axes` and the parallelisms.

        Args:
            devices: default all devices of the process.

        Raises:
            InputError: `devices` is not a list of devices.
            MeshError: the product of the parallelisms is not the number of devices.

        Example:
            >>> import jax
            >>> config = ma.AttentionConfig(mesh_axes=["data", "context"])
            >>> dict(config.make_mesh(jax.devices()[:1]).shape)
            {'data': 1, 'context': 1}
        """
        from maxattn.sharding import make_mesh

        return make_mesh(self.axis_parallelism(), _checked_devices(devices))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Overrides = ()) -> Self:
        """Read a YAML file, apply overrides, and validate.

        The top-level mappings `model`, `data`, `training`, `sampling` and `rollout` belong to the
        program around attention. They are ignored unless a subclass declares such a field.

        Args:
            path: the file.
            overrides: `key=value` texts with dotted keys and YAML values, or a dict of values by
                key. If a key occurs twice, the last value counts.

        Raises:
            ConfigErrors: with every problem of the file and the overrides, by file and line.
        """
        from maxattn.config.load import check_path, load

        check_path(path)
        return load(cls, path, overrides)

    @classmethod
    def from_maxdiffusion(
        cls, path: str | os.PathLike[str], overrides: Overrides = ()
    ) -> Imported[Self]:
        """Translate the attention and mesh keys of a MaxDiffusion YAML to a config.

        Args:
            path: the file.
            overrides: as for `from_yaml`, with maxattn's keys; applied after the translation.

        Returns:
            (config, left_out, notes): the settings, the names of keys that were not translated, and
            a note for each setting whose meaning or value differs from the file's.

        Raises:
            ConfigErrors: with every problem of the translated keys, by file and line.
        """
        from maxattn.config.maxdiffusion import load

        return load(cls, path, overrides)

    @classmethod
    def from_overrides(cls, overrides: Overrides) -> Self:
        """Build a config from defaults and overrides, as for `from_yaml`.

        Raises:
            ConfigErrors: with every problem, each with its override's number.

        Example:
            >>> words = ["attention=ring", "ici_context_parallelism=4", "mesh_axes=[context]"]
            >>> config = ma.AttentionConfig.from_overrides(words)
            >>> config.attention, config.axis_parallelism()
            ('ring', {'context': (4, 1)})
        """
        from maxattn.config.load import load

        return load(cls, None, overrides)


def _checked_devices(devices: object) -> list[jax.Device] | None:
    from jax import Device

    if devices is None:
        return None
    listed = list(devices) if isinstance(devices, Iterable) else []
    if listed and all(isinstance(device, Device) for device in listed):
        return listed
    count = devices if type(devices) is int and devices > 0 else 4
    rule = "it must be a list of jax devices"
    raise InputError("devices", devices, rule, f"write jax.devices()[:{count}]")


def _checked(role: str) -> str:
    if role not in ("self", "cross"):
        remedy = did_you_mean(role, ("self", "cross")) or "write self or cross"
        raise InputError("role", role, "it must be one of self, cross", remedy)
    return role
