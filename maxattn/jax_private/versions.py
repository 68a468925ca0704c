"""The tested versions of the packages whose private names kernels use.

A private name can change with any release, so a kernel that uses one refuses untested versions
(`Target.refuse_untested`). Kernels that use only public functions take every version. The extras in
pyproject.toml have the same bounds; jax has none there, since plain kernels run with newer jax.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import NamedTuple


class Versions(NamedTuple):
    """A range of versions: at least `first`, and below `below`."""

    first: str
    below: str

    def __str__(self) -> str:
        return f">={self.first},<{self.below}"

    def hold(self, version: str) -> bool:
        """Check whether a version is in the range; a version without a number ("?") counts.

        >>> Versions("0.10.2", "0.13").hold("0.12.1"), Versions("0.1", "0.2").hold("0.2.0")
        (True, False)
        """
        given = numbers(version)
        return not given or numbers(self.first) <= given < numbers(self.below)


# By pip's names. maxattn uses, of jax: cuDNN's primitives and splash attention; of tokamax: splash
# attention on TPUs, the Mosaic kernels on GPUs; of fa4-jax: its launches; of
# nvidia-cutlass-dsl: CuTe, the language of maxattn's own kernels (4.8.0 and 4.8.1 were tested, and
# fa4-jax 0.1.0 needs 4.8); of TransformerEngine: the two functions of its fused attention and the
# random state of its dropout, which minor releases change (2.10 inserted an argument).
TESTED = {
    "jax": Versions("0.10.2", "0.13"),
    "tokamax": Versions("0.0.12", "0.0.18"),
    "fa4-jax": Versions("0.1", "0.2"),
    "nvidia-cutlass-dsl": Versions("4.8", "4.9"),
    "transformer-engine-jax": Versions("2.20", "2.21"),
}
LIBTPU = Versions("0.0.42", "0.0.53")  # the TPU's compiler, whose dumps of schedules are read
CUTLASS = "nvidia-cutlass-dsl"  # pip's name of CuTe, which fa4-jax depends on
CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # pip's names of cuDNN, which XLA calls
TOKAMAX_SPLASH = Versions("0.0.12", "0.0.19")  # tokamax's TPU kernels, which 0.0.18 only moves
TOKAMAX_ON_GPU = "0.0.17"  # the first version whose Mosaic kernels are called on GPUs


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 0, 17) for "0.0.17.dev3"."""
    leading = re.match(r"\d+(\.\d+)*|", version)
    return tuple(int(part) for part in leading[0].split(".") if part) if leading else ()


AITER = "aiter"
"""A target's name for the fused attention in AMD's jax, which is no package of pip's."""


def aiter_in_jax() -> tuple[tuple[str, str], ...]:
    """Return (AITER, "in jax") if this jax has AITER, which no kernel of maxattn calls."""
    return ((AITER, "in jax"),) if find_spec("jax._src.aiter") is not None else ()
