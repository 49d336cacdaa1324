"""Thousands of damaged inputs: refused in sentences, or converted to what the damage says.

Everything follows from the seeds. Each test also checks that it saw enough of both outcomes, so
that a change which refuses everything (or checks nothing) shows.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_tokenizers import SHAPES, write_shape
from tiny_checkpoint import draft_config

import dflash_convert
from dflash_convert.checkpoint import STORED, open_checkpoint
from dflash_convert.config import read_config
from dflash_convert.errors import DFlashError, InputError
from dflash_convert.gguf_file import read_gguf
from dflash_convert.plan import Plan, build_plan
from dflash_convert.target import Target, read_target

Make = Callable[..., Path]

LARGE = 2**70
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 7, 8, 16, 32, 48, 64, 300, 2**31 - 1, 2**31, 2**32, LARGE),
    *(0.0, 0.5, 1.0, -1.5, 1e-45, 1e39, 1e300, float("nan"), float("inf"), 10**400),
    *("", "x", "full_attention", "yarn", "bfloat16", "\u0000", "\ud800", "300"),
    *([], [1], [1, 3], [-1], ["sliding_attention"], [None], {}, {"a": 1}, {"rope_theta": 1.0}),
    [[[]]],
]


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """A length field that somebody believes fails here instead of swapping."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sentence(error: DFlashError) -> None:
    """The form of an error: a message, and problems without line breaks of their own."""
    assert error.message
    assert "Traceback" not in str(error)
    assert all(p and "\n" not in p for p in error.problems)


def keys_of(plan: Plan) -> dict[str, Any]:
    return {k.name: k.value if k.field is None else k.field.payload for k in plan.keys}


def shapes_of(plan: Plan) -> dict[str, Any]:
    return {t.name: (t.shape, t.out.name, t.source and t.source.offset) for t in plan.tensors}


def plan_of(path: Path, config: dict[str, Any], target: Target) -> Plan:
    """What would be written of a checkpoint with another config."""
    read = read_config(config, target_layers=target.layers, mrope=target.mrope)
    return build_plan(open_checkpoint(path), read, target)


# --- configs ------------------------------------------------------------------------------------

_WINDOW = {
    "dflash.attention.sliding_window",
    "dflash.attention.sliding_window_pattern",
    "dflash.attention.causal",
}
_ROPE = {
    "dflash.rope.freq_base",
    "dflash.rope.dimension_count",
    "dflash.rope.scaling.type",
    "dflash.rope.scaling.factor",
    "dflash.rope.scaling.original_context_length",
    "dflash.rope.scaling.attn_factor",
    "dflash.rope.scaling.yarn_attn_factor",
    "dflash.rope.scaling.yarn_beta_fast",
    "dflash.rope.scaling.yarn_beta_slow",
}
# Key of the config -> keys of the GGUF that it may change. Keys that are not listed change nothing.
SAYS: dict[str, set[str]] = {
    "max_position_embeddings": {"dflash.context_length"} | _ROPE,
    "rms_norm_eps": {"dflash.attention.layer_norm_rms_epsilon"},
    "hidden_act": {"dflash.hidden_activation"},
    "layer_types": _WINDOW,
    "use_sliding_window": _WINDOW,
    "sliding_window": _WINDOW,
    "max_window_layers": _WINDOW,
    "use_swa": _WINDOW,
    "swa_window_size": _WINDOW,
    "is_causal": {"dflash.attention.causal"},
    "causal": {"dflash.attention.causal"},
    "block_size": {"dflash.block_size"},
    "selector_top_k": {"dflash.selector_top_k"},
    "target_layer_ids": {"dflash.target_layers"},
    "num_target_layers": {"dflash.target_layers"},
    "mask_token_id": {"tokenizer.ggml.mask_token_id"},
    "output_multiplier": {"dflash.logit_scale"},
    "final_logit_softcapping": {"dflash.final_logit_softcapping"},
    "input_embedding_scale": {"dflash.embedding_scale"},
    "attention_value_scale": {"dflash.attention.value_scale"},
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"), _ROPE
    ),
}
_OWN = ("use_swa", "swa_window_size", "causal", "output_multiplier", "final_logit_softcapping")
_OWN += ("input_embedding_scale", "attention_value_scale", "block_size", "mask_token_id")


