"""Vectors of integers that check their shapes with the texts of torch, and compute nothing."""


class Tensor:
    """A vector, or a view of one: a slice shares its storage."""

    def __init__(self, values, start=0, size=None):
        self._storage = values if isinstance(values, list) else list(values)
        self._start = start
        self._size = len(self._storage) - start if size is None else size

    def __len__(self):
        return self._size

    def __iter__(self):
        return iter(self._storage[self._start : self._start + self._size])

    def __getitem__(self, key):
        if isinstance(key, slice):
            first, last, step = key.indices(self._size)
            if step != 1:
                raise ValueError("step must be 1")
            return Tensor(self._storage, self._start + first, max(0, last - first))
        if not -self._size <= key < self._size:
            raise IndexError("index %d is out of bounds for dimension 0 with size %d" % (key, self._size))
        return self._storage[self._start + key % self._size]

    def __repr__(self):
        return "tensor(%r)" % (self.tolist(),)

    @property
    def shape(self):
        return (self._size,)

    def numel(self):
        return self._size

    def tolist(self):
        return list(self)

    def clone(self):
        return Tensor(self.tolist())

    def copy_(self, other):
        """Copy in place; one element is broadcast, any other size must match."""
        values = other.tolist()
        if len(values) == 1:
            values = values * self._size
        if len(values) != self._size:
            raise RuntimeError(
                "The size of tensor a (%d) must match the size of tensor b (%d) at non-singleton dimension 0"
                % (self._size, len(values))
            )
        self._storage[self._start : self._start + self._size] = values
        return self


def zeros(size):
    """A vector of zeros."""
    return Tensor([0] * size)


def cat(tensors):
    """One vector of all."""
    return Tensor([value for tensor in tensors for value in tensor])
