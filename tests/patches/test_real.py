"""The real patch set against the real base, taken from the cache that `make build` fills."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import patchset
import pytest

from patchlib.base import SdistBase, cache_dir, file_sha256, read_base_toml
from patchlib.series import PatchSet

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"


@pytest.fixture(scope="module")
def patches(tmp_path_factory) -> Path:
    """A copy, so that somebody may edit the overlay while this runs."""
    copy = tmp_path_factory.mktemp("set") / "patches"
    shutil.copytree(PATCHES, copy)
    return copy


@pytest.fixture(scope="module")
def base() -> SdistBase:
    info = read_base_toml(PATCHES / "base.toml")
    path = cache_dir() / info.file
    if not path.is_file() or file_sha256(path) != info.sha256:
        pytest.skip(f"{info.file} is not in {cache_dir()}; run `make build`")
    return SdistBase(info)


@pytest.fixture(autouse=True)
def pinned_base(monkeypatch):
    monkeypatch.delenv("LLAMA_CPP_SOURCE", raising=False)


def test_set_is_in_order_and_makes_the_tree_once(base, patches, tmp_path, capsys):
    def run(*arguments: str) -> int:
        return patchset.main(["--patches", str(patches), *arguments])

    tree = tmp_path / "llama.cpp"
    assert run("apply", str(tree)) == 0
    assert run("check", "--tree", str(tree)) == 0
    capsys.readouterr()
    assert run("apply", str(tree)) == 0
    assert capsys.readouterr() == ("", "")  # nothing to write, no file taken for an edit
    assert run("unpack", str(tree)) == 0
    pristine = {path: data for path, data, _ in base.files()}
    found = {p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()}
    assert found - {".dflash-manifest.json"} == set(pristine)
    for path in PatchSet.load(patches).patched_paths():
        assert (tree / path).read_bytes() == pristine[path]


def test_gnu_patch_makes_the_same_files(base, patches, tmp_path, gnu_patch):
    loaded = PatchSet.load(patches)
    pristine = {path: data for path, data, _ in base.files(loaded.patched_paths())}
    for path, data in pristine.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    for patch in loaded.patches:
        command = [gnu_patch, "-p1", "--fuzz=0", "-i", str(patches / patch.name)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout
        assert "fuzz" not in done.stdout
    for path, data in pristine.items():
        assert (tmp_path / path).read_bytes() == loaded.patched(path, data)


def test_hooks_are_few_lines():
    """A hook calls; code belongs in the overlay. The limit is a reminder, not a law of nature."""
    for patch in PatchSet.load(PATCHES).patches:
        for path in patch.files:
            added, removed = patch.counts(path)
            assert added <= 40, f"{patch.name}: {added} lines added to {path}"
            assert removed <= added, f"{patch.name} removes more of {path} than it adds"


def test_no_overlay_file_carries_a_path_of_this_machine():
    places = {str(p) for p in (ROOT, Path.home(), Path(tempfile.gettempdir())) if len(p.parts) > 1}
    for path, source in PatchSet.load(PATCHES).overlay.items():
        data = source.read_text()
        assert not [place for place in places if f"{place}/" in data], path


def test_the_converter_and_the_library_know_the_same_targets():
    """Both check pairs, one without the library and one without Python; the tables must agree."""
    from dflash_convert.schema import LAST_LAYER_TAPPED_ARCHITECTURES, TAPPED_ARCHITECTURES

    text = (PATCHES / "overlay" / "dflash" / "src" / "dflash-check.cpp").read_text()

    def table(function: str) -> set[str]:
        body = text[text.index(f"bool {function}(") :]
        return set(re.findall(r'"([^"]+)"', body[: body.index("};")]))

    assert table("dflash_target_arch_supported") == TAPPED_ARCHITECTURES
    assert table("dflash_target_arch_taps_last") == LAST_LAYER_TAPPED_ARCHITECTURES
