"""Every architecture of this llama.cpp, as a tiny model: right with KV memory, or refused by name.

Right means: plain llama.cpp's logits bit by bit where the budget holds the history; where it does
not, those of a run that sees the same blocks; and keys and queries that lose their rotation again,
so that a text has the same key wherever it stands. The table is tests/architectures.py.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from any_model import EXTRAS, list_tensors, write_any, write_file
from architectures import (
    ARCHITECTURES,
    BASE,
    DEFAULTS,
    EXPERTS,
    REASONS,
    UNTRIED,
    VARIANTS,
    Kind,
    table,
)
from engines import Recorded, ask, make_config, random_tokens, record
from numpy.typing import NDArray
from stock import largest_difference, replay, replay_masked, stock_context
from stored_keys import stored_keys
from timeline import differs_from_twin

from kvmem.cli.faults import describe
from kvmem.engine.engine import Engine
from kvmem.errors import ConfigError, ModelError
from kvmem.kv.rope import unrotate

BLOCK = 32
SMALL = {"budget_tokens": 4 * BLOCK, "reserve_tokens": BLOCK, "batch_tokens": 64}
EXACT = {"ordered": True, "type_k": "f16", "type_v": "f16"}

LARGEST, MEDIAN = 0.5, 0.02
"""As in test_masked.py."""

UNROTATED = {"f32": 2e-5, "q8_0": 2e-2}
"""Of keys up to position 400, relative to their RMS: ggml's angles are floats, Q8_0 rounds."""

POPULAR = [
    "llama", "qwen2", "qwen3", "qwen3moe", "smollm3", "phi3", "gemma", "glm4", "granite",
    "mistral3", "minicpm3", "bloom", "jamba", "granitehybrid", "lfm2", "falcon-h1", "nemotron_h",
    "qwen3next", "llama, YaRN", "phi3, LongRoPE", "deepseek2, converted without MLA",
    "openelm, layers of other head counts", "deci, layers without attention", "hunyuan-dense",
    "hunyuan-dense, YaRN and wide heads", "minicpm3, wide heads", "talkie",
]  # fmt: skip
"""Tried in each run of the quick tests; the others are slow tests."""

POSITION_TABLES = {"gpt2", "starcoder", "mpt"}
"""Keys depend on the position for another reason than a rotation."""

KINDS = (*ARCHITECTURES, *VARIANTS)
REFUSED = [kind for kind in KINDS if kind.reason]
WORKING = [
    pytest.param(kind, marks=[] if kind.name in POPULAR else pytest.mark.slow)
    for kind in KINDS
    if not kind.reason
]

