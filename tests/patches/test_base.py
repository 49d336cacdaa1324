"""The base: fetched by name, checked, unpacked safely, or taken from the user's checkout."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from mini_patchset import BASE_FILES, TOP, make_archive

from patchlib import PatchsetError
from patchlib.base import parse_simple_toml, read_base_toml

REAL = Path(__file__).resolve().parents[2] / "patches" / "base.toml"


@pytest.fixture
def index(mini, tmp_path, monkeypatch):
    """An offline package index with the mini base's archive; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    shutil.move(mini.archive, folder / mini.archive.name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def cached(mini) -> list[str]:
    return sorted(path.name for path in mini.cache.iterdir() if path.name != ".lock")


def test_fetch_downloads_once_with_pip(mini, index, capsys):
    assert mini.run("fetch") == 0
    assert capsys.readouterr().out.strip() == str(mini.archive)
    assert cached(mini) == [mini.archive.name]
    shutil.rmtree(index)
    assert mini.run("fetch") == 0  # from the cache


def test_wrong_hash_from_the_index_keeps_nothing(mini, index, capsys):
    make_archive(index / mini.archive.name, {"other": b"content"})
    assert mini.apply() == 1
    error = capsys.readouterr().err
    assert "offers mini_base-1.0.tar.gz with sha256 " in error
    assert "nothing was kept" in error
    assert cached(mini) == []
    assert not mini.tree.exists()


def test_damaged_cache_is_fetched_again(mini, index, capsys):
    mini.archive.write_bytes(b"half")
    assert mini.run("fetch") == 0
    assert "did not have the expected sha256; removed" in capsys.readouterr().err
    assert mini.archive.stat().st_size > 100


def test_damaged_cache_without_network(mini, monkeypatch, capsys):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    mini.archive.write_bytes(b"half")
    assert mini.apply() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: cannot download mini-base 1.0: no network (")
    assert "--archive mini_base-1.0.tar.gz" in lines[-1]
    assert "LLAMA_CPP_SOURCE" in lines[-1]
    assert cached(mini) == []
    assert not mini.tree.exists()


def test_missing_version_names_pips_reason(mini, index, capsys):
    shutil.rmtree(index)
    index.mkdir()
    assert mini.run("fetch") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "pip says `Could not find a version that satisfies" in error


def test_archive_of_the_user(mini, tmp_path, capsys):
    mine = tmp_path / "mine.tar.gz"
    shutil.move(mini.archive, mine)
    assert mini.run("fetch", "--archive", mine) == 0
    assert cached(mini) == [mini.archive.name]
    mini.archive.unlink()
    mine.write_bytes(b"other")
    assert mini.run("fetch", "--archive", mine) == 1
    assert "patches/base.toml expects" in capsys.readouterr().err
    assert mine.read_bytes() == b"other"  # the user's file is left alone
    assert cached(mini) == []
    assert mini.run("fetch", "--archive", tmp_path / "absent.tar.gz") == 2
    assert "cannot read" in capsys.readouterr().err


def hostile(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = 1 if kind == tarfile.REGTYPE else 0
    return info


@pytest.mark.parametrize(
    "member",
    [
        hostile("/tmp/escaped"),
        hostile(f"{TOP}/vendor/base/../../../../escaped"),
        hostile("../escaped"),
        hostile(f"{TOP}/vendor/base/a\\..\\escaped"),
        hostile(f"{TOP}/vendor/base/c:escaped"),
        hostile(f"{TOP}/vendor/base/link", tarfile.SYMTYPE, "/etc/passwd"),
        hostile(f"{TOP}/vendor/base/hard", tarfile.LNKTYPE, "/etc/passwd"),
        hostile(f"{TOP}/vendor/base/pipe", tarfile.FIFOTYPE),
        hostile(f"{TOP}/vendor/base/disk", tarfile.BLKTYPE),
    ],
    ids=lambda member: member.name,
)
def test_hostile_archive_is_not_unpacked(mini, member, capsys):
    mini.set_base(BASE_FILES, [member])
    assert mini.apply() == 1
    error = capsys.readouterr().err
    assert f"holds `{member.name}`, expected plain files below one folder" in error
    assert not mini.tree.exists()
    assert mini.leftovers() == []
    assert not list(mini.folder.parent.rglob("*escaped*"))


def test_truncated_archive_with_the_right_hash(mini, capsys):
    import hashlib

    half = mini.archive.read_bytes()[:-60]
    mini.archive.write_bytes(half)
    mini.pin(hashlib.sha256(half).hexdigest())
    assert mini.apply() == 1
    assert "is damaged (" in capsys.readouterr().err
    assert not mini.tree.exists()
    assert mini.leftovers() == []


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout as a user has it: version control, an own build folder, one more file."""
    folder = tmp_path / "llama.cpp"
    for name, data in (BASE_FILES | {"extra.txt": b"mine"}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for name in (".git/HEAD", "build/CMakeCache.txt", "build/bin/old.o", "x/__pycache__/y.pyc"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("no source")
    return folder


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_checkout_is_copied_and_never_changed(mini, checkout, monkeypatch):
    before = snapshot(checkout)
    mini.archive.unlink()  # not needed
    monkeypatch.setenv("LLAMA_CPP_SOURCE", str(checkout))
    assert mini.apply() == 0
    content = mini.content()
    assert set(content) == {*BASE_FILES, "extra.txt", "ours/ours.cpp"}
    assert b"ours();" in content["src/a.cpp"]
    assert mini.apply() == 0
    assert snapshot(checkout) == before
    (checkout / "extra.txt").write_bytes(b"changed")
    assert mini.apply() == 0
    assert mini.content()["extra.txt"] == b"changed"


def test_checkout_whose_patch_does_not_apply(mini, checkout, capsys):
    (checkout / "src/a.cpp").write_bytes(b"\n" + BASE_FILES["src/a.cpp"])
    assert mini.apply("--source", str(checkout)) == 1
    error = capsys.readouterr().err
    assert "0010-hook.patch, `src/a.cpp`: hunk 1 no longer applies at line 1" in error
    assert not mini.tree.exists()
    assert mini.leftovers() == []


def test_no_checkout_is_bad_input(mini, tmp_path, capsys):
    assert mini.apply("--source", str(tmp_path)) == 2
    assert "is no llama.cpp checkout (no ggml/CMakeLists.txt)" in capsys.readouterr().err


def test_simple_toml_reads_the_real_file_as_tomllib_does():
    tomllib = pytest.importorskip("tomllib")
    text = REAL.read_text()
    assert parse_simple_toml(text) == tomllib.loads(text)["base"]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('version = "0.3.36"\n', "", "section [base] lacks version"),
        ('commit = "', 'commit = ["', "is not valid TOML"),
        ('sha256 = "8', 'sha256 = "X', "sha256 must be 64 lower-case hexadecimal digits"),
        ('file = "', 'file = "../', "file must be the plain name of a .tar.gz"),
    ],
)
def test_wrong_base_toml(tmp_path, old, new, sentence):
    path = tmp_path / "base.toml"
    text = REAL.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(PatchsetError) as error:
        read_base_toml(path)
    assert sentence in str(error.value)


def test_missing_base_toml(mini, capsys):
    (mini.patches / "base.toml").unlink()
    assert mini.apply() == 1
    assert "cannot read" in capsys.readouterr().err
