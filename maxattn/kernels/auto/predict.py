"""How long a kernel takes on an NVIDIA GPU: the terms of its cost, weighed as they were fitted.

The weights are not negative, so that more work never takes less time by them. `maxattn bench
--write-table` measures a grid of calls and fits them, by relative error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from maxattn.call import Call
from maxattn.devices import Device
from maxattn.kernels import computed_call
from maxattn.kernels.auto.cost_terms import Terms, terms
from maxattn.kernels.auto.near import NearCalls

# Kernels pad heads to sizes of their own, with tiles of their own: each range has its weights.
HEAD_CLASSES = (64, 96, 128, 160, 192, 256)
Key = tuple[str, str, int]
"""Kernel, pass, head class."""


class Margins(NamedTuple):
    """Say by which share of the usual kernel's time another must be predicted to be faster.

    That is of calls far from all measured ones. It is less of others, and nothing of a measured
    call: near calls correct what is predicted of them.

    Attributes:
        forward, backward: of a pass.
    """

    forward: float = 0.0
    backward: float = 0.0

    def beside(self, nearest: float) -> Margins:
        """Return those of a call; `nearest` says how near a measured one is, from 0 to 1."""
        return Margins(*(share * (1 - nearest) for share in self))

    @property
    def shown(self) -> str:
        """Spell them; "" where they come to nothing."""
        shares = {what: f"{share:.0%}" for what, share in self._asdict().items()}
        return ", ".join(f"{share} less {what}" for what, share in shares.items() if share != "0%")

    def of(self, usual: str) -> str:
        """Say them of a usual kernel."""
        return f"{usual} unless another takes {self.shown or 'less'}"


NO_MARGINS = Margins()


@dataclass(frozen=True)
class FittedCosts:
    """Hold the weights of every kernel and pass, and how far off they are.

    Args:
        weights: by kernel, pass and head class, then by term.
        error: the median relative error of a call that is left out of the fit.
        calls: on how many it was fitted.
        decides: whether `auto` chooses by them: where they are no worse than the nearest measured
            shape, on calls that are left out.
        near: corrects predictions by measured calls that are like them; None for nothing.
        usual: the kernel that is fastest on most calls, which is taken unless another is predicted
            to be faster by more than a margin: predictions err.
        margins: of both passes.
    """

    weights: Mapping[Key, Terms]
    error: float = 0.0
    calls: int = 0
    decides: bool = False
    near: NearCalls | None = None
    usual: str = ""
    margins: Margins = NO_MARGINS

    def predict_all(
        self, kernels: Iterable[str], what: str, call: Call, device: Device
    ) -> dict[str, float]:
        """Return ms of those kernels that were measured.

        Args:
            kernels: their names; they take the call.
            what: "forward" or "backward".
            call: of one device.
            device: an NVIDIA GPU.
        """
        calls = {name: computed_call(name, call, "gpu") for name in kernels}
        known = {
            n: x for n, x in calls.items() if (n, what, head_class(x.head_dim)) in self.weights
        }
        found = {name: terms(name, what, its, device) for name, its in known.items()}
        return self.weigh_all(found, what, call)

    def weigh_all(self, found: Mapping[str, Terms], what: str, call: Call) -> dict[str, float]:
        """Return ms of kernels from their terms, which are known; arguments as `predict_all`."""
        calls = {name: computed_call(name, call, "gpu") for name in found}
        ms = {name: self._weighed(name, what, calls[name], its) for name, its in found.items()}
        if self.near is None:
            return ms
        alike = {its: self.near.alike(its) for its in set(calls.values())}
        return {n: x * self.near.factor(n, what, alike[calls[n]]) for n, x in ms.items()}

    def _weighed(self, name: str, what: str, call: Call, found: Terms) -> float:
        return weighed(self.weights[name, what, head_class(call.head_dim)], found)

    def nearest(self, call: Call) -> float:
        """Return how near the nearest measured call is: 1 for the call itself, 0 for none."""
        if self.near is None:
            return 0.0
        its = computed_call(self.usual, call, "gpu") if self.usual else call
        return float(self.near.alike(its).max())

    def ranked(
        self, times: Mapping[str, float], what: str, nearest: float = 0.0
    ) -> tuple[tuple[str, float], ...]:
        """Return (kernel, ms) of a pass, what is taken first; `nearest` is from the method."""
        handicap = {self.usual: 1 - getattr(self.margins.beside(nearest), what)}
        return tuple(sorted(times.items(), key=lambda each: each[1] * handicap.get(each[0], 1.0)))

    def accuracy(self, names: Collection[str], nearest: float = 0.0) -> str:
        """Say how far off it is, and of what, where these kernels can run."""
        margins = self.margins.beside(nearest)
        has_usual = margins.shown and self.usual in names and len(names) > 1
        unless = f"{margins.of(self.usual)}, " if has_usual else ""
        return f"{unless}{self.error:.0%} median error on {self.calls} calls left out of the fit,"

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it."""
        found: dict[str, Any] = {}
        for (kernel, what, heads), weights in self.weights.items():
            rounded = {name: float(f"{x:.4g}") for name, x in weights.items() if x > 0}
            found.setdefault(kernel, {}).setdefault(what, {})[str(heads)] = rounded
        rest = {"error": round(self.error, 4), "calls": self.calls, "decides": self.decides}
        near = {} if self.near is None else {"near": self.near.to_json()}
        rest |= {"usual": self.usual, "margins": list(self.margins)}
        return rest | {"weights": found} | near

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> FittedCosts:
        """Read it back."""
        weights = {
            (kernel, what, int(heads)): its
            for kernel, passes in row["weights"].items()
            for what, classes in passes.items()
            for heads, its in classes.items()
        }
        near = NearCalls.of_json(row["near"]) if "near" in row else None
        rest = near, row.get("usual", ""), Margins(*row.get("margins", ()))
        return FittedCosts(weights, row["error"], row["calls"], row["decides"], *rest)


def weighed(weights: Terms, found: Terms) -> float:
    """Return the sum of terms, each times its weight."""
    return sum(weight * found.get(name, 0.0) for name, weight in weights.items())


def head_class(head_dim: int) -> int:
    """Return the least class that holds a head dim."""
    return next((most for most in HEAD_CLASSES if head_dim <= most), HEAD_CLASSES[-1])
