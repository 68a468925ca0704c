"""What score_digits.py writes: a row for each way of sampling, and tests of pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from PIL import Image

from maxattn.weights.replacing import replacing
from maxattn_examples.common.statistics import drift, frechet, paired, spearman, table
from maxattn_examples.compare.ways import DENSE, FLOOR, Arm, Count

from .clips import Clips, of_model
from .drawing import Drawn
from .scenes import Scene
from .scores import BETTER, Judge, Scored

REAL = "real"
LEAST_ROWS = 4  # that an order is told of
SHOWN = 2  # clips of each way of sampling in the picture
COLUMNS = {
    "digit": "{:.1%}", "likelihood": "{:.3f}", "margin": "{:.2f}", "identity": "{:.1%}",
    "kept": "{:.3f}", "path": "{:.1%}", "stray": "{:.2%}",
}  # fmt: skip
TESTED = ("digit", "likelihood", "margin", "identity", "kept", "path", "drift")
WORDS = """
digit: the classifier names it. likelihood, margin: logarithms of its probability. identity, kept:
a digit that was hidden, before and after. path: it moves as told. FD: Frechet distance of the
classifier's features. flicker: difference of neighbouring frames, over the dense clip's. drift: how
far the last latents are from the dense ones, the median clip and the worst one, in multiples of the
floor's median.
"""


@dataclass
class Row:
    """What is known of a way of sampling.

    Args:
        arm: the way.
        scored: its clips' scores.
        count: forwards; None of real clips.
        drawn: its clips, as the model drew them; None of real ones.
    """

    arm: Arm
    scored: Scored
    count: Count | None = None
    drawn: Drawn | None = None


@dataclass
class Report:
    """Collect rows, and write them.

    Args:
        judge: scores clips.
        scene: what the prompts say.
        out: the folder that files are written to.
    """

    judge: Judge
    scene: Scene
    out: Path
    rows: dict[str, Row] = field(default_factory=dict)
    pictures: list[np.ndarray] = field(default_factory=list)
    other: Scored | None = None

    def add_real(self, real: Clips, others: Clips, of: Scene) -> None:
        """Add real clips of the prompts, and others, which say how far real ones lie apart."""
        self.rows[REAL] = Row(Arm(REAL, {}), self.judge.score(real, self.scene))
        self.other = self.judge.score(others, of)
        self._picture(np.asarray(real))

    def add(self, arm: Arm, count: Count, drawn: Drawn) -> None:
        """Add the clips of a way of sampling."""
        clips = of_model(jnp.asarray(drawn.clips))
        self.rows[arm.name] = Row(arm, self.judge.score(clips, self.scene), count, drawn)
        self._picture(np.asarray(clips))

    def _picture(self, clips: Float[np.ndarray, "B F H W 3"]) -> None:
        for clip in clips[:SHOWN]:
            framed = np.pad(clip, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=0.4)
            self.pictures.append(np.concatenate(list(framed), axis=1))

    # ---- what is known -------------------------------------------------------------------------

    def values(self, name: str, score: str) -> Float[np.ndarray, " B"] | None:
        """Return a score of every clip; None where there is none."""
        row, dense = self.rows[name], self.rows.get(DENSE)
        if score != "drift":
            return row.scored.scores[score]
        if row.drawn is None or dense is None or dense.drawn is None:
            return None
        return drift(row.drawn.clips, dense.drawn.clips)

    @property
    def floor(self) -> float | None:
        """The median drift of another kernel; None without one, or where it changes nothing."""
        found = self.values(FLOOR, "drift") if FLOOR in self.rows else None
        return None if found is None else float(np.median(found)) or None

    def facts(self, name: str) -> dict[str, Any]:
        """Return the figures of a row."""
        row = self.rows[name]
        facts: dict[str, Any] = {"name": name, "changes": dict(row.arm.changes)}
        if row.count is not None and row.drawn is not None:
            facts |= {"forwards": row.count.computed, "of": row.count.whole}
            facts["seconds"] = row.drawn.seconds
        facts |= {key: float(row.scored.scores[key].mean()) for key in COLUMNS}
        against = self.other if name == REAL else self.rows[REAL].scored
        if against is not None:
            facts["fd_real"] = frechet(row.scored.features, against.features)
        if DENSE in self.rows and name != REAL:
            dense = self.rows[DENSE].scored
            facts["fd_dense"] = frechet(row.scored.features, dense.features)
            rates = row.scored.scores["flicker"] / dense.scores["flicker"]
            facts["flicker"] = float(np.median(rates))
        if (apart := self.values(name, "drift")) is not None and name != DENSE:
            facts |= {"drift": float(np.median(apart)), "drift_worst": float(apart.max())}
        return facts

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Yield tests of each way of sampling against its equal cost, and against dense."""
        for name, row in self.rows.items():
            for beside in dict.fromkeys((row.arm.same_cost, DENSE)):
                if beside is None or beside not in self.rows or name in (beside, REAL, FLOOR):
                    continue
                for score in TESTED:
                    ours, theirs = self.values(name, score), self.values(beside, score)
                    if ours is None or theirs is None or (score == "drift" and beside == DENSE):
                        continue
                    found = paired(ours, theirs, BETTER.get(score, -1))
                    yield {"name": name, "beside": beside, "score": score, **found._asdict()}

    def orders(self) -> dict[str, float]:
        """Return by score how well the drift of rows orders them by what they lose (Spearman)."""
        rows = [self.facts(name) for name in self.rows if name not in (REAL, DENSE, FLOOR)]
        rows = [row for row in rows if "drift" in row]
        if len(rows) < LEAST_ROWS:
            return {}
        drifts = [row["drift"] for row in rows]
        lost = {key: [-way * row[key] for row in rows] for key, way in BETTER.items()}
        lost |= {key: [row[key] for row in rows] for key in ("fd_real", "fd_dense")}
        return {key: spearman(drifts, values) for key, values in lost.items()}

    # ---- files ---------------------------------------------------------------------------------

    def text(self) -> str:
        """Write two tables in Markdown."""
        heads = ("", "forwards", "seconds", *COLUMNS, "FD to real", "FD to dense", "flicker")
        rows = [self._cells(self.facts(name)) for name in self.rows]
        found = table((*heads, "drift", "worst"), rows) + WORDS
        tests = [
            (
                pair["name"], pair["beside"], pair["score"], f"{pair['mean']:+.4f}",
                f"{pair['better']} / {pair['worse']}", f"{pair['p']:.2g}",
            )
            for pair in self.pairs()
        ]  # fmt: skip
        heads = ("", "beside", "score", "mean difference", "clips better / worse", "p")
        found = f"{found}\n{table(heads, tests)}" if tests else found
        orders = ", ".join(f"{key} {value:.2f}" for key, value in self.orders().items())
        said = f"\nDrift orders the rows by what they lose (Spearman): {orders}\n"
        return found + said if orders else found

    def _cells(self, facts: dict[str, Any]) -> Sequence[str]:
        """Return the cells of a row."""
        cells = [facts["name"]]
        cells.append(f"{facts['forwards']:g} of {facts['of']}" if "of" in facts else "")
        cells.append(f"{facts['seconds']:.1f}" if "of" in facts else "")
        cells += [form.format(facts[key]) for key, form in COLUMNS.items()]
        for key in ("fd_real", "fd_dense", "flicker"):
            cells.append(f"{facts[key]:.3g}" if key in facts else "")
        unit, one = (1.0, " |x|") if self.floor is None else (self.floor, "")
        for key in ("drift", "drift_worst"):
            cells.append(f"{facts[key] / unit:.3g}{one}" if key in facts else "")
        return cells

    def write(self) -> Sequence[Path]:
        """Write all that is known; return the files."""
        self.out.mkdir(parents=True, exist_ok=True)
        scores = {name: self._per_clip(name) for name in self.rows}
        found = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "classifier": self.judge.accuracy,
            "clips": self.scene.prompts(),
            "floor": self.floor,
            "rows": [self.facts(name) for name in self.rows],
            "pairs": list(self.pairs()),
            "drift_orders": self.orders(),
            "per_clip": scores,
        }
        texts = {"scores.json": json.dumps(found, indent=1), "scores.md": self.text()}
        for name, text in texts.items():
            with replacing(self.out / name) as beside:
                beside.write_text(text + "\n", "utf-8")
        sheet = np.round(255 * np.concatenate(self.pictures)).astype(np.uint8)
        with replacing(self.out / "clips.png") as beside:
            Image.fromarray(sheet).save(beside)
        return [self.out / name for name in (*texts, "clips.png")]

    def _per_clip(self, name: str) -> dict[str, list[float]]:
        found = {key: self.values(name, key) for key in (*COLUMNS, "flicker", "drift")}
        return {k: [round(float(x), 6) for x in v] for k, v in found.items() if v is not None}
