"""`maxattn check`, as golden text: valid configs, every kind of mistake, memory, and advice."""

from __future__ import annotations

from pathlib import Path
from shlex import split

import pytest

import maxattn as ma
from maxattn.config import AttentionConfig
from maxattn.decide import plan
from maxattn.devices import memory_of
from maxattn.target import Target
from maxattn.tools.cli.check import advice
from maxattn.tools.memory import estimate, total
from maxattn.tools.model_shapes import read
from tests.golden_text import check_golden
from tests.tools.cli.command import run
from tests.waiting import but

HERE = Path(__file__).parent
GOOD = {
    "plans": (
        "configs/wan_14b.yml --shape wan-14b-720p --shape wan-14b-cross --target v5p --devices 8 "
        "--batch 2"
    ),
    "no_shape": "configs/attention.yml",
    "every_key": "flash_block_sizes.block_q=512 --all",
    "inference": (
        "attention=flash --shape wan-14b-480p --target v6e --inference "
        "'flash_block_sizes={block_q: 3024, block_kv: 2048}'"
    ),
}
ADVISED = {
    "dense_and_memory": "attention=dot_product --shape wan-14b-480p --target v5e",
    "dense_on_a_gpu": "attention=dot_product --shape flux-1024 --target H200",
    "nothing_to_shard": "attention=ring attention_kernel=flash --shape sdxl-64 --target v5p",
    "short_shards": (
        "attention=ring attention_kernel=dot_product --shape 1,256,256,4,64 --mesh context=8 "
        "--target cpu"
    ),
    "padding_attended": (
        "mask_padding_tokens=false cross_attention=flash --shape sdxl-64 --shape sdxl-cross "
        "--batch 2 --target v5p --lengths 20,77"
    ),
    "blocks_and_their_padding": (
        "attention=flash --shape wan-1.3b-480p --target v6e 'flash_block_sizes={block_q: 3000, "
        "block_kv: 3000, use_fused_bwd_kernel: true}'"
    ),
    "one_shape_cannot_run": "attention=flash --shape 1,64,64,4,64 --dtype f16 --target v5p",
}
BAD_LENGTHS = {
    "beyond_s": "--lengths 300,9999 --shape 2,4096,512,8,64",
    "of_other_keys": "configs/wan_i2v_14b.yml --batch 2 --lengths 300,512",
    "neither_one_nor_b": "--lengths 300,512 --shape 3,4096,512,8,64",
    "more_than_one": "--lengths 300,512 --shape wan-cross",
    "of_self_attention": "--lengths 257 --shape 1,256,256,8,64",
    "no_number": "--lengths 300,x --shape 2,4096,512,8,64",
}


@pytest.mark.parametrize("name", GOOD)
def test_valid(capsys, name):
    ran = run(capsys, "check", *split(GOOD[name]))
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"cli/check/{name}", ran.out)


@pytest.mark.parametrize("name", ADVISED)
def test_advice(capsys, name):
    check_golden(f"cli/check/{name}", run(capsys, "check", *split(ADVISED[name])).text)


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_lengths_that_cannot_be(capsys, name):
    ran = run(capsys, "check", *split(BAD_LENGTHS[name]), "--target", "TPU v5p")
    assert ran.status == 1 and "runs" not in ran.out
    check_golden(f"cli/check/lengths_{name}", ran.err)


def test_lengths_are_those_of_the_text_and_one_is_of_all(capsys):
    words = split("check mask_padding_tokens=false --shape 2,256,256,4,64 --shape 2,256,512,4,64")
    each, one = (
        run(capsys, *words, "--target", "cpu", "--lengths", said) for said in ("384,384", "384")
    )
    assert each.status == 0 and each.out == one.out and "25.0% of the keys are padding" in one.out


def test_lengths_say_nothing_where_padding_is_masked_and_help_says_so(capsys):
    words = ["check", "attention=auto", "--shape", "2,256,512,4,64", "--target", "cpu"]
    assert run(capsys, *words, "--lengths", "20,30").out == run(capsys, *words).out
    assert "mask_padding_tokens is false" in " ".join(run(capsys, "check", "--help").out.split())


def test_inference_names_no_backward(capsys):
    for asked in ("flash", "ring --mesh context=4"):
        words = split(f"check --shape wan-14b-480p --target v5p attention={asked}")
        assert "backward" in run(capsys, *words).out
        lines = run(capsys, *words, "--inference").out.splitlines()
        assert not [line for line in lines if "backward" in line and "estimated by" not in line]


def test_a_file_with_each_kind_of_mistake(capsys, monkeypatch):
    monkeypatch.chdir(HERE)
    ran = run(capsys, "check", "mistakes.yml", "ulysses_shards=many")
    assert (ran.status, ran.out) == (1, "")
    check_golden("cli/check/mistakes", ran.text)


