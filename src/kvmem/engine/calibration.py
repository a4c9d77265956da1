"""Which pairs score for a model, as `kvmem calibrate` found it: the file, and how it is found.

A calibration holds for one model (by its fingerprint) and one pair of KV types. Its file stands
beside the model, or in the cache folder where that cannot be written.
docs/retrieval.md, "Calibration", says how pairs are picked.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kvmem.config import EngineConfig, MemoryConfig
from kvmem.engine.fingerprint import fingerprint
from kvmem.errors import ConfigError
from kvmem.kv.layout import KvLayout, Pair
from kvmem.kv.scorers import DEFAULT_SCORER
from kvmem.paths import cache_folder

__all__ = [
    "ALL_PAIRS_SCORERS",
    "SLICE_TOKENS",
    "Calibration",
    "Found",
    "Scoring",
    "file_names",
    "find",
    "scoring",
]

FORMAT: Final = "kvmem calibration 1"
CALIBRATED_SCORERS: Final = ("fused", "heads")
"""Those that pairs are picked for."""
ALL_PAIRS_SCORERS: Final = ("mass", "cosine")
"""These stand for methods that use all pairs, and get them, whatever was calibrated."""
ALL_PAIRS_SLICE_TOKENS: Final = 8

SLICE_TOKENS: Final = 4
"""Of chosen pairs. Without a calibration half of the pairs in these slices take the bytes of all
pairs in slices of 8, and find more (docs/retrieval.md)."""
FEW_LAYERS: Final = 8
"""Below this many layers with attention all of them score, in twice those bytes."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The pairs that score, all with the same weight.

    pairs: (layer number in the model, KV head). report: how it was found and what it is worth.
    """

    fingerprint: str
    type_k: str
    type_v: str
    pairs: tuple[tuple[int, int], ...]
    slice_tokens: int
    report: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises ConfigError: the file is not readable or no calibration of this version."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("calibration", path, f"a readable JSON file ({error})") from None
        try:
            if fields["format"] != FORMAT:
                raise ConfigError("calibration", path, f'a file of the format "{FORMAT}"')
            pairs = tuple((_natural(il), _natural(head)) for il, head in fields["pairs"])
            found = cls(
                fingerprint=str(fields["fingerprint"]),
                type_k=str(fields["type_k"]),
                type_v=str(fields["type_v"]),
                pairs=pairs,
                slice_tokens=_natural(fields["slice_tokens"]),
                report=dict(fields["report"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                "calibration", path, f"a whole calibration file ({type(error).__name__}: {error})"
            ) from None
        if not pairs or len(set(pairs)) != len(pairs) or found.slice_tokens < 1:
            raise ConfigError("calibration", path, "one with pairs, each once, and slices")
        return found

    def check(self, path: Path, model_print: str, memory: MemoryConfig) -> None:
        """Raises ConfigError: it was made for another model or other KV types."""
        if self.fingerprint != model_print:
            raise ConfigError(
                "calibration",
                path,
                "made for this model file, but it was made for another one; "
                "run kvmem calibrate again",
            )
        if (self.type_k, self.type_v) != (memory.type_k, memory.type_v):
            raise ConfigError(
                "calibration",
                path,
                f"made for K {memory.type_k} and V {memory.type_v}, but it was made for "
                f"{self.type_k} and {self.type_v}; run kvmem calibrate with these types",
            )


def _natural(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


class Scoring(NamedTuple):
    """What the key summaries of a history are made of."""

    pairs: tuple[Pair, ...]
    slice_tokens: int
    is_calibrated: bool

    def __str__(self) -> str:
        how = "calibrated" if self.is_calibrated else "uncalibrated"
        return f"{len(self.pairs)} pairs ({how}), slices of {self.slice_tokens}"


def scoring(
    layout: KvLayout, calibration: Calibration | None, scorer: str = DEFAULT_SCORER
) -> Scoring:
    """The pairs of a layout with which a scorer scores. Raises ConfigError: the calibration names
    others.

    Without a calibration these are the pairs of the middle half of the layers: heads that look up
    what was told are rare in the first and in the last ones.
    """
    if scorer in ALL_PAIRS_SCORERS:
        return Scoring(layout.pairs(), ALL_PAIRS_SLICE_TOKENS, False)
    if calibration is None:
        n_layers = len(layout.layers)
        skipped = n_layers // 4 if n_layers >= FEW_LAYERS else 0
        middle = range(skipped, n_layers - skipped)
        pairs = tuple(pair for pair in layout.pairs() if pair.layer in middle)
        return Scoring(pairs, SLICE_TOKENS, False)
    index_of = {layer.il: index for index, layer in enumerate(layout.layers)}
    known = {(layer.il, head) for layer in layout.layers for head in range(layer.n_head_kv)}
    if unknown := [pair for pair in calibration.pairs if pair not in known]:
        raise ConfigError(
            "calibration", f"for (layer, KV head) {unknown[0]}", "for attention that the model has"
        )
    if layout.block_tokens % calibration.slice_tokens:
        raise ConfigError(
            "calibration",
            f"for slices of {calibration.slice_tokens}",
            f"for slices that divide block_tokens={layout.block_tokens}",
        )
    pairs = tuple(Pair(index_of[il], head) for il, head in calibration.pairs)
    return Scoring(pairs, calibration.slice_tokens, True)


class Found(NamedTuple):
    """The calibration that an engine uses, and where it is from; or None, and why."""

    calibration: Calibration | None
    source: str


def file_names(model: Path, memory: MemoryConfig, model_print: str) -> tuple[Path, Path]:
    """Where the calibration of a model is looked for: beside it, then in the cache."""
    types = memory.type_k if memory.type_k == memory.type_v else f"{memory.type_k}-{memory.type_v}"
    return (
        model.with_name(f"{model.name}.{types}.kvmem.json"),
        cache_folder() / "calibration" / f"{model_print[:32]}.{types}.json",
    )


def find(config: EngineConfig) -> Found:
    """The calibration for this model and these KV types.

    A file that was given must hold: ConfigError otherwise. One that was found and does not hold is
    refused by name in the log, and the uncalibrated default is used.
    """
    memory = config.memory
    if not memory.enabled:
        return Found(None, "none: KV memory is off")
    if memory.calibration == "off":
        return Found(None, "off")
    if memory.scorer not in CALIBRATED_SCORERS:
        return Found(None, f"none: the scorer {memory.scorer} has no use for it")
    model_print = fingerprint(config.model.path)
    if memory.calibration != "auto":
        path = Path(memory.calibration)
        given = Calibration.load(path)
        given.check(path, model_print, memory)
        return Found(given, str(path))
    refused = ""
    for path in _existing(file_names(config.model.path, memory, model_print)):
        try:
            found = Calibration.load(path)
            found.check(path, model_print, memory)
        except ConfigError as error:
            refused = f"none: {path} was refused"
            _log.warning("%s; the uncalibrated default is used", error)
            continue
        return Found(found, str(path))
    return Found(None, refused or "none: kvmem calibrate makes one")


def _existing(paths: tuple[Path, ...]) -> Iterator[Path]:
    return (path for path in paths if path.exists())
