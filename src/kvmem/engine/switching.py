"""Conversations take turns on the device: branching, switching, forgetting.

Which one, and when, engine.conversations decides.
"""

from kvmem.engine.conversation import Conversation
from kvmem.engine.memory import TieredMemory
from kvmem.engine.room import with_room
from kvmem.errors import HostCapacityError
from kvmem.kv.transfer import Transfer

__all__ = ["branch", "forget", "switch"]


def branch(memory: TieredMemory, source: Conversation, n_tokens: int) -> Conversation:
    """A new conversation that begins with the first n_tokens of another, which stays as it is.

    They share what is complete. Raises CapacityError, TransferError; then there is none.
    """
    if source is memory.active:
        memory.try_seal()
        memory.index.flush()
    history = with_room(memory, lambda: memory.working_set.branch(source.history, n_tokens))
    n_blocks = min(n_tokens // memory.block_tokens, source.lexical.n_blocks)
    return Conversation(
        history=history,
        summaries=source.summaries.branch(n_blocks),
        lexical=source.lexical.branch(n_blocks),
        checkpoints=source.checkpoints.branch(n_tokens),
        question=source.question,
        known=source.known,
    )


def switch(memory: TieredMemory, target: Conversation, n_tokens: int) -> Transfer:
    """Put another conversation on the device, cut back to n_tokens or a checkpoint before.

    Of the one that leaves, everything is kept; if there is no room for its state, it ends at the
    checkpoint before, and if there is none for its blocks, it is forgotten. Both are noted.

    Raises:
        CapacityError, TransferError: Conversations.settle puts right what that leaves. The one that
            was there is still there, or a new, empty one is (see WorkingSet.switch).
    """
    memory.try_seal()
    memory.index.flush()
    memory.save_checkpoint()
    transfer = _switch_blocks(memory, target)
    memory.make_active(target)
    if not memory.is_hybrid:
        memory.restore_order()
        memory.truncate(n_tokens)
    elif memory.n_tokens:
        memory.go_back(n_tokens)
    else:
        memory.clear_device()
    memory.renew_summaries()
    return transfer


def _switch_blocks(memory: TieredMemory, target: Conversation) -> Transfer:
    def leave() -> Transfer:
        _end_at_checkpoint(memory)  # each time: the last one may have given way
        return memory.working_set.switch(target.history)

    try:
        return with_room(memory, leave)
    except HostCapacityError as error:
        memory.note(f"a conversation of {memory.n_tokens} tokens could not be kept: {error}")
        memory.clear()
        return leave()


def _end_at_checkpoint(memory: TieredMemory) -> None:
    """A hybrid history leaves with its state: where that is not saved, it ends before."""
    n_tokens = memory.n_tokens
    if memory.is_hybrid and n_tokens and memory.checkpoints.positions[-1:] != [n_tokens]:
        memory.go_back(n_tokens)


def forget(memory: TieredMemory, conversation: Conversation) -> None:
    """Give all memory of a conversation back, on the device or not."""
    if conversation is memory.active:
        memory.clear()
        return
    conversation.checkpoints.clear()
    conversation.lexical.truncate(0)
    conversation.summaries.truncate(0)
    conversation.history.forget()
