"""The tool as a program: exit codes, one line per error, no traceback."""

from __future__ import annotations

import os

import pytest


def test_no_command_is_usage(mini):
    process = mini.spawn()
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "usage: patchset.py" in error
    assert out == ""


def test_error_is_one_line_without_traceback(mini):
    (mini.patches / "series").write_text("0010-hook.patch\n0020-gone.patch\n")
    process = mini.spawn("apply", mini.tree)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert error.startswith("error: patches/series names `0020-gone.patch`")
    assert error.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_that_cannot_be_written(mini, capsys):
    mini.tree.parent.mkdir(parents=True)
    mini.tree.parent.chmod(0o500)
    assert mini.apply() == 1
    assert "error: Permission denied:" in capsys.readouterr().err


def test_file_in_the_way(mini, capsys):
    mini.tree.parent.write_text("a file where the build folder should be")
    assert mini.apply() == 1
    assert capsys.readouterr().err.startswith("error: ")
