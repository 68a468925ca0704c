"""`Steps`: what each step of a run computes, as one value, known before the run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax

from maxattn.steps.settings import COMPUTE, DECIDE, REUSE

# Names of predictions. "both" is one call of twice the rows, those without the text first.
WITH, WITHOUT, BOTH, THIRD = "with", "without", "both", "third"


class Mix(NamedTuple):
    """How predictions are mixed; see `Predictions.mixed`."""

    zero_star: bool = False
    rescale: float = 0.0
    third_scale: float = 2.8


USUAL = Mix()


@dataclass(frozen=True)
class Step:
    """What a step computes.

    A pytree: its numbers are leaves, so that steps which differ in these alone share a compiled
    program, and everything else is structure.

    Args:
        layers: "compute", "reuse" (add what the layers added in earlier steps), or "decide" which.
        guidance: predictions: "one" with the text, "two" with one without it, "zero" none.
        keeps: how many sums of what layers added it leaves for later steps, 0 to 2.
        span: the first layer that is reused, and the first one after them; None for all.
        blocks: first layers, which run in every step, where steps decide; 0 elsewhere.
        skip: numbers of layers that one prediction skips.
        skip_in: which prediction that is.
        attention: settings of self-attention that replace those of the modules' config.
        mix: how predictions are mixed.
        model_layers: number of layers that the model must have; 0 is not compared.
        weights: of the sums that are added, the newest first.
        threshold: of the decision: infinite reuses, below 0 computes.
        most: steps in a row that reuse, at most.
        number: of the step in its run.
    """

    layers: Literal["compute", "reuse", "decide"] = "compute"
    guidance: Literal["one", "two", "zero"] = "one"
    keeps: int = 0
    span: tuple[int, int] | None = None
    blocks: int = 0
    skip: tuple[int, ...] = ()
    skip_in: Literal["third", "negative"] = "third"
    attention: tuple[tuple[str, Any], ...] = ()
    mix: Mix = USUAL
    model_layers: int = 0
    weights: tuple[float, ...] = ()
    threshold: float = -1.0
    most: int = 1
    number: int = 0

    @property
    def predictions(self) -> tuple[str, ...]:
        """The names of its predictions, in the order in which they are called."""
        third = (THIRD,) if self.skip and self.skip_in == "third" else ()
        names = (*((WITHOUT,) if self.guidance == "two" else ()), WITH, *third)
        return () if self.guidance == "zero" else names

    def skipped_in(self, name: str) -> tuple[int, ...]:
        """Return the layers that a prediction skips."""
        return self.skip if name == (THIRD if self.skip_in == "third" else WITHOUT) else ()

    @property
    def letter(self) -> str:
        """The step's letter in a schedule; a step that decides has the letter of its settings."""
        if self.layers == "decide":
            return COMPUTE if self.threshold < 0 else REUSE if self.threshold > 1e30 else DECIDE
        return REUSE if self.layers == "reuse" else COMPUTE

    def forwards(self, layers: int, reused: Container[str] | None = None) -> float:
        """Count the forwards that the step computes; skipped layers count in part.

        Args:
            layers: number of layers of the model.
            reused: predictions that the step decided to reuse; default: those that surely are.
        """
        first, last = (self.blocks, layers) if self.blocks else self.span or (0, layers)
        found = 0.0
        for name in self.predictions:
            is_reused = self.letter == REUSE if reused is None else name in reused
            left_out = {*range(first, last)} if is_reused else set[int]()
            found += 1 - len(left_out | {*self.skipped_in(name)}) / layers
        return found


jax.tree_util.register_dataclass(
    Step,
    data_fields=["weights", "threshold", "most", "number"],
    meta_fields=[
        *("layers", "guidance", "keeps", "span", "blocks", "skip", "skip_in", "attention", "mix"),
        "model_layers",
    ],
)


