"""The base of kernels that prepare the operands of another kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Kernel, Pass
from maxattn.target import Target


def _of_inner(attribute: str) -> Any:
    return property(lambda kernel: getattr(kernel.inner, attribute))


@dataclass(frozen=True)
class AdaptedKernel(Kernel):
    """Take all properties, notes and times from `inner`, the kernel that computes."""

    inner: Kernel

    name = _of_inner("name")
    computes = _of_inner("computes")
    is_pallas = _of_inner("is_pallas")
    differentiates_twice = _of_inner("differentiates_twice")
    takes_value_dim = _of_inner("takes_value_dim")
    needs_an_example = _of_inner("needs_an_example")
    blocks = _of_inner("blocks")
    changes = _of_inner("changes")

    def computed(self, call: Call) -> Call:
        raise NotImplementedError

    def for_inference(self) -> Self:
        return replace(self, inner=self.inner.for_inference())

    def for_forward_alone(self) -> Self:
        return replace(self, inner=self.inner.for_forward_alone())

    def without_dbias(self) -> Self:
        return replace(self, inner=self.inner.without_dbias())

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        return self.inner.microseconds(self.computed(call), target)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return self.inner.notes(self.computed(call), config, target)

    def notes_of(
        self, what: Pass, call: Call, config: AttentionConfig, target: Target
    ) -> tuple[str, ...]:
        return self.inner.notes_of(what, self.computed(call), config, target)
