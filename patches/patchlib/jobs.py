"""Prints how many compile jobs this machine can hold: by cores, and by memory.

Run as a program by make and CMake: `jobs.py [ON]`, where ON means CUDA, whose compiler needs more.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

GIB = 1 << 30
BYTES_PER_JOB = 1.5 * GIB
BYTES_PER_CUDA_JOB = 3 * GIB
CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def free_memory() -> int | None:
    """Bytes available now, bounded by the container's limit; None when the system does not say."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError):
        pass
    for limit, used, cache in (
        ("memory.max", "memory.current", r"^file (\d+)"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", r"^total_cache (\d+)"),
    ):
        try:
            left = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            text = (CGROUP / limit).with_name("memory.stat").read_text()
        except (OSError, ValueError):  # no such group, or no limit (reads `max`)
            continue
        match = re.search(cache, text, flags=re.MULTILINE)
        found.append(max(0, left + (int(match[1]) if match else 0)))  # cache can be given back
    return min(found) if found else None


def jobs(core_count: int, memory: int | None, cuda: bool = False) -> int:
    """At least 1; `memory` in bytes."""
    if memory is None:
        return core_count
    return max(1, min(core_count, int(memory / (BYTES_PER_CUDA_JOB if cuda else BYTES_PER_JOB))))


if __name__ == "__main__":
    print(jobs(cores(), free_memory(), cuda="ON" in sys.argv[1:]))
