"""A model, its context and the memory: loaded once, used by one caller at a time."""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvmem.config import EngineConfig, ModelConfig
from kvmem.engine.calibration import Found, find
from kvmem.engine.conversations import Conversations
from kvmem.engine.draft import Drafter, make_drafter
from kvmem.engine.facts import context_settings, memory_facts, warn_without_gpu
from kvmem.engine.fit import make_fitting
from kvmem.engine.memory import Memory, PlainMemory, TieredMemory, as_tiered
from kvmem.engine.session import Session
from kvmem.engine.turns import Turns
from kvmem.errors import ConfigError, StateError
from kvmem.llama.context import Context
from kvmem.llama.model import Model
from kvmem.llama.vocab import Vocab
from kvmem.sizes import MemoryFacts, PoolSizes

__all__ = ["Engine"]


class Engine:
    """Loads a model and gives out sessions.

    config: an EngineConfig, or the path of a GGUF file for all defaults.
    progress: called with 0..1 while the model loads.

    Raises:
        ModelError, ConfigError, CapacityError: the model, a setting, or the memory for them cannot
            be had.
    """

    def __init__(
        self,
        config: EngineConfig | str | os.PathLike[str],
        *,
        progress: Callable[[float], object] | None = None,
    ) -> None:
        if not isinstance(config, EngineConfig):
            config = EngineConfig(model=ModelConfig(path=Path(config)))
        self.config = config
        self._turns = Turns()
        self._session: Session | None = None
        self._memory: Memory | None = None
        warn_without_gpu(config.model)
        self.model = Model(
            config.model.path,
            n_gpu_layers=config.model.n_gpu_layers,
            use_mmap=config.model.use_mmap,
            use_mlock=config.model.use_mlock,
            load_mtp=config.draft.enabled,
            progress=progress,
        )
        try:
            self.vocab = Vocab(self.model)
            self.calibration: Found = find(config)
            self.facts: MemoryFacts = memory_facts(self.model, config, self.calibration.calibration)
            self.sizes: PoolSizes
            self.sizes, self._memory = make_fitting(
                self.model, config, self.facts, self._make_memory
            )
        except BaseException:
            self.close()
            raise

    def _make_memory(self, sizes: PoolSizes) -> Memory:
        config, memory = self.config, self.config.memory
        if memory.enabled and sizes.n_budget_blocks < 2:
            raise ConfigError(
                "budget_tokens",
                sizes.budget_tokens,
                f"at least two blocks of {sizes.block_tokens}, one to write and one to look at",
            )
        context = Context(
            self.model,
            n_ctx=sizes.workspace_tokens,
            n_cells=(sizes.n_slots + memory.n_slack_blocks) * sizes.block_tokens
            if memory.enabled
            else 0,
            block_tokens=sizes.block_tokens if memory.enabled else 0,
            n_threads=config.model.threads,
            n_threads_batch=config.model.threads_batch,
            **context_settings(config),
        )
        drafter: Drafter | None = None
        try:
            if not memory.enabled:
                return PlainMemory(context)
            if config.draft.enabled:
                drafter = make_drafter(context, config.draft)
            return TieredMemory(context, sizes, memory, self.calibration.calibration, drafter)
        except BaseException:
            if drafter is not None:
                drafter.close()
            context.close()
            raise

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            raise StateError("the engine is closed")
        return self._memory

    @property
    def tiered(self) -> TieredMemory:
        """The memory, where it is tiered. Raises StateError with --no-kvmem."""
        return as_tiered(self.memory)

    @property
    def n_ctx(self) -> int:
        """The workspace: tokens that one history may have."""
        return self.sizes.workspace_tokens

    def session(self) -> Session:
        """A new, empty session.

        The engine has one: the session before, if it is open, is closed.
        """
        memory = self.memory
        if self._session is not None:
            self._session.close()
        conversations = None
        if isinstance(memory, TieredMemory):
            conversations = Conversations(
                memory,
                limit=self.config.memory.conversations,
                limit_bytes=self.config.memory.conversations_bytes,
            )
        self._session = Session(memory, self.vocab, self.n_ctx, self._turns, conversations)
        return self._session

    def use_calibration(self, found: Found) -> None:
        """Score with other pairs from now on.

        The summaries of what was read are made anew from the stored keys; nothing is read again.
        Raises ConfigError: the calibration is for another model. CapacityError: the host limit has
        no room for both sets of summaries; the old ones stay in use.
        """
        with self._turns.take():
            if self._session is not None:
                self._session.settle()
            self.tiered.use_calibration(found.calibration)
            self.calibration = found

    def close(self) -> None:
        """Close the session, free the context and the model. A second call does nothing.

        A generation that this thread has not read to its end is closed with it; for one in another
        thread it waits.
        """
        if self._session is not None:
            self._session.close()
            self._session = None
        with self._turns.take():
            if self._memory is not None:
                self._memory.close()
                self._memory = None
            self.model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