def mutate_config(rng: random.Random, config: dict[str, Any]) -> tuple[str, str, Any]:
    """Change one value in place; return where, its key and the value."""
    own, rope = config["dflash_config"], config["rope_parameters"]
    where = rng.choice(["top", "top", "own", "rope", "new", "drop"])
    table = {"own": own, "rope": rope}.get(where, config)
    if where == "new":
        table, key = rng.choice([(config, "rope_theta"), (config, "junk"), (own, rng.choice(_OWN))])
    else:
        key = rng.choice([*sorted(table), *(["factor", "type"] if where == "rope" else [])])
    value = rng.choice(VALUES)
    if where == "drop":
        config.pop(key)
    else:
        table[key] = value
    return ("rope_parameters" if table is rope else key), key, value


def test_configs(small: Make, small_target: Path) -> None:
    """One wrong value in a config: 2000 times, as a plan, so in seconds."""
    path, target = small(), read_target(small_target)
    original = json.loads((path / "config.json").read_text())
    base = plan_of(path, original, target)
    seen: Counter[str] = Counter()
    rng = random.Random(1)
    for number in range(2000):
        config = json.loads(json.dumps(original))
        key, inner, value = mutate_config(rng, config)
        try:
            plan = plan_of(path, config, target)
        except InputError as exc:
            sentence(exc)
            seen["refused"] += 1
            continue
        seen["accepted"] += 1
        assert shapes_of(plan) == shapes_of(base), (number, inner, value)
        before, after = keys_of(base), keys_of(plan)
        changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
        assert changed <= SAYS.get(key, set()), (number, inner, value)
        seen["different"] += bool(changed)
    assert seen["refused"] > 400
    assert seen["accepted"] > 400
    assert seen["different"] > 50


def test_accepted_configs_are_written_as_planned(
    small: Make, small_target: Path, tmp_path: Path
) -> None:
    """The same mutations through the whole conversion, down to the file."""
    path, target = small(), read_target(small_target)
    file = path / "config.json"
    original = json.loads(file.read_text())
    fresh = read_gguf(dflash_convert.convert(path, small_target, tmp_path / "base.gguf").path)
    base = {n: fresh.path.read_bytes()[t.offset :][: t.nbytes] for n, t in fresh.tensors.items()}
    rng, written = random.Random(2), 0
    for number in range(150):
        config = json.loads(json.dumps(original))
        key, inner, value = mutate_config(rng, config)
        file.write_text(json.dumps(config))
        out = tmp_path / "out.gguf"
        try:
            dflash_convert.convert(path, small_target, out)
        except InputError as exc:
            sentence(exc)
            assert not list(tmp_path.glob("*out*")), (number, inner, value)
            continue
        made, raw = read_gguf(out), out.read_bytes()
        out.unlink()
        tensors = {n: raw[t.offset :][: t.nbytes] for n, t in made.tensors.items()}
        assert tensors == base, (number, inner, value)
        changed = {
            k
            for k in made.fields.keys() | fresh.fields.keys()
            if made.fields.get(k) != fresh.fields.get(k)
        }
        assert changed <= SAYS.get(key, set()), (number, inner, value)
        assert dflash_convert.check_pair(target.path, fresh.path) == []
        written += 1
    assert 30 < written < 140


# --- headers of safetensors files ---------------------------------------------------------------


