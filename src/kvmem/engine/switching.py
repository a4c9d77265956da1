"""Conversations take turns on the device: branching, switching, forgetting.

Which one, and when, engine.conversations decides.
"""

from kvmem.engine.conversation import Conversation
from kvmem.engine.memory import TieredMemory
from kvmem.errors import HostCapacityError
from kvmem.kv.transfer import Transfer

__all__ = ["branch", "forget", "switch"]


def branch(memory: TieredMemory, source: Conversation, n_tokens: int) -> Conversation:
    """A new conversation that begins with the first n_tokens of another, which stays as it is.

    They share what is complete. Raises CapacityError, TransferError; then there is none.
    """
    if source is memory.active:
        memory.try_seal()
        memory.worker.flush()
    history = memory.with_room(lambda: memory.working_set.branch(source.history, n_tokens))
    n_blocks = min(n_tokens // memory.block_tokens, source.lexical.n_blocks)
    return Conversation(
        history=history,
        summaries=source.summaries.branch(n_blocks),
        lexical=source.lexical.branch(n_blocks),
        checkpoints=source.checkpoints.branch(n_tokens),
        question=source.question,
    )


def switch(memory: TieredMemory, target: Conversation, n_tokens: int) -> Transfer:
    """Put another conversation on the device, cut back to n_tokens or a checkpoint before.

    Of the one that leaves, everything is kept; if there is no room for its state, it ends at the
    checkpoint before, and if there is none for its blocks, it is forgotten. Both are noted.

    Raises:
        CapacityError, TransferError: the one that was there is still there, or a new, empty one is
            (see WorkingSet.switch); memory.active says which.
    """
    memory.try_seal()
    memory.worker.flush()
    _end_at_checkpoint(memory)
    try:
        transfer = _switch_blocks(memory, target)
    except BaseException:
        if memory.working_set.history is not memory.active.history:
            memory.active = memory.conversation_of(memory.working_set.history)
            memory.worker.attach(memory.active.summaries)
            memory.clear_device()
        raise
    memory.active = target
    memory.worker.attach(target.summaries)
    memory.restore_order()
    if not memory.is_hybrid:
        memory.truncate(n_tokens)
    elif memory.n_tokens:
        memory.go_back(n_tokens)
    else:
        memory.clear_device()
    memory.renew_summaries()
    return transfer


def _switch_blocks(memory: TieredMemory, target: Conversation) -> Transfer:
    working_set = memory.working_set
    try:
        return memory.with_room(lambda: working_set.switch(target.history))
    except HostCapacityError as error:
        memory.note(f"a conversation of {memory.n_tokens} tokens could not be kept: {error}")
        memory.clear()
        return working_set.switch(target.history)


def _end_at_checkpoint(memory: TieredMemory) -> None:
    """Before a hybrid history leaves the device: its state is saved, or it ends before."""
    if not memory.is_hybrid or memory.n_tokens == 0:
        return
    if memory.port.is_recurrent_valid:
        memory.save_checkpoint()
    if memory.checkpoints.positions[-1:] != [memory.n_tokens]:
        memory.go_back(memory.n_tokens)


def forget(memory: TieredMemory, conversation: Conversation) -> None:
    """Give all memory of a conversation back, on the device or not."""
    if conversation is memory.active:
        memory.clear()
        return
    conversation.checkpoints.clear()
    conversation.lexical.truncate(0)
    conversation.summaries.truncate(0)
    conversation.history.forget()
