"""What the JSON of a state file must look like: half-written and hand-edited ones are found before they are used."""

import collections

OneOf = collections.namedtuple("OneOf", "choices")
OneOf.__doc__ = """Any of several shapes."""

NUMBER = OneOf((int, float))


def misfit(value, shape, path=""):
    """Where a value does not have a shape, such as `files.srt/a.py`, or None where it has.

    Args:
        value: From a JSON file.
        shape: A type; None for null; [shape] for a list of any length; (shape, ...) for one of exactly these;
            {name: shape} for an object that has at least these names; {"*": shape} for one of any names; OneOf.
        path: Where the value stands.
    """
    if isinstance(shape, OneOf):
        return None if any(misfit(value, one) is None for one in shape.choices) else path
    if isinstance(shape, type):
        fits = isinstance(value, shape) and not (shape is int and isinstance(value, bool))
        return None if fits else path
    if shape is None:
        return None if value is None else path
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return path
        names = value if "*" in shape else shape
        for name in names:
            if name not in value:
                return _below(path, name)
            found = misfit(value[name], shape.get(name, shape.get("*")), _below(path, name))
            if found is not None:
                return found
        return None
    if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
        return path
    for place, one in enumerate(value):
        found = misfit(one, shape[place] if isinstance(shape, tuple) else shape[0], _below(path, place))
        if found is not None:
            return found
    return None


def _below(path, name):
    return "%s.%s" % (path, name) if path else str(name)
