"""The command: `python -m tests.fuzz --seed 1 --seconds 600`, or `--case attention:17`."""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.categories import CATEGORIES
from tests.fuzz.loop import fuzz
from tests.fuzz.table import table


def main() -> int:
    """Draw and run cases, print failures as they come and the table at the end."""
    args = _parser().parse_args()
    if args.case:
        return _one(*args.case.split(":"))
    seed = random.randrange(10**6) if args.seed is None else args.seed
    names = args.only.split(",") if args.only else list(CATEGORIES)
    print(f"seed {seed}, {args.seconds:g} s: {', '.join(names)}", flush=True)
    outcomes = list(fuzz(names, seed, args.seconds, args.count))
    print(table(outcomes))
    return int(any(outcome.kind == "failed" for outcome in outcomes))


def _one(category: str, seed: str) -> int:
    from tests.fuzz.categories import draw
    from tests.fuzz.machine import set_up
    from tests.fuzz.run import run

    case = draw(category, int(seed), set_up())
    outcome = run(case)
    print(outcome.snippet or f"# {case.name}\n{case.source}")
    print(f"# {outcome.kind} {outcome.letter} in {outcome.seconds:.1f} s: {outcome.what}")
    return int(outcome.kind == "failed")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the whole run; default one that is drawn")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long")
    parser.add_argument("--count", type=int, help="how many cases, in place of how long")
    parser.add_argument("--only", default="", help="categories, joined by commas")
    parser.add_argument("--case", help="one case again: category:seed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
