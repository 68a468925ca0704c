"""The TPUs whose VMEM is known: what the compiler gives one kernel."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from maxattn.devices import DEVICES
from maxattn.target import Target

Family = Literal["v4", "v5p", "v6e", "v7x"]


class Chip(NamedTuple):
    """What the block sizes need to know of a TPU.

    Args:
        name: jax's name of the device kind.
        limit: bytes of VMEM that the compiler gives one kernel unless told otherwise.
        family: whose constants of `vmem` it follows: the compiler keeps more of the scores in
            registers on v5e, v6e and v7x than on v4 and v5p.
    """

    name: str
    limit: int
    family: Family


# The constants that each family follows: v5e's compiler keeps scores as v6e's does.
_FOLLOWS: dict[str, Family] = {
    "tpu-v4": "v4",
    "tpu-v5e": "v6e",
    "tpu-v5p": "v5p",
    "tpu-v6e": "v6e",
    "tpu-v7x": "v7x",
}
CHIPS = {
    kind: Chip(kind, device.vmem, _FOLLOWS[device.family.name])
    for kind, device in DEVICES.items()
    if device.platform == "tpu"
}
SMALLEST = min(CHIPS, key=lambda kind: CHIPS[kind].limit)

LIMIT_FLAG = re.compile(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)")


def chip_of(target: Target) -> Chip | None:
    """Return the target's TPU, the smallest one for an unknown kind; None where it is no TPU.

    Its limit is the compiler's own, or the one that LIBTPU_INIT_ARGS sets.
    """
    if target.platform != "tpu":
        return None
    chip = CHIPS.get(target.device_kind, CHIPS[SMALLEST])
    asked = LIMIT_FLAG.findall(dict(target.env).get("LIBTPU_INIT_ARGS", ""))
    return chip._replace(limit=int(asked[-1]) * 1024) if asked else chip
