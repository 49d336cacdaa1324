"""Types of tensors: llama-quantize's own choices and bytes, the floors, the user's rules."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_target
from tiny_checkpoint import make_draft_checkpoint

import dflash_convert
from dflash_convert.errors import InputError
from dflash_convert.gguf_file import GgufFile, read_gguf
from dflash_convert.mix import FLOOR_TENSORS
from dflash_convert.tensor_types import BUILT_IN, OUT_TYPES, TENSOR_TYPES

Make = Callable[..., Path]

# Rows of 256, so that every block divides them.
WIDE: dict[str, Any] = {
    "hidden": 256,
    "layers": 1,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 64,
    "ffn": 256,
    "group": 16,
    "rank": 256,
    "top_k": 4,
    "target_layer_ids": (1, 3),
}
# Rows of 288 and 96: no super-block divides them.
NARROW = WIDE | {"hidden": 288, "ffn": 96, "heads": 3, "head_dim": 32, "rank": 32}
# As many layers as it takes for "the first eighth" (sixteenth) to be one or two of them; grouped
# queries by 1, 4 and 2; with a head, or with an embedding that serves as head.
MIXED = {
    "deep": WIDE | {"layers": 16, "kv_heads": 4, "own_embedding": True, "own_head": True},
    "grouped": WIDE | {"layers": 9, "own_embedding": True, "own_head": True},
    "tied": WIDE
    | {"own_embedding": True, "config_overrides": {"tie_word_embeddings": True}, "kv_heads": 2},
}

QUANTIZED = [name for name in OUT_TYPES if OUT_TYPES[name].base.quantized]
# llama-quantize has no fallback for the blocks of 128 and stops.
NARROW_TYPES = [name for name in QUANTIZED if name != "q1_0"]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Targets of 8 layers by hidden size."""
    root = tmp_path_factory.mktemp("targets")
    return {
        n: make_target(root / f"{n}.gguf", "qwen3", n_layer=8, n_embd=n, n_ff=64, n_vocab=300)
        for n in (256, 288)
    }


@pytest.fixture(scope="module")
def quantize(
    stock_bin_dir: Path, targets: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """Convert a shape to F32, and that with llama-quantize: returns the checkpoint and the file."""
    sources: dict[str, tuple[Path, Path]] = {}
    root = tmp_path_factory.mktemp("quantized")

    def run(name: str, shape: dict[str, Any], outtype: str, *options: str) -> tuple[Path, str]:
        if name not in sources:
            checkpoint = make_draft_checkpoint(root / name, **shape)
            target = targets[shape["hidden"]]
            result = dflash_convert.convert(checkpoint, target, root / f"{name}.gguf", "f32")
            sources[name] = checkpoint, result.path
        checkpoint, source = sources[name]
        out = root / f"{name}-{outtype}.gguf"
        command = [str(stock_bin_dir / "llama-quantize"), *options, str(source)]
        command += [outtype] if "--dry-run" in options else [str(out), outtype, "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return checkpoint, done.stdout + done.stderr if "--dry-run" in options else str(out)

    return run


def types_of(file: GgufFile) -> dict[str, str]:
    """Type of every tensor, in lower case."""
    return {name: info.type_name.lower() for name, info in file.tensors.items()}


def planned(checkpoint: Path, target: Path, outtype: str, *rules: str) -> dict[str, str]:
    """Type of every tensor in a dry run."""
    result = dflash_convert.convert(
        checkpoint, target, outtype=outtype, dry_run=True, tensor_types=rules
    )
    return {t.name: t.out.name for t in result.plan.tensors}


# --- beside llama-quantize ------------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("name", MIXED)
def test_mixes_are_llama_quantizes(
    quantize: Callable[..., Any], targets: dict[int, Path], name: str
) -> None:
    shape = MIXED[name]
    for outtype in QUANTIZED:
        checkpoint, log = quantize(name, shape, outtype, "--dry-run")
        theirs = dict(re.findall(r"\] +(\S+) +- \[.*?size = .*?-> .*?\((\w+)\)", log))
        theirs = {tensor: kind.lower() for tensor, kind in theirs.items()}
        ours = planned(checkpoint, targets[256], outtype)
        assert len(theirs) == 5 + 9 * shape["layers"] + shape.get("own_head", False)
        for tensor, kind in theirs.items():
            wanted = "q8_0" if tensor in FLOOR_TENSORS else kind
            assert ours[tensor] == wanted, (outtype, tensor)
        kept = [tensor for tensor in ours if tensor not in theirs]
        assert {ours[t] for t in kept} == {"f32"}, "what llama-quantize leaves alone"


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "outtype"),
    [("wide", t) for t in QUANTIZED] + [("narrow", t) for t in NARROW_TYPES],
)
def test_bytes_are_llama_quantizes(
    quantize: Callable[..., Any],
    targets: dict[int, Path],
    tmp_path: Path,
    name: str,
    outtype: str,
) -> None:
    shape = WIDE if name == "wide" else NARROW
    checkpoint, path = quantize(name, shape, outtype)
    out = tmp_path / "ours.gguf"
    result = dflash_convert.convert(checkpoint, targets[shape["hidden"]], out, outtype)
    ours, theirs = read_gguf(out), read_gguf(path)
    assert ours.get("general.file_type") == theirs.get("general.file_type")
    raw, theirs_raw = out.read_bytes(), Path(path).read_bytes()
    equal = 0
    for tensor, mine in ours.tensors.items():
        twin = theirs.tensors[tensor]
        if mine.type_id != twin.type_id:
            assert tensor in FLOOR_TENSORS
            assert mine.type_name == "Q8_0"
            continue
        assert raw[mine.offset :][: mine.nbytes] == theirs_raw[twin.offset :][: twin.nbytes], tensor
        equal += twin.type_name not in ("F32", "F16")
    assert equal >= 9
    fell_back = [t.name for t in result.plan.tensors if t.fallback]
    assert bool(fell_back) == (name == "narrow" and OUT_TYPES[outtype].base.block > 32)
    sentences = " ".join(w for w in result.warnings if " instead of " in w)
    further = sum(map(int, re.findall(r"and (\d+) more", sentences)))
    assert sentences.count("`") // 2 + further == len(fell_back)


