"""The results of a comparison: distances, tests by clip, tables, and a YAML file."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import yaml
from jaxtyping import Float

import maxattn as ma
from maxattn.errors import InputError
from maxattn.weights.replacing import replacing

PerClip = Float[np.ndarray, " n"]
Samples = Float[np.ndarray, "n ..."]
Draw = Callable[[Any], Any]  # from noise to samples, a batch each
DENSE, FLOOR = "dense", "floor"
HEADS = ("sampling", "forwards", "seconds", "drift", "worst", "x floor", "a step", "PSNR")
WORDS = {
    "drift": "|x - dense| / |dense| of the final samples, median of the clips",
    "worst": "the clip that is farthest",
    "x floor": "drift in multiples of dense sampling with another kernel",
    "a step": (
        "error from the dense samples, as a share of the step, median of the steps that reuse or"
        " approximate (of all steps where none does), in the first batch"
    ),
    "PSNR": "of the final samples, dB",
}


def drift(
    dense: Draw,
    ways: Mapping[str, Draw],
    noise: Any,
    floor: Draw | None = None,
    *,
    same_cost: Mapping[str, str] | None = None,
    batch: int | None = None,
) -> Report:
    """Compare ways of sampling with the dense one, clip by clip, from the same noise.

    Args:
        dense: draws samples from noise without shortcuts.
        ways: functions that draw samples from the same noise, by name.
        noise: one row per clip; any array that can be sliced.
        floor: dense sampling with a change that affects rounding alone, such as another kernel.
        same_cost: for a way, the name of the row of equal cost, such as fewer plain steps; a
            paired test compares both.
        batch: number of clips to draw at once; default all.

    Raises:
        InputError: names or shapes do not fit.

    Example:
        >>> import numpy as np
        >>> from maxattn_examples.compare import drift
        >>> def steps(n, skip=()):  # of dx/dt = -sin x; a skipped one reuses the last derivative
        ...     def draw(x):
        ...         v = -np.sin(x)
        ...         for i in range(n):
        ...             v = v if i in skip else -np.sin(x)
        ...             x = x + v / n
        ...         return x
        ...     return draw
        >>> noise = np.random.default_rng(0).normal(size=(8, 4, 4))
        >>> ways = {"reuse": steps(8, skip=(3, 5)), "6 steps": steps(6)}
        >>> report = drift(steps(8), ways, noise, same_cost={"reuse": "6 steps"})
        >>> print(report)  # doctest: +ELLIPSIS
        | sampling | drift | worst | PSNR |
        ...
        | reuse | 0.0192 | 0.0293 | 45.0 |
        | 6 steps | 0.0120 | 0.0183 | 49.1 |
        ...
        | reuse | 6 steps | drift | +0.0077 | 0 / 8 | 0.0078 |
        ...
        >>> path = report.write("drift.yml")
    """
    others = {**({} if floor is None else {FLOOR: floor}), **ways}
    pairs = same_cost or {}
    if taken := {DENSE, *({FLOOR} if floor is not None else ())} & set(ways):
        raise InputError("ways", sorted(taken), "dense and floor name other rows", "rename it")
    if unknown := ({*pairs} - {*ways}) | ({*pairs.values()} - {*ways, DENSE}):
        remedy = f"use names of ways: {', '.join(ways)}"
        raise InputError("same_cost", sorted(unknown), "it pairs rows by name", remedy)
    report = Report({**machine_facts(), "clips": len(noise)}, [Row(DENSE)])
    of = _drawn(dense, noise, batch)
    for name, draw in others.items():
        x = _drawn(draw, noise, batch)
        if x.shape != of.shape:
            rule = f"samples must have the shape of the dense ones, {of.shape}"
            raise InputError(name, x.shape, rule, "return the final samples alone")
        report.rows.append(Row.of_samples(name, x, of, same_cost=pairs.get(name)))
    return report


def _drawn(draw: Draw, noise: Any, batch: int | None) -> Samples:
    batch = batch or len(noise)
    parts = [np.asarray(draw(noise[i : i + batch])) for i in range(0, len(noise), batch)]
    return np.concatenate(parts)


class Count(NamedTuple):
    """The forwards of a run; a forward with skipped layers counts in part."""

    computed: float
    whole: int  # forwards without shortcuts
    at_most: bool = False  # True before a run whose steps decide

    def __str__(self) -> str:
        return f"{'at most ' * self.at_most}{self.computed:g} of {self.whole} forwards"


class Score(NamedTuple):
    """A further column of the table."""

    value: float
    form: str = "{:.3f}"
    better: int = 0  # 1 if larger values are better, -1 if smaller ones are, 0 for no test
    clips: PerClip | None = None  # None if the score is of all clips together


@dataclass
class Row:
    """The measurements of one way of sampling."""

    name: str
    drift: PerClip | None = None  # None for the dense row
    psnr: PerClip | None = None
    same_cost: str | None = None  # the row that it is compared with at equal cost
    changes: Mapping[str, Any] = field(default_factory=dict)
    count: Count | None = None
    seconds: float | None = None  # of all clips, without compiling
    steps: PerClip | None = None  # median error of the steps that reuse or approximate
    scores: Mapping[str, Score] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # why figures are missing
    of: Mapping[str, Any] = field(default_factory=dict)  # settings that its drift depends on

    @classmethod
    def of_samples(cls, name: str, x: Samples, dense: Samples, **more: Any) -> Self:
        return cls(name, distances(x, dense), _psnr(x, dense), **more)

    def tested(self) -> dict[str, tuple[PerClip, int]]:
        """Return the scores to test, by clip, with 1 if larger ones are better, else -1."""
        scores = self.scores.items()
        found = {k: (x.clips, x.better) for k, x in scores if x.better and x.clips is not None}
        return found if self.drift is None else {"drift": (self.drift, -1), **found}

    def cells(self, floor: float | None) -> dict[str, str]:
        """Return the table's cells by column head."""
        cells = {"sampling": self.name}
        if self.count is not None:
            cells["forwards"] = f"{self.count.computed:g} of {self.count.whole}"
        if self.seconds is not None:
            cells["seconds"] = f"{self.seconds:.1f}"
        if self.drift is not None and self.psnr is not None:
            cells |= {"drift": f"{np.median(self.drift):.4f}", "worst": f"{self.drift.max():.4f}"}
            cells |= {"x floor": f"{np.median(self.drift) / floor:.1f}"} if floor else {}
            cells["PSNR"] = f"{np.median(self.psnr):.1f}"
        if self.steps is not None:
            cells["a step"] = f"{np.median(self.steps):.4f}"
        return cells | {name: x.form.format(x.value) for name, x in self.scores.items()}

    def plain(self) -> dict[str, Any]:
        """Return the row as values that YAML can store."""
        found: dict[str, Any] = {"name": self.name, "changes": dict(self.changes)}
        found |= {"of": dict(self.of)} if self.of else {}
        if self.count is not None:
            found["forwards"] = [self.count.computed, self.count.whole]
        if self.seconds is not None:
            found["seconds"] = round(self.seconds, 3)
        every = {"drift": self.drift, "psnr": self.psnr, "step_error": self.steps}
        every |= {name: x.clips for name, x in self.scores.items()}
        every = {n: [round(float(one), 6) for one in x] for n, x in every.items() if x is not None}
        found |= every
        alone = {name: x.value for name, x in self.scores.items() if x.clips is None}
        found |= {name: round(float(x), 6) for name, x in alone.items()}
        found |= {"notes": list(self.notes)} if self.notes else {}
        return found if self.same_cost is None else {**found, "same_cost": self.same_cost}


