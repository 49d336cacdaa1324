"""The constructed pair: acceptance is exactly 100 %, and every wrong wire shows as less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("our_library")]

ARCHS = ["llama", "qwen3", "qwen35", "gemma4"]
# one more or less than the right layer, and the right layers in the wrong order
WRONG_LAYERS = {"later": [2, 4], "earlier": [0, 2], "swapped": [3, 1]}
FAULTS = [
    "anchor masked",
    "anchor masked for the layers",
    "anchor masked for the selector",
    "ids shifted by one",
    "ids shifted by one in the embedding",
    "codebooks swapped",
    "convolution sides swapped",
    "convolution taps reversed",
    "dynamic sides swapped",
    *(f"target layers {name}" for name in WRONG_LAYERS),
]
SILENT_FAULT = "dynamic taps swapped"
# a hybrid target goes back by snapshots (7) or by a checkpoint and replay (0)
ROLL_BACKS = [("llama", 0), ("qwen3", 0), ("gemma4", 0), ("qwen35", 0), ("qwen35", 7)]


def random_ids(n: int, seed: int = 0) -> list[int]:
    """Ids of ordinary tokens."""
    return np.random.default_rng([n, seed]).integers(0, 500, n).tolist()


def acceptance(target: Any, draft: Any, n_predict: int = 120, **job: Any) -> float:
    """Share of drafted tokens that a greedy run accepts."""
    from our_pair import OurPair

    with OurPair({"target": target, "draft": draft, **job}, trace=False) as ours:
        ours.generate(random_ids(40), n_predict)
        stats = ours.stats()
    return stats.n_accepted / stats.n_drafted


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n_draft", [1, 3, 7])
def test_every_draft_token_is_accepted(arch: str, n_draft: int, make_bigram: Callable) -> None:
    from our_pair import OurPair

    pair = make_bigram(arch)
    prompt = random_ids(40)
    with OurPair(
        {"target": pair.target, "draft": pair.draft, "n_draft": n_draft}, trace=False
    ) as ours:
        text, lengths = ours.generate(prompt, 600)
        stats = ours.stats()
    assert text == pair.text(prompt[-1], 600)
    assert set(lengths) == {n_draft + 1}
    assert stats.n_accepted == stats.n_drafted == stats.n_rounds * n_draft
    assert (stats.n_invalid, stats.n_plain, stats.n_replayed) == (0, 0, 0)
    for counts in (stats.n_drafted_per_pos, stats.n_accepted_per_pos):
        assert list(counts)[: n_draft + 1] == [stats.n_rounds] * n_draft + [0]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"layer_types": ("full_attention", "full_attention"), "sliding_window": None},
        {"sliding_window": 16},
        {"group": 8},
        {"group": 32},
        {"taps": 3},
        {"block": 4},
        {"block": 16},
        {"top_k": 8},
        {"softcap": 30.0, "output_multiplier": 0.5},
        {"target_layer_ids": (0, 1, 3)},
        {"dtype": "f16", "outtype": "f16"},
        {"dtype": "q8_0", "outtype": "q8_0"},
        {"outtype": "bf16"},
        {"busy": True},
    ],
    ids=str,
)
def test_every_draft_of_every_kind_is_accepted(
    options: dict[str, Any], make_bigram: Callable
) -> None:
    pair = make_bigram("llama", **options)
    assert acceptance(pair.target, pair.draft, 300) == 1.0


@pytest.mark.parametrize("n_context", [2, 60, 64, 65, 128, 513, 1030])
def test_acceptance_does_not_depend_on_the_context(n_context: int, make_bigram: Callable) -> None:
    """Before, at and far past the window of 64, and across batches of 512."""
    from our_pair import OurPair

    pair = make_bigram("qwen3")
    job = {"target": pair.target, "draft": pair.draft, "n_ctx": 2048}
    with OurPair(job, trace=False) as ours:
        ours.generate(random_ids(n_context), 100)
        stats = ours.stats()
    assert stats.n_accepted == stats.n_drafted


@pytest.mark.parametrize(("arch", "n_rs_seq"), ROLL_BACKS)
def test_known_mistakes_cost_exactly_what_they_must(
    arch: str, n_rs_seq: int, make_bigram: Callable
) -> None:
    """A draft that gets some classes wrong: every round's acceptance is known in advance."""
    from our_pair import OurPair

    pair = make_bigram(arch, wrong=0.2)
    prompt = random_ids(40)
    job = {"target": pair.target, "draft": pair.draft, "n_rs_seq": n_rs_seq}
    with OurPair(job, trace=False) as ours:
        text, lengths = ours.generate(prompt, 300)
        stats = ours.stats()
    assert text == pair.text(prompt[-1], 300)
    expected, anchor = [], pair.next_token(prompt[-1])
    while len(expected) < len(lengths):
        expected.append(pair.accepted(anchor, 7))
        anchor = pair.text(anchor, expected[-1] + 1)[-1]
    assert [n - 1 for n in lengths] == expected
    assert 0 < stats.n_accepted < stats.n_drafted
    per_position = [sum(n > i for n in expected) for i in range(7)]
    assert list(stats.n_accepted_per_pos)[:7] == per_position
    needs_replay = arch == "qwen35" and n_rs_seq == 0
    assert (stats.n_replayed > 0) == needs_replay


