"""The patched tree: made whole or not at all, refreshed file by file, edits never lost."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from mini_patchset import BASE_FILES, HOOK

from patchlib import tree as tree_module
from patchlib.tree import MANIFEST


def times(mini) -> dict[str, int]:
    return {
        path.relative_to(mini.tree).as_posix(): path.stat().st_mtime_ns
        for path in mini.tree.rglob("*")
        if path.is_file()
    }


def rewritten(mini, before: dict[str, int]) -> set[str]:
    return {path for path, at in times(mini).items() if before.get(path) != at} - {MANIFEST}


def test_fresh_tree_is_base_overlay_and_patches(mini, capsys):
    assert mini.apply() == 0
    assert "7 files written, 0 removed" in capsys.readouterr().out
    content = mini.content()
    assert content.pop("ours/ours.cpp") == b"void ours() {}\n"
    patched = content.pop("src/a.cpp")
    assert patched == BASE_FILES["src/a.cpp"].replace(b"{\n    r", b"{\n    ours();\n    r", 1)
    assert content == {name: BASE_FILES[name] for name in BASE_FILES if name != "src/a.cpp"}
    assert os.access(mini.tree / "tools/run.sh", os.X_OK)
    assert mini.leftovers() == []


def test_inside_another_git_repository(mini):
    """`git apply` there can do nothing and report success; ours must not depend on git."""
    subprocess.run(["git", "init", "-q", str(mini.folder)], check=True)
    (mini.folder / ".gitignore").write_text("build/\n")
    assert mini.apply() == 0
    assert b"ours();" in mini.content()["src/a.cpp"]


def test_second_run_writes_nothing(mini, capsys):
    mini.apply()
    before = times(mini)
    capsys.readouterr()
    mini.archive.unlink()  # not even read
    assert mini.apply() == 0
    assert capsys.readouterr().out == ""
    assert times(mini) == before


def test_only_changed_files_are_rewritten(mini):
    mini.overlay("ours/second.cpp", "int second;\n")
    mini.apply()
    before = times(mini)
    mini.overlay("ours/second.cpp", "int changed;\n")
    mini.apply()
    assert rewritten(mini, before) == {"ours/second.cpp"}
    before = times(mini)
    mini.patch("0010-hook.patch", HOOK.replace("ours();", "theirs();"))
    mini.apply()
    assert rewritten(mini, before) == {"src/a.cpp"}
    assert b"theirs();" in mini.content()["src/a.cpp"]
    before = times(mini)
    mini.patch("0010-hook.patch", HOOK.replace("ours();", "theirs();"), header="Description: y\n\n")
    mini.apply()
    assert rewritten(mini, before) == set()


def test_files_that_left_the_patch_set(mini):
    mini.overlay("deep/er/gone.cpp", "int gone;\n")
    mini.apply()
    (mini.patches / "overlay/deep/er/gone.cpp").unlink()
    (mini.patches / "0010-hook.patch").unlink()
    (mini.patches / "series").write_text("")
    mini.apply()
    assert not (mini.tree / "deep").exists()
    assert mini.content()["src/a.cpp"] == BASE_FILES["src/a.cpp"]


def test_unpack_and_apply_share_a_folder(mini):
    assert mini.run("unpack", mini.tree) == 0
    assert mini.content() == BASE_FILES
    assert mini.apply() == 0
    assert b"ours();" in mini.content()["src/a.cpp"]
    assert mini.run("unpack", mini.tree) == 0
    assert mini.content() == BASE_FILES


def test_new_base_keeps_unchanged_files(mini):
    mini.apply()
    before = times(mini)
    mini.set_base({**BASE_FILES, "src/b.cpp": b"new\n", "src/c.cpp": b"added\n"})
    assert mini.apply() == 0
    assert rewritten(mini, before) == {"src/b.cpp", "src/c.cpp"}
    mini.set_base(BASE_FILES)
    mini.apply()
    assert "src/c.cpp" not in mini.content()


def test_edits_stand_while_the_patch_set_does_not_touch_them(mini, capsys):
    mini.apply()
    mini.edit("src/b.cpp", "line 7\n", "line seven\n")  # a file no patch has
    mini.edit("src/a.cpp", "return 2", "return 3")
    mini.edit("ours/ours.cpp", "{}", "{ more(); }")
    (mini.tree / "ours/new.cpp").write_text("int fresh;\n")
    edited = mini.content()
    capsys.readouterr()
    assert mini.apply() == 0
    assert "keeps your edits of" in capsys.readouterr().err
    mini.overlay("ours/other.cpp", "int other;\n")
    assert mini.apply() == 0
    assert mini.content() == edited | {"ours/other.cpp": b"int other;\n"}
    assert mini.apply("--force") == 0
    assert mini.content()["src/b.cpp"] == BASE_FILES["src/b.cpp"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("src/a.cpp", lambda m: m.patch("0010-hook.patch", HOOK.replace("ours()", "theirs()"))),
        ("ours/ours.cpp", lambda m: m.overlay("ours/ours.cpp", "void changed() {}\n")),
        ("ours/ours.cpp", lambda m: (m.patches / "overlay/ours/ours.cpp").unlink()),
        ("ours/fresh.cpp", lambda m: m.overlay("ours/fresh.cpp", "void fresh() {}\n")),
    ],
    ids=["patch", "overlay", "overlay removed", "overlay added"],
)
def test_edit_in_both_places_is_never_overwritten(mini, name, change, capsys):
    mini.apply()
    path = mini.tree / name
    path.write_text((path.read_text() if path.exists() else "") + "// mine\n")
    before = times(mini)
    change(mini)
    assert mini.apply() == 1
    error = capsys.readouterr().err
    assert f"`{name}`" in error
    assert "`make patches`" in error
    assert "--force" in error
    assert times(mini) == before
    assert mini.apply("--force") == 0
    assert not path.exists() or "// mine" not in path.read_text()


def test_edit_that_equals_the_new_patch_set_is_taken_over(mini):
    mini.apply()
    mini.overlay("ours/ours.cpp", "void same() {}\n")
    (mini.tree / "ours/ours.cpp").write_text("void same() {}\n")
    before = times(mini)
    assert mini.apply() == 0
    assert rewritten(mini, before) == set()
    mini.overlay("ours/ours.cpp", "void later() {}\n")
    assert mini.apply() == 0  # no longer counts as an edit


def test_deleted_file_is_restored(mini):
    mini.apply()
    (mini.tree / "src/b.cpp").unlink()
    (mini.tree / "ours/ours.cpp").unlink()
    assert mini.apply() == 0
    assert {"src/b.cpp", "ours/ours.cpp"} <= set(mini.content())


def test_leftovers_of_editors_are_no_edits(mini, capsys):
    mini.apply()
    for name in ("src/a.cpp~", "src/a.cpp.orig", "src/__pycache__/x.pyc", "sub/CMakeCache.txt"):
        (mini.tree / name).parent.mkdir(exist_ok=True)
        (mini.tree / name).write_text("x")
    capsys.readouterr()
    assert mini.apply() == 0
    assert capsys.readouterr().err == ""


def test_foreign_folder_is_left_alone(mini, capsys):
    mini.tree.mkdir(parents=True)
    (mini.tree / "mine.txt").write_text("mine")
    assert mini.apply() == 2
    assert "was not made by this tool" in capsys.readouterr().err
    assert mini.content() == {"mine.txt": b"mine"}


def test_empty_folder_is_filled(mini):
    mini.tree.mkdir(parents=True)
    assert mini.apply() == 0
    assert "src/a.cpp" in mini.content()


def test_failed_unpack_leaves_nothing(mini, monkeypatch, capsys):
    count = 0

    def disk_full(path, data, executable):
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(28, "No space left on device", str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(tree_module, "_write", disk_full)
        assert mini.apply() == 1
    assert "error: No space left on device:" in capsys.readouterr().err
    assert not mini.tree.exists()
    assert mini.leftovers() == []
    assert mini.apply() == 0


# Unpacks three files, says so and waits: the signal always comes in the middle.
WAIT_IN_THE_MIDDLE = """
import os, runpy, sys, time
program = sys.argv.pop(1)
sys.path.insert(0, os.path.dirname(program))
from patchlib import tree
write, count = tree._write, 0
def stop(*arguments):
    global count
    count += 1
    if count > 3:
        print("unpacking", flush=True)
        time.sleep(600)
    write(*arguments)