@dataclass
class Report:
    """The rows of all ways of sampling; `print` shows them as tables in Markdown."""

    facts: Mapping[str, Any]  # about the run, such as the hash of its checkpoint
    rows: list[Row] = field(default_factory=list)
    words: str = ""  # explains the columns of `Row.scores`

    @property
    def floor(self) -> float | None:
        """The median drift of dense sampling with another kernel, if that was run."""
        found = (x.drift for x in self.rows if x.name == FLOOR and x.drift is not None)
        return next((float(np.median(x)) for x in found), None)

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Test the scores of each row against those of its `same_cost` row and of the dense row."""
        rows = {row.name: row for row in self.rows}
        for row in (x for x in self.rows if x.drift is not None and x.name != FLOOR):
            for beside in dict.fromkeys((row.same_cost, DENSE)):
                theirs = rows[beside].tested() if beside in rows else {}
                for score, (ours, better) in row.tested().items():
                    if score in theirs:
                        found = paired(ours, theirs[score][0], better)._asdict()
                        yield {"name": row.name, "beside": beside, "score": score, **found}

    def __str__(self) -> str:
        cells = [row.cells(self.floor) for row in self.rows]
        known = dict.fromkeys(name for row in cells for name in row)
        heads = [*(x for x in HEADS if x in known), *(x for x in known if x not in HEADS)]
        words = "; ".join(f"{name}: {WORDS[name]}" for name in heads if name in WORDS)
        said = f"{words}. All of them measure distance from the dense samples, not beauty."
        lines = [table(heads, [[row.get(x, "") for x in heads] for row in cells]), said]
        lines += [self.words] if self.words else []
        lines += ["floor: both give the same samples"] if self.floor == 0 else []
        lines += [f"{row.name}: {note}" for row in self.rows for note in row.notes]
        return "\n".join([*lines, *self._tests()])

    def _tests(self) -> Iterator[str]:
        counts = {x.name: f", {x.count.computed:g} forwards" for x in self.rows if x.count}
        rows = [
            (
                x["name"], x["beside"] + counts.get(x["beside"], ""), x["score"],
                f"{x['mean']:+.4f}", f"{x['better']} / {x['worse']}", f"{x['p']:.2g}",
            )
            for x in self.pairs()
        ]  # fmt: skip
        if not rows:
            return
        heads = ("sampling", "beside", "score", "mean difference", "clips better / worse", "p")
        yield f"\n{table(heads, rows)}"
        clips = int(self.facts["clips"])
        yield (
            "p: Wilcoxon's signed-rank test by clip, two-sided, not corrected for the number of"
            f" tests ({len(rows)}); with {clips} clips p cannot be below {2.0 ** (1 - clips):.2g}."
        )

    def plain(self) -> dict[str, Any]:
        """Return the report as values that YAML can store."""
        rows, tests = [row.plain() for row in self.rows], list(self.pairs())
        return {**self.facts, "floor": self.floor, "rows": rows, "pairs": tests}

    def write(self, path: str | Path) -> Path:
        """Write the report as YAML, atomically."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(yaml.safe_dump(self.plain(), sort_keys=False), "utf-8")
        return path


