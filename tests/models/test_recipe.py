"""The training recipe on a tiny scale: equal to the reference, learns, exports, evaluates."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import data as dt  # noqa: E402
import evaluate as ev  # noqa: E402
import export as ex  # noqa: E402
import features as ft  # noqa: E402
import model as md  # noqa: E402
import prompts as pr  # noqa: E402
import target as tg  # noqa: E402
import train as tr  # noqa: E402

VOCAB, HIDDEN, LAYERS = 320, 64, 8
IDS = (1, 4, 6)


def tiny_target(path: Path, architecture: str = "llama") -> Path:
    """A random llama GGUF with the keys that the recipe reads."""
    rng = np.random.default_rng(0)
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_name("tiny")
    w.add_block_count(LAYERS)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(96)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(10000.0)
    w.add_context_length(512)
    w.add_vocab_size(VOCAB)
    w.add_token_list([f"t{i}" for i in range(VOCAB)])
    w.add_eos_token_id(2)

    def add(name: str, *shape: int) -> None:
        data = rng.normal(0, shape[-1] ** -0.5, shape) if len(shape) > 1 else np.ones(shape)
        w.add_tensor(name, data.astype(np.float32))

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN)
    for i in range(LAYERS):
        p = f"blk.{i}."
        add(p + "attn_norm.weight", HIDDEN)
        add(p + "ffn_norm.weight", HIDDEN)
        for name, rows, cols in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", HIDDEN // 2, HIDDEN),
            ("attn_v", HIDDEN // 2, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", 96, HIDDEN),
            ("ffn_up", 96, HIDDEN),
            ("ffn_down", HIDDEN, 96),
        ):
            add(f"{p}{name}.weight", rows, cols)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> tg.Target:
    return tg.Target(tiny_target(tmp_path_factory.mktemp("t") / "t.gguf"), torch.float32)


def tiny_config(target: tg.Target, **kwargs) -> md.DraftConfig:
    kwargs = {"target_layer_ids": IDS, "rank": 8, "window": 20} | kwargs
    return md.DraftConfig.for_target(target, 2, **kwargs)


def random_draft(config: md.DraftConfig) -> md.Draft:
    torch.manual_seed(0)
    draft = md.Draft(config)
    for p in draft.parameters():
        p.data = torch.randn_like(p) * 0.3
    return draft


def test_target_equals_transformers(target):
    transformers = pytest.importorskip("transformers")
    c = target.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ffn,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.eps,
        rope_theta=c.rope_theta,
        tie_word_embeddings=True,
    )
    hf = transformers.LlamaForCausalLM(config).float().eval()
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    with torch.no_grad():
        hf.model.embed_tokens.weight.copy_(target.embedding)
        hf.model.norm.weight.copy_(target.norm)
        for layer, weights in zip(hf.model.layers, target.layers, strict=True):
            for short, name in names.items():
                layer.get_submodule(name).weight.copy_(weights[short])
        ids = torch.randint(0, VOCAB, (2, 30))
        ref = hf(ids, output_hidden_states=True)
    last, feats = target.forward(ids, torch.zeros(2, dtype=torch.long), IDS)
    assert (target.logits(last) - ref.logits).abs().max() < 1e-4
    for j, i in enumerate(IDS):
        assert (feats[:, :, j] - ref.hidden_states[i + 1]).abs().max() < 1e-4


def test_generation_equals_whole_passes(target):
    """Padding, cache and compaction change nothing: each answer is the argmax of a full pass."""
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14], [3] * 4]
    gen = torch.Generator().manual_seed(0)
    answers = target.generate(prompts, 12, torch.zeros(3), gen)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer])
        last, _ = target.forward(ids, torch.zeros(1, dtype=torch.long))
        assert target.logits(last)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.parametrize("window", [20, 512])
def test_draft_equals_reference(target, window):
    reference = pytest.importorskip("dflash.model")
    transformers = pytest.importorskip("transformers")
    config = tiny_config(target, window=window)
    draft = random_draft(config)
    hf = {k: v for k, v in config.to_hf().items() if k not in ("architectures", "dtype")}
    ref = reference.DFlash2DraftModel(transformers.Qwen3Config(**hf)).float().eval()
    weights = {k + ".weight" * k.endswith("codebook"): v for k, v in draft.state_dict().items()}
    missing, unexpected = ref.load_state_dict(weights, strict=False)
    assert not missing
    assert not unexpected
    features = torch.randn(1, 40, len(IDS), HIDDEN)
    anchors = torch.tensor([[1, 9, 27, 40]])
    rows = torch.randn(1, 4, config.block, HIDDEN)
    with torch.no_grad():
        mine = draft(features, anchors, rows)[0]
        for j, a in enumerate(anchors[0].tolist()):
            theirs = ref(
                position_ids=torch.arange(a + config.block)[None],
                noise_embedding=rows[:, j],
                target_hidden=features[:, :a].flatten(2),
            )
            assert (theirs[0] - mine[j]).abs().max() < 1e-4
            logits = theirs[:, 1:] @ target.head.T
            path, _ = md.propose(draft, mine[j : j + 1, 1:], logits, torch.tensor([7]))
            want, _, _ = ref.candidate_selector.select(
                theirs[:, 1:], logits, torch.tensor([7]), 0.0
            )
            assert path.tolist() == want.tolist()


def test_later_positions_do_not_reach_a_block(target):
    draft = random_draft(tiny_config(target, window=512))
    features, rows = torch.randn(1, 30, len(IDS), HIDDEN), torch.randn(1, 1, 8, HIDDEN)
    anchors = torch.tensor([[12]])
    with torch.no_grad():
        before = draft(features, anchors, rows)
        features[:, 12:] += 5
        assert torch.equal(before, draft(features, anchors, rows))
        features[:, 11] += 5
        assert not torch.allclose(before, draft(features, anchors, rows))


def test_expected_rounds_by_simulation():
    gen = torch.Generator().manual_seed(3)
    agree = torch.rand(9, 3, generator=gen)
    left = torch.arange(9, 0, -1)
    rounds, tokens = ev.expected_rounds(agree, left)
    assert tokens == 9
    total, runs = 0, 20000
    luck = torch.rand(runs, 9, 3, generator=gen) < agree
    good = luck.long().cumprod(-1).sum(-1).tolist()
    for run in good:
        a = 0
        while a < 9:
            total, a = total + 1, a + run[a] + 1
    assert abs(total / runs - rounds) < 0.06


def test_heldout_is_held_out():
    path = Path(pr.__file__).with_name("heldout.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 100
    assert {r["class"] for r in rows} == set(pr.CLASSES)
    trained = {r["prompt"] for r in pr.training_prompts(20_000)}
    assert not trained & {r["prompt"] for r in rows}


def test_recipe_end_to_end(target, tmp_path, monkeypatch):
    """Answers with a pattern -> features -> training fits them -> export -> evaluation."""
    monkeypatch.setattr(
        md.DraftConfig,
        "for_target",
        classmethod(
            lambda cls, t, layers=2, **kw: cls(
                HIDDEN,
                96,
                layers,
                4,
                2,
                16,
                VOCAB,
                1e-5,
                1e4,
                512,
                LAYERS,
                2,
                IDS,
                **{"rank": 8} | kw,
            )
        ),
    )
    rng = np.random.default_rng(1)

    def make(n: int) -> list[dict]:
        rows = []
        for _ in range(n):
            cycle = rng.integers(3, VOCAB, 3).tolist()
            rows.append(
                {
                    "class": "repetition",
                    "origin": "template",
                    "ids": cycle * 2,
                    "answer": (cycle * 10)[:24],
                    "temperature": 0.0,
                }
            )
        return rows

    feats = tmp_path / "feats"
    feats.mkdir()
    for name, rows in (
        ("answers-0000", make(48)),
        ("heldout-greedy", make(6)),
        ("heldout-sampled", make(6)),
    ):
        ft.save_shard(feats / f"{name}.safetensors", ft.collect(target, rows, IDS), rows)
    run = tmp_path / "run"
    args = argparse.Namespace(
        target=target.path,
        features=feats,
        out=run,
        minutes=0.0,
        steps=120,
        more=False,
        lr=3e-3,
        warmup=0.05,
        hold=0.5,
        sequences=8,
        anchors=8,
        short=0.3,
        hard=1.0,
        gamma=3.0,
        selector=1.0,
        layers=2,
        rank=8,
        no_conv=False,
        no_selector=False,
        seed=1,
        compile=False,
        profile=False,
    )
    tr.run(args)
    assert (run / "state.pt").is_file()
    out = tmp_path / "checkpoint"
    draft, _ = ex.load_run(run)
    ex.export(draft, out, "test\n")
    again = ev.load_checkpoint(out)
    assert {k: tuple(v.shape) for k, v in again.state_dict().items()} == {
        k: tuple(v.shape) for k, v in draft.state_dict().items()
    }
    # on what it was trained on: so few steps teach it to fit, not to generalise
    shard = feats / "answers-0000.safetensors"
    trace = io.StringIO()
    trained = ev.evaluate(again, target, shard, False, 7, False, trace=trace)["all"]
    lines = trace.getvalue().splitlines()
    assert lines.pop(0) == "repetition 23"
    rounds, at = 0, 0
    first = [line.split() for line in lines[:23]]
    while at < 23:
        rounds, at = rounds + 1, at + int(first[at][0]) + 1
    assert sum(line.startswith("repetition") for line in lines) == 47
    assert all(len(row) == 8 and 0 <= float(row[1]) <= 1 for row in first)
    assert rounds < 23 / 1.2, "the trace accepts next to nothing of a text that was learned"
    fresh = ev.evaluate(md.Draft(draft.config), target, shard, False, 7, False)["all"]
    score = [float(t["hits"][1, 0] / t["blocks"][0]) for t in (trained, fresh)]
    assert score[0] > score[1] + 0.1, f"Top-16 at position 1: trained {score[0]}, new {score[1]}"
    sampled = ev.evaluate(again, target, feats / "heldout-sampled.safetensors", True, 7, False)
    assert sampled["all"]["tokens"] >= sampled["all"]["rounds"] >= 1


def test_more_shards_repeat_no_prompt(tmp_path, monkeypatch):
    """`--shards` raised later: the prompts of finished shards and held-out ones are left out."""
    ids = {}
    monkeypatch.setattr(dt, "Target", lambda path: None)
    monkeypatch.setattr(dt, "load_tokenizer", lambda path: None)
    monkeypatch.setattr(dt, "chat_ids", lambda tok, text: [ids.setdefault(text, len(ids))])
    monkeypatch.setattr(dt, "own_prompts", lambda *args: [])
    monkeypatch.setattr(
        dt, "answer", lambda target, rows, *args: [r | {"answer": [0]} for r in rows]
    )
    held = dt.read_lines(dt.HERE / "heldout.jsonl")[-1]["prompt"]
    prompts = [{"class": "qa", "prompt": f"{i}"} for i in range(99)]
    monkeypatch.setattr(
        dt, "training_prompts", lambda n: [*prompts[: n - 1], {"class": "qa", "prompt": held}]
    )
    for shards in (4, 20):
        dt.cmd_answers(
            argparse.Namespace(
                out=tmp_path,
                target=None,
                shards=shards,
                per_shard=5,
                seed=1,
                compile=False,
                worker="0/1",
                greedy=0.5,
                max_new=1,
            )
        )
    rows = [r for path in sorted(tmp_path.glob("*.jsonl")) for r in dt.read_lines(path)]
    seen = [r["ids"][0] for r in rows]
    assert len(seen) > 30
    assert len(seen) == len(set(seen))
    assert held not in ids or ids[held] not in seen


@pytest.mark.parametrize("what", ["absent", "other"])
def test_wrong_target_is_one_sentence(tmp_path, what):
    path = tmp_path / "x.gguf"
    if what == "other":
        tiny_target(path, "gpt2")
    with pytest.raises(tg.TargetError, match=r"not a readable GGUF|expected llama"):
        tg.Target(path)
