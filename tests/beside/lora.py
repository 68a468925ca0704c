"""LoRA beside the projections of a model of torch, whose own weights are frozen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

TARGETS = ("to_q", "to_k", "to_v", "to_out")  # TrainingSettings().lora_targets of examples/


class Adapted(nn.Module):
    """A frozen linear layer with a float32 change of low rank, computed in the layer's dtype."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        how = {"device": base.weight.device, "dtype": torch.float32}
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, **how) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, **how))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer, and its change beside it."""
        inner = functional.linear(x, self.down.to(x.dtype))
        return self.base(x) + functional.linear(inner, self.up.to(x.dtype))


def add(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze a model, add a change to the projections of its attentions, and return the changes."""
    model.requires_grad_(False)
    for parent, name, linear in list(projections(model)):
        setattr(parent, name, Adapted(linear, rank))
    return [p for p in model.parameters() if p.requires_grad]


def projections(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield the linear layers that get a change, with their parents; `to_out` is a list's first."""
    for module in model.modules():
        if not hasattr(module, "to_q"):
            continue
        for target in TARGETS:
            found = getattr(module, target, None)
            if isinstance(found, nn.ModuleList):
                yield found, "0", found[0]  # type: ignore[misc]
            elif isinstance(found, nn.Linear):
                yield module, target, found
