"""Reads the names of targets: "TPU v5p", "tpu7x", "H200", "Trillium", "v5p:2x2x1".

Case, spaces, dashes and underscores are ignored.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from maxattn.devices import DEVICES, USUAL
from maxattn.errors import ConfigError, closest

# Trade names that are no part of a device kind, without spaces and dashes.
_TRADE_NAMES = {
    "trillium": "TPU v6e",
    "ironwood": "TPU v7x",
    "v5litepod": "TPU v5e",
    "mi300": "AMD Instinct MI300X",
    "gb200nvl72": "NVIDIA GB200",
    "gb300nvl72": "NVIDIA GB300",
}
# Other names that jax and libtpu use.
_OTHERS = {
    "TPU v5e": ("v5lite", "v5 lite"),
    "TPU v5p": ("TPU v5",),
    "TPU v6e": ("v6lite", "v6 lite"),
    "TPU v7x": ("7x", "v7", "TPU 7"),
    "NVIDIA RTX PRO 6000 Blackwell": ("RTX PRO 6000", "PRO 6000"),
}
_LIBTPU = {"TPU v7x": "tpu7x"}  # libtpu's generation, if it is not the kind's last word
_HOST = {"TPU v4": (2, 2, 1), "TPU v5p": (2, 2, 1), "TPU v7x": (2, 2, 1)}  # chips; else 2 x 2
_DEVICES_OF_A_CHIP = {"TPU v7x": 2}
_SIDES = re.compile(r"\d{1,4}(x\d{1,4}){1,2}")


class TargetName(NamedTuple):
    """A device kind of `devices.DEVICES`, and the chips along each side of a TPU topology."""

    kind: str
    sides: tuple[int, ...] = ()

    @property
    def devices(self) -> int | None:
        """Return the number of jax devices of the topology, None if the name has no topology.

        >>> read_target("v5p:2x2x1").devices, read_target("tpu7x:2x2x1").devices
        (4, 8)
        """
        return prod(self.sides) * _DEVICES_OF_A_CHIP.get(self.kind, 1) if self.sides else None

    @property
    def topology(self) -> str:
        """Return libtpu's name of the topology, which is one host if the target's name has none.

        >>> read_target("Ironwood").topology
        'tpu7x:2x2x1'
        """
        generation = _LIBTPU.get(self.kind, self.kind.rpartition(" ")[2])
        return f"{generation}:{'x'.join(map(str, self.sides or _HOST.get(self.kind, (2, 2))))}"


def read_target(text: str) -> TargetName:
    """Parse the name of a device kind, and the TPU topology after a colon.

    >>> read_target("tpu v6e").kind, read_target("h200").kind, read_target("v5p:2x2x1").sides
    ('TPU v6e', 'NVIDIA H200', (2, 2, 1))

    Raises:
        ConfigError: the name is unknown, or its chips are not written as 2x2 or 2x2x1.
    """
    name, colon, layout = str(text).partition(":")
    kind = _SPELLINGS.get(_bare(name)) or USUAL.get(name)
    if kind is None:
        rule = f"it must be one of {', '.join(DEVICES)}"
        raise ConfigError("target", str(text), rule, _guess(_bare(name)))
    return TargetName(kind, _sides(str(text), kind, layout) if colon else ())


def _guess(bare: str) -> str:
    spelling = closest(bare, _SPELLINGS)
    # Names that differ only in digits are different machines: TPU v3 is no misspelt TPU v4.
    family, meant = (re.sub(r"\d", "#", word) for word in (bare, spelling))
    if spelling and family != meant:
        return f"did you mean '{_SPELLINGS[spelling]}'?"
    alike = {kind: None for each, kind in _SPELLINGS.items() if re.sub(r"\d", "#", each) == family}
    one_of = f"; names like it are {', '.join(alike)}" if alike else ""
    return f"use a name from that list{one_of}"


def _sides(text: str, kind: str, layout: str) -> tuple[int, ...]:
    if DEVICES[kind].platform != "tpu":
        rule = f"only a TPU's name may have a topology after a colon, and {kind} is no TPU"
        raise ConfigError("target", text, rule, f"write {kind!r}, and set --devices or --mesh")
    sides = tuple(map(int, layout.split("x"))) if _SIDES.fullmatch(layout) else ()
    if not sides or 0 in sides:
        rule = "after the colon, it must have the chips along each side"
        raise ConfigError("target", text, rule, f"write for example {TargetName(kind).topology}")
    return sides


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def _spellings() -> dict[str, str]:
    """Map every name, with and without the maker's name, to a device kind."""
    found = dict(_TRADE_NAMES)
    for kind in DEVICES:
        maker = kind.partition(" ")[0]
        for each in (*_ends(kind), *_OTHERS.get(kind, ())):
            found |= {_bare(f"{first}{each}"): kind for first in ("", maker)}
    # "TPU v6e" is also written "tpu6e".
    tpus = [_bare(kind) for kind, row in DEVICES.items() if row.platform == "tpu"]
    found |= {name.replace("tpuv", "tpu"): found[name] for name in tpus}
    return found


def _ends(kind: str) -> list[str]:
    """Return a kind's name, and those of its shorter endings (in whole words) that have a digit.

    >>> _ends("NVIDIA GeForce RTX 5070 Ti")[2:]
    ['RTX 5070 Ti', '5070 Ti']
    """
    words = kind.split(" ")
    ends = (" ".join(words[i:]) for i in range(len(words)))
    return [end for end in ends if end == kind or re.search(r"\d", end)]


_SPELLINGS = _spellings()