def mutate_header(rng: random.Random, raw: bytes) -> tuple[bytes, set[str]]:
    """Damage a safetensors file; return it and the tensors that the damage speaks of."""
    (length,) = struct.unpack_from("<Q", raw)
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = sorted(n for n in header if n != "__metadata__")
    name = rng.choice(names)
    kind = rng.choice(["length", "bytes", "cut", "entry", "rename", "twin", "swap", "metadata"])
    touched = {name}
    if kind == "length":
        wrong = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1, len(raw)])
        return struct.pack("<Q", wrong) + raw[8:], set(names)
    if kind == "bytes":
        broken = bytearray(raw)
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(8 + length)] = rng.randrange(256)
        return bytes(broken), set(names)
    if kind == "cut":
        return raw[: rng.randrange(len(raw))], set(names)
    if kind == "entry":
        field = rng.choice(["dtype", "shape", "data_offsets", "more"])
        values = [*VALUES, "F32", "F16", "BF16", "I64", "F8_E4M3", [2**63, 2], [0, 2**63], [0, 0]]
        header[name][field] = rng.choice(values)
    elif kind == "rename":
        new = rng.choice(["x", "", f"model.{name}", name.upper(), f"{name}\u0000", names[0]])
        touched |= {new}
        header[new] = header.pop(name)
    elif kind == "twin":
        touched |= {f"model.{name}"}
        header[f"model.{name}"] = header[name]
    elif kind == "swap":
        other = rng.choice(names)
        touched |= {other}
        places = header[name]["data_offsets"], header[other]["data_offsets"]
        header[other]["data_offsets"], header[name]["data_offsets"] = places
    else:
        header["__metadata__"] = rng.choice(VALUES)
        touched = set()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data, touched


def contents(path: Path) -> dict[str, bytes]:
    tensors = open_checkpoint(path).tensors
    return {n: t.read(0, t.elements).tobytes() for n, t in tensors.items() if t.dtype in STORED}


def test_headers(small: Make, small_target: Path) -> None:
    """A damaged header is refused, or every tensor it does not speak of keeps its bytes."""
    path, target = small(), read_target(small_target)
    file = path / "model.safetensors"
    config = json.loads((path / "config.json").read_text())
    raw, before = file.read_bytes(), contents(path)
    seen: Counter[str] = Counter()
    rng = random.Random(3)
    for number in range(1500):
        broken, touched = mutate_header(rng, raw)
        file.write_bytes(broken)
        try:
            plan_of(path, config, target)
        except InputError as exc:
            sentence(exc)
            seen["refused"] += 1
            continue
        seen["accepted"] += 1
        after = contents(path)
        assert after.keys() == before.keys(), number
        plain = {t.removeprefix("model.") for t in touched}
        if broken[8:] != raw[8:]:  # a length field alone changes no entry
            assert all(after[n] == before[n] for n in before.keys() - plain), number
    assert seen["refused"] > 700
    assert seen["accepted"] > 100


# --- indexes ------------------------------------------------------------------------------------


def test_indexes(small: Make, small_target: Path) -> None:
    """An index that is accepted leads to the same tensors, whatever was done to it."""
    path, target = small(shards=3), read_target(small_target)
    file = path / "model.safetensors.index.json"
    config = json.loads((path / "config.json").read_text())
    original = json.loads(file.read_text())
    files = sorted(set(original["weight_map"].values()))
    before = contents(path)
    seen: Counter[str] = Counter()
    rng = random.Random(4)
    for number in range(1000):
        document = json.loads(json.dumps(original))
        table = document["weight_map"]
        name = rng.choice(sorted(table))
        places = [*VALUES, *files, "../x", "/etc/passwd", "a/b", "mask_embedding.safetensors"]
        kind = rng.choice(["place", "drop", "add", "rename", "whole", "top", "bytes"])
        if kind == "place":
            table[name] = rng.choice(places)
        elif kind == "drop":
            table.pop(name)
        elif kind == "add":
            table[rng.choice(["x", "", f"model.{name}"])] = rng.choice(places)
        elif kind == "rename":
            table[name.upper()] = table.pop(name)
        elif kind == "whole":
            document["weight_map"] = rng.choice(VALUES)
        elif kind == "top":
            document[rng.choice(["metadata", "junk"])] = rng.choice(VALUES)
        text = json.dumps(document).encode()
        if kind == "bytes":
            broken = bytearray(text)
            broken[rng.randrange(len(broken))] = rng.randrange(256)
            text = bytes(broken)
        file.write_bytes(text)
        try:
            plan_of(path, config, target)
        except InputError as exc:
            sentence(exc)
            seen["refused"] += 1
            continue
        seen["accepted"] += 1
        assert contents(path) == before, number
    assert seen["refused"] > 300
    assert seen["accepted"] > 100


