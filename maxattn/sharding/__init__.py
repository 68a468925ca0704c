"""Mesh axes, partition specs and the one `shard_map` helper. It decides nothing about kernels.

Axes: batch on (data, fsdp), sequence on context, heads on tensor. A size-1 or absent axis shards
nothing.
"""

from maxattn.sharding.mesh import (
    AXES,
    BATCH_AXES,
    MeshShape,
    check_devices,
    check_mesh,
    check_surrounding,
    check_unchecked,
    make_mesh,
    mesh_shape,
    surrounding_manual_axes,
    usable_mesh,
)
from maxattn.sharding.parameters import (
    batch_sharding,
    constrain,
    parameter_shardings,
    parameter_spec,
    place,
)
from maxattn.sharding.shards import (
    LETTERS,
    Layout,
    axis_offset,
    on_shards,
    over_shards,
    pad_axis,
    partition_spec,
    spec_of,
    sum_over,
    ways,
)

__all__ = [
    "AXES",
    "BATCH_AXES",
    "LETTERS",
    "Layout",
    "MeshShape",
    "axis_offset",
    "batch_sharding",
    "check_devices",
    "check_mesh",
    "check_surrounding",
    "check_unchecked",
    "constrain",
    "make_mesh",
    "mesh_shape",
    "on_shards",
    "over_shards",
    "pad_axis",
    "parameter_shardings",
    "parameter_spec",
    "partition_spec",
    "place",
    "spec_of",
    "sum_over",
    "surrounding_manual_axes",
    "usable_mesh",
    "ways",
]
