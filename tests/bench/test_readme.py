"""The README's figures are those of the newest kept run of each kind."""

from itertools import takewhile
from pathlib import Path
from typing import Any

from kvmem.bench.record import read_jsonl
from kvmem.bench.saved import load_recall, load_run
from kvmem.bench.speed_summary import ratios, request_rows, speed_rows
from kvmem.bench.summary import DEFAULT_SIZE, Size, summarise

RESULTS = Path(__file__).parents[2] / "bench/results"


def newest(name: str) -> Path:
    return sorted(RESULTS.glob(f"{name}-20*.jsonl"))[-1]


def table(root: Path, head: str) -> list[list[str]]:
    """The README's table whose head begins so: the cells of its rows."""
    lines = iter((root / "README.md").read_text().splitlines())
    assert any(line.startswith(head) for line in lines), head
    next(lines)
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row[1:-1].split("|")] for row in rows]


def percent(share: float) -> str:
    """Whole per cents, where that makes no whole of less."""
    text = f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %" if text == "100 %" and share < 1 else text


def bare(share: float, digits: int) -> str:
    """Below one, without the zero in front."""
    return f"{share:.{digits}f}".removeprefix("0")


def test_the_readme_says_what_smollm2_recalled(root: Path) -> None:
    found = load_recall(newest("quality-smollm2"))
    kept = [record for cell, record in found if Size.of(cell) == DEFAULT_SIZE]
    rows = {row.policy: row for row in summarise(kept)}
    named = {
        "kvmem (`fused`)": "fused @first",
        "the same, calibrated": "fused* @first",
        "the newest blocks": "recency",
        "the reference system's scorer (`cosine`), asked with the whole history in sight": (
            "cosine @ideal"
        ),
        "the very blocks of the facts": "gold",
        "full attention over the same K and V": "full",
    }
    assert table(root, "| | fact's tokens visible") == [
        [
            name,
            percent(rows[policy].gold_recall.mean),
            f"{rows[policy].kl_nats.mean:.2f}",
            percent(rows[policy].forced.mean),
        ]
        for name, policy in named.items()
    ]
    assert len({(rows[policy].n, rows[policy].n_paraphrased) for policy in named.values()}) == 1
    fused, calibrated = rows["fused @first"], rows["fused* @first"]
    n_histories = len({(record.generator, record.seed) for record in kept})
    assert (
        f"These are {n_histories} histories that nothing was chosen on (n = {fused.n} questions). "
        f"Where a question shares no rare word with its fact (n = {fused.n_paraphrased}), kvmem "
        f"finds {percent(fused.paraphrase_recall.mean)} of the tokens, calibrated "
        f"{percent(calibrated.paraphrase_recall.mean)}."
    ) in (root / "README.md").read_text()


Answers = dict[tuple[str, int, int], dict[tuple[str, int], bool]]
"""By policy, divisor and block: whether the answer to what was told is right."""


def answers(path: Path) -> Answers:
    right: Answers = {}
    for line in read_jsonl(path):
        if "policy" not in line or line.get("n_drafts"):
            continue
        run = right.setdefault((line["policy"], line["divisor"], line["block_tokens"]), {})
        for index, (kind, is_right) in enumerate(zip(line["kinds"], line["right"], strict=True)):
            if kind != "none":  # what was never told
                run[line["conversation"], index] = bool(is_right)
    return right


def test_the_readme_says_what_the_recall_model_answered(root: Path) -> None:
    right, before = answers(newest("recall-table")), answers(newest("recall-heldout"))
    full = right["full", 4, 16]
    fused = right["fused", 4, 16]
    eighth = answers(newest("recall-eighth"))["fused", 8, 8]
    recency, shuffled = before["recency", 4, 16], before["shuffled", 4, 16]
    assert not {policy for policy, *_ in right} & {"recency", "shuffled"}  # else they are newer
    for run in (fused, eighth, recency, shuffled):
        assert run.keys() == full.keys()

    def of_full(run: dict[tuple[str, int], bool]) -> str:
        share = sum(run[question] for question in full if full[question]) / sum(full.values())
        return f"{100 * share:.1f} %"

    assert table(root, f"| visible | right, of {len(full)} | of the {sum(full.values())} ") == [
        ["everything (plain llama.cpp)", str(sum(full.values())), "100 %"],
        ["kvmem (`fused`), a quarter in blocks of 16", str(sum(fused.values())), of_full(fused)],
        ["an eighth in blocks of 8", str(sum(eighth.values())), of_full(eighth)],
        ["the newest blocks, a quarter", str(sum(recency.values())), ""],
        ["`fused` with its scores mixed up, a quarter", str(sum(shuffled.values())), ""],
    ]


