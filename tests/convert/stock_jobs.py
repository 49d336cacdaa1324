"""Run the base's own convert_hf_to_gguf.py on several inputs in one process.

    python stock_jobs.py BASE_TREE JOBS.json

JOBS.json holds a list of argument lists. Two things are answered here, the rest is the converter as
it is: a tiny tokenizer is not in its list of known pre-tokenizers, and before it finds that there
is no SentencePiece model it imports a package for one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Convert every job; the process fails with the first that fails."""
    base, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sys.path.insert(0, str(base))
    import convert_hf_to_gguf
    from conversion.base import TextModel

    def no_sentencepiece(self: TextModel) -> None:
        raise FileNotFoundError("tokenizer.model")

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    TextModel._set_vocab_sentencepiece = no_sentencepiece
    for job in jobs:
        sys.argv = ["convert_hf_to_gguf.py", *job]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
