"""A tiny Mamba with random weights: a purely recurrent target, to which no draft can belong."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from tiny_vocab import make_vocab

N_LAYER, N_EMBD, N_VOCAB = 2, 64, 512
INNER, STATE, CONV, RANK = 2 * N_EMBD, 16, 4, 8  # llama.cpp allows no other INNER


def make_mamba(path: Path, seed: int = 0) -> Path:
    """Write the model as GGUF, F32 throughout; returns `path`."""
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name("tiny mamba")
    writer.add_context_length(8192)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(N_LAYER)
    writer.add_ssm_conv_kernel(CONV)
    writer.add_ssm_inner_size(INNER)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_time_step_rank(RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    vocab = make_vocab(N_VOCAB)
    vocab.write(writer)
    for name, values in _tensors(vocab.text_ids, np.random.default_rng(seed)).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(text_ids: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)

    head = np.zeros((N_VOCAB, N_EMBD))  # other ids get logit 0, which never is the highest
    head[list(text_ids)] = matrix(len(text_ids), N_EMBD, 3.0)
    tensors = {
        "token_embd.weight": rng.standard_normal((N_VOCAB, N_EMBD)),
        "output_norm.weight": np.ones(N_EMBD),
        "output.weight": head,
    }
    for i in range(N_LAYER):
        tensors |= {
            f"blk.{i}.{name}": values
            for name, values in {
                "attn_norm.weight": np.ones(N_EMBD),
                "ssm_in.weight": matrix(2 * INNER, N_EMBD),
                "ssm_conv1d.weight": matrix(INNER, CONV, 1.5),
                "ssm_conv1d.bias": np.zeros(INNER),
                "ssm_x.weight": matrix(RANK + 2 * STATE, INNER, 2.0),
                "ssm_dt.weight": matrix(INNER, RANK),
                "ssm_dt.bias": rng.uniform(-3.0, 0.0, INNER),
                "ssm_a": -np.tile(np.arange(1.0, STATE + 1), (INNER, 1)),
                "ssm_d": np.ones(INNER),
                "ssm_out.weight": matrix(N_EMBD, INNER, 2.0),
            }.items()
        }
    return tensors
