"""`kvmem bench agent`: what an agent does to a server, round by round.

    tools   one question, then rounds of tool results below it until the history is n_tokens long
    chat    a long text with a question, then further messages, each with a question of its own; the
            last asks for code, and gets a longer reply

The same rounds run in this process, with kvmem or with plain llama.cpp, or against a server that
speaks OpenAI's chat completions (`kvmem.bench.client`).
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from kvmem.bench.progress import Report, silent
from kvmem.bench.record import gpu_used_bytes
from kvmem.bench.speed import make_text
from kvmem.bench.speed_systems import OPENING_TOKENS
from kvmem.config import DraftConfig, EngineConfig, KvType, MemoryConfig, ModelConfig
from kvmem.engine.engine import Engine
from kvmem.engine.events import Done, PromptProgress, TokenEvent
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import Prompt, RoleSpan, Span
from kvmem.engine.sampling import GenerateParams, SamplingParams
from kvmem.engine.stats import RequestStats
from kvmem.errors import ConfigError

__all__ = [
    "CODE_REQUEST",
    "TASKS",
    "AgentRecord",
    "AgentSpec",
    "AgentSummary",
    "AgentSystem",
    "Task",
    "run_agent",
    "summarise_agent",
]

Task = Literal["tools", "chat"]
AgentSystem = Literal["kvmem", "stock", "server"]

TASKS: Final[tuple[Task, ...]] = get_args(Task)
QUESTION_TOKENS: Final = 64
CODE_REQUEST: Final = (
    "\n\nWrite one page of HTML without scripts: the lighthouse on its hill as inline SVG, and "
    "below it a table of the ships that were named, each with its day."
)
CODE_REPLIES: Final = 4
"""Times as long as another reply the one with code is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """What is played.

    model: None against a server. n_tokens: length of the history at the end, replies included.
    n_drafts: tokens that the model's MTP block proposes at a time, with kvmem alone; 0 for none.
    """

    model: Path | None
    task: Task = "tools"
    system: AgentSystem = "kvmem"
    n_tokens: int = 6144
    rounds: int = 8
    reply_tokens: int = 32
    budget_tokens: int = 768
    reserve_tokens: int = 256
    block_tokens: int = 32
    batch_tokens: int = 512
    ubatch_tokens: int = 512
    kv_type: KvType = "q8_0"
    n_drafts: int = 0
    n_threads: int | None = None
    n_gpu_layers: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ConfigError("rounds", self.rounds, "at least 2")
        if self.reply_tokens < 2:
            raise ConfigError("reply_tokens", self.reply_tokens, "at least 2")
        least = self.rounds * QUESTION_TOKENS + self._replies
        if self.n_tokens < 2 * least:
            raise ConfigError("n_tokens", self.n_tokens, f"at least {2 * least} for these rounds")

    def asks_for_code(self, turn: int) -> bool:
        return self.task == "chat" and turn == self.rounds - 1

    def reply_of(self, turn: int) -> int:
        """Tokens of a round's reply."""
        return self.reply_tokens * (CODE_REPLIES if self.asks_for_code(turn) else 1)

    @property
    def _replies(self) -> int:
        return sum(map(self.reply_of, range(self.rounds)))

    def new_tokens(self, turn: int) -> int:
        """Tokens that a round adds in front of its reply: in `chat` half of all in the first."""
        given = self.n_tokens - self._replies
        if self.task == "tools":
            return given // self.rounds
        return given // 2 if turn == 0 else given // 2 // (self.rounds - 1)

    @property
    def engine(self) -> EngineConfig:
        assert self.model is not None
        tiered = self.system == "kvmem"
        return EngineConfig(
            model=ModelConfig(
                path=self.model, n_gpu_layers=self.n_gpu_layers, n_threads=self.n_threads
            ),
            memory=MemoryConfig(
                enabled=tiered,
                workspace_tokens=self.n_tokens + 1,
                budget_tokens=self.budget_tokens if tiered else None,
                reserve_tokens=self.reserve_tokens if tiered else None,
                block_tokens=self.block_tokens,
                batch_tokens=self.batch_tokens,
                ubatch_tokens=self.ubatch_tokens,
                type_k=self.kv_type,
                type_v=self.kv_type,
            ),
            draft=DraftConfig(spec_type="draft-mtp", n_max=self.n_drafts)
            if self.n_drafts and tiered
            else DraftConfig(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """One round. prompt_s: to the first token; decode_s: from there to the end.

    phases: seconds of each, as MemoryReport has them. Bytes are those at the end of the round, None
    where a server does not tell. rss_peak_bytes: the most that the process held since the task
    began. gpu_used_bytes: the most in use on all GPUs during the round, by anyone, CUDA itself and
    all else included; gpu_bytes: without what was in use before the model was loaded, by then
    CUDA's own too.
    bytes_stored: of the blocks that were copied to the host. The rates are over the seconds of
    moving and of storing, of_ceiling and to_host_of_ceiling over the machine's plain copies; None
    where nothing moved.
    """

    task: Task
    system: AgentSystem
    round: int
    prompt_tokens: int
    cached_tokens: int
    replayed_tokens: int | None
    reply_tokens: int
    prompt_s: float
    decode_s: float
    decision: str
    phases: dict[str, float] | None
    bytes_in: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    device_bytes: int | None
    host_bytes: int | None
    rss_bytes: int | None
    gpu_bytes: int | None
    rss_peak_bytes: int | None = None
    gpu_used_bytes: int | None = None
    to_device_per_s: float | None = None
    of_ceiling: float | None = None
    bytes_stored: int | None = None
    to_host_per_s: float | None = None
    to_host_of_ceiling: float | None = None

    @property
    def read_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSummary:
    """Rates of a task. initial: the first round's, over an empty pool; overall: of all rounds.

    replay_share: tokens read a second time, over all that were read. accepted_share: drafts that
    became reply tokens, over all drafts. Peaks are of the bytes that AgentRecord has; None where it
    is not told.
    """

    task: Task
    system: AgentSystem
    rounds: int
    n_tokens: int
    initial_per_s: float
    overall_per_s: float
    decode_per_s: float
    decode_last_per_s: float
    replay_share: float | None
    accepted_share: float | None
    peak_rss_bytes: int | None
    peak_gpu_bytes: int | None
    peak_gpu_used_bytes: int | None

    @property
    def overall_over_initial(self) -> float:
        """NaN where the first round read nothing: a server may have kept its prompt."""
        return self.overall_per_s / self.initial_per_s if self.initial_per_s else math.nan


def run_agent(spec: AgentSpec, *, report: Report = silent) -> Iterator[AgentRecord]:
    """Play the task in this process."""
    before = gpu_used_bytes()
    _forget_peak()
    with Engine(spec.engine) as engine:
        session = engine.session()
        ceilings = (1.0, 1.0)
        if isinstance(engine.memory, TieredMemory):
            ceilings = engine.memory.port.copy_ceiling()
        text = make_text(engine, spec.n_tokens).tolist()
        history: list[int] = []
        question = Span(0, 0)
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        request = engine.vocab.tokenize(CODE_REQUEST)
        for turn in range(spec.rounds):
            start, n_new = len(history), spec.new_tokens(turn)
            asked = text[start + n_new - QUESTION_TOKENS : start + n_new]
            if spec.asks_for_code(turn):
                asked = request[:n_new]
            history += text[start : start + n_new - len(asked)] + asked
            if turn == 0 or spec.task == "chat":
                question = Span(len(history) - len(asked), len(history) - OPENING_TOKENS)
            params = GenerateParams(sampling=greedy, max_tokens=spec.reply_of(turn))
            stats = None
            messages = [RoleSpan("user", question)]
            if question.stop < len(history) - OPENING_TOKENS:
                result = Span(question.stop, len(history) - OPENING_TOKENS)
                messages.append(RoleSpan("tool", result))
            prompt = Prompt(tokens=tuple(history), spans=tuple(messages), query_span=question)
            n_sealed, used = _sealed_bytes(engine), gpu_used_bytes()
            for event in session.generate(prompt, params):
                if isinstance(event, PromptProgress):
                    used = max(used, gpu_used_bytes())
                    report("history", event.n_done, spec.n_tokens)
                elif isinstance(event, TokenEvent):
                    history.append(event.token)
                elif isinstance(event, Done):
                    stats = event.stats
            assert stats is not None
            stored = max(0, _sealed_bytes(engine) - n_sealed)
            at_end = gpu_used_bytes()
            used = max(used, at_end)
            yield _record(spec, turn, stats, at_end - before, used, stored, ceilings)
        report("history", spec.n_tokens, spec.n_tokens)


def _sealed_bytes(engine: Engine) -> int:
    """Of the blocks of the history that have a copy on the host."""
    memory = engine.memory
    if not isinstance(memory, TieredMemory):
        return 0
    return int(memory.working_set.n_sealed * memory.port.payload_bytes)


def _record(
    spec: AgentSpec,
    turn: int,
    stats: RequestStats,
    gpu_bytes: int,
    gpu_used: int,
    bytes_stored: int,
    ceilings: tuple[float, float],
) -> AgentRecord:
    memory, times = stats.memory, stats.memory.times
    inward = memory.bytes_in / times.move_s if memory.bytes_in and times.move_s else None
    outward = bytes_stored / times.store_s if bytes_stored and times.store_s else None
    return AgentRecord(
        task=spec.task,
        system=spec.system,
        round=turn,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        replayed_tokens=memory.replayed_tokens,
        reply_tokens=stats.completion_tokens,
        prompt_s=stats.prompt_s,
        decode_s=stats.decode_s,
        decision=memory.decision,
        phases=asdict(memory.times),
        bytes_in=memory.bytes_in,
        drafted_tokens=stats.draft_n,
        accepted_tokens=stats.draft_n_accepted,
        device_bytes=memory.device_bytes,
        host_bytes=memory.host_bytes,
        rss_bytes=_status_bytes("VmRSS"),
        gpu_bytes=gpu_bytes,
        rss_peak_bytes=_status_bytes("VmHWM"),
        gpu_used_bytes=gpu_used,
        to_device_per_s=inward,
        of_ceiling=None if inward is None else inward / ceilings[0],
        bytes_stored=bytes_stored,
        to_host_per_s=outward,
        to_host_of_ceiling=None if outward is None else outward / ceilings[1],
    )


def _status_bytes(name: str) -> int:
    """VmRSS, what the process holds, or VmHWM, its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def _forget_peak() -> None:
    """Let VmHWM begin anew: another task of this process may have held more."""
    with suppress(OSError):  # some sandboxes forbid it; then the peak is that of the process
        Path("/proc/self/clear_refs").write_text("5")


def summarise_agent(records: Sequence[AgentRecord]) -> list[AgentSummary]:
    """One summary for each task and system, in the order of the records."""
    keys = dict.fromkeys((r.task, r.system) for r in records)
    return [_summary([r for r in records if (r.task, r.system) == key]) for key in keys]


def _summary(records: Sequence[AgentRecord]) -> AgentSummary:
    first, last = records[0], records[-1]
    n_read = sum(r.read_tokens for r in records)
    replayed = [r.replayed_tokens for r in records if r.replayed_tokens is not None]
    n_all = n_read + sum(replayed)
    drafted = sum(r.drafted_tokens or 0 for r in records)
    accepted = sum(r.accepted_tokens or 0 for r in records)
    # a server may end a reply at once, or send no text but at its end
    timed = [r for r in records if r.reply_tokens > 1 and r.decode_s > 0]
    rates = [(r.reply_tokens - 1) / r.decode_s for r in timed] or [math.nan]
    # old records have no peak of the process
    rss = [r.rss_peak_bytes or r.rss_bytes for r in records if r.rss_bytes is not None]
    gpu = [r.gpu_bytes for r in records if r.gpu_bytes is not None]
    used = [r.gpu_used_bytes for r in records if r.gpu_used_bytes is not None]
    return AgentSummary(
        task=first.task,
        system=first.system,
        rounds=len(records),
        n_tokens=last.prompt_tokens + last.reply_tokens,
        initial_per_s=first.read_tokens / first.prompt_s,
        overall_per_s=n_read / sum(r.prompt_s for r in records),
        decode_per_s=statistics.median(rates),
        decode_last_per_s=rates[-1],
        replay_share=sum(replayed) / n_all if replayed and n_all else None,
        accepted_share=accepted / drafted if drafted else None,
        peak_rss_bytes=max((n for n in rss if n is not None), default=None),
        peak_gpu_bytes=max(gpu, default=None),
        peak_gpu_used_bytes=max(used, default=None),
    )
