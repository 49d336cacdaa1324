"""config.json: what the reference would do with it, and every mistake listed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import draft_config

from dflash_convert.config import DraftConfig, default_target_layer_ids, read_config
from dflash_convert.errors import InputError
from dflash_convert.keys import load_json
from dflash_convert.rope import Rope, llama3_factors

FULL, SLIDING = "full_attention", "sliding_attention"


def read(config: dict[str, Any] | None = None, **changes: Any) -> DraftConfig:
    """Read a config with changes at top level; a value of None removes the key."""
    config = draft_config() if config is None else config
    merged = {k: v for k, v in {**config, **changes}.items() if v is not None}
    return read_config(merged, target_layers=8)


def problems(config: dict[str, Any] | None = None, **changes: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(config, **changes)
    return str(caught.value)


def nested(**changes: Any) -> dict[str, Any]:
    """Return the default config with changes inside dflash_config."""
    config = draft_config()
    own = {**config["dflash_config"], **changes}
    config["dflash_config"] = {k: v for k, v in own.items() if v is not None}
    return config


def test_values_of_the_default_config() -> None:
    config = read()
    assert (config.version, config.hidden, config.layers, config.head_dim) == (2, 288, 5, 64)
    assert (config.block_size, config.taps, config.group) == (8, 2, 16)
    assert (config.rank, config.top_k, config.mask_token_id) == (32, 16, 298)
    assert config.target_layer_ids == (1, 2, 3, 4, 5)
    assert config.fused == 5 * 288
    assert config.conv_rows == 2 * 2 * 18
    assert config.rope.theta == 1e7
    assert config.ignored == config.warnings == ()


def test_own_keys_may_stand_at_top_level_and_nested_ones_win() -> None:
    assert read(draft_config(nested=False)) == read(draft_config(nested=True))
    assert read(nested(block_size=6), block_size=4).block_size == 6
    assert read(nested(block_size=None), block_size=4).block_size == 4
    assert read(nested(block_size=None)).block_size == 16  # the reference's default


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("depth", [4, 8, 28, 36, 64])
def test_default_target_layer_ids_are_the_references(layers: int, depth: int) -> None:
    reference = pytest.importorskip("dflash.model")
    expected = reference.build_target_layer_ids(depth, layers)
    assert list(default_target_layer_ids(depth, layers)) == expected


def test_missing_target_layer_ids_use_the_default() -> None:
    config = read(draft_config(target_layer_ids=None, n_target_layers=36))
    assert config.target_layer_ids == default_target_layer_ids(36, 5)
    assert "default" in config.warnings[0]


# --- window and causality, against the reference itself ----------------------------------------

_CHOICES = list(
    itertools.product(
        (None, [FULL] * 3, [SLIDING] * 3, [SLIDING, FULL, SLIDING]),  # layer_types
        ("missing", None, 64),  # sliding_window; None is written as null
        (None, True, False),  # use_sliding_window
        (None, True, False),  # is_causal
        (None, False),  # use_swa
    )
)


def window_config(
    types: list[str] | None, window: int | str | None, use: bool | None, causal: bool | None
) -> dict[str, Any]:
    """A config of three layers that says what is not None about windows and causality."""
    raw = draft_config(layers=3, target_layer_ids=(1, 2))
    changes = {
        "layer_types": types,
        "use_sliding_window": use,
        "is_causal": causal,
        "max_window_layers": 2,
    }
    raw = {k: v for k, v in {**raw, **changes}.items() if v is not None}
    raw.pop("sliding_window", None)
    if window != "missing":
        raw["sliding_window"] = window
    return raw


@pytest.mark.parametrize(("types", "window", "use", "causal", "swa"), _CHOICES)
def test_window_and_causality_are_the_references(
    types: list[str] | None,
    window: int | str | None,
    use: bool | None,
    causal: bool | None,
    swa: bool | None,
) -> None:
    reference = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    raw = window_config(types, window, use, causal)
    theirs = Qwen3Config(**raw)
    if swa is not None:
        raw["dflash_config"]["use_swa"] = swa
    layers = [reference.Qwen3DFlashAttention(theirs, i) for i in range(3)]
    flags = {layer.is_causal for layer in layers}
    if len(flags) > 1:
        with pytest.raises(InputError) as caught:
            read_config(raw, target_layers=8)
        assert "one flag for all" in str(caught.value)
        assert read_config(raw, target_layers=8, causal=False).causal is False
        return
    ours = read_config(raw, target_layers=8)
    assert ours.causal is flags.pop()
    windows = [layer.sliding_window for layer in layers]
    assert [ours.window if s else None for s in ours.sliding] == windows


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("types", [None, [FULL] * 3, [SLIDING] * 3])
@pytest.mark.parametrize("use", [None, True, False])
@pytest.mark.parametrize(
    ("size", "window", "expected"),
    [(77, "missing", 77), (77, 64, 77), (None, 64, 64), (None, "missing", 4096), (77, None, 77)],
)
@pytest.mark.parametrize(
    ("causal", "own"), [(None, None), (None, True), (False, True), (True, None)]
)
def test_use_swa_is_another_exporters_way(
    nested: bool,
    types: list[str] | None,
    use: bool | None,
    size: int | None,
    window: int | str | None,
    expected: int,
    causal: bool | None,
    own: bool | None,
) -> None:
    """The reference does not know the key; every layer slides, as the base's converter has it.

    Causality: `is_causal`, else `dflash_config.causal`, else by the layer types as ever.
    """
    raw = window_config(types, window, use, causal)
    keys = {"use_swa": True, "swa_window_size": size, "causal": own}
    where = raw["dflash_config"] if nested else raw
    where |= {k: v for k, v in keys.items() if v is not None}
    ours = read_config(raw, target_layers=8)
    assert (ours.window, ours.sliding) == (expected, (True,) * 3)
    stated = own if causal is None else causal
    assert ours.causal is (stated if stated is not None else types == [SLIDING] * 3)


def test_use_swa_without_any_size() -> None:
    raw = window_config([FULL] * 3, None, None, False)
    raw["dflash_config"]["use_swa"] = True
    with pytest.raises(InputError, match="`use_swa` is true, but there is no window size"):
        read_config(raw, target_layers=8)


def test_window_without_use_sliding_window_warns() -> None:
    config = read(use_sliding_window=None)
    assert config.window is None
    assert "use_sliding_window is missing" in config.warnings[0]


def test_nested_causal_counts_when_is_causal_is_missing() -> None:
    assert read(nested(causal=True), is_causal=None).causal is True
    both = read(nested(causal=True))
    assert both.causal is False
    assert "wins" in both.warnings[0]


# --- rotary embedding ---------------------------------------------------------------------------


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", **parameters}}


def test_rope_theta_nested_top_missing_and_conflicting() -> None:
    assert read(**rope(rope_theta=5e5)).rope.theta == 5e5
    assert read(rope_parameters=None, rope_theta=2e5).rope.theta == 2e5
    old = {"type": "linear", "factor": 2.0}
    assert read(rope_parameters=None, rope_scaling=old, rope_theta=2e5).rope.scaling == "linear"
    assert "no `rope_theta`" in problems(rope_parameters=None)
    assert "expected one value" in problems(**rope(rope_theta=1e6), rope_theta=1e7)


def test_mrope_gives_degenerate_sections_and_whole_heads() -> None:
    raw = draft_config() | rope(partial_rotary_factor=0.25, mrope_section=[11, 11, 10])
    config = read_config(raw, target_layers=8, mrope=True)
    assert config.rope.sections == (32, 0, 0, 0)
    assert config.rope.dimensions is None
    assert "belongs to the M-RoPE target" in config.warnings[0]
    plain = read_config(raw, target_layers=8, mrope=False)
    assert (plain.rope.sections, plain.rope.dimensions) == (None, 16)


def test_llama3_factors_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import Qwen3Config

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read(rope_parameters=parameters).rope
    theirs = Qwen3Config(head_dim=64, rope_parameters=dict(parameters))
    scaled, _ = utils.ROPE_INIT_FUNCTIONS["llama3"](theirs)
    plain = 1.0 / 5e5 ** (np.arange(0, 64, 2) / 64)
    assert config.llama3 is not None
    factors = llama3_factors(config.llama3, config.theta, 64)
    assert factors == pytest.approx(plain / scaled.numpy(), rel=1e-5)
    assert factors.min() == 1.0  # all three regions occur
    assert factors.max() == 8.0
    assert ((factors > 1) & (factors < 8)).any()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
_ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 64.0, "beta_slow": 2.0},
    "yarn-factor": YARN | {"attention_factor": 1.5},
    "yarn-default-factor": YARN | {"attention_factor": 1 + 0.1 * math.log(4.0)},
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-without-context": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize("name", _ROPES)
def test_frequencies_are_the_references(name: str, theta: float) -> None:
    """With the written keys llama.cpp turns by the reference's angles and scales by its factor."""
    pytest.importorskip("dflash.model")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    raw = draft_config() | {"rope_parameters": {"rope_theta": theta, **_ROPES[name]}}
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**json.loads(json.dumps(raw))))
    ours = read_config(raw, target_layers=8).rope
    frequencies, scale = llama_cpp_rope(ours, 64)
    assert frequencies == pytest.approx(theirs.inv_freq.numpy(), rel=1e-5)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-6)


