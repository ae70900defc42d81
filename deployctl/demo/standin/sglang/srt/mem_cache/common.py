"""Slots of the KV cache."""

from sglang.srt.utils import Tensor


def alloc_token_slots(tree_cache, num_tokens, backup_state=False):
    """Allocate slots; with `backup_state` also what is needed to give them back."""
    allocator = tree_cache.token_to_kv_pool_allocator
    state = allocator.backup_state() if backup_state else None
    out_cache_loc = allocator.alloc(num_tokens)
    if backup_state:
        return out_cache_loc, state
    return out_cache_loc


class Allocator:
    """Hands out slot numbers."""

    def __init__(self, size=1 << 20):
        self.size = size
        self.next = 0

    def backup_state(self):
        return self.next

    def restore_state(self, state):
        self.next = state

    def alloc(self, count):
        start = self.next
        self.next = (self.next + count) % self.size
        return Tensor(range(start, start + count))


class TreeCache:
    """Holds the allocator, as the real one does."""

    def __init__(self):
        self.token_to_kv_pool_allocator = Allocator()
