"""What the JSON of a state file must look like: half-written and hand-edited ones are found before they are used."""

import collections

OneOf = collections.namedtuple("OneOf", "choices")
OneOf.__doc__ = """Any of several shapes."""

NUMBER = OneOf((int, float))


def misfit(value, shape):
    """Where a value does not have a shape, such as `files.srt/a.py`, or None where it has.

    Args:
        value: From a JSON file.
        shape: A type; None for null; [shape] for a list of any length; (shape, ...) for one of exactly these;
            {name: shape} for an object that has at least these names; {"*": shape} for one of any names; OneOf.
    """
    found = _misfit(value, shape)
    return None if found is None else ".".join(str(part) for part in reversed(found))


def _misfit(value, shape):
    """The way from the misfit up to the value, or None: thousands of files fit, so nothing is built before one does
    not.
    """
    if type(value) is shape or (value is None and shape is None):
        return None
    if isinstance(shape, OneOf):
        return None if any(_misfit(value, one) is None for one in shape.choices) else []
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return []
        every = shape.get("*")
        pairs = ((name, every) for name in value) if every is not None else shape.items()
        for name, inner in pairs:
            if name not in value:
                return [name]
            found = _misfit(value[name], inner)
            if found is not None:
                return [*found, name]
        return None
    if not isinstance(shape, (list, tuple)) or not isinstance(value, list):
        return []
    if isinstance(shape, tuple) and len(value) != len(shape):
        return []
    for place, one in enumerate(value):
        found = _misfit(one, shape[place] if isinstance(shape, tuple) else shape[0])
        if found is not None:
            return [*found, place]
    return None
