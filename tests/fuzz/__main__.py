"""The command: `python -m tests.fuzz --seed 1 --seconds 600`, or `--case attention:17`."""

from __future__ import annotations

import argparse
import random
import sys

from tests.fuzz.loop import CATEGORIES, draw, fuzz, table
from tests.fuzz.run import run, set_up


def main() -> int:
    """Run one case, or draw cases, print failures as they occur, and a table at the end."""
    parser = argparse.ArgumentParser("make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the whole run; default one that is drawn")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long")
    parser.add_argument("--count", type=int, help="how many cases, in place of how long")
    parser.add_argument("--only", default="", help="categories, joined by commas")
    parser.add_argument("--case", help="one case again: category:seed")
    args = parser.parse_args()
    if args.case:
        case = draw(args.case, set_up())
        outcome = run(case)
        print(outcome.snippet or f"# {case.name}\n{case.source}")
        print(f"# {outcome.kind} {outcome.letter} in {outcome.seconds:.1f} s: {outcome.what}")
        return int(outcome.kind == "failed")
    seed = random.randrange(10**6) if args.seed is None else args.seed
    names = args.only.split(",") if args.only else list(CATEGORIES)
    print(f"seed {seed}, {args.seconds:g} s: {', '.join(names)}", flush=True)
    outcomes = list(fuzz(names, seed, args.seconds, args.count))
    print(table(outcomes))
    return int(any(outcome.kind == "failed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