tree._write = stop
runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_unpack(mini, number):
    process = mini.spawn("apply", mini.tree, code=WAIT_IN_THE_MIDDLE)
    try:
        assert process.stdout.readline() == "unpacking\n"
        assert mini.leftovers()
        process.send_signal(number)
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert not mini.tree.exists()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}.get(number, -9)
    if number != signal.SIGKILL:
        assert mini.leftovers() == []
        assert "Traceback" not in error
    assert mini.apply() == 0
    assert mini.leftovers() == []
    assert len(mini.content()) == 7


def test_interrupted_refresh_is_finished_even_after_further_changes(mini, monkeypatch):
    for name in "abcd":
        mini.overlay(f"ours/{name}.cpp", "int one;\n")
    mini.apply()
    for name in "abcd":
        mini.overlay(f"ours/{name}.cpp", "int two;\n")
    real, count = tree_module.write_atomically, 0

    def stop_after_two_files(path, data, mode=0o644):
        nonlocal count
        count += path.suffix == ".cpp"
        if count > 2:
            raise KeyboardInterrupt
        real(path, data, mode)

    with monkeypatch.context() as patched:
        patched.setattr(tree_module, "write_atomically", stop_after_two_files)
        assert mini.apply() == 130
    assert [mini.content()[f"ours/{n}.cpp"] for n in "abcd"].count(b"int two;\n") == 2
    for name in "abcd":
        mini.overlay(f"ours/{name}.cpp", "int three;\n")
    assert mini.apply() == 0
    assert all(mini.content()[f"ours/{n}.cpp"] == b"int three;\n" for n in "abcd")


