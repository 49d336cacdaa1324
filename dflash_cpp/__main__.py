"""`python -m dflash_cpp`, the same as the command `dflash-cpp`."""

from __future__ import annotations

from .cli import main

if __name__ == "__main__":
    main()