def _psnr(x: Samples, of: Samples) -> PerClip:
    """Return the PSNR in dB; the peak is the range of the dense sample."""
    inner = tuple(range(1, x.ndim))
    error = np.square(x.astype(np.float64) - of).mean(axis=inner)
    peak = of.max(axis=inner) - of.min(axis=inner)
    return 10 * np.log10(np.maximum(peak, 1e-30) ** 2 / np.maximum(error, 1e-30))


def machine_facts() -> dict[str, str]:
    """Return the machine, versions and date of a measurement."""
    device = jax.devices()[0]
    return {
        "machine": f"{len(jax.devices())} x {device.device_kind}",
        "versions": f"maxattn {ma.__version__}, jax {jax.__version__}",
        "date": datetime.date.today().isoformat(),
    }


def distances(x: Samples, of: Samples) -> PerClip:
    """Return the relative distance of samples from reference samples `of`: |x - of| / |of|."""
    x, of = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (x, of))
    return np.linalg.norm(x - of, axis=1) / np.linalg.norm(of, axis=1)


def frechet(a: Float[np.ndarray, "n D"], b: Float[np.ndarray, "m D"]) -> float:
    """Return the Frechet distance of two normal distributions fitted to features.

    |mean a - mean b|^2 + tr(A + B - 2 (A B)^(1/2)), with the covariances A and B.

    Source: Heusel et al. 2017, https://arxiv.org/abs/1706.08500.
    """
    if min(len(a), len(b)) < 2:
        return float("inf")
    apart = a.mean(0) - b.mean(0)
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values, vectors = np.linalg.eigh(first)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    both = np.linalg.eigvalsh(root @ second @ root)
    return float(
        apart @ apart + np.trace(first) + np.trace(second) - 2 * np.sqrt(np.maximum(both, 0)).sum()
    )


class Paired(NamedTuple):
    """The difference of two ways of sampling, over the same clips.

    Args:
        mean: mean difference of the scores.
        better, worse: number of clips whose score is better, or worse.
        p: of Wilcoxon's signed-rank test, two-sided; 1 if no clip differs.
    """

    mean: float
    better: int
    worse: int
    p: float


def paired(
    ours: Float[np.ndarray, " n"], theirs: Float[np.ndarray, " n"], better: int = 1
) -> Paired:
    """Compare scores of the same clips.

    Args:
        better: 1 if larger scores are better, -1 if smaller ones are.
    """
    from scipy.stats import wilcoxon

    apart = better * (np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    differ = apart[np.abs(apart) > 1e-12]
    tested: Any = wilcoxon(differ) if len(differ) else None
    mean = float(better * apart.mean())
    p = 1.0 if tested is None else float(tested.pvalue)
    return Paired(mean, int((differ > 0).sum()), int((differ < 0).sum()), p)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
