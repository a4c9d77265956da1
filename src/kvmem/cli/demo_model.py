"""`kvmem demo-model`: fetch a small real model once and print where it is."""

from kvmem.bench.demo_model import fetch
from kvmem.cli.progress import progress


def demo_model() -> None:
    """Fetch SmolLM2-135M-Instruct (Q4_1, 94 MB, Apache-2.0) into the cache and print its path.

    The download happens once; later calls check the file and print the same path.
    """
    with progress(unit_bytes=True) as report:
        path = fetch(report=report)
    print(path)
