"""Write the tokenizer keys of targets with the base's own converter.

    python stock_vocab.py BASE_TREE JOBS.json

JOBS.json holds a list of (target directory, output GGUF, pre). A vocabulary that the base knows
must give `pre` by itself; a tiny one is not in its list and gets it. As in `stock_jobs`, the search
for a SentencePiece model ends without its package.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class FakeKimi:
    """What the base reads of Kimi's own tokenizer class, which is not on this machine."""

    def __init__(self, directory: Path):
        import base64

        ranks = {}
        for line in (directory / "tiktoken.model").read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        named = {int(i): t["content"] for i, t in settings["added_tokens_decoder"].items()}
        ids = range(len(ranks), len(ranks) + 256)
        self.model = SimpleNamespace(_mergeable_ranks=ranks)
        self.special_tokens = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}


def main() -> None:
    """Write every job's keys; the process fails with the first that fails."""
    base, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path[:0] = [str(base / "gguf-py"), str(base)]
    import gguf
    import transformers
    from conversion import get_model_class
    from conversion.base import ModelType, TextModel, get_model_architecture

    known = TextModel.get_vocab_base_pre
    plain = transformers.AutoTokenizer.from_pretrained
    wanted: list[str | None] = [None]

    def pre_of(self: TextModel, tokenizer: Any) -> str:
        if isinstance(tokenizer, FakeKimi):
            return "kimi-k2"
        try:
            found = known(self, tokenizer)
        except NotImplementedError:
            assert len(tokenizer) < 1000, "a real vocabulary is not recognised"
            return str(wanted[0])
        return found

    def tokenizer_of(directory: Path, **options: Any) -> Any:
        if (Path(directory) / "tiktoken.model").exists():
            if not options.get("trust_remote_code"):
                raise ValueError("needs code of its own")
            return FakeKimi(Path(directory))
        return plain(directory, **options)

    def no_sentencepiece(self: TextModel) -> None:
        raise FileNotFoundError("tokenizer.model")

    TextModel.get_vocab_base_pre = pre_of
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    transformers.AutoTokenizer.from_pretrained = tokenizer_of
    for directory, out, pre in jobs:
        wanted[0] = pre
        config = json.loads((Path(directory) / "config.json").read_text())
        kind = get_model_class(get_model_architecture(config, ModelType.TEXT))
        model = object.__new__(kind)
        model.dir_model = Path(directory)
        model.hparams = {**config, **config.get("text_config", {})}
        model.origin_hf_arch = None
        model.is_mistral_format = False
        model.gguf_writer = gguf.GGUFWriter(out, "dflash")
        model.set_vocab()
        model.gguf_writer.write_header_to_file()
        model.gguf_writer.write_kv_data_to_file()
        model.gguf_writer.close()


if __name__ == "__main__":
    main()
