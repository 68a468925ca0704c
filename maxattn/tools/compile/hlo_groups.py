"""Which devices a collective runs over, and how many bytes a type has, read off an instruction."""

from __future__ import annotations

import re
from math import prod

from maxattn.tools.compile.hlo_text import Instruction

Groups = tuple[tuple[int, ...], ...]
_ITEM_BITS = {"pred": 8, "c64": 64, "c128": 128}
_LISTED = r"=\{((?:\{[\d,]*\},?)*)\}"
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def groups_of(collective: Instruction, devices: int) -> Groups:
    """Return (from, to) pairs of a permute, else the groups; no groups are one of all devices."""
    if collective.opcode.removesuffix("-start") == "collective-permute":
        return _braced(collective.attribute(f"source_target_pairs{_LISTED}"))
    return _replica_groups(collective) or (tuple(range(devices)),)


def bytes_of(type_: str) -> int:
    """Count the bytes of a type or a tuple of them."""
    bits = 0
    for kind, dims in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", type_):
        width = _ITEM_BITS.get(kind) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
        bits += width * prod(_numbers(dims))
    return bits // 8


def _replica_groups(instruction: Instruction) -> Groups:
    """Read `replica_groups` in one of its three spellings.

    Groups are listed, or a reshaped and transposed count such as [2,4]<=[4,2]T(1,0), or axes of a
    mesh.
    """
    if of_mesh := _OF_MESH.search(instruction.rest):
        return _of_mesh(*of_mesh.groups())
    if listed := instruction.attribute(f"replica_groups{_LISTED}"):
        return _braced(listed)
    counted = _COUNTED.search(instruction.rest)
    return _of_count(*(_numbers(part or "") for part in counted.groups())) if counted else ()


def _of_count(shape: tuple[int, ...], counted: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    import numpy as np

    ids = np.arange(prod(counted)).reshape(counted).transpose(order or None).reshape(shape)
    return tuple(tuple(int(n) for n in group) for group in ids)


def _of_mesh(mesh: str, axes: str) -> Groups:
    """Read groups along axes of a mesh: 'data'=1,'fsdp'=2,'context'=2 and 'context' (jax 0.12)."""
    import numpy as np

    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    along = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", axes)]
    ids = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    across = [axis for axis in range(ids.ndim) if axis not in along]
    groups = ids.transpose(*across, *along).reshape(-1, prod(ids.shape[axis] for axis in along))
    return tuple(tuple(int(n) for n in group) for group in groups)


def _braced(text: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
