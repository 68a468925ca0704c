"""The page that says what is adjusted, when and why, written from the table of rules.

`python -m docs.building.flowchart` prints `docs/guide/block_sizes_flowchart.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from maxattn.block_sizes.adjust import DEFAULT
from maxattn.block_sizes.rules import RULES, Rule
from maxattn.block_sizes.sizes import Facts, KernelKind, facts_of
from maxattn.call import Call
from maxattn.target import Target

HEAD = f"""# Block sizes: what is adjusted, when and why

This page is printed from the rules (`python -m docs.building.flowchart`), and a test compares
the two.

A key that is not set is filled in first, from the keys that are set, else with {DEFAULT}: that is
no change. Then the rules are applied from the top until every one of them holds. A request that
they all allow is never changed. What is changed is logged once and kept in the plan.
"""


def page() -> str:
    """Write the page in Markdown."""
    return (
        "\n".join(
            [HEAD, "```mermaid", *chart_lines(), "```", "", "## The rules", "", *rule_lines()]
        )
        + "\n"
    )


def rules_table() -> str:
    """Write the rules as a Markdown table, in the order in which they are applied."""
    rows = ["| when | what must hold | why |", "|---|---|---|"]
    rows += [f"| {rule.when} | {rule.needs} | {rule.why} |" for rule in RULES]
    return "\n".join(rows)


def chart_lines() -> Iterator[str]:
    """Write the flowchart: a question for each run of rules, then what must hold."""
    groups = [(when, list(rules)) for when, rules in groupby(RULES, key=lambda rule: rule.when)]
    yield "flowchart TD"
    yield '  start(["sizes as asked, the others filled in"])'
    before = ["start"]  # arrows that lead to the next node
    for n, (when, rules) in enumerate(groups):
        todo = "<br>".join(f"rule {RULES.index(rule) + 1}: {rule.needs}" for rule in rules)
        yield f'  do{n}["{todo}"]'
        if when == "always":
            yield from (f"  {arrow} --> do{n}" for arrow in before)
            before = [f"do{n}"]
            continue
        yield f'  is{n}{{"{when}?"}}'
        yield from (f"  {arrow} --> is{n}" for arrow in before)
        yield f"  is{n} -- yes --> do{n}"
        before = [f"do{n}", f"is{n} -- no"]
    yield '  changed{"was a size changed?"}'
    yield from (f"  {arrow} --> changed" for arrow in before)
    yield (
        f"  changed -- yes, apply the rules again --> {'do' if groups[0][0] == 'always' else 'is'}0"
    )
    yield '  changed -- no --> run(["the kernels run with these sizes"])'


def rule_lines() -> Iterator[str]:
    """List the rules: what must hold, which keys it governs, why, and what the log says."""
    for number, rule in enumerate(RULES, 1):
        keys = ", ".join(f"`{key}`" for key in rule.keys)
        yield (
            f"{number}. **{rule.name}** ({rule.when}): {rule.needs}, since {rule.why}. Governs"
            f" {keys}. Logged as, for example, *{rule.reason(_example(rule))}*."
        )


def _example(rule: Rule) -> Facts:
    """Describe a call that the rule governs: cross-attention to 77 text tokens on a TPU v5p."""
    call = Call(1, 4096, 77, 10, 10, 64, "bfloat16", role="cross")
    kernels: tuple[KernelKind, ...] = ("flash", "tokamax_flash")
    v5p = Target.named("TPU v5p")
    found = (
        facts_of(call, kernel, v5p, training) for kernel in kernels for training in (True, False)
    )
    return next(facts for facts in found if rule.applies(facts))


if __name__ == "__main__":
    print(page(), end="")