@pytest.mark.native
@pytest.mark.parametrize("kind", [t for t in TENSOR_TYPES if t not in ("f32", "tq1_0", "tq2_0")])
def test_bytes_of_a_named_type_are_llama_quantizes(
    quantize: Callable[..., Any], targets: dict[int, Path], tmp_path: Path, kind: str
) -> None:
    """Every tensor type by `--tensor-type`, those without a file type of their own too."""
    rule = f"attn_q.weight={kind}"
    checkpoint, path = quantize("wide", WIDE, "q8_0", "--tensor-type", rule)
    out = tmp_path / "ours.gguf"
    dflash_convert.convert(checkpoint, targets[256], out, "q8_0", tensor_types=[rule])
    name = "blk.0.attn_q.weight"
    mine, twin = read_gguf(out).tensors[name], read_gguf(path).tensors[name]
    assert mine.type_name.lower() == twin.type_name.lower() == kind
    ours, theirs = out.read_bytes(), Path(path).read_bytes()
    assert ours[mine.offset :][: mine.nbytes] == theirs[twin.offset :][: twin.nbytes]


# --- rules of the user ----------------------------------------------------------------------------


def test_rules_the_last_match_wins(make: Make, targets: dict[int, Path]) -> None:
    checkpoint = make(**WIDE | {"layers": 2})
    rules = (r"ffn=q4_0", r"^blk\.1\.ffn_down=Q6_K", r"selector_p=bf16", r"fc=q4_k")
    types = planned(checkpoint, targets[256], "q8_0", *rules)
    assert types["blk.0.ffn_down.weight"] == types["blk.1.ffn_up.weight"] == "q4_0"
    assert types["blk.1.ffn_down.weight"] == "q6_k"
    assert types["selector_predecessor.weight"] == "bf16"
    assert types["selector_successor.weight"] == "q8_0"
    assert types["fc.weight"] == "q4_k", "below the floor when asked"
    assert types["blk.0.ffn_norm.weight"] == types["blk.0.ffn_conv_base"] == "f32"
    again = planned(checkpoint, targets[256], "q8_0", r"ffn_down=q6_k", r"ffn=q4_0")
    assert again["blk.1.ffn_down.weight"] == "q4_0"
    assert planned(checkpoint, targets[256], "f32", ".=q5_k")["fc.weight"] == "q5_k"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("attn_q", "is not of the form REGEX=TYPE"),
        ("=q8_0", "is not of the form REGEX=TYPE"),
        ("attn_(q=q8_0", "`attn_(q` in `--tensor-type` is not a regular expression"),
        ("attn_q=q9_9", "no tensor type `q9_9`, expected f32, f16"),
        ("attn_q=iq2_xxs", "tensor type `iq2_xxs` needs an importance matrix"),
        ("attn_x=q8_0", "`attn_x` matches no tensor"),
        ("output_norm=f16", "only tensors whose type is fixed (`enc.output_norm.weight`)"),
        ("selector_succ=tq2_0", "`selector_successor.weight` is read row by row"),
        ("selector_succ=nvfp4", "`selector_successor.weight` is read row by row"),
    ],
)
def test_rules_that_are_refused(
    make: Make, targets: dict[int, Path], rule: str, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        planned(make(**WIDE), targets[256], "q8_0", rule)
    assert expected in str(caught.value)


def test_codebooks_that_the_gpu_cannot_read(make: Make, targets: dict[int, Path]) -> None:
    """Two types are read row by row in whole super-blocks only."""
    for kind in ("iq4_nl", "mxfp4"):
        rule = f"selector_succ={kind}"
        assert kind in planned(make("w", **WIDE), targets[256], "bf16", rule).values()
        with pytest.raises(InputError, match=f"cannot do for {kind} in rows of 32"):
            planned(make("n", **WIDE | {"rank": 32}), targets[256], "bf16", rule)


def test_gathered_types_are_the_bases(base_gguf_py: Path) -> None:
    """What is refused for codebooks is what the base's CUDA backend cannot gather, no more."""
    from dflash_convert import mix

    source = base_gguf_py.parent / "ggml" / "src" / "ggml-cuda" / "ggml-cuda.cu"
    cases = source.read_text().split("case GGML_OP_GET_ROWS:", 2)[2].split("GET_ROWS_BACK")[0]
    always, rest = cases.split("return true;", 1)
    names = {t.lower() for t in re.findall(r"GGML_TYPE_(\w+)", always)}
    by_block = {t.lower() for t in re.findall(r"GGML_TYPE_(\w+)", rest)}
    assert by_block == set(mix._GATHERED_BY_SUPER_BLOCK)
    assert set(TENSOR_TYPES) - names - by_block == set(mix._NOT_GATHERED)
    cpu = (base_gguf_py.parent / "ggml" / "src" / "ggml-cpu" / "ops.cpp").read_text()
    body = cpu.split("void ggml_compute_forward_get_rows(", 1)[1].split("\n}", 1)[0]
    assert set(TENSOR_TYPES) <= {t.lower() for t in re.findall(r"GGML_TYPE_(\w+)", body)}


@pytest.mark.parametrize(
    ("name", "reason", "instead"),
    [
        ("iq2_xs", "needs an importance matrix", "q2_k"),
        ("IQ3_XS", "needs an importance matrix", "iq3_s"),
        ("q2_k_s", "needs an importance matrix", "q2_k"),
        ("MXFP4_MOE", "is for experts", "q8_0"),
    ],
)
def test_types_of_llama_quantize_that_are_not_offered(
    make: Make, targets: dict[int, Path], name: str, reason: str, instead: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        planned(make(**WIDE), targets[256], name)
    assert instead in (caught.value.hint or "")


def test_every_type_of_llama_quantize_is_answered(base_gguf_py: Path) -> None:
    """Offered, an alias, or refused with a reason: none is unknown."""
    from dflash_convert import tensor_types

    tool = base_gguf_py.parent / "tools" / "quantize" / "quantize.cpp"
    table = tool.read_text().split("QUANT_OPTIONS = {", 1)[1].split("};", 1)[0]
    names = {n.lower() for n in re.findall(r'\{ "(\w+)",', table)} - {"copy"}
    known = {*OUT_TYPES, *tensor_types.ALIASES, *tensor_types._NOT_OFFERED}
    assert names == known
    source = (base_gguf_py.parent / "src" / "llama-quant.cpp").read_text()
    body = source.split("static bool tensor_requires_imatrix", 1)[1].split("default:", 1)[0]
    needing = {t.lower() for t in re.findall(r"case GGML_TYPE_(\w+)", body)} - {"q2_k"}
    assert needing == set(tensor_types.IMATRIX_TENSOR_TYPES)


def test_strict_refuses_fallbacks_and_skipped_tensors(make: Make, targets: dict[int, Path]) -> None:
    narrow = make("narrow", **NARROW)
    dflash_convert.convert(narrow, targets[288], outtype="q4_k_m", dry_run=True)
    with pytest.raises(InputError, match="allows no fallback") as caught:
        dflash_convert.convert(narrow, targets[288], outtype="q4_k_m", dry_run=True, strict=True)
    wanted = "q5_0 instead of q4_k, whose blocks of 256 do not divide rows of 288: `selector_hidden"
    assert any(p.startswith(wanted) for p in caught.value.problems)
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    skipped = make("skipped", **WIDE, tensors=extra)
    result = dflash_convert.convert(skipped, targets[256], dry_run=True)
    assert result.plan.skipped == ("layers.0.self_attn.rotary_emb.inv_freq",)
    with pytest.raises(InputError, match="no skipped tensor") as caught:
        dflash_convert.convert(skipped, targets[256], dry_run=True, strict=True)
    assert "tensor without effect: `layers.0.self_attn" in caught.value.problems[0]


def test_no_fallback_is_defined_for_q1_0(make: Make, targets: dict[int, Path]) -> None:
    with pytest.raises(InputError, match="blocks of 128 do not divide"):
        planned(make(**NARROW), targets[288], "q1_0")


# --- the library ----------------------------------------------------------------------------------


def test_without_ggmls_library(
    make: Make, targets: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_convert import ggml

    checkpoint = make(**WIDE)

    def converted(outtype: str) -> bytes:
        out = tmp_path / "out.gguf"
        return dflash_convert.convert(
            checkpoint, targets[256], out, outtype, True
        ).path.read_bytes()

    with_library = {outtype: converted(outtype) for outtype in BUILT_IN}
    monkeypatch.setenv("DFLASH_LIB_PATH", str(tmp_path / "nowhere"))
    ggml.load.cache_clear()
    try:
        assert {outtype: converted(outtype) for outtype in BUILT_IN} == with_library
        with pytest.raises(InputError, match=r"ggml's library .* is not in") as caught:
            converted("q4_k_m")
        assert "f32, f16, bf16, q8_0 can be written" in (caught.value.hint or "")
    finally:
        ggml.load.cache_clear()


@pytest.mark.native
def test_a_library_of_another_version(lib_dir: Path) -> None:
    from dataclasses import replace

    from dflash_convert import ggml

    for name, out in TENSOR_TYPES.items():
        if name in ("f32", "f16", "bf16"):
            continue
        ggml.load().require(out)
        with pytest.raises(InputError, match=f"has no {name} as type 4"):
            ggml.load().require(replace(out, type_id=4))
        with pytest.raises(InputError, match="expected the build of this toolkit"):
            ggml.load().require(replace(out, block_bytes=out.block_bytes + 1))


@pytest.mark.parametrize("outtype", ["bf16", "q8_0", "q4_k_m"])
def test_threads_do_not_change_the_file(
    make: Make, targets: dict[int, Path], tmp_path: Path, outtype: str
) -> None:
    checkpoint = make(**WIDE)
    files = {
        dflash_convert.convert(
            checkpoint, targets[256], tmp_path / f"{n}.gguf", outtype, threads=n
        ).path.read_bytes()
        for n in (1, 2, 7)
    }
    assert len(files) == 1
    with pytest.raises(InputError, match="0 threads"):
        dflash_convert.convert(checkpoint, targets[256], outtype=outtype, threads=0)


def test_the_command_line_says_what_was_chosen(
    run: Callable[..., Any], make: Make, targets: dict[int, Path], tmp_path: Path
) -> None:
    checkpoint = make(**WIDE)
    options = ["--target", targets[256], "--outtype", "Q4_K_M", "--threads", "2"]
    done = run(checkpoint, *options, "--tensor-type", "attn_q=q6_k", "--tensor-type", "ffn_up=q6_k")
    assert done.returncode == 0, done.stderr
    assert "weights, q4_k_m (8 f32, 6 q4_k, 4 q6_k, 3 q8_0); from the target" in done.stdout
    (file,) = tmp_path.glob("dflash-*-Q4_K_M.gguf")
    assert types_of(read_gguf(file))["blk.0.attn_q.weight"] == "q6_k"
    for wrong, expected in (
        (("--threads", "0"), "invalid value for '--threads'"),
        (("--tensor-type", "nothing=q8_0"), "a `--tensor-type` is without effect"),
        (("--outtype", "iq1_s"), "`iq1_s` needs an importance matrix"),
    ):
        refused = run(checkpoint, *options[:2], *wrong)
        assert refused.returncode == 2
        assert expected in refused.stderr
        assert "Traceback" not in refused.stderr