# --- targets ------------------------------------------------------------------------------------


def test_tokenizers(tmp_path: Path) -> None:
    """A damaged tokenizer of a target: refused, or the tokens are those of the files."""
    seen: Counter[str] = Counter()
    rng = random.Random(5)
    for shape in ("qwen3", "llama3", "gemma4", "glm4"):
        directory = tmp_path / shape
        write_shape(directory, SHAPES[shape])
        texts = {
            n: (directory / n).read_text()
            for n in ("config.json", "tokenizer.json", "tokenizer_config.json")
        }
        before = read_target(directory)
        for number in range(300):
            name = rng.choice(sorted(texts))
            document = json.loads(texts[name])
            _damage(rng, document)
            (directory / name).write_text(json.dumps(document))
            try:
                target = read_target(directory)
            except InputError as exc:
                sentence(exc)
                seen["refused"] += 1
            else:
                seen["accepted"] += 1
                assert target.vocab == target.file.fields["tokenizer.ggml.tokens"].count
                if name == "config.json" and target.vocab == before.vocab:
                    tokens = "tokenizer.ggml.tokens"
                    assert target.file.fields[tokens] == before.file.fields[tokens], number
            (directory / name).write_text(texts[name])
    assert seen["refused"] > 200
    assert seen["accepted"] > 200


def _damage(rng: random.Random, document: Any) -> None:
    """Replace or drop something at a random place of a JSON document."""
    while True:
        keys = list(document) if isinstance(document, dict) else list(range(len(document)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = document[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.8:
            document = inner
            continue
        if rng.random() < 0.2:
            del document[key]
        else:
            document[key] = copy.deepcopy(rng.choice(VALUES))
        return


def test_headers_of_targets(small: Make, small_target: Path, tmp_path: Path) -> None:
    """A damaged GGUF of a target is refused with a sentence, or gives whole facts."""
    raw = small_target.read_bytes()
    start = min(t.offset for t in read_gguf(small_target).tensors.values())
    path = tmp_path / "broken.gguf"
    seen: Counter[str] = Counter()
    rng = random.Random(6)
    for _ in range(600):
        broken = bytearray(raw[: start + 64])
        for _ in range(rng.randint(1, 3)):
            at = rng.choice([rng.randrange(start), rng.randrange(24)])
            if rng.random() < 0.3:
                struct.pack_into("<Q", broken, at, rng.choice([2**63, 2**32, 2**40, 0, 1]))
            else:
                broken[at] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            target = read_target(path)
        except InputError as exc:
            sentence(exc)
            seen["refused"] += 1
        else:
            seen["accepted"] += 1
            assert target.hidden > 0
            assert target.vocab > 0
    assert seen["refused"] > 100
    assert seen["accepted"] > 20


def test_the_damaged_is_not_the_original() -> None:
    """The mutations do mutate: guards against a harness that tests nothing."""
    rng = random.Random(7)
    config = draft_config()
    changed = 0
    for _ in range(200):
        copy = json.loads(json.dumps(config))
        mutate_config(rng, copy)
        changed += json.dumps(copy) != json.dumps(config)
    assert changed > 180