def llama_cpp_rope(rope: Rope, size: int) -> tuple[np.ndarray, float]:
    """What ggml's rope does with these keys: angle per position, and the factor on cos and sin."""
    pair = np.arange(size // 2)
    plain = rope.theta ** (-2 * pair / size)
    if rope.llama3 is not None:
        plain = plain / llama3_factors(rope.llama3, rope.theta, size)
    factor = rope.factor or 1.0
    if rope.scaling != "yarn":
        return plain / factor, 1.0

    def dimension(turns: float) -> float:
        full = (rope.original_positions or 0) / (turns * 2 * math.pi)
        return size * math.log(full) / (2 * math.log(rope.theta))

    low = max(0, math.floor(dimension(rope.beta_fast or 32.0)))
    high = min(size - 1, math.ceil(dimension(rope.beta_slow or 1.0)))
    mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
    scale = (1 + 0.1 * math.log(factor)) * (rope.attention_scale or 1.0)
    return plain / factor * (1 - mix) + plain * mix, scale


def test_yarn_keys() -> None:
    config = read(**rope(**YARN)).rope
    assert (config.scaling, config.factor, config.original_positions) == ("yarn", 4.0, 1024)
    assert (config.attention_factor, config.attention_scale) == (None, None)
    other = read(**rope(**YARN, attention_factor=1.5)).rope
    assert other.attention_factor == 1.5
    assert other.attention_scale == pytest.approx(1.5 / (1 + 0.1 * math.log(4.0)))
    assert "llama.cpp always truncates" in problems(**rope(**YARN, truncate=False))


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "`hidden_size` is missing, expected an integer"),
        ({"hidden_size": "288"}, '`hidden_size` is "288", expected an integer'),
        ({"hidden_size": 288.0}, "`hidden_size` is 288.0, expected an integer"),
        ({"hidden_size": True}, "`hidden_size` is true, expected an integer"),
        ({"hidden_size": -1}, "`hidden_size` is -1, expected at least 1"),
        ({"num_hidden_layers": 10**9}, "expected at most 512"),
        ({"head_dim": 63}, "head_dim is 63, expected an even number"),
        ({"num_key_value_heads": 3}, "is not a multiple of 3 kv heads"),
        ({"vocab_size": 250}, "mask_token_id is 298, expected 0 to 249"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` is 0.0, expected more than 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` is NaN, expected a number"),
        ({"rms_norm_eps": 1e-50}, "`rms_norm_eps` is 1e-50, expected a number that fits 32 bits"),
        ({"num_target_layers": 10**2000}, "expected at most 2147483647"),
        (rope(rope_theta=1e39), "is 1e+39, expected a number that fits 32 bits"),
        (rope(rope_theta=10**400), "expected a number"),
        (
            rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=2**33),
            "`rope_parameters.original_max_position_embeddings` is 8589934592, expected at most",
        ),
        ({"hidden_act": "relu"}, "`hidden_act` is `relu`"),
        ({"attention_bias": True}, "reads no biases"),
        ({"is_causal": "no"}, '`is_causal` is "no", expected true or false'),
        ({"layer_types": [FULL]}, "has 1 entries for 5 layers"),
        ({"layer_types": ["chunked"] * 5}, 'contains "chunked"'),
        ({"layer_types": []}, "`layer_types` is empty"),
        ({"dflash_config": 3}, "`dflash_config` is 3, expected an object"),
        ({"quantization_config": {"bits": 4}}, "is quantised"),
        (nested(mask_token_id=None), "`mask_token_id` is missing"),
        (nested(mask_token_id=300), "expected 0 to 299"),
        (nested(block_size=1), "`dflash_config.block_size` is 1, expected at least 2"),
        (nested(block_size=65), "expected at most 64"),
        (nested(conv_kernel_size=9), "expected at most block_size 8"),
        (nested(conv_group_size=17), "is not a multiple of conv_group_size 17"),
        (nested(selector_top_k=17), "at least k * (k + 1) = 306"),
        (nested(selector_rank=None), "`selector_rank` is missing"),
        (nested(target_layer_ids=[]), "`target_layer_ids` is empty"),
        (nested(target_layer_ids=[1, -2]), "contains -2"),
        (nested(target_layer_ids=[1, "2"]), 'contains "2"'),
        (nested(selector_vocab_size=128), "selector_vocab_size is 128"),
        (nested(sink_bias=1), "`dflash_config.sink_bias` is not known"),
        (rope(rope_type="longrope"), "is `longrope`"),
        (rope(wavelength=3), "has unknown keys: wavelength"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1.0}, FULL: {}}}, "differs by layer type"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], expected: str) -> None:
    assert expected in problems(**changes)