def test_two_runs_at_once(mini):
    mini.set_base(BASE_FILES | {f"many/{i}.txt": b"x" * 2000 for i in range(800)})
    processes = [mini.spawn("apply", mini.tree) for _ in range(3)]
    for process in processes:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert len(mini.content()) == 807


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: m.overlay("src/a.cpp", "x"), "is an overlay file and in `0010-hook.patch`"),
        (lambda m: m.overlay("src/b.cpp", "x"), "`patches/overlay/src/b.cpp` would replace a file"),
        (
            lambda m: m.patch("0020-other.patch", HOOK),
            "`src/a.cpp` is in `0010-hook.patch` and in `0020-other.patch`",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("src/a.cpp", "src/none.cpp")),
            "0010-hook.patch no longer applies: the base has no file `src/none.cpp`",
        ),
        (
            lambda m: m.patch("0010-hook.patch", HOOK.replace("return 1", "return 9")),
            "found `return 1;`, expected `return 9;`",
        ),
        (lambda m: (m.patches / "0010-hook.patch").unlink(), "series names `0010-hook.patch`"),
        (
            lambda m: (m.patches / "series").write_text("0010-hook.patch\n0010-hook.patch\n"),
            "patches/series names `0010-hook.patch` twice",
        ),
        (lambda m: (m.patches / "series").write_text("../x.patch\n"), "not of the form NNNN-"),
    ],
)
@pytest.mark.parametrize("existing", [False, True], ids=["fresh", "refresh"])
def test_wrong_patch_set(mini, change, sentence, existing, capsys):
    if existing:
        mini.apply()
    before = mini.content() if existing else None
    change(mini)
    assert mini.apply() == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert mini.leftovers() == []
    assert (mini.content() if existing else None) == before
    assert existing or not mini.tree.exists()


def test_stamp_changes_with_every_input(mini, capsys):
    def stamp() -> str:
        assert mini.run("stamp") == 0
        return capsys.readouterr().out.strip()

    keys = [stamp()]
    assert stamp() == keys[0]
    mini.overlay("ours/ours.cpp", "void other() {}\n")
    keys.append(stamp())
    (mini.patches / "overlay/ours/ours.cpp").rename(mini.patches / "overlay/ours/moved.cpp")
    keys.append(stamp())
    mini.patch("0010-hook.patch", HOOK.replace("ours", "theirs"))
    keys.append(stamp())
    mini.set_base({**BASE_FILES, "src/b.cpp": b"other\n"})
    keys.append(stamp())
    assert len(set(keys)) == 5


def test_loose_lists_what_no_longer_matches(mini, capsys):
    body = HOOK + "--- a/src/b.cpp\n+++ b/src/b.cpp\n@@ -3 +3,2 @@\n line 2\n+hook\n"
    mini.patch("0010-hook.patch", body)
    changed = dict(BASE_FILES)
    changed["src/a.cpp"] = b"// new first line\n" + changed["src/a.cpp"]  # shifted
    changed["src/b.cpp"] = changed["src/b.cpp"].replace(b"line 2\n", b"line two\n")  # gone
    mini.set_base(changed)
    assert mini.apply() == 1
    assert mini.apply("--loose") == 1
    assert "left out: 0010-hook.patch, `src/b.cpp`: hunk 1" in capsys.readouterr().err
    assert b"{\n    ours();\n    return 1" in mini.content()["src/a.cpp"]
    mini.edit("src/b.cpp", "line two\n", "line two\nhook\n")
    assert mini.run("export", mini.tree) == 0
    assert mini.apply() == 0
    assert mini.run("check", "--tree", mini.tree) == 0
