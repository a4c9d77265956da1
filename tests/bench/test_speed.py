"""Speed measurements on a tiny model, and their medians and ratios by hand."""

from collections.abc import Callable
from pathlib import Path
from time import process_time

import pytest

from kvmem.bench import speed, speed_systems
from kvmem.bench.speed import SYSTEMS, RequestRecord, SpeedRecord, SpeedSpec, run_speed
from kvmem.bench.speed_summary import Ratio, ratios, request_rows, speed_rows
from kvmem.engine.index import BlockIndex
from kvmem.engine.memory import TieredMemory
from kvmem.engine.room import make_reply_room
from kvmem.errors import ConfigError


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_every_system_is_measured_in_every_round(
    kind: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ("engine.session", "engine.memory", "engine.plain")
    for module in ("bench.speed", "bench.speed_systems", *engine):
        # of CPU time none is lost where a busy machine stops the process
        monkeypatch.setattr(f"kvmem.{module}.perf_counter", process_time)
    spec = SpeedSpec(
        model=tiny(kind),
        depths=(1024,),
        pool_tokens=256,
        prefill_tokens=128,
        decode_tokens=8,
        repeats=2,
        n_threads=1,
    )
    steps: list[tuple[int, int]] = []
    records = list(run_speed(spec, report=lambda what, done, total: steps.append((done, total))))
    speeds = [r for r in records if isinstance(r, SpeedRecord)]
    found = [(r.round, r.system, r.phase, r.n_tokens) for r in speeds]
    assert found == [
        (turn, system, phase, n)
        for turn in (0, 1, 2)
        for system in SYSTEMS
        for phase, n in (("prefill", 128), ("decode", 8), ("reserve", 8))
        if phase != "reserve" or system == "kvmem"
    ]
    assert all(r.seconds > 0 for r in speeds)
    for r in speeds:
        assert (r.bytes_out > 0) == (r.system == "kvmem" and r.phase == "prefill")
        assert (r.to_host_per_s is None) == (r.of_ceiling is None) == (r.bytes_out == 0)
    requests = [r for r in records if isinstance(r, RequestRecord)]
    assert [(r.round, r.system, r.kind, r.in_a_row) for r in requests] == [
        (turn, system, "warm" if turn else "cold", False)
        for turn in (0, 1, 2)
        for system in ("kvmem", "stock")
    ] + [(turn, system, "warm", True) for system in ("kvmem", "stock") for turn in (0, 1, 2)]
    for request in requests:
        assert request.read_tokens == 64 + 1024 * (request.kind == "cold")  # the prefix was held
        phases = request.phases
        assert sum(phases.values()) == pytest.approx(request.first_token_s)
        assert all(seconds >= 0 for seconds in phases.values())
        assert (phases["read_s"] + phases["query_s"]) > 0
        assert (request.to_device_per_s is None) == (request.bytes_in == 0)
        assert phases["other_s"] < 0.2 * request.first_token_s + 0.01  # no phase is forgotten
    assert steps[-1] == (9, 9)


def test_cpu_time_has_the_summaries_of_every_phase(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SpeedSpec(
        model=tiny_llama,
        depths=(512,),
        pool_tokens=256,
        prefill_tokens=64,
        decode_tokens=40,  # a block and more
        repeats=1,
        n_threads=1,
        cpu_time=True,
    )
    steps: list[str] = []

    def clock() -> float:
        steps.append("clock")
        return process_time()

    flush = BlockIndex.flush

    def flush_and_tell(index: BlockIndex) -> None:
        steps.append("flush")
        flush(index)

    for module in (speed, speed_systems):
        monkeypatch.setattr(module, "process_time", clock)
    monkeypatch.setattr(BlockIndex, "flush", flush_and_tell)
    for record in run_speed(spec):
        if isinstance(record, SpeedRecord) and record.system == "kvmem":
            last = len(steps) - steps[::-1].index("clock") - 1
            assert steps[last - 1] == "flush", record.phase
        steps.clear()


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
@pytest.mark.parametrize("alone", [False, True], ids=["together", "one at a time"])
def test_each_depth_is_read_on_to_from_the_one_before(
    kind: str, alone: bool, tiny: Callable[..., Path]
) -> None:
    """The first lies within the budget: there is no window, and no reserve that fills."""
    spec = SpeedSpec(
        model=tiny(kind),
        depths=(128, 512, 768),
        pool_tokens=320,
        prefill_tokens=64,
        decode_tokens=8,
        repeats=1,
        n_threads=1,
        alone=alone,
    )
    read: dict[str, list[int]] = {}

    def report(what: str, done: int, total: int) -> None:
        if what.endswith("reads"):
            read.setdefault(what, []).append(total)

    records = list(run_speed(spec, report=report))
    # the window is a hybrid's that leaves room for 66 tokens, or all of its cells
    window = 320 - 66 * (kind == "qwen35")
    assert read == {
        "kvmem reads": [128, 384, 256],
        "stock reads": [128, 384, 256],
        "window reads": [window],
    }
    speeds = [r for r in records if isinstance(r, SpeedRecord)]
    measured = {(r.depth_tokens, r.system, r.phase) for r in speeds}
    both = {(system, phase) for system in SYSTEMS for phase in ("prefill", "decode")}
    within = {each for each in both if each[0] != "window"}
    beyond = both | {("kvmem", "reserve")}
    assert measured == {
        (depth, *each)
        for depth, wanted in ((128, within), (512, beyond), (768, beyond))
        for each in wanted
    }
    found = {(ratio.depth_tokens, ratio.phase, ratio.against) for ratio in ratios(speeds)}
    assert (128, "prefill", "stock") in found and (128, "prefill", "window") not in found
    assert (768, "reserve", "stock") in found and (768, "reserve", "window") not in found
    requests = [r for r in records if isinstance(r, RequestRecord)]
    cold = [r for r in requests if r.kind == "cold"]
    assert {(r.system, r.depth_tokens, r.read_tokens) for r in cold} == {
        (system, depth, depth + 64) for system in SYSTEMS[:2] for depth in spec.depths
    }
    for r in requests:
        assert r.kind == "cold" or r.read_tokens == 64  # no question read the history again


def test_a_full_reserve_is_full(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells of the pool are in use at the end of the reply, and none has to leave for it."""
    used: list[int] = []

    def look(memory: TieredMemory, first_own: int) -> int:
        used.append(memory.working_set.n_cells_used)
        return make_reply_room(memory, first_own)

    monkeypatch.setattr("kvmem.bench.speed_systems.make_reply_room", look)
    spec = SpeedSpec(
        model=tiny_llama,
        depths=(1024,),
        pool_tokens=256,
        prefill_tokens=64,
        decode_tokens=32,
        repeats=1,
        n_threads=1,
    )
    list(run_speed(spec))
    replies = [used[at : at + 32] for at in range(0, len(used), 32)]
    decode, reserve = replies[:2]
    assert decode == list(range(192, 192 + 32))
    assert reserve == list(range(224, 224 + 32))


def record(system: str, turn: int, seconds: float) -> SpeedRecord:
    return SpeedRecord(
        system=system,  # type: ignore[arg-type]
        phase="decode",
        depth_tokens=100,
        round=turn,
        n_tokens=12,
        seconds=seconds,
    )


def test_medians_and_ratios_are_taken_within_rounds() -> None:
    records = [
        record(system, turn, seconds)
        for turn, times in enumerate([(1, 2, 1), (2, 8, 2), (3, 9, 6)], start=1)
        for system, seconds in zip(SYSTEMS, times, strict=True)
    ]
    # the round that warms up is in no figure
    records += [record(system, 0, 100 * i) for i, system in enumerate(SYSTEMS, start=1)]
    rows = {row.system: row for row in speed_rows(records)}
    assert rows["kvmem"].tokens_per_s == 6.0
    assert (rows["kvmem"].slowest, rows["kvmem"].fastest) == (4.0, 12.0)
    assert rows["kvmem"].n == 3
    assert ratios(records) == [
        Ratio("decode", 100, "stock", 3.0),
        Ratio("decode", 100, "window", 1.0),
    ]


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"repeats": 0}, "repeats"),
        ({"pool_tokens": 512}, "pool_tokens"),
        ({"depths": (512,)}, "depth"),
        ({"depths": (8192, 7168)}, "depths"),
        ({"depths": (7168, 7168)}, "depths"),
        ({"depths": (64,)}, "depth"),
        ({"cpu_time": True, "n_threads": 2}, "threads"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, object], setting: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=setting):
        SpeedSpec(model=tmp_path, **fields)  # type: ignore[arg-type]


def test_a_new_window_is_measured_against_the_plain_copy(tiny_llama: Path) -> None:
    """With a pool that holds a quarter of the history, questions bring blocks in."""
    spec = SpeedSpec(
        model=tiny_llama, depths=(4096,), prefill_tokens=64, decode_tokens=4, repeats=3, n_threads=1
    )
    requests = [r for r in run_speed(spec) if isinstance(r, RequestRecord)]
    moved = [r for r in requests if r.bytes_in]
    assert moved
    for request in moved:
        assert request.to_device_per_s == pytest.approx(request.bytes_in / request.move_s)
        assert request.of_ceiling is not None
        assert 0 < request.of_ceiling < 2
    rows = {(row.system, row.kind): row for row in request_rows(requests)}
    assert rows["kvmem", "warm"].n == 4  # in a row, the first among them
    assert {row.n for row in request_rows(requests) if not row.in_a_row} == {1, 3}
    assert rows["stock", "warm"].of_ceiling is None
