"""Run the base's own convert_hf_to_gguf.py on several inputs in one process.

    python stock_jobs.py BASE_TREE JOBS.json

JOBS.json holds a list of argument lists. A tiny tokenizer is not in the converter's list of known
pre-tokenizers, so that one lookup is answered here, and sentencepiece is imported but not needed;
everything else is the converter as it is.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path


def main() -> None:
    """Convert every job; the process fails with the first that fails."""
    base, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path.insert(0, str(base))
    if importlib.util.find_spec("sentencepiece") is None:
        absent = types.ModuleType("sentencepiece")
        absent.SentencePieceProcessor = None
        sys.modules["sentencepiece"] = absent
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    for job in jobs:
        sys.argv = ["convert_hf_to_gguf.py", *job]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
