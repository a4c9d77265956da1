"""The generators by name."""

from collections.abc import Callable
from typing import Final

from kvmem.bench.generators.agent import Agent
from kvmem.bench.generators.base import Generator
from kvmem.bench.generators.harbor import Harbor
from kvmem.bench.generators.office import Office

__all__ = ["GENERATORS"]

GENERATORS: Final[dict[str, Callable[[], Generator]]] = {
    "harbor": Harbor,
    "office": Office,
    "agent": Agent,
}
