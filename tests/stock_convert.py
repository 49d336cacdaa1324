"""Run llama.cpp's own converter on a draft checkpoint, with a generated tokenizer for the target.

    python stock_convert.py LLAMA_CPP_TREE PRE CHECKPOINT --target-model-dir DIR --outfile OUT ...

The converter recognises a byte-level BPE by the hash of what it makes of a sample text, and knows
only published tokenizers. `PRE` stands in for that one look-up, and an empty module for
`sentencepiece`, which is imported before the check that there is nothing for it to read.
Everything else is the converter's own.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path


def main(tree: Path, pre: str, arguments: list[str]) -> None:
    """Convert with the program in `tree`."""
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    if importlib.util.find_spec("sentencepiece") is None:
        stand_in = types.ModuleType("sentencepiece")
        stand_in.SentencePieceProcessor = object  # type: ignore[attr-defined]
        sys.modules["sentencepiece"] = stand_in

    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre  # type: ignore[method-assign]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
