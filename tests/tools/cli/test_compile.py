"""`maxattn compile` with the TPU's own compiler; skipped if libtpu is not installed."""

from __future__ import annotations

import json
import re
from shlex import split

import pytest

from maxattn.config import AttentionConfig
from maxattn.decide import plan
from maxattn.target import Target
from maxattn.tools.cli.compile import fits, report
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.memory import estimate, total
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden
from tests.packages import needs_libtpu
from tests.tools.cli.command import run

RING = split(
    "attention=ring attention_kernel=flash ici_context_parallelism=4 --target v5p:2x2x1 --shape"
)


def without_figures(text: str) -> str:
    """Remove figures that differ between compilers: seconds, sizes, and overlapping transfers."""
    text = re.sub(r"compiled in .*", "compiled in # s", text)
    return re.sub(
        r"(?m)^  (memory|sends) .*", lambda line: re.sub(r"\d[\d.]*", "#", line.group()), text
    )


def without_codes(text: str) -> str:
    """Remove additions of libtpu 0.0.50 to an error: its code, the module and a link."""
    text = re.sub(r"E\d{4}: \w+: ", "", text)
    return re.sub(r" HLO module: .*\nSee https://.* for more details\.", "", text)


@needs_libtpu
def test_a_ring_fits(capsys):
    ran = run(capsys, "compile", *RING, "1,2048,2048,4,128")
    assert (ran.status, ran.err) == (0, "")
    check_golden("cli/compile/ring", without_figures(ran.out))


@needs_libtpu
@pytest.mark.parametrize("training", [False, True])
def test_the_estimate_of_memory_is_near_the_compiler(training):
    config, shape = AttentionConfig(attention="flash"), read("wan-1.3b-480p")
    outcome = run_in_child(CompileJob("v5e:1x1", config, shape, training), 120)
    estimated = total(estimate(plan(shape.call(), config, None, Target.named("TPU v5e")), training))
    assert 0.9 < estimated / outcome.needed < 1.16  # as `maxattn.tools.memory` says


@needs_libtpu
def test_a_training_step_of_a_module_as_json(capsys):
    words = split("attention=flash --target v5e:1x1 --shape 1,1024,77,2,64 --train --module --json")
    ran = run(capsys, "compile", *words)
    (outcome,) = json.loads(ran.out)
    assert (ran.status, outcome["ending"], outcome["device_kind"]) == (0, "compiled", "TPU v5e")
    # float32 kernels, biases and norms
    weights = 4 * (2 * 64) ** 2 * 4 + 4 * 2 * 64 * 4 + 2 * 2 * 64 * 4
    states = (2 * 1024 + 77) * 2 * 64 * 2  # bfloat16 tokens, their cotangent and text
    assert weights + states <= outcome["memory"]["argument"] <= 1.2 * (weights + states)
    assert outcome["memory"]["output"] >= weights + states - 1024 * 2 * 64 * 2


@needs_libtpu
def test_two_slices(capsys):
    words = split(
        "compile attention=flash dcn_data_parallelism=2 ici_tensor_parallelism=4"
        " ici_data_parallelism=1 --target v5p:2x2x1 --shape 2,512,512,4,128 --slices"
    )
    ran = run(capsys, *words, "2")
    assert ran.status == 0 and "for 2 slices of v5p:2x2x1" in ran.out
    assert "mesh data=2 tensor=4" in ran.out
    assert run(capsys, *words, "0").status == 1


@needs_libtpu
def test_what_does_not_fit(capsys):
    ran = run(capsys, *split("compile attention=dot_product --target v5e:1x1 --shape wan-14b-480p"))
    assert ran.status == 1
    check_golden("cli/compile/too_much", without_codes(re.sub(r"\(\d[\d.]*G\)", "(#G)", ran.out)))


@needs_libtpu
def test_what_is_refused(capsys):
    ran = run(capsys, "compile", "attention=auto", "--target", "v5p:3x5x7", "--shape", "sdxl-64")
    assert ran.status == 1
    check_golden("cli/compile/unknown_topology", ran.out)
    ran = run(capsys, "compile", "attention=auto", "--target", "v5e:2x2", "--shape", "wan-cross")
    assert ran.status == 1 and "use a batch of 4" in ran.out  # data=4 by default, and B is 1


def test_a_report_names_what_waits():
    job = CompileJob("v5p:2x2x1", AttentionConfig(), read("sdxl-64"))
    move = {"kind": "ppermute", "axes": ["context"], "bytes": 2**20, "times": 3}
    move |= {"is_async": True, "is_overlapped": True}
    gather = move | {"kind": "all_gather", "times": 1, "is_async": False, "is_overlapped": False}
    gib = {"argument": 3, "temp": 1, "output": 1, "alias": 0.5, "generated_code": 0}
    memory = {name: int(size * 2**30) for name, size in gib.items()}
    planned = [move | {"bytes": 3 * 2**20}]
    outcome = Outcome("compiled", "TPU v5p", "the plan", {}, planned, [move, gather], memory, 1.0)
    text = report(job, outcome)
    parts = "3 GiB + temporaries 1 GiB + outputs 1 GiB - 512 MiB shared = 4.5 GiB of 95.7 GiB"
    moved = "ppermute over context: 3 in the program, 3 MiB, 3 overlapped with a kernel (3 MiB in"
    waited = "all_gather over context: 1 in the program, 1 MiB, 0 overlapped with a kernel, 1"
    assert parts in text and moved in text and f"{waited} synchronous (none" in text
    assert fits(outcome) and text.endswith("fits")
    full = Outcome("compiled", "TPU v5e", "the plan", memory=memory | {"temp": 2**34})
    assert not fits(full) and "does not fit" in report(job, full)


@pytest.mark.parametrize("option", ["--visited 28,8", "--layout flat"])
def test_options_of_a_kernel_file_need_one(option, capsys):
    ran = run(capsys, *split(f"compile --target v6e --shape sdxl-64 --estimate {option}"))
    assert ran.status == 1 and "none is given" in ran.err and f"leave {option[:8]}" in ran.err
