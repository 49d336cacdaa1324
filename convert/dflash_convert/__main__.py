"""`python -m dflash_convert` is `dflash-convert`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