def test_a_good_plan_has_no_advice():
    config = AttentionConfig(attention="flash")
    made = plan(read("sdxl-64").call(), config, None, Target.named("TPU v5p"))
    assert advice(made, config, training=True) == ()


@pytest.mark.parametrize("strategy", ["all_gather", "ring", "ulysses"])
def test_more_devices_need_less_memory_each(strategy):
    """Except for the parts of dQ in a fused backward, which runs if they take at most a tenth."""
    config = AttentionConfig(attention="flash", context_parallel=strategy)
    call, v5p = read("wan-14b-720p").call(), Target.named("TPU v5p")
    each = [estimate(plan(call, config, {"context": n}, v5p), True) for n in (1, 2, 4, 8)]
    parts = [sum(part.bytes for part in one if "dq in parts" in part.what) for one in each]
    sums = [total(one) - size for one, size in zip(each, parts, strict=True)]
    assert sums[1:] == sorted(sums[1:], reverse=True) and sums[3] < sums[0]
    assert max(parts) <= 0.1 * (v5p.device.memory or 0)


def test_memory_of_an_unknown_device_is_not_judged():
    config = AttentionConfig(attention="dot_product")
    made = plan(read("wan-14b-480p").call(), config, None, Target.named("cpu"))
    assert memory_of(made.target.device_kind) is None and total(estimate(made, False)) > 2**37


WRONG_SIZES = {
    "batch_of_a_file": "model: {heads: 2, dim_head: 8, tokens: 5}\ntraining: {batch_size: -3}",
    "batch_that_is_text": "model: {heads: 2, dim_head: 8, tokens: 5}\ntraining: {batch_size: abc}",
    "heads_that_are_true": "model: {heads: true, dim_head: 8, tokens: 5}",
    "text_tokens": "model: {heads: 2, dim_head: 8, tokens: 5, text_tokens: -1}",
}


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_a_file_with_a_wrong_size_is_refused_by_its_key(capsys, tmp_path, name):
    path = tmp_path / "model.yml"
    path.write_text(f"attention: auto\n{WRONG_SIZES[name]}\n")
    ran = run(capsys, "check", str(path))
    assert (ran.status, ran.out) == (1, "")
    check_golden(f"cli/check/{name}", ran.err)
    assert run(capsys, "check", str(path), "--shape", "1,64,64,2,8", "--target", "cpu").status == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--batch", str(10**30)],
        ["--lengths", "9" * 5000],
        ["--mask", "block-causal:" + "9" * 5000],
        ["--mask", "block-causal:" + str(2**31)],
        ["--mask", "+".join(["causal"] * 1000)],
        ["--devices", str(10**30)],
        ["--mesh", "context=" + "9" * 5000],
        ["--mesh", f"context={10**30}"],
    ],
    ids=lambda words: words[0] + words[1][:16],
)
def test_numbers_of_any_size_are_refused_in_our_words(capsys, words):
    ran = run(capsys, "check", "--shape", "2,64,64,2,8", "--target", "cpu", *words)
    assert ran.status == 1 and "remedy" in ran.err and len(ran.err) < 1000


# ---- memory by parts -----------------------------------------------------------------------------


def parts(head_dim: int, value_dim: int, strategy: str) -> dict[str, int]:
    sizes = 2, 4096, 4096, 8, 4, head_dim
    call = ma.Call(*sizes, dtype="bfloat16", value_head_dim=value_dim)
    config = ma.AttentionConfig(attention="dot_product", context_parallel=strategy)  # type: ignore[arg-type]
    plan = ma.plan(call, config, {"context": 4}, ma.Target.named("cpu"))
    assert plan.strategy.name == strategy
    return {part.what: part.bytes for part in estimate(plan, True)}


@pytest.mark.parametrize("strategy", but(["all_gather", "ring"], ["ring"]))
def test_values_are_counted_by_their_own_channels(strategy: str) -> None:
    """In training, the arrays of V channels are as many as those of H channels."""
    narrow, wide = (parts(dim, dim, strategy) for dim in (32, 128))
    mixed, turned = parts(128, 32, strategy), parts(32, 128, strategy)
    assert len(mixed) >= 4
    for what, size in mixed.items():
        assert 2 * size == narrow[what] + wide[what] == 2 * turned[what], what


@pytest.mark.parametrize(
    ("words", "is_advised"),
    [
        ("ici_context_parallelism=16", True),
        ("ici_context_parallelism=3", True),
        ("ici_context_parallelism=4 ici_data_parallelism=1", True),
        ("ici_context_parallelism=4", False),
        ("ici_context_parallelism=16 --target v5p", False),
        ("ici_context_parallelism=16 --mesh context=16", False),
    ],
)
def test_a_mesh_of_other_devices_than_this_machines_is_advised(capsys, words, is_advised):
    ran = run(capsys, "check", "attention=ring", *words.split())
    assert ran.status == 0
    assert ("  advice  this machine does not fit the config's mesh, " in ran.out) == is_advised
