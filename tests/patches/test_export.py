"""`make patches` and `make patches-check`: from an edited tree to the patch set and back."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from mini_patchset import BASE_FILES, HEADER, HOOK

from patchlib.export import TABLE_BEGIN, TABLE_END


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def built(mini):
    mini.apply()
    return mini


def test_export_of_an_unedited_tree_changes_nothing(built, capsys):
    before = {path: path.stat().st_mtime_ns for path in built.patches.rglob("*")}
    assert built.run("export", built.tree) == 0
    assert "patches/ is up to date" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in built.patches.rglob("*")} == before


def test_edits_are_written_back_and_stable(built):
    built.edit("src/a.cpp", "return 2;", "ours();\n    return 2;")
    built.edit("ours/ours.cpp", "{}", "{ /* more */ }")
    assert built.run("export", built.tree) == 0
    text = (built.patches / "0010-hook.patch").read_text()
    assert text == HEADER + (
        "--- a/src/a.cpp\n+++ b/src/a.cpp\n"
        "@@ -1,2 +1,3 @@\n int a() {\n+    ours();\n     return 1;\n"
        "@@ -5,2 +6,3 @@\n int b() {\n+    ours();\n     return 2;\n"
    )
    assert (built.patches / "overlay/ours/ours.cpp").read_text() == "void ours() { /* more */ }\n"
    once = files(built.patches)
    assert built.run("export", built.tree) == 0
    assert files(built.patches) == once
    content = built.content()
    assert built.apply() == 0  # the tree already is what the patch set makes
    assert built.content() == content
    shutil.rmtree(built.tree)
    assert built.apply() == 0  # and it is made again from nothing
    assert built.content() == content
    assert built.run("check", "--tree", built.tree) == 0


def test_written_patch_applies_with_gnu_patch(built, gnu_patch, tmp_path):
    built.edit("src/a.cpp", "return 2;", "ours();\n    return 2;")
    built.edit("src/no-newline.txt", "last", "last\nmore")
    built.run("export", built.tree, "--patch", "0020-text.patch")
    tree = tmp_path / "by-gnu"
    for name, data in BASE_FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    for name in ("0010-hook.patch", "0020-text.patch"):
        command = [gnu_patch, "-p1", "--fuzz=0", "-i", str(built.patches / name)]
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout
        assert "fuzz" not in done.stdout
    expected = built.content()
    del expected["ours/ours.cpp"]
    assert files(tree) == expected


def test_new_upstream_file_needs_a_patch_name(built, capsys):
    built.edit("src/b.cpp", "line 7\n", "line 7\nhook\n")
    before = files(built.patches)
    assert built.run("export", built.tree) == 2
    assert "`src/b.cpp` changed, but no patch has it; name one" in capsys.readouterr().err
    assert built.run("export", built.tree, "--patch", "new") == 2
    assert "not of the form NNNN-what.patch" in capsys.readouterr().err
    assert files(built.patches) == before
    assert built.run("export", built.tree, "--patch", "0005-first.patch") == 0
    series = (built.patches / "series").read_text()
    assert series == "# order\n0005-first.patch\n0010-hook.patch\n"
    assert built.run("check") == 1  # until its header is written
    error = capsys.readouterr().err
    assert "0005-first.patch: header lacks Description, Hooks, Drop-when, Forwarded" in error


def test_new_files_are_divided_among_patches(built, capsys):
    built.edit("src/b.cpp", "line 7\n", "line 7\nhook\n")
    built.edit("CMakeLists.txt", "add_subdirectory(src)\n", "add_subdirectory(src)\n# ours\n")
    built.edit("ggml/CMakeLists.txt", "project(ggml)\n", "project(ggml)\n# ours\n")
    wrong = ["--patch", "0020-build.patch=CMakeLists.txt,src/a.cpp"]
    assert built.run("export", built.tree, *wrong) == 2
    assert "`src/a.cpp` is not a changed file of llama.cpp without a patch" in (
        capsys.readouterr().err
    )
    choices = ["--patch", "0020-build.patch=CMakeLists.txt,ggml/CMakeLists.txt",
               "--patch", "0010-hook.patch"]  # fmt: skip
    assert built.run("export", built.tree, *choices) == 0
    assert "ggml/CMakeLists.txt" in (built.patches / "0020-build.patch").read_text()
    hook = (built.patches / "0010-hook.patch").read_text()
    assert hook.startswith(HEADER)  # kept
    assert hook.count("--- a/") == 2


def test_reverted_hook_leaves_the_series(built, capsys):
    (built.tree / "src/a.cpp").write_bytes(BASE_FILES["src/a.cpp"])
    assert built.run("export", built.tree) == 0
    assert "removed: 0010-hook.patch" in capsys.readouterr().out
    assert not (built.patches / "0010-hook.patch").exists()
    assert (built.patches / "series").read_text() == "# order\n"


def test_overlay_files_come_and_go(built, capsys):
    (built.tree / "ours/new.h").write_text("#pragma once\n")
    (built.tree / "ours/ours.cpp").unlink()
    (built.tree / "ours/ours.cpp~").write_text("backup")
    assert built.run("export", built.tree) == 0
    out = capsys.readouterr().out
    assert "added: overlay/ours/new.h" in out
    assert "removed: overlay/ours/ours.cpp" in out
    assert set(files(built.patches / "overlay")) == {"ours/new.h"}


def test_newer_overlay_is_not_undone(built):
    built.overlay("ours/ours.cpp", "void newer() {}\n")
    built.overlay("ours/added.cpp", "void added() {}\n")
    assert built.run("export", built.tree) == 0
    assert (built.patches / "overlay/ours/ours.cpp").read_text() == "void newer() {}\n"
    assert (built.patches / "overlay/ours/added.cpp").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda m: (
                m.overlay("ours/ours.cpp", "void a() {}\n"),
                m.edit("ours/ours.cpp", "ours", "b"),
            ),
            "`ours/ours.cpp` was edited in the tree and in patches/overlay",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("ours()", "theirs()")),
            "`src/a.cpp` (0010-hook.patch) has changed in patches/ since the tree was made",
        ),
        (lambda m: (m.tree / "src/b.cpp").unlink(), "`src/b.cpp` of llama.cpp is missing"),
        (
            lambda m: m.set_base({**BASE_FILES, "src/b.cpp": b"x\n"}),
            "was made from another base",
        ),
    ],
)
def test_doubtful_export_is_refused(built, change, sentence, capsys):
    change(built)
    before = files(built.patches)
    assert built.run("export", built.tree) == 1
    assert sentence in capsys.readouterr().err
    assert files(built.patches) == before


def test_export_of_something_else(built, tmp_path, capsys):
    assert built.run("export", tmp_path / "absent") == 2
    assert "no patched tree at" in capsys.readouterr().err
    assert built.run("export", tmp_path) == 2
    assert "was not made by this tool" in capsys.readouterr().err


def test_check_passes(built, capsys):
    assert built.run("check", "--tree", built.tree) == 0
    assert "1 patches of 1 upstream files and 1 overlay files are in order" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            lambda m: (m.patches / "0020-stray.patch").write_text(HEADER + HOOK),
            "patches/0020-stray.patch is not in patches/series",
        ),
        (
            lambda m: (
                m.patch(
                    "0020-x.patch",
                    "--- a/src/b.cpp\n+++ b/src/b.cpp\n@@ -3,2 +3,3 @@\n line 2\n+x\n line 3\n",
                ),
                (m.patches / "series").write_text("0020-x.patch\n0010-hook.patch\n"),
            ),
            "patches/series is not in the order of the numbers",
        ),
        (
            lambda m: m.patch(
                "0010-second.patch",
                "--- a/src/b.cpp\n+++ b/src/b.cpp\n@@ -3,2 +3,3 @@\n line 2\n+x\n line 3\n",
            ),
            "patches/series has number 0010 twice",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK, HEADER.replace("Drop-when", "Drop")),
            "0010-hook.patch: header lacks Drop-when",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK, HEADER.replace("test", "to be written")),
            "0010-hook.patch: header lacks Description",
        ),
        (
            lambda m: m.patch(
                "0010-hook.patch",
                HOOK.replace("-1,2 +1,3", "-1,3 +1,4") + " }\n",
            ),
            "`src/a.cpp` is not as export writes it",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("-1,2", "-1,2").replace("1;", "7;")),
            "found `return 1;`, expected `return 7;`",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("@@\n", "@@ int a()\n", 1)),
            "not in the form export writes",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("a.cpp", "none.cpp")),
            "0010-hook.patch: the base has no file `src/none.cpp`",
        ),
        (
            lambda m: m.overlay("src/b.cpp", "x"),
            "patches/overlay/src/b.cpp would replace a file of llama.cpp",
        ),
        (lambda m: m.edit("src/b.cpp", "line 3\n", "edit\n"), "`src/b.cpp` differs between"),
        (lambda m: (m.tree / "src/b.cpp").unlink(), "`src/b.cpp` is missing in the tree"),
        (lambda m: (m.tree / "new.cpp").write_text("x"), "`new.cpp` is in the tree only"),
        (lambda m: m.overlay("ours/ours.cpp", "x"), "`ours/ours.cpp` differs between"),
        (
            lambda m: (m.patches / "README.md").write_text(
                f"{TABLE_BEGIN}\n\nold\n\n{TABLE_END}\n"
            ),
            "its table of hooks is stale",
        ),
    ],
)
def test_check_finds_each_planted_fault(built, fault, sentence, capsys):
    fault(built)
    assert built.run("check", "--tree", built.tree) == 1
    assert sentence in capsys.readouterr().err


def test_table_of_hooks_is_written(built, capsys):
    readme = built.patches / "README.md"
    readme.write_text(f"# Head\n\n{TABLE_BEGIN}\n{TABLE_END}\n\ntail\n")
    header = HEADER.replace("Drop-when", "Relies-on: the order of | a\n and b\nDrop-when")
    built.patch("0010-hook.patch", HOOK, header)
    assert built.run("export", built.tree) == 0
    text = readme.read_text()
    assert "| `src/a.cpp` | 0010-hook | 1 / 0 | ours() | the order of \\| a and b |" in text
    assert text.startswith("# Head\n")
    assert text.endswith("\ntail\n")
    built.run("export", built.tree)
    assert readme.read_text() == text
    assert built.run("check") == 0
