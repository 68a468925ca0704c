"""A kernel that hands another one its operands in a form that it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from maxattn.block_sizes import BlockSizes, Change
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Kernel, Pass
from maxattn.target import Target


@dataclass(frozen=True)
class AdaptedKernel(Kernel):
    """Answer for the kernel that computes.

    Args:
        inner: that kernel.
    """

    inner: Kernel

    def computed(self, call: Call) -> Call:
        """Return the call that the inner kernel computes, from the one that is asked for."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Name the kernel that runs."""
        return self.inner.name

    @property
    def computes(self) -> Kernel:
        """The kernel that runs."""
        return self.inner.computes

    @property
    def is_pallas(self) -> bool:
        """Ask the kernel that runs."""
        return self.inner.is_pallas

    @property
    def differentiates_twice(self) -> bool:
        """Ask the kernel that runs."""
        return self.inner.differentiates_twice

    @property
    def takes_value_dim(self) -> bool:
        """Ask the kernel that runs."""
        return self.inner.takes_value_dim

    @property
    def needs_an_example(self) -> bool:
        """Ask the kernel that runs."""
        return self.inner.needs_an_example

    @property
    def blocks(self) -> BlockSizes | None:
        """The tile sizes of the kernel that runs."""
        return self.inner.blocks

    @property
    def changes(self) -> tuple[Change, ...]:
        """How they differ from those that were asked for."""
        return self.inner.changes

    def for_inference(self) -> Self:
        """Return the kernel of a forward that is not differentiated, adapted as this one."""
        return replace(self, inner=self.inner.for_inference())

    def for_forward_alone(self) -> Self:
        """Return the kernel of a forward whose backward is another's, adapted as this one."""
        return replace(self, inner=self.inner.for_forward_alone())

    def without_dbias(self) -> Self:
        """Return the kernel whose backward leaves the bias's gradient out."""
        return replace(self, inner=self.inner.without_dbias())

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        """Ask the kernel that runs, of what it computes."""
        return self.inner.microseconds(self.computed(call), target)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say what there is to know of the kernel that runs."""
        return self.inner.notes(self.computed(call), config, target)

    def notes_of(
        self, what: Pass, call: Call, config: AttentionConfig, target: Target
    ) -> tuple[str, ...]:
        """Say what there is to know of one pass of the kernel that runs."""
        return self.inner.notes_of(what, self.computed(call), config, target)
