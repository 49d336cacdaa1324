"""What a measurement was made on, for the line under its figures."""

from __future__ import annotations

import os
import platform
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Other work above this share of the processor makes speeds mean little.
BUSY_SHARE = 0.2

_SECONDS = 1.0


def machine(threads: int) -> dict[str, Any]:
    """Describe this machine at this moment; takes a second.

    Args:
        threads: CPU threads that the measurement will use.

    Returns:
        Plain data; `busy_before` is the share of the processor that other work takes, 0 to 1, None
        where the system does not tell.
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "busy_before": busy_share(),
    }


def file_facts(path: Path) -> dict[str, Any]:
    """Tell which file was measured: `path`, `bytes`, `modified_ns`."""
    found = path.stat()
    return {"path": str(path), "bytes": found.st_size, "modified_ns": found.st_mtime_ns}


def busy_share(seconds: float = _SECONDS) -> float | None:
    """Measure how much of the processor is in use, 0 to 1; call it while doing nothing.

    The load average would remember a build that ended a minute ago. Time that a hypervisor gave to
    others counts as in use.
    """
    before = _ticks()
    if before is None:
        return None
    time.sleep(seconds)
    after = _ticks()
    if after is None or after[1] <= before[1]:
        return None
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])


def _ticks() -> tuple[int, int] | None:
    """Return idle and all ticks since the system started; None where it does not tell."""
    try:
        line = Path("/proc/stat").read_text("ascii").partition("\n")[0]
        # user nice system idle iowait irq softirq steal; guest time is part of user
        ticks = [int(word) for word in line.split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)
    except (OSError, ValueError, IndexError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