def test_the_page_on_drafts_says_how_many_were_said(root: Path) -> None:
    path = newest("recall-drafts")
    page = (root / "docs" / "drafts.md").read_text()
    assert f"bench/results/{path.name}" in page
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in read_jsonl(path):
        if "policy" in line:
            runs.setdefault((line["policy"], line.get("n_drafts", 0)), []).append(line)
    for policy in ("full", "fused"):
        plain, drafted = runs[policy, 0], runs[policy, 3]
        assert [run["right"] for run in drafted] == [run["right"] for run in plain]
        said, proposed = (
            sum(sum(run[name]) for run in drafted) for name in ("accepted", "drafted")
        )
        assert f"{said:,} of {proposed:,}" in page


def test_the_readme_says_what_the_gpu_did(root: Path) -> None:
    path = newest("speed-27b-h200")
    run = load_run(path)
    depth = max(record.depth_tokens for record in run.speeds)
    speeds = [record for record in run.speeds if record.depth_tokens == depth]
    rate: dict[tuple[str, str], float] = {
        (row.system, row.phase): row.tokens_per_s for row in speed_rows(speeds)
    }
    ratio: dict[tuple[str, str], float] = {
        (each.phase, each.against): each.value for each in ratios(speeds)
    }
    requests = [record for record in run.requests if record.depth_tokens == depth]
    first_s: dict[tuple[str, str], float] = {
        (row.system, row.kind): row.first_token_s
        for row in request_rows(requests)
        if row.in_a_row == (row.kind == "warm")
    }
    pool = next(record.device_bytes for record in requests if record.system == "kvmem")
    own_cells, own_gib = run.environment["settings"]["pool_tokens"], pool / (1 << 30)
    stock_gib = own_gib / own_cells * depth
    expected = [
        [name, f"{rate['kvmem', phase]:{form}}", f"{rate['stock', phase]:{form}}",
         f"{ratio[phase, 'stock']:.2f}"]
        for name, phase, form in (("decode, t/s", "decode", ".1f"),
                                  ("prefill, t/s", "prefill", ",.0f"))
    ]  # fmt: skip
    for name, kind, form in (
        ("the whole history", "cold", ".0f"),
        ("one more question", "warm", ".2f"),
    ):
        own, stock = first_s["kvmem", kind], first_s["stock", kind]
        expected.append([f"first token of {name}", f"{own:{form}} s", f"{stock:{form}} s",
                         f"{own / stock:.2g}"])  # fmt: skip
    held = (f"{own_gib:.1f} GiB", f"{stock_gib:.1f} GiB", f"{own_gib / stock_gib:.2f}")
    expected.append(["KV on the device", *held])
    own_host, stock_host = (
        max(record.host_bytes for record in requests if record.system == system) / (1 << 30)
        for system in ("kvmem", "stock")
    )
    kept = ["KV and saved states in host memory", f"{own_host:.1f} GiB", f"{stock_host:.0f}", ""]
    expected.append(kept)
    head = f"| 27B shape (qwen35, IQ4_XS, q8_0 KV), one H200, at {depth:,} tokens of history"
    assert table(root, head) == expected
    window = run.environment["settings"]["window_tokens"]
    assert (
        f"with a pool of {own_cells:,} cells, decode is {bare(ratio['decode', 'window'], 3)} and "
        f"prefill {bare(ratio['prefill', 'window'], 2)} of plain llama.cpp with a full window of "
        f"{window:,}:"
    ) in (root / "README.md").read_text()
