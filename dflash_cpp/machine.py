"""What a measurement was made on, for the line under its figures."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Above this share of busy cores before a run, its speeds say little.
BUSY_SHARE = 0.5


def machine(threads: int) -> dict[str, Any]:
    """Describe this machine at this moment.

    Args:
        threads: CPU threads that the measurement will use.

    Returns:
        Plain data; `busy` is None where the system does not tell its load.
    """
    cores = os.cpu_count() or 1
    try:
        load: float | None = os.getloadavg()[0]
    except (AttributeError, OSError):
        load = None
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": load,
        "busy": None if load is None else load > BUSY_SHARE * cores,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
