"""The command line inside the test's own process, and pairs to give it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import tiny
from bigram import Bigram, make_bigram

from dflash_convert.errors import run_cli


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run `dflash-cpp` with arguments; a traceback on stderr fails the test."""
    from dflash_cpp.cli import app

    def run(*arguments: object) -> Done:
        with pytest.raises(SystemExit) as end:
            run_cli(app, [str(a) for a in arguments], prog_name="dflash-cpp")
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Done(int(end.value.code or 0), out, err)

    return run


@pytest.fixture(scope="session")
def pair(our_library: None, tmp_path_factory: pytest.TempPathFactory) -> Bigram:
    """A pair whose draft is right about most tokens."""
    return make_bigram(tmp_path_factory.mktemp("pair"), wrong=0.2)


@pytest.fixture(scope="session")
def random_pair(our_library: None, tmp_path_factory: pytest.TempPathFactory) -> tiny.Pair:
    """A pair with random weights, whose sampled texts differ."""
    return tiny.make_pair(tmp_path_factory.mktemp("random"), "llama")