@pytest.mark.parametrize(("arch", "n_rs_seq"), ROLL_BACKS)
def test_text_that_depends_on_the_context_survives_roll_back(
    arch: str, n_rs_seq: int, make_bigram: Callable
) -> None:
    """Rounds of all lengths; a state that is not rolled back exactly would change the text."""
    from our_pair import OurPair

    pair = make_bigram(arch, drift=0.15 if arch == "qwen35" else 0.28)
    prompt = random_ids(40)
    # F32 without flash attention, where one token and a block of eight give the same logits to 1e-5
    job = {"target": pair.target, "draft": pair.draft, "kv": "f32", "n_rs_seq": n_rs_seq}
    with OurPair(job, trace=False) as ours:
        text, lengths = ours.generate(prompt, 200)
        ours.rollback(0)
        plain = ours.greedy(prompt, 200)
    assert text == plain
    assert text != pair.text(prompt[-1], 200), "the drift changed nothing: the test shows nothing"
    assert len(set(lengths)) >= 5, f"rounds of many lengths were expected, got {sorted(lengths)}"


@pytest.fixture(scope="module")
def faults(make_bigram: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Drafts with one wrong wire each, planted in the GGUF file."""
    from gguf_files import GGUFFile, edit_gguf

    pair = make_bigram("llama")
    folder = tmp_path_factory.mktemp("faults")
    draft, target = GGUFFile(pair.draft), GGUFFile(pair.target)
    before, after = (draft.values(f"selector_{n}.weight") for n in ("predecessor", "successor"))
    embedding, head = target.values("token_embd.weight"), target.values("output.weight")
    mask = len(embedding) - 1
    assert embedding[mask].sum() == 1.0, "the mask token has a coordinate of its own"
    masked = {
        "token_embd.weight": np.tile(embedding[mask], (len(embedding), 1)),
        "output.weight": head,
    }
    unselected = {"selector_predecessor.weight": np.tile(before[mask], (len(before), 1))}
    base = draft.values("blk.0.attn_conv_base")  # [side, tap, channel]
    projection = draft.values("blk.0.attn_conv_proj.weight")  # [side * tap * group, channel]
    half = len(projection) // 2
    edits: dict[str, dict[str, Any]] = {
        # the graph sees the mask token in place of the last token of the text
        "anchor masked": {"tensors": masked | unselected},
        "anchor masked for the layers": {"tensors": masked},
        "anchor masked for the selector": {"tensors": unselected},
        # every id means its neighbour
        "ids shifted by one": {
            "tensors": {
                "selector_predecessor.weight": np.roll(before, 1, axis=0),
                "selector_successor.weight": np.roll(after, 1, axis=0),
            }
        },
        "ids shifted by one in the embedding": {
            "tensors": {"token_embd.weight": np.roll(embedding, 1, axis=0), "output.weight": head}
        },
        "codebooks swapped": {
            "tensors": {"selector_predecessor.weight": after, "selector_successor.weight": before}
        },
        "convolution sides swapped": {"tensors": {"blk.0.attn_conv_base": base[::-1]}},
        "convolution taps reversed": {"tensors": {"blk.0.attn_conv_base": base[:, ::-1]}},
        "dynamic sides swapped": {
            "tensors": {"blk.0.attn_conv_proj.weight": np.roll(projection, half, axis=0)}
        },
        "dynamic taps swapped": {
            "tensors": {"blk.0.attn_conv_proj.weight": np.roll(projection, half // 2, axis=0)}
        },
        # the same draft with the borrowed tensors in its own file: no fault
        "nothing": {"tensors": {"token_embd.weight": embedding, "output.weight": head}},
    } | {
        f"target layers {name}": {"keys": {"dflash.target_layers": layers}}
        for name, layers in WRONG_LAYERS.items()
    }

    assert set(edits) == {*FAULTS, SILENT_FAULT, "nothing"}

    def get(name: str) -> tuple[Any, Any]:
        out = folder / f"{name.replace(' ', '-')}.gguf"
        return pair.target, edit_gguf(pair.draft, out, **edits[name])

    return get


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_lose_acceptance(name: str, faults: Callable) -> None:
    # reversed taps move a block by one row, which hits by chance now and then
    assert acceptance(*faults(name)) < (0.2 if name == "convolution taps reversed" else 0.05)


def test_a_fault_that_proposals_survive_shows_in_the_numbers(faults: Callable) -> None:
    """In exact arithmetic this one changes no choice (F16 sums used to hide that by their ties)."""
    from our_pair import OurPair

    hidden = []
    for name in (SILENT_FAULT, "nothing"):
        target, draft = faults(name)
        with OurPair({"target": target, "draft": draft, "kv": "f32"}) as ours:
            ours.step(ours.prompt(random_ids(40)))
            hidden.append(ours.trace().hidden)
    assert np.abs(hidden[0] - hidden[1]).max() > 1e-2 * np.abs(hidden[1]).max()


def test_the_unplanted_control_loses_nothing(faults: Callable) -> None:
    assert acceptance(*faults("nothing")) == 1.0
