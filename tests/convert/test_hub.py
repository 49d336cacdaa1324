"""Hub ids for draft and target, against a hub on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from converted import gguf_tensors
from fake_hub import COMMIT, FakeHub, fake_hub
from hf_tokenizers import SHAPES, write_shape
from tiny_checkpoint import write_safetensors

from dflash_convert.gguf_file import read_gguf
from dflash_convert.hub import parse_id

Make = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(make: Make, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with a draft in shards, its target with weights, and what nobody needs beside them."""
    target = tmp_path / "served" / "Qwen3-0.1B"
    vocab = write_shape(target, SHAPES["qwen3-moe"])
    (target / "model.safetensors").write_bytes(b"never read")
    (target / "assets").mkdir()
    (target / "assets" / "logo.png").write_bytes(b"png")
    draft = make("served/Draft-DFlash2", vocab=vocab, mask_token_id=1, shards=2)
    (draft / "README.md").write_text("---\nlicense: mit\n---\n")
    (draft / "consolidated.safetensors").write_bytes(b"not named by the index")
    (draft / "optimizer.pt").write_bytes(b"never read")
    with fake_hub({"org/Draft-DFlash2": draft, "org/Qwen3-0.1B": target}) as server:
        yield server


@pytest.fixture
def convert(run: Run, hub: FakeHub, tmp_path: Path) -> Run:
    """Run the command against the hub with an empty cache."""

    def call(*args: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        quiet = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_TOKEN": ""}
        quiet |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return run(*args, env={**quiet, **(env or {})})

    return call


def error_of(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("error: "))
    return line


def test_draft_and_target_by_id(convert: Run, hub: FakeHub, tmp_path: Path) -> None:
    result = convert("org/Draft-DFlash2", "--target", "org/Qwen3-0.1B@v1", "-q")
    assert result.returncode == 0, result.stderr
    path = Path(result.stdout.strip())
    assert path.name.startswith("dflash-Draft-DFlash2")
    # Of the target no weights, of the draft only what its index names.
    assert hub.fetched() == [
        "README.md",
        "config.json",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    file = read_gguf(path)
    assert file.get("general.license") == "mit"
    assert file.get("general.organization") == "org"
    assert file.get("general.repo_url") == f"{hub.endpoint}/org/Draft-DFlash2"
    assert file.get("general.base_model.0.name") == "Qwen3-0.1B"
    assert file.get("general.base_model.0.organization") == "org"
    assert file.get("dflash_convert.source_revision") == f"org/Draft-DFlash2@{COMMIT}"
    local = tmp_path / "local.gguf"
    directories = [hub.models[i] for i in ("org/Draft-DFlash2", "org/Qwen3-0.1B")]
    assert convert(directories[0], "--target", directories[1], "-o", local).returncode == 0
    twin = read_gguf(local)
    assert {k: v for k, v in file.fields.items() if not k.startswith(("general.", "dflash_c"))} == {
        k: v for k, v in twin.fields.items() if not k.startswith(("general.", "dflash_c"))
    }
    data, twin_data = path.read_bytes(), local.read_bytes()
    for name, tensor in file.tensors.items():
        other = twin.tensors[name]
        assert data[tensor.offset :][: tensor.nbytes] == twin_data[other.offset :][: other.nbytes]


def test_a_cached_model_converts_offline(convert: Run, hub: FakeHub) -> None:
    args = ("org/Draft-DFlash2", "--target", "org/Qwen3-0.1B", "-o", "d.gguf")
    offline = {"HF_HUB_OFFLINE": "1"}
    refused = convert(*args, env=offline)
    assert "HF_HUB_OFFLINE forbids asking the hub" in error_of(refused, 1)
    assert convert(*args).returncode == 0
    seen = len(hub.requests)
    again = convert(*args, "--force", env=offline)
    assert again.returncode == 0, again.stderr
    assert len(hub.requests) == seen
    nobody = convert(*args, "--force", env={"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert nobody.returncode == 0, nobody.stderr


def test_of_a_targets_weights_only_what_a_mask_embedding_needs(
    convert: Run, hub: FakeHub, tmp_path: Path
) -> None:
    vector = np.arange(288, dtype=np.float32) / 256
    draft, target = (hub.models[i] for i in ("org/Draft-DFlash2", "org/Qwen3-0.1B"))
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    write_safetensors(draft / "mask_embedding.safetensors", {"mask_embedding": vector}, "f32")
    table = np.random.default_rng(3).normal(size=(vocab, 288)).astype(np.float32)
    shards = {
        "model-1.safetensors": {"model.embed_tokens.weight": table},
        "model-2.safetensors": {"lm_head.weight": table + 1},
    }
    for name, tensors in shards.items():
        write_safetensors(target / name, tensors, "f32")
    (target / "model-3.safetensors").write_bytes(b"never read")
    names = {t: n for n, tensors in shards.items() for t in tensors}
    names["model.norm.weight"] = "model-3.safetensors"
    index = {"metadata": {}, "weight_map": names}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "model.safetensors").unlink()
    args = ("org/Draft-DFlash2", "--target", "org/Qwen3-0.1B", "-o", "d.gguf", "--outtype", "f32")
    result = convert(*args)
    assert result.returncode == 0, result.stderr
    fetched = [n for n in hub.fetched() if n.startswith("model-") and "of" not in n]
    assert fetched == ["model-1.safetensors", "model-2.safetensors"]
    written = gguf_tensors(tmp_path / "d.gguf")
    table[1] = vector
    assert np.array_equal(written["token_embd.weight"][1], table)
    table[1] = written["output.weight"][1][1] - 1
    assert np.allclose(written["output.weight"][1], table + 1)


def test_a_hub_that_does_not_answer(convert: Run) -> None:
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    result = convert("org/Draft-DFlash2", "--target", "org/Qwen3-0.1B", env=nobody)
    assert "does not answer, and `org/Qwen3-0.1B` is not complete in the cache" in error_of(
        result, 1
    )


def test_models_and_revisions_that_do_not_exist(
    convert: Run, hub: FakeHub, target: Path, tmp_path: Path
) -> None:
    missing = convert("org/Nothing", "--target", target)
    assert "no directory `org/Nothing`, and no such model on the hub" in error_of(missing, 2)
    assert "HF_TOKEN" in missing.stderr
    wrong = convert("org/Draft-DFlash2@v9", "--target", target)
    assert error_of(wrong, 2) == "error: the hub's `org/Draft-DFlash2` has no revision `v9`"
    hub.broken.add("org/Draft-DFlash2")
    broken = convert("org/Draft-DFlash2", "--target", target)
    assert "the hub refused `org/Draft-DFlash2`: 503" in error_of(broken, 1)
    assert not list(tmp_path.glob("*.gguf"))


def test_gated_models_need_the_token(convert: Run, hub: FakeHub) -> None:
    hub.gated.add("org/Qwen3-0.1B")
    args = ("org/Draft-DFlash2", "--target", "org/Qwen3-0.1B", "-o", "d.gguf")
    result = convert(*args)
    assert "the hub's `org/Qwen3-0.1B` is gated" in error_of(result, 2)
    assert "HF_TOKEN" in result.stderr
    assert convert(*args, env={"HF_TOKEN": hub.token}).returncode == 0


def test_repositories_without_a_checkpoint(convert: Run, hub: FakeHub, target: Path) -> None:
    draft = hub.models["org/Draft-DFlash2"]
    for file in draft.glob("*.safetensors*"):
        file.unlink()
    bare = convert("org/Draft-DFlash2", "--target", target)
    assert "the model has no safetensors files, only optimizer.pt" in error_of(bare, 2)
    (draft / "config.json").rename(draft / "x.gguf")
    ggufs = convert("org/Draft-DFlash2", "--target", target)
    assert "holds GGUF files, no checkpoint" in error_of(ggufs, 2)
    (draft / "x.gguf").unlink()
    nothing = convert("org/Draft-DFlash2", "--target", target)
    assert "has no config.json" in error_of(nothing, 2)


def test_a_wrong_model_is_found_before_its_weights_are_fetched(
    convert: Run, hub: FakeHub, target: Path
) -> None:
    draft = hub.models["org/Draft-DFlash2"]
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3DSparkModel"]}))
    result = convert("org/Draft-DFlash2", "--target", target)
    assert "has architecture `Qwen3DSparkModel`" in error_of(result, 2)
    assert hub.fetched() == ["README.md", "config.json"]


def test_what_counts_as_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_id("org/name") == ("org/name", None)
    assert parse_id("org/name@v1") == ("org/name", "v1")
    assert parse_id("org/name@refs/pr/3") == ("org/name", "refs/pr/3")
    for path in ("name", "./org/name", "/org/name", "org/name/more", "../org/name", "org/", "a/b@"):
        assert parse_id(path) is None, path
    (tmp_path / "models").mkdir()
    assert parse_id("models/typo") is None  # meant as a path
    (tmp_path / "models" / "there").mkdir()
    assert parse_id("models/there") is None
