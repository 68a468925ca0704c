"""The process that runs cases: it reads their names and answers each with an outcome, as JSON."""

from __future__ import annotations

import json
import os
import sys

from tests.fuzz.machine import set_up


def main() -> None:
    """Answer until there are no more names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what cases print must not be taken for an answer
    machine = set_up()
    from tests.fuzz.categories import draw
    from tests.fuzz.run import run

    for line in sys.stdin:
        category, _, seed = line.strip().partition(":")
        print(json.dumps(run(draw(category, int(seed), machine))), file=answers, flush=True)


if __name__ == "__main__":
    main()