@dataclass(frozen=True)
class Steps(Sequence[Step]):
    """The steps of a run: hashable, and prints as a table with its forwards.

    Args:
        steps: one for each step of the sampler.
        layers: number of layers of the model.
        guided: of each step, whether it would be guided without settings.
    """

    steps: tuple[Step, ...]
    layers: int
    guided: tuple[bool, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: Any) -> Any:
        return self.steps[index]

    @property
    def letters(self) -> str:
        """The letters of all steps, as in a schedule."""
        return "".join(step.letter for step in self.steps)

    @property
    def forwards(self) -> float:
        """The number of forwards that are computed, or a maximum if steps decide."""
        return sum(step.forwards(self.layers) for step in self.steps)

    @property
    def whole(self) -> int:
        """The number of forwards of the same run without settings."""
        return len(self) + sum(self.guided)

    def memory(
        self,
        run: Callable[..., Any],
        *args: Any,
        size: Callable[[Any], int] = lambda x: x.size * x.dtype.itemsize,
    ) -> int:
        """Return the most bytes that a run keeps between two steps, without running it.

        Args:
            run: from a step, what is kept and `args` to what is kept after it, as the loop does it.
            args: arrays, or their shapes.
            size: bytes of an array, or its shape; default those of all of it.
        """
        kept: Any = {}
        most, traced = 0, jax.jit(run)  # which traces steps that differ in numbers alone once
        for step in self.steps:
            kept = traced.eval_shape(step, step_needs(step, kept), *args)
            most = max(most, sum(map(size, jax.tree.leaves(kept))))
        return most

    def table(self, forward_seconds: float | None = None, kept_bytes: int = 0) -> str:
        """Return the steps as a table, with the share of forwards computed; "" if that is all.

        Args:
            forward_seconds: of one forward, measured or estimated; default not printed.
            kept_bytes: from `memory`.
        """
        return "\n".join(_table(self, forward_seconds, kept_bytes))

    def __str__(self) -> str:
        return self.table() or f"all {len(self)} steps are computed: {self.whole} forwards"


def step_needs(step: Step, kept: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `kept` without sums that neither this step nor a later one reads.

    Drop the rest before a step that computes: the new sum can take its memory.
    """
    if step.layers != "compute":
        return kept
    older = max(0, step.keeps - 1)
    cut = {name: x._replace(sums=tuple(s[:older] for s in x.sums)) for name, x in kept.items()}
    return cut if older else {}


# ---- as a table ----------------------------------------------------------------------------------

HEADINGS = "steps", "layers", "predictions", "attention", "forwards"
MOST = 4  # ranges of steps in a cell


def _table(steps: Steps, seconds: float | None, kept_bytes: int) -> Iterator[str]:
    same: dict[tuple[str, ...], list[int]] = {}
    for i, step in enumerate(steps):
        same.setdefault((_layers(step), _predictions(step), _attention(step)), []).append(i)
    usual = all(
        replace(step, number=0, model_layers=0) == Step(guidance="two" if guided else "one")
        for step, guided in zip(steps, steps.guided, strict=True)
    )
    if usual:
        return
    rows: list[tuple[str, ...]] = [HEADINGS]
    for kind, numbers in same.items():
        count = sum(steps[i].forwards(steps.layers) for i in numbers)
        rows.append((ranges(numbers), *kind, f"{count:.4g}"))
    if not any(step.attention for step in steps):
        rows = [(*row[:3], *row[4:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "   ".join(cells).rstrip()
    computed, whole = steps.forwards, steps.whole
    at_most = "at most " if DECIDE in steps.letters else ""
    line = f"approximate: {at_most}{computed:.4g} of {whole} forwards are computed"
    line += f", {computed / whole:.0%}"
    line += f", {computed * seconds:.3g} of {whole * seconds:.3g} s" if seconds else ""
    line += f"; {kept_bytes / 2**20:.4g} MiB kept between steps" if kept_bytes else ""
    yield line
    if set(steps.letters) != {COMPUTE}:
        yield f"schedule {steps.letters}"


def ranges(numbers: Sequence[int]) -> str:
    """Write numbers of steps, counted from 1, as ranges: 1 to 3, 5 to 11 by 2, ..."""
    parts: list[str] = []
    rest = [n + 1 for n in numbers]
    while rest:
        apart = rest[1] - rest[0] if len(rest) > 1 else 1
        end = 1
        while end < len(rest) and rest[end] - rest[end - 1] == apart:
            end += 1
        end = 1 if apart > 1 and end == 2 else end
        by = f" by {apart}" if apart > 1 and end > 1 else ""
        parts.append(f"{rest[0]} to {rest[end - 1]}{by}" if end > 1 else str(rest[0]))
        rest = rest[end:]
    return ", ".join(parts if len(parts) <= MOST else [*parts[: MOST - 2], "...", parts[-1]])


def _layers(step: Step) -> str:
    if step.guidance == "zero":
        return "none"
    span = "" if step.span is None else f"{step.span[0]} to {step.span[1] - 1} "
    found = {
        COMPUTE: "computed",
        REUSE: f"{span}reused",
        DECIDE: f"{step.blocks} computed, rest: ?",
    }
    return found[step.letter]


def _predictions(step: Step) -> str:
    skipped = step.skip and any(map(step.skipped_in, step.predictions))
    which = "the negative one" if step.skip_in == "negative" else "one more"
    numbers = ", ".join(map(str, step.skip))
    skips = f", {which} skips layer{'s' * (len(step.skip) > 1)} {numbers}" if skipped else ""
    return ("zeros" if step.guidance == "zero" else step.guidance) + skips


def _attention(step: Step) -> str:
    return ", ".join(f"{key}={value}" for key, value in step.attention) or "as configured"
