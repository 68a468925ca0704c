"""The tested versions of the packages whose private names kernels use.

A private name can change with any release, so such a kernel refuses other versions
(`Target.refuse_untested`). Kernels of public functions alone take every version. The extras in
pyproject.toml have the same bounds; jax has none there, since the plain kernels run with newer jax.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple


class Versions(NamedTuple):
    """The versions from `first` on that are below `below`."""

    first: str
    below: str

    def __str__(self) -> str:
        return f">={self.first},<{self.below}"

    def hold(self, version: str) -> bool:
        """Return whether a version is in the range; one without a number, such as "?", is too.

        >>> Versions("0.10.2", "0.13").hold("0.12.1"), Versions("0.1", "0.2").hold("0.2.0")
        (True, False)
        """
        given = numbers(version)
        return not given or numbers(self.first) <= given < numbers(self.below)


# pip's names. jax: cuDNN's primitives and splash attention; tokamax: splash attention on TPUs, the
# Mosaic kernels on GPUs; fa4-jax: its launches; nvidia-cutlass-dsl: CuTe, in which kernels here are
# written (4.8.0 and 4.8.1 were tested; fa4-jax 0.1.0 needs 4.8); TransformerEngine: the two
# functions of its fused attention and its state of dropout, which minor releases change (2.10 put
# an argument in between).
TESTED = {
    "jax": Versions("0.10.2", "0.13"),
    "tokamax": Versions("0.0.12", "0.0.18"),
    "fa4-jax": Versions("0.1", "0.2"),
    "nvidia-cutlass-dsl": Versions("4.8", "4.9"),
    "transformer-engine-jax": Versions("2.20", "2.21"),
}
CUTLASS = "nvidia-cutlass-dsl"  # pip's name of CuTe, which comes with fa4-jax
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # pip's names of cuDNN, which XLA calls
TOKAMAX_SPLASH = Versions("0.0.12", "0.0.19")  # its kernels of TPUs: 0.0.18 only moves them
TOKAMAX_ON_GPU = "0.0.17"  # the first version whose Mosaic kernels are called on GPUs


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 0, 17) of "0.0.17.dev3"."""
    leading = re.match(r"\d+(\.\d+)*|", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()


AITER = "aiter"
"""A target's name for AMD's fused attention in AMD's jax for ROCm; it is no name of pip's."""


def aiter_in_jax() -> tuple[tuple[str, str], ...]:
    """Return (AITER, "in jax") if this jax has it; no kernel of maxattn calls it."""
    return ((AITER, "in jax"),) if find_spec("jax._src.aiter") is not None else ()
