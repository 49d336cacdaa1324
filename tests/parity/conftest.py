"""Pairs for the parity tests, made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
from bigram import Bigram, make_bigram


@pytest.fixture(scope="session")
def random_pair(
    our_library: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tiny.Pair]:
    """Make a pair with random weights for an architecture; its draft hardly ever is right."""
    made: dict[str, tiny.Pair] = {}

    def make(arch: str) -> tiny.Pair:
        if arch not in made:
            made[arch] = tiny.make_pair(tmp_path_factory.mktemp(arch), arch)
        return made[arch]

    return make


@pytest.fixture(scope="session")
def noisy_bigram(
    our_library: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Bigram]:
    """Make a pair whose draft is right about some tokens and wrong about others."""
    made: dict[str, Bigram] = {}

    def make(arch: str) -> Bigram:
        if arch not in made:
            folder = tmp_path_factory.mktemp(f"bigram-{arch}")
            made[arch] = make_bigram(folder, arch, wrong=0.3, drift=0.5)
        return made[arch]

    return make