def test_all_mistakes_at_once_and_the_hint_repeats_unknown_keys() -> None:
    with pytest.raises(InputError) as caught:
        read(nested(odd=1, even=2), hidden_act="relu", attention_bias=True)
    error = caught.value
    assert len(error.problems) == 4
    assert error.hint is not None
    assert "--ignore-key odd --ignore-key even" in error.hint
    accepted = read_config(nested(odd=1), target_layers=8, ignore_keys=frozenset({"odd"}), name="x")
    assert accepted.ignored == ("dflash_config.odd",)


@pytest.mark.parametrize(
    ("architectures", "hint"),
    [
        (["Qwen3DSparkModel"], "convert_hf_to_gguf.py handles this one"),
        (["LlamaForCausalLMEagle3"], "convert_hf_to_gguf.py handles this one"),
        (["Qwen3ForCausalLM"], "looks like a target"),
        (["SomethingElse"], None),
    ],
)
def test_other_architectures_say_who_handles_them(architectures: list[str], hint: str) -> None:
    with pytest.raises(InputError, match="DFlash2DraftModel") as caught:
        read(architectures=architectures)
    assert caught.value.hint == hint or (hint and hint in str(caught.value.hint))


@pytest.mark.parametrize("value", [None, [], [3], "DFlash2DraftModel"])
def test_unusable_architectures(value: Any) -> None:
    with pytest.raises(InputError, match="names no architecture"):
        read(architectures=value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds \\[1\\], expected an object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_unreadable_json(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=expected):
        load_json(path)


# --- mutations ----------------------------------------------------------------------------------

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([FULL, SLIDING, "yarn", "linear", "llama3", 1, 2, 8, 288]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
_TOP = [*draft_config(), "rope_theta", "rope_scaling", "draft_vocab_size", "rope_is_neox_style"]
_OWN = [
    *draft_config()["dflash_config"],
    "use_swa",
    "swa_window_size",
    "causal",
    "output_multiplier",
]
_ROPE = ["rope_theta", "rope_type", "factor", "partial_rotary_factor", "beta_fast", "truncate"]


def outcome(config: dict[str, Any], mrope: bool) -> DraftConfig | InputError:
    """Return what reading gives or the one kind of error it may raise."""
    try:
        return read_config(config, target_layers=8, mrope=mrope)
    except InputError as exc:
        return exc


@settings(max_examples=300)
@given(data=st.data())
def test_mutated_configs_are_read_or_refused_with_sentences(data: st.DataObject) -> None:
    config = json.loads(json.dumps(draft_config()))
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from(["top", "own", "rope", "drop"]))
        if where == "top":
            config[data.draw(st.sampled_from(_TOP))] = data.draw(_VALUES)
        elif where == "own" and isinstance(config.get("dflash_config"), dict):
            config["dflash_config"][data.draw(st.sampled_from(_OWN))] = data.draw(_VALUES)
        elif where == "rope" and isinstance(config.get("rope_parameters"), dict):
            config["rope_parameters"][data.draw(st.sampled_from(_ROPE))] = data.draw(_VALUES)
        elif config:
            config.pop(data.draw(st.sampled_from(sorted(config))))
    result = outcome(config, data.draw(st.booleans()))
    if isinstance(result, InputError):
        assert result.message
        assert all(isinstance(p, str) and p for p in result.problems)
    else:
        assert result.hidden > 0
        assert 0 <= result.mask_token_id < result.vocab
        assert len(result.sliding) == result.layers
