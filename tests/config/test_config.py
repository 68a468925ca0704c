"""AttentionConfig as a value: equality, hash, replacement, and what its settings mean."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Hashable

import jax
import pytest

from maxattn.config import AttentionConfig, FlashBlockSizes, rules
from maxattn.config.errors import ConfigErrors
from maxattn.config.section import Section
from maxattn.errors import ConfigError, InputError
from tests.config.settings import FOREIGN, ModelSettings, Settings, TrainingSettings

SPELLINGS = FOREIGN | {
    **{name: (name, "auto") for name in ("auto", "dot_product", "flash", "tokamax_flash",
                                         "tpu_flash", "tpu_few_keys", "cudnn_flash_te",
                                         "cudnn")},
    **{name: ("auto", name) for name in ("ring", "ulysses", "ulysses_ring")},
}  # fmt: skip


def test_every_spelling_has_its_pair():
    assert set(rules.attentions()) == set(SPELLINGS)
    for spelling, (kernel, strategy) in SPELLINGS.items():
        config = AttentionConfig(attention=spelling)
        assert config.attention == spelling
        assert (config.kernel_for("self"), config.strategy_for("self")) == (kernel, strategy)
        assert (config.kernel_for("cross"), config.strategy_for("cross")) == ("auto", "none")
        note = config.spelling_note()
        if "auto" in (kernel, strategy):
            assert note is None
        else:
            assert note is not None and kernel in note and strategy in note


BESIDE = {
    ("cudnn", "ring"): {"attention": "ring", "attention_kernel": "cudnn"},
    ("flash", "ulysses"): {"attention": "flash", "context_parallel": "ulysses"},
    ("dot_product", "ring"): {"attention_kernel": "dot_product", "context_parallel": "ring"},
    # The same setting twice is no contradiction.
    ("auto", "ring"): {"attention": "ring", "context_parallel": "ring"},
    ("flash", "auto"): {"attention": "flash", "attention_kernel": "flash"},
    ("tokamax_flash", "ring"): {"attention": "tokamax_ring", "attention_kernel": "auto"},
}


def test_kernel_and_strategy_beside_each_other():
    for pair, settings in BESIDE.items():
        config = AttentionConfig(**settings, cross_attention="flash")
        assert (config.kernel_for("self"), config.strategy_for("self")) == pair
        assert config.kernel_for("cross") == "flash"
    with pytest.raises(InputError, match="did you mean 'cross'"):
        AttentionConfig().kernel_for("crss")  # type: ignore[arg-type]


FALLBACKS = [
    ({}, "warn", "warn"),
    ({"attention": "flash"}, "error", "warn"),
    ({"attention": "ring"}, "error", "warn"),
    ({"context_parallel": "ulysses"}, "error", "warn"),
    ({"context_parallel": "none"}, "warn", "warn"),
    ({"attention_kernel": "cudnn"}, "error", "warn"),
    ({"cross_attention": "flash"}, "warn", "error"),
    ({"attention": "flash", "fallback": "allow"}, "allow", "allow"),
    ({"fallback": "error"}, "error", "error"),
]


def test_fallback():
    for settings, on_self, on_cross in FALLBACKS:
        config = AttentionConfig(**settings)
        assert (config.fallback_for("self"), config.fallback_for("cross")) == (on_self, on_cross)


def test_axes_follow_mesh_axes_in_order_and_the_gpu_spelling():
    config = AttentionConfig(
        mesh_axes=("context", "data"), ici_context_parallelism=4, dcn_data_parallelism=2
    )
    assert list(config.axis_parallelism().items()) == [("context", (4, 1)), ("data", (-1, 2))]
    assert config.axis_mapping_note() is None
    sizes = {"ici_fsdp_batch_parallelism": 2, "ici_fsdp_parallelism": 4}
    config = AttentionConfig(**sizes, dcn_fsdp_parallelism=3)
    want = {"data": (-1, -1), "fsdp": (2, 3), "context": (4, 1), "tensor": (1, 1)}
    assert config.axis_parallelism() == want
    note = str(config.axis_mapping_note())
    assert "batch_parallelism=2 sets the fsdp" in note and "parallelism=4 sets the context" in note


def test_the_data_axis_gives_way_to_a_rest_elsewhere():
    config = AttentionConfig(ici_context_parallelism=-1)
    assert config.axis_parallelism()["data"] == (1, -1)
    assert config.replace(ici_context_parallelism=2).axis_parallelism()["data"] == (-1, -1)
    assert config == AttentionConfig(ici_data_parallelism=1, ici_context_parallelism=-1)
    assert AttentionConfig(mesh_axes=("fsdp",), ici_fsdp_parallelism=-1).ici_data_parallelism == 1
    with pytest.raises(ConfigError, match="only one ici_"):
        AttentionConfig(ici_data_parallelism=-1, ici_context_parallelism=-1)


def test_equal_values_are_equal_however_they_were_given():
    sizes = {"block_q": 512}
    a = AttentionConfig(
        attention="auto", mesh_axes=["data", "fsdp", "context", "tensor"], flash_block_sizes=sizes
    )
    b = AttentionConfig(flash_block_sizes=FlashBlockSizes(block_q=512))
    assert a == b and hash(a) == hash(b) and len(frozenset((a, b))) == 1
    assert a.changed == b.changed == {"flash_block_sizes"}
    assert a != AttentionConfig() and a != "auto" and AttentionConfig() != FlashBlockSizes()
    assert AttentionConfig(**a.resolved()) == a


def test_every_key_is_part_of_equality_and_hash():
    other = {
        "attention": "flash", "attention_kernel": "flash", "cross_attention": "flash",
        "context_parallel": "none", "flash_block_sizes": {"block_kv": 128}, "hardware": "cpu",
        "mesh_axes": ("data",), "remat_policy": "FULL", "fallback": "allow",
        "ring_direction": "both_ways",
    }  # fmt: skip
    base = AttentionConfig()
    for key, value in base:
        if key not in other:
            other[key] = (not value) if isinstance(value, bool) else (value or 1) + 1 or 2
        changed = AttentionConfig(**{key: other[key]})
        assert changed != base and hash(changed) != hash(base), key
        assert key in changed.changed


def test_a_config_is_hashable_to_a_type_checker_and_hashed_once():
    # pyright reads the tests: it refuses these names for a type without a hash.
    config: Hashable = AttentionConfig(attention="ring")
    sizes: Hashable = AttentionConfig().flash_block_sizes
    assert {config: 1, sizes: 2} == {AttentionConfig(attention="ring"): 1, FlashBlockSizes(): 2}

    class Counted(tuple):
        hashed = 0

        def __hash__(self) -> int:
            Counted.hashed += 1
            return super().__hash__()

    class Holder(Section):
        values: tuple[int, ...]

    holder = Holder.model_construct(values=Counted((1, 2)))
    assert len({hash(holder) for _ in range(5)}) == 1
    assert Counted.hashed == 1


def test_a_pickled_config_is_hashed_anew_where_it_arrives():
    """The hash of a string differs between processes."""
    config = AttentionConfig(attention="ring", ici_context_parallelism=2)
    copied = pickle.loads(pickle.dumps(config)) if hash(config) else config
    assert copied.__dict__.keys() == AttentionConfig.model_fields.keys()
    assert copied == config and hash(copied) == hash(config)


def test_frozen_and_validated_when_replaced():
    config = AttentionConfig()
    with pytest.raises(Exception, match=r"write changed = settings.replace\("):
        config.attention = "flash"  # type: ignore[misc]
    assert config.replace(attention="flash").attention == "flash" and config.attention == "auto"
    for change in (config.replace, lambda **kw: config.model_copy(update=kw)):
        with pytest.raises(ConfigErrors, match="did you mean 'flash'"):
            change(attention="flahs")
        with pytest.raises(ConfigErrors, match="did you mean 'attention'"):
            change(atention="flash")
    with pytest.raises(ConfigErrors, match="already names the strategy ring"):
        config.replace(attention="ring").replace(context_parallel="ulysses")
    hash(config)
    other = config.model_copy(update={"attention": "flash"})
    assert hash(other) == hash(AttentionConfig(attention="flash"))
    assert copy.deepcopy(config) == config == config.model_copy()


def test_block_sizes_alone_and_null():
    with pytest.raises(ConfigErrors, match="block_kv: true") as caught:
        FlashBlockSizes(block_q=0, block_kv=True)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    assert AttentionConfig(flash_block_sizes=None) == AttentionConfig()  # type: ignore[arg-type]
    assert FlashBlockSizes(use_fused_bwd_kernel=False) != FlashBlockSizes()


def test_problems_are_reported_with_their_parts():
    sizes = {"ici_fsdp_batch_parallelism": 2, "ici_context_parallelism": 2}
    with pytest.raises(ConfigErrors) as caught:
        AttentionConfig(attention="ringg", context_parallel="ulysses", **sizes)
    first, second = caught.value.problems
    assert (first.value, first.remedy, first.where) == ("ringg", "did you mean 'ring'?", "")
    assert second.setting == "ici_context_parallelism"
    assert caught.value.setting == first.setting == "attention"


def test_sections_of_a_program():
    settings = Settings(training={"steps": 3}, model={"patch": [1, 2, 2]}, attention="ring")
    assert settings.training == TrainingSettings(steps=3)
    assert settings.model == ModelSettings(patch=(1, 2, 2))
    assert hash(settings) == hash(settings.replace())
    assert settings.replace(training={"steps": 4}) != settings
    assert isinstance(settings, AttentionConfig)
    assert settings.changed == {"attention", "model", "training"}
    assert settings.resolved()["model"]["patch"] == [1, 2, 2]


def test_a_programs_own_contradictions():
    class Run(TrainingSettings):
        warmup: int = 0

        @classmethod
        def contradictions(cls, values):
            if values["warmup"] > values["steps"]:
                yield ConfigError("warmup", values["warmup"], "it is at most steps", "raise steps")

    class Program(AttentionConfig):
        training: Run

        @classmethod
        def contradictions(cls, values):
            yield from super().contradictions(values)
            if values["training"].steps > 100 and values["attention"] == "dot_product":
                yield ConfigError("attention", "dot_product", "long runs need flash", "write flash")

    with pytest.raises(ConfigErrors) as caught:
        Program(training={"steps": 3, "warmup": 4}, attention="ring", context_parallel="ulysses")
    assert [p.setting for p in caught.value.problems] == ["training.warmup", "context_parallel"]
    with pytest.raises(ConfigErrors) as caught:
        Program(training={"steps": 300}, attention="dot_product", deterministic="yes")
    assert [p.setting for p in caught.value.problems] == ["deterministic", "attention"]


def test_a_mesh_is_of_jax_s_devices():
    for devices in (4, "cpu", [0, 1], []):
        with pytest.raises(InputError, match=r"list of jax devices\n.*jax\.devices\(\)\[:\d\]"):
            AttentionConfig().make_mesh(devices)  # type: ignore[arg-type]
    mesh = AttentionConfig(mesh_axes=("context", "data")).make_mesh(jax.devices()[:1])
    assert dict(mesh.shape) == {"context": 1, "data": 1}
