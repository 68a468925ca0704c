"""Mesh axes, partition specs and the one `shard_map` helper.

The batch is split over data and fsdp, the sequence over context, heads over tensor. An axis of size
1, or an axis that the mesh does not have, splits nothing.
"""

from maxattn.sharding.axes import AXES, BATCH_AXES, LETTERS
from maxattn.sharding.explicit import (
    check_layouts,
    explicit_mesh,
    inside_auto_axes,
    over_auto_axes,
    program_mesh,
    spec_of_type,
)
from maxattn.sharding.mesh import (
    MeshShape,
    check_devices,
    check_mesh,
    check_names,
    check_unchecked,
    make_mesh,
    mesh_shape,
    surrounding_manual_axes,
    usable_mesh,
)
from maxattn.sharding.parameters import (
    batch_sharding,
    constrain,
    log_replicated,
    on_axes,
    parameter_shardings,
    parameter_spec,
    place,
    variable_sharding,
)
from maxattn.sharding.shards import (
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

__all__ = ["AXES", "BATCH_AXES", "LETTERS", "Layout", "MeshShape", "axis_offset",
           "batch_sharding", "check_devices", "check_layouts", "check_mesh", "check_names",
           "check_unchecked", "constrain", "explicit_mesh", "inside_auto_axes", "log_replicated",
           "make_mesh", "mesh_shape", "on_axes", "on_shards", "over_auto_axes", "over_shards",
           "pad_axis",
           "parameter_shardings", "parameter_spec", "partition_spec", "place", "program_mesh",
           "spec_of", "spec_of_type", "sum_over", "surrounding_manual_axes", "usable_mesh",
           "variable_sharding", "ways"]  # fmt: skip
