"""Estimates by libtpu's schedule, stored in a log, so that a stopped run continues from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maxattn.tools.compile.job import CompileJob, run_in_child

Estimate = dict[str, Any]


class EstimateLog:
    """A file with a line of JSON for each compiled job; without a path nothing is stored."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.path, self.seconds = path, seconds
        lines = path.read_text().splitlines() if path and path.exists() else ()
        self._known = {json.dumps(row["key"]): row for row in map(json.loads, lines)}

    def estimate(self, key: list[Any], job: CompileJob) -> Estimate:
        """Return libtpu's version and the kernels of a job, or why it "failed".

        Args:
            key: names the job in the log.
            job: compiled in a child process, within `seconds`, if the log lacks the key.
        """
        known = self._known.get(json.dumps(key))
        if known is None:
            known = {"key": key} | self._compiled(job)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps(known) + "\n")
        return known

    def _compiled(self, job: CompileJob) -> Estimate:
        outcome = run_in_child(job, self.seconds)
        made, took = outcome.estimate, {"compiled_seconds": round(outcome.seconds, 1)}
        if outcome.ending != "compiled" or "refused" in made:
            why = made.get("refused") or f"{outcome.ending}: {outcome.message[:600]}"
            return took | {"failed": why}
        blocks = [line.strip() for line in outcome.plan.splitlines() if "blocks " in line]
        return took | {"libtpu": made["libtpu"], "kernels": made["kernels"], "blocks": blocks}
