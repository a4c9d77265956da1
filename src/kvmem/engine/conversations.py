"""Which conversation a request goes on, and which one leaves when there is no room.

docs/memory.md, "Conversations", has the rules.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmem.engine.conversation import Conversation, LastPrompt
from kvmem.engine.marks import generation_start
from kvmem.engine.memory import TieredMemory
from kvmem.engine.prompt import Prompt
from kvmem.engine.stats import ConversationUse, MemoryReport
from kvmem.engine.switching import branch, forget, switch
from kvmem.errors import HostCapacityError

__all__ = ["ConversationInfo", "Conversations", "common_prefix"]

I32 = NDArray[np.int32]

# Of a conversation on the host where room is short: the system prompt, the last question, the end
# of the last message, and the end.
PARKED_CHECKPOINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationInfo:
    """What is known of a kept conversation, for those who watch. shared: blocks held together with
    another one.
    """

    number: int
    client_id: str | None
    is_on_device: bool
    n_tokens: int
    n_blocks: int
    n_shared: int
    checkpoints: tuple[int, ...]


class Conversations:
    """The conversations of one memory; exactly one of them is on the device.

    limit: how many are kept. limit_bytes: what all of them may take of the host while there are
    several; None for the host limit.
    """

    def __init__(self, memory: TieredMemory, *, limit: int, limit_bytes: int | None) -> None:
        self._memory = memory
        self._limit = limit
        self._host_limit = memory.host.limit
        self._limit_bytes = min(limit_bytes or self._host_limit, self._host_limit)
        self._kept = [memory.active]
        self._needed: Conversation | None = None  # must not leave now
        self._clock = 0
        self._n_made = 1
        self.n_evicted = 0
        self.infos: tuple[ConversationInfo, ...] = ()
        memory.active.number = 1
        memory.make_room_on_host = self._make_room

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def parked(self) -> tuple[Conversation, ...]:
        """Those that are not on the device."""
        return tuple(one for one in self._kept if one is not self._memory.active)

    def enter(self, prompt: Prompt, tokens: I32, report: MemoryReport) -> int:
        """Put the conversation that this prompt goes on on the device, cut back to where they part.

        Returns how many tokens they have in common; a hybrid may have been cut back further, or
        begin anew and save its state there for the next one that begins like this.

        Raises CapacityError, TransferError: every conversation is whole, or gone.
        """
        memory = self._memory
        self._clock += 1
        best, shared, kept = self._find(prompt, tokens)
        use = self._choose(best, prompt, shared, kept)
        is_unlike = shared == 0
        if prompt.is_read_anew:
            use, kept, shared = self._forget_known(use, best), 0, 0
        elif use == "new":
            shared = self._begins_like(tokens)
        self._needed = None if use == "new" else best
        try:
            self._enter(use, best, prompt, kept, report)
        except BaseException:
            self.settle()
            raise
        finally:
            self._needed = None
            self._tidy()
        active = memory.active
        if is_unlike:  # whatever conversation this was, it is another one from here on
            use = "new"
            if active.used:
                self._number(active)
        active.used = self._clock
        active.is_superseded = False
        active.client_id = prompt.conversation_id or active.client_id
        active.last = _last_prompt(prompt)
        report.conversation = active.number
        report.conversation_use = use
        report.n_conversations = len(self)
        return shared

    def settle(self) -> None:
        """Undo what an error or an interrupt has left half done: see TieredMemory.settle."""
        self._needed = None
        self._find_active()
        self._memory.settle()
        for one in self.parked:
            if not one.n_tokens:
                self._forget(one)
        self._tidy()

    def note(self) -> None:
        """Tell those who watch what is kept now."""
        memory = self._memory
        self.infos = tuple(
            ConversationInfo(
                number=one.number,
                client_id=one.client_id,
                is_on_device=one is memory.active,
                n_tokens=one.n_tokens,
                n_blocks=one.history.n_blocks,
                n_shared=one.history.n_shared,
                checkpoints=tuple(one.checkpoints.positions),
            )
            for one in sorted(self._kept, key=lambda one: -one.used)
        )

    def clear(self) -> None:
        """Forget all of them."""
        self._needed = None
        self._find_active()
        for one in self.parked:
            self._forget(one)
        memory = self._memory
        memory.clear()
        memory.active.question = memory.active.window = memory.active.client_id = None
        memory.active.known = ()
        memory.active.is_superseded = False
        memory.active.last = LastPrompt()
        self._tidy()
        self.infos = ()

    def check(self) -> None:
        """State every invariant; AssertionError names the broken one."""
        self._memory.check(self.parked)
        assert self._memory.active in self._kept
        assert len(self) <= self._limit + 1  # one more behind a failed switch, see _find_active
        assert all(one.n_tokens for one in self.parked)
        if self.parked:
            assert self._memory.host.used <= self._limit_bytes

    # which

    def _find(self, prompt: Prompt, tokens: I32) -> tuple[Conversation, int, int]:
        """The conversation to go on or to branch from, what it has in common with the prompt, and
        how much of that need not be read again.

        That is most where it goes on; one to branch from must save a block more.
        """
        memory = self._memory
        limit = len(tokens) - 1  # the last one is read again: its logits are wanted
        found: list[tuple[tuple[int, bool, int], Conversation, int, int]] = []
        for one in self._kept:
            shared = min(common_prefix(one.history.tokens, tokens), limit)
            kept = self._restorable(one, shared)
            worth = kept + memory.block_tokens * self._goes_on(one, prompt, shared)
            found.append(((worth, self._is_own(one, prompt), one.used), one, shared, kept))
        _, best, shared, kept = max(found, key=lambda item: item[0])
        return best, shared, kept

    def _begins_like(self, tokens: I32) -> int:
        """Tokens that some conversation begins with, too, if they are a block or more."""
        found = (common_prefix(one.history.tokens, tokens) for one in self._kept)
        shared = min(max(found), len(tokens) - 1)
        return shared if shared >= self._memory.block_tokens else 0

    def _is_own(self, one: Conversation, prompt: Prompt) -> bool:
        return prompt.conversation_id is not None and one.client_id == prompt.conversation_id

    def _goes_on(self, one: Conversation, prompt: Prompt, shared: int) -> bool:
        """Whether the prompt holds all of its last prompt's messages, and may be its next one."""
        ids = {one.client_id, prompt.conversation_id} - {None}
        return len(ids) < 2 and shared >= min(one.last.messages_end, one.n_tokens)

    def _restorable(self, one: Conversation, n_tokens: int) -> int:
        """How many of its first n_tokens need not be read again."""
        if not self._memory.is_hybrid or n_tokens == one.n_tokens:
            return n_tokens
        checkpoint = one.checkpoints.nearest(n_tokens)
        return 0 if checkpoint is None else checkpoint.n_tokens

    def _choose(
        self, best: Conversation, prompt: Prompt, shared: int, kept: int
    ) -> ConversationUse:
        if self._limit == 1 or best.n_tokens == 0 or self._goes_on(best, prompt, shared):
            return "same" if best is self._memory.active else "switched"
        if kept < self._memory.block_tokens:
            return "new"
        is_own = not {best.client_id, prompt.conversation_id} - {None, prompt.conversation_id}
        if is_own and not prompt.is_read_anew:  # then nothing goes on from it
            best.is_superseded = shared >= best.last.may_change_from > 0
        return "branched"

    def _forget_known(self, use: ConversationUse, best: Conversation) -> ConversationUse:
        """Of a prompt that is to be read anew: it takes the place of the conversation that it goes
        on, and no other one's.
        """
        if use == "same":
            return use
        if use == "switched":
            self._forget(best)
        return "new"

    def _enter(
        self,
        use: ConversationUse,
        best: Conversation,
        prompt: Prompt,
        kept: int,
        report: MemoryReport,
    ) -> None:
        memory = self._memory
        if use == "same":
            self._keep_to_limit()
            memory.truncate(kept)
            return
        if use == "switched":
            target = best
        else:
            while len(self) >= self._limit and self._evict():
                pass
            if len(self) >= self._limit:  # the two that are left: one leaves, one is branched from
                memory.clear()
            target = self._branch(best, kept) if use == "branched" else memory.new_conversation()
            if target is best:
                memory.truncate(kept)
                return
            self._number(target, prompt.conversation_id)
            self._kept.append(target)
        self._needed = target
        try:
            self._bound_bytes()
            transfer = switch(memory, target, kept)
        except BaseException:
            if use != "switched" and memory.working_set.history is not target.history:
                self._forget(target)
            raise
        for one in self.parked:  # what left without a token
            if not one.n_tokens:
                self._forget(one)
        self._keep_to_limit()
        report.count(transfer)

    def _branch(self, source: Conversation, n_tokens: int) -> Conversation:
        """A branch. Where there is no room for one beside what must not leave, the conversation on
        the device gives way; if that is the source, it is gone on with itself.
        """
        memory = self._memory
        try:
            return branch(memory, source, n_tokens)
        except HostCapacityError as error:
            memory.note(f"a conversation of {memory.n_tokens} tokens could not be kept: {error}")
            if source is memory.active:
                return source
            memory.clear()
            return branch(memory, source, n_tokens)

    def _number(self, one: Conversation, client_id: str | None = None) -> None:
        """It is a new one."""
        self._n_made += 1
        one.number, one.client_id = self._n_made, client_id

    def _find_active(self) -> None:
        """The active one is that whose blocks are on the device, wherever a switch has ended.

        Behind one that failed it may be an empty one, beside as many as may be kept.
        """
        memory = self._memory
        history = memory.working_set.history
        if memory.active.history is history:
            return
        found = next((one for one in self._kept if one.history is history), None)
        if found is None:
            found = memory.conversation_of(history)
            self._number(found)
            self._kept.append(found)
        memory.make_active(found)

    # what leaves

    def _make_room(self) -> bool:
        """Let something leave for the sake of host memory; False if nothing can.

        First checkpoints of conversations on the host: each can do with a few.
        """
        for one in self._leaving():
            if len(one.checkpoints) > PARKED_CHECKPOINTS and one.checkpoints.give_way(
                least=PARKED_CHECKPOINTS
            ):
                return True
        is_done = self._evict()
        self._tidy()
        return is_done

    def _leaving(self) -> list[Conversation]:
        """Those that may leave: superseded ones first, then those not used for the longest time."""
        return sorted(
            (one for one in self.parked if one is not self._needed),
            key=lambda one: (not one.is_superseded, one.used),
        )

    def _evict(self) -> bool:
        """Let the first one leave; False if there is none."""
        leaving = self._leaving()
        if not leaving:
            return False
        self._forget(leaving[0])
        self.n_evicted += 1
        return True

    def _keep_to_limit(self) -> None:
        """A failed switch may have left one more than are kept."""
        while len(self) > self._limit and self._evict():
            pass

    def _forget(self, one: Conversation) -> None:
        self._kept.remove(one)
        forget(self._memory, one)

    def _bound_bytes(self) -> None:
        """From now on there are several: what they may take together holds."""
        memory = self._memory
        memory.working_set.trim()
        while memory.host.used > self._limit_bytes:
            if memory.checkpoints.give_back_spare() or self._make_room():
                continue
            if not memory.checkpoints.give_way():
                memory.note(
                    f"a conversation of {memory.n_tokens} tokens takes more than "
                    f"{self._limit_bytes} bytes: it cannot be kept beside another"
                )
                memory.clear()
                return  # what is switched to is alone
        memory.host.set_limit(self._limit_bytes)

    def _tidy(self) -> None:
        """One alone may take all of the host limit."""
        if len(self) == 1 and self._needed is None:
            self._memory.host.set_limit(self._host_limit)


def _last_prompt(prompt: Prompt) -> LastPrompt:
    messages_end = generation_start(prompt)
    may_change_from = 0
    if any(item.role == "assistant" for item in prompt.spans):
        may_change_from = prompt.spans[-1].span.start
        if prompt.query_span is not None:
            may_change_from = min(may_change_from, prompt.query_span.stop)
    return LastPrompt(messages_end, may_change_from)


def common_prefix(first: I32, second: I32) -> int:
    """Tokens that both begin with."""
    n = min(len(first), len(second))
    differs = first[:n] != second[:n]
    return int(differs.argmax()) if differs.any() else n
