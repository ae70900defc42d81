"""Slots of the KV cache."""

from sglang.srt.tensors import Tensor


class TokenToKVPoolAllocator:
    """Hands out slots of the pool and takes them back."""

    def __init__(self, size):
        self.size = size
        self.free_slots = list(range(1, size + 1))

    def available_size(self):
        return len(self.free_slots)

    def alloc(self, need_size):
        if need_size > len(self.free_slots):
            return None
        selected, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return Tensor(selected)

    def free(self, free_index):
        self.free_slots.extend(free_index)

    def backup_state(self):
        return list(self.free_slots)

    def restore_state(self, state):
        self.free_slots = state


class TreeCache:
    """Owner of the allocator."""

    def __init__(self, size):
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(size)


def alloc_token_slots(tree_cache, num_tokens, backup_state=False):
    """Allocate `num_tokens` slots.

    Returns:
        The slots; with `backup_state` a pair: the slots, and the state that gives them back.
    """
    allocator = tree_cache.token_to_kv_pool_allocator
    state = None
    if backup_state:
        state = allocator.backup_state()

    out_cache_loc = allocator.alloc(num_tokens)
    if out_cache_loc is None:
        raise RuntimeError(
            "Out of memory. Try to lower your batch size.\nTry to allocate %d tokens.\nAvailable tokens: %d"
            % (num_tokens, allocator.available_size())
        )
    return (out_cache_loc, state) if backup_state else out_cache_loc
