"""The rules of TPU tiles as the table of docs/guide/block_sizes.md:

python -m docs.building.block_size_rules
"""

from __future__ import annotations

from maxattn.block_sizes.rules import RULES


def rules_table() -> str:
    """Write the rules as a Markdown table, in the order in which they are applied."""
    rows = ["| when | what must hold | why |", "|---|---|---|"]
    rows += [f"| {rule.when} | {rule.needs} | {rule.why} |" for rule in RULES]
    return "\n".join(rows)


if __name__ == "__main__":
    print(rules_table())
