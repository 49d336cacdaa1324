"""The command line that `dflash-cpp serve` hands to llama-server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_convert.errors import FailureError, InputError
from dflash_cpp import server
from dflash_cpp.server import serve_command


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A target and a draft by name; what would read them is replaced."""
    from dflash_cpp import session

    monkeypatch.setattr(session, "check_pair", lambda target, draft: None)
    monkeypatch.setattr(server, "block_size", lambda draft: 16)
    monkeypatch.setattr(server, "need_program", lambda name: Path("/bin-of-ours") / name)
    for variable in ("LLAMA_ARG_SPEC_TYPE", "LLAMA_ARG_SPEC_DRAFT_N_MAX"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("t.gguf", "d.gguf"):
        (tmp_path / name).touch()
    return str(tmp_path / "t.gguf"), str(tmp_path / "d.gguf")


PROGRAM = "/bin-of-ours/llama-server"
DEFAULTS = ["--spec-type", "draft-dflash", "--spec-draft-n-max", "15"]


@pytest.mark.parametrize("spelling", server.DRAFT_OPTIONS)
def test_defaults(files: tuple[str, str], spelling: str) -> None:
    t, d = files
    command = serve_command(["-m", t, spelling, d])
    assert list(command.argv) == [PROGRAM, "-m", t, "-md", d, *DEFAULTS]
    assert command.n_max == 15


def test_everything_else_passes_in_order(files: tuple[str, str]) -> None:
    t, d = files
    # -mg, -np and -mm begin with letters of our own options
    extra = ["-np", "4", "-mg", "0", "--port", "1", "-mm", "x", "--temp=-1", "--", "-c", "5"]
    command = serve_command(["--", *extra[:6], f"--model={t}", *extra[6:], "-md", d])
    assert list(command.argv) == [PROGRAM, "-m", t, "-md", d, *DEFAULTS, *extra]


@pytest.mark.parametrize("given", [["--spec-draft-n-max", "3"], ["--spec-draft-n-max=3"]])
def test_what_the_user_gives_is_kept(files: tuple[str, str], given: list[str]) -> None:
    t, d = files
    command = serve_command(["-m", t, "-md", d, *given, "--spec-type", "draft-dflash,ngram-mod"])
    assert command.n_max is None
    assert command.argv.count("--spec-type") == 1
    assert "15" not in command.argv


def test_llama_cpps_variables_count_as_given(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    t, d = files
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_N_MAX", "4")
    assert "--spec-draft-n-max" not in serve_command(["-m", t, "-md", d]).argv


def test_models_of_the_hub_are_left_to_llama_server(files: tuple[str, str]) -> None:
    command = serve_command(["-hf", "org/target", "-hfd", "org/draft"])
    assert list(command.argv) == [PROGRAM, "--spec-type", "draft-dflash", "-hf", "org/target",
                                  "-hfd", "org/draft"]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "-m TARGET.gguf is missing"),
        (["-m", "T"], "-md DRAFT.gguf is missing"),
        (["-md", "D"], "-m TARGET.gguf is missing"),
        (["-m", "T", "-md"], "`-md` needs a value"),
        (["-m", "nowhere.gguf", "-md", "D"], "the target `nowhere.gguf` does not exist"),
        (["-m", "T", "-md", "nowhere.gguf"], "the draft `nowhere.gguf` does not exist"),
    ],
)
def test_bad_usage(files: tuple[str, str], arguments: list[str], said: str) -> None:
    names = {"T": files[0], "D": files[1]}
    with pytest.raises(InputError, match=said):
        serve_command([names.get(a, a) for a in arguments])


def test_a_program_that_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "program_path", lambda name: tmp_path / name)
    with pytest.raises(FailureError, match="does not exist, expected the built llama-server") as e:
        server.need_program("llama-server")
    assert "make build" in (e.value.hint or "")


def test_the_command_passes_its_arguments_untouched(
    command: Callable[..., Any], files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[server.ServeCommand] = []
    monkeypatch.setattr(server, "replace_process", started.append)
    t, d = files
    arguments = ["-m", t, "-np", "4", "-mg", "0", "-ngl", "99", "-fa", "on", "-md", d, "--jinja"]
    done = command("serve", *arguments)
    assert done.code == 0
    assert done.out == ""
    assert "drafting up to 15 tokens per round" in done.err
    assert list(started[0].argv) == [PROGRAM, "-m", t, "-md", d, *DEFAULTS, "-np", "4", "-mg", "0",
                                     "-ngl", "99", "-fa", "on", "--jinja"]  # fmt: skip
    command("serve", "--", "--help")
    assert started[1].argv == (PROGRAM, "--help")
    assert "serve -m TARGET -md DRAFT" in command("serve", "--help").out
