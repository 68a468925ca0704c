"""What `compile --estimate` prints and how it ends; and the whole way with libtpu, where it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from maxattn.config import AttentionConfig
from maxattn.tools.cli.compile import estimate_lines, report
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.process import tpu_python
from maxattn.tools.estimate.program import estimate_of
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden
from tests.tools.cli.command import run
from tests.tools.estimate.dumps import BACKWARD, FOLDER, FORWARD, dump
from tests.tools.estimate.test_kernel import ALL, V6E, causal_plan, tiles_of

needs_libtpu = pytest.mark.skipif(
    tpu_python() is None, reason='libtpu is not installed (pip install "maxattn[tpu]")'
)
CONFIG = AttentionConfig(attention="flash")
WORDS = "estimated by libtpu 0.0.50.1's schedule, not run"
MEMORY = {"argument": 2**20, "temp": 0, "output": 2**20, "alias": 0, "generated_code": 0}
LONGEST = {"xla_longest": [("copy.24", 6e-6), ("fusion.1", 4e-6)], "xla_unknown": []}
HOP = {"kind": "ppermute", "axes": ["context"], "bytes": 9 * 10**5, "times": 3}
HOP |= {"is_async": True, "is_overlapped": True, "kernels": [BACKWARD]}


def outcome(estimate: dict[str, Any], kind: str = "TPU v5p") -> Outcome:
    found = Outcome("compiled", kind, "the plan", {"context": 4}, [], [HOP], MEMORY, 1.0)
    return replace(found, estimate=json.loads(json.dumps(estimate)))


def test_the_report():
    kernels = [dump("v5p", FORWARD).estimate(ALL, 3)._asdict()]
    backward = dump("v5p", BACKWARD).estimate(ALL)
    kernels += [backward._replace(name=f"{BACKWARD[:-1]}{i}")._asdict() for i in (1, 2)]
    made = outcome({"how": WORDS, "kernels": kernels, "xla_seconds": 1e-5} | LONGEST)
    lines = estimate_lines(made)
    assert all(line.endswith(WORDS) for line in lines)  # beside every number
    check_golden("cli/estimate/report", "\n".join(lines))


def test_the_report_of_masks_and_of_what_is_not_known():
    tiles = tiles_of(causal_plan(), False)["fwd"]
    kernels = [dump("v6e", FORWARD).estimate(tiles)._asdict()]
    bound = tiles_of(causal_plan("flash", "ring", 4), True)["dkv"]
    kernels += [dump("v5p", BACKWARD).estimate(each)._asdict() for each in (bound, None)]
    made = outcome(
        {"how": WORDS, "kernels": kernels, "xla_seconds": 0.0, "xla_longest": []}
        | {"xla_unknown": ["copy.7", "copy.8", "copy.9", "copy.10"]},
        "TPU v6e",
    )
    check_golden("cli/estimate/report_of_masks", "\n".join(estimate_lines(made)))


def test_nothing_is_printed_where_nothing_was_asked():
    assert estimate_lines(outcome({})) == []


def test_a_refused_estimate_is_no_success(capsys, monkeypatch):
    made = outcome({"refused": "estimate: why"})
    job = CompileJob("v5p:2x2x1", CONFIG, read("1,512,512,2,128"))
    assert report(job, made).splitlines()[-2:] == ["estimate: why", "fits"]
    monkeypatch.setattr("maxattn.tools.cli.compile.run_in_child", lambda job, limit: made)
    words = ["attention=flash", "--target", "v5p", "--shape", "1,512,512,2,128"]
    assert run(capsys, "compile", *words, "--estimate").status == 1
    made = outcome({})
    assert run(capsys, "compile", *words).status == 0


HLO = """HloModule jit_f, num_partitions=1

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %inside = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"1000000"}
}

%body (p: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %again = f32[8]{0} copy(%q), backend_config={"estimated_cycles":"50"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"estimated_cycles":"700"}
  %w = f32[8]{0} while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %never = f32[8]{0} copy(%x), backend_config={"estimated_cycles":"9223372036854775807"}
  %splash_mha_fwd_residuals.1 = f32[8]{0} custom-call(%w), KERNEL"forward"}}
  %other.7 = f32[8]{0} custom-call(%w), KERNEL"forward"}}
  ROOT %splash_mha_dkv_no_residuals.1 = f32[8]{0} custom-call(%w), KERNEL"backward"}}
}
""".replace(
    "KERNEL", 'custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":'
)


def test_a_program_is_its_kernels_and_xlas_cycles(monkeypatch):
    monkeypatch.setattr("maxattn.tools.estimate.program.metadata.version", lambda _: "0.0.50.1")
    made = estimate_of(HLO, FOLDER / "v5p", V6E, {"fwd": ALL, "dkv": ALL})
    assert (made["libtpu"], made["how"]) == ("0.0.50.1", WORDS)
    assert made["xla_seconds"] == (700 + 6 * 50) / 1.75e9  # a fusion's inside counts once
    assert made["xla_longest"] == [("a", 700 / 1.75e9), ("again", 300 / 1.75e9)]
    assert made["xla_unknown"] == ["never"]  # the largest int64 is no number of cycles
    names = [kernel["name"] for kernel in made["kernels"]]
    assert names == [FORWARD, "other.7", BACKWARD]
    # The kernel without a file is the same as the first; its name says no phase.
    first, twin, _ = made["kernels"]
    assert twin["steps"] == first["steps"] and (twin["flops"], twin["hbm"]) == (0.0, 0.0)


@needs_libtpu
@pytest.mark.parametrize("kernel, phases", [("flash", ("fwd", "dq", "dkv"))])
def test_every_kernel_of_a_training_step(kernel, phases, capsys):
    words = [f"attention={kernel}", "--target", "v5e:1x1", "--train", "--estimate", "--json"]
    ran = run(capsys, "compile", *words, "--shape", "1,1024,1024,2,128")
    (made,) = json.loads(ran.out)
    kernels = made["estimate"]["kernels"]
    assert ran.status == 0
    assert {re.findall("_(fwd|dkv|dq)", k["name"])[0] for k in kernels} == {*phases}
    for one in kernels:
        assert one["steps"] == 2 * 2 * 2 and (one["full"], one["masked"]) == (1.0, 0.0)
        fast, slow = one["seconds"]
        assert 0 < fast <= slow
        assert 0.1 < one["flops"] / fast / one["peak"] <= 1


@needs_libtpu
def test_a_kernel_of_gpus_is_refused(capsys):
    words = ["attention=cudnn", "--target", "v6e:1x1", "--shape", "1,512,512,2,128"]
    check_golden("cli/estimate/gpu_kernel", run(capsys, "compile", *words, "--estimate").text)


@needs_libtpu
def test_the_folder_of_schedules_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    job = CompileJob("v5e:1x1", CONFIG, read("1,256,256,1,128"), estimate=True)
    for limit in (120, 3):
        assert run_in_child(job, limit).ending == ("compiled" if limit == 120 else "timeout")
        assert list(tmp_path.iterdir()) == []