Writer = Callable[[Kind], Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Write the tiny model of a kind, once."""
    folder = tmp_path_factory.mktemp("kinds")

    def write(kind: Kind) -> Path:
        path = folder / f"{kind.name}.gguf"
        if not path.exists():
            write_any(path, kind.arch, {**BASE, **kind.keys}, DEFAULTS, kind.extras)
        return path

    return write


def test_the_table_has_every_architecture_once(root: Path) -> None:
    source = root / "vendor" / "llama.cpp" / "src" / "llama-arch.cpp"
    if not source.exists():
        pytest.skip("vendor/llama.cpp is not there to list its architectures")
    names = re.findall(r'\{ LLM_ARCH_\w+, +"([^"(]+)"', source.read_text())
    listed = [kind.arch for kind in ARCHITECTURES] + list(UNTRIED)
    assert sorted(listed) == sorted(set(names))
    assert {kind.name for kind in KINDS} >= set(POPULAR)
    assert {kind.reason for kind in REFUSED} == set(REASONS)


def test_the_page_has_the_table(root: Path) -> None:
    assert table() in (root / "docs" / "models.md").read_text(), "run scripts/gen-docs"


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.name)
def test_it_is_refused_by_its_own_name(kind: Kind, model: Writer) -> None:
    path, reason = model(kind), REASONS[kind.reason]
    with pytest.raises(ModelError) as caught:
        Engine(make_config(path, type_k="f16", type_v="f16"))
    assert reason.message in str(caught.value)
    assert str(caught.value).startswith(f"{kind.arch} models cannot run")
    hint = "; try --no-kvmem" if reason.plain else "; try another model"
    assert hint in str(caught.value)
    assert describe(caught.value, command="run")[0] == f"error: {caught.value}"
    if not reason.plain:
        with pytest.raises(ModelError) as plain:
            Engine(make_config(path, enabled=False, type_k="f16", type_v="f16"))
        assert str(plain.value) == str(caught.value)
        return
    with record(path, enabled=False, type_k="f16", type_v="f16") as recorded:
        history = random_tokens(90)
        reply = ask(recorded.session, history, max_tokens=8)
        history += reply.tokens + random_tokens(20, seed=1)
        assert len(ask(recorded.session, history, max_tokens=8).tokens) == 8
        calls = recorded.calls
    with stock_context(path) as context:
        assert largest_difference(calls, replay(context, calls)) == 0


@pytest.mark.parametrize("kind", WORKING, ids=lambda kind: kind.name)
def test_it_is_right(kind: Kind, model: Writer) -> None:
    path = model(kind)
    equals_stock(path)
    sees_its_blocks_alone(path)
    if kind.arch not in POSITION_TABLES:
        loses_its_rotation(path)


def equals_stock(path: Path) -> None:
    with record(path, budget_tokens=512, **EXACT) as recorded:
        history: tuple[int, ...] = ()
        for turn, n_tokens in enumerate((150, 60)):
            history += random_tokens(n_tokens, seed=turn)
            reply = ask(recorded.session, history, max_tokens=8)
            assert reply.stats.memory.decision == "all_resident"
            history += reply.tokens
        calls = recorded.calls
    with stock_context(path) as context:
        assert largest_difference(calls, replay(context, calls)) == 0


def sees_its_blocks_alone(path: Path) -> None:
    """Three turns beyond the pool: a reply longer than the reserve, more text, another end."""
    with record(path, **SMALL, **EXACT) as recorded:
        first = random_tokens(300, seed=1)
        reply = ask(recorded.session, first, span=(270, 295), max_tokens=50)
        second = first + reply.tokens + random_tokens(40, seed=2)
        ask(recorded.session, second, span=(355, 380), max_tokens=6)
        third = second[:-4] + random_tokens(6, seed=3)
        reply = ask(recorded.session, third, span=(355, 380), max_tokens=6)
        assert reply.stats.cached_tokens > 300  # a hybrid went back to a checkpoint
        recorded.memory.check()
        calls, is_hybrid = recorded.calls, recorded.memory.is_hybrid
    assert sum(len(call.visible or ()) < call.start // BLOCK for call in calls) > 50
    if is_hybrid:
        assert differs_from_twin(path, calls, **SMALL, **EXACT) == 0
        return
    with stock_context(path, n_seq_max=2) as context:
        rows = replay_masked(context, calls, BLOCK)
    found = [
        np.abs(call.logits - row).max()
        for call, row in zip(calls, rows, strict=True)
        if call.logits is not None and row is not None
    ]
    assert len(found) > 50
    assert max(found) < LARGEST
    assert np.median(found) < MEDIAN


def loses_its_rotation(path: Path) -> None:
    """The same block of text at several places has the same keys, and asks with the same queries.

    That is so for the first layer, whose input depends on the tokens alone.
    """
    text = random_tokens(BLOCK, seed=5)
    for kv_type, tolerance in UNROTATED.items():
        with record(path, type_k=kv_type, type_v=kv_type, **SMALL) as recorded:
            layer = recorded.memory.layout.layers[0]
            if layer.il != 0:
                return
            recorded.session.read(text * 12)
            asked = queries(recorded, text)
            keys = [unrotated(recorded, block) for block in (0, 3, 9)]
            assert differs(keys[1:], keys[0]) < tolerance
            raw = [stored_keys(recorded.memory, block, 0) for block in (0, 3, 9)]
            assert (differs(raw[1:], raw[0]) < tolerance) == (layer.rope_k is None)
            recorded.session.read(text * 5)
            again = queries(recorded, text)
            # an attention temperature scales them all by their position
            assert differs([again / rms(again)], asked / rms(asked)) < UNROTATED["f32"]


def queries(recorded: Recorded, text: tuple[int, ...]) -> NDArray[np.float32]:
    return recorded.session.query(text, range(0, BLOCK, 4)).layers[0]


def unrotated(recorded: Recorded, block: int) -> NDArray[np.float32]:
    layer = recorded.memory.layout.layers[0]
    keys = stored_keys(recorded.memory, block, 0)
    pos = recorded.memory.working_set.pos[block * BLOCK : (block + 1) * BLOCK]
    unrotate(keys, np.ascontiguousarray(pos), layer.rope_k, layer.hadamard)
    return keys


def rms(values: NDArray[np.float32]) -> float:
    return float(np.sqrt((values.astype(np.float64) ** 2).mean()))


def differs(found: list[NDArray[np.float32]], wanted: NDArray[np.float32]) -> float:
    """The largest RMS of the difference, relative."""
    return max(rms(one - wanted) for one in found) / rms(wanted)


def test_a_workspace_beyond_the_learnt_positions_is_refused(tmp_path: Path) -> None:
    """llama.cpp aborts at the first token whose position has no row."""
    path = write_any(tmp_path / "gpt2.gguf", "gpt2", {**BASE, "context_length": 512}, DEFAULTS)
    for enabled in (True, False):
        with pytest.raises(ConfigError, match="workspace_tokens is 4096, but must be at most 512"):
            Engine(make_config(path, enabled=enabled, type_k="f16", type_v="f16"))
    config = make_config(path, workspace_tokens=512, budget_tokens=64, reserve_tokens=32)
    with Engine(config) as engine:
        assert len(ask(engine.session(), random_tokens(500), max_tokens=None).tokens) == 12


@pytest.mark.parametrize("arch", ["glm4moe", "hy_v3"])
def test_an_mtp_block_leaves_the_trunk_alone(arch: str, tmp_path: Path) -> None:
    """The cache leaves the last block out: llama.cpp asks for its tensors, and drafts use it."""
    keys = {**BASE, **EXPERTS, "block_count": 3}
    path = write_file(tmp_path / f"{arch}.gguf", arch, keys, {})
    shapes = {n: s for n, s in list_tensors(path).items() if not EXTRAS.search(n)}
    width = shapes["output_norm.weight"][0]
    shapes["blk.2.nextn.eh_proj.weight"] = (width, 2 * width)
    shapes["blk.2.nextn.enorm.weight"] = shapes["blk.2.nextn.hnorm.weight"] = (width,)
    write_file(path, arch, {**keys, "nextn_predict_layers": 1}, shapes)
    equals_stock(path)
    sees_its_blocks_alone(path)
    loses_its_rotation(path)


def test_a_head_that_a_kv_type_does_not_divide_is_refused(tmp_path: Path) -> None:
    """Heads of 80 values, as phi-2 has them: q8_0, the default, comes in groups of 32."""
    keys = {**BASE, "embedding_length": 320}
    path = write_any(tmp_path / "phi2.gguf", "phi2", keys, DEFAULTS)
    for enabled in (True, False):
        with pytest.raises(ConfigError, match=r"type_k is q8_0, but must be f16 .* 80 values"):
            Engine(make_config(path, enabled=enabled))
    equals_stock(path)
    sees_its_blocks_alone(path)
