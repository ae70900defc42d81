"""Whether a version satisfies PEP 440 specifiers, decided as `packaging` decides; the host may not have `packaging`.

Source: PEP 440, sections "Version scheme", "Summary of permitted suffixes" and "Version specifiers".
"""

import re

from .failure import EXIT_USAGE, Failure

_VERSION = re.compile(
    r"v?(?:(?P<epoch>[0-9]+)!)?(?P<release>[0-9]+(?:\.[0-9]+)*)"
    r"(?:[-_.]?(?P<pre>alpha|beta|preview|pre|a|b|c|rc)[-_.]?(?P<pre_number>[0-9]+)?)?"
    r"(?P<post>-(?P<post_short>[0-9]+)|[-_.]?(?:post|rev|r)[-_.]?(?P<post_number>[0-9]+)?)?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_number>[0-9]+)?)?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE | re.ASCII,
)
_SPECIFIER = re.compile(r"\s*(~=|===|==|!=|<=|>=|<|>)\s*(\S+?)\s*")
_PRE = {"a": "a", "alpha": "a", "b": "b", "beta": "b", "c": "rc", "rc": "rc", "pre": "rc", "preview": "rc"}


class Version:
    """A parsed version; `key` orders as PEP 440 says."""

    def __init__(self, text):
        match = _VERSION.fullmatch(text.strip())
        if match is None:
            raise Failure("%r is not a version" % text, kind="bad-version", exit_code=EXIT_USAGE)
        self.epoch = int(match.group("epoch") or 0)
        self.release = tuple(int(part) for part in match.group("release").split("."))
        pre = match.group("pre")
        self.pre = (_PRE[pre.lower()], int(match.group("pre_number") or 0)) if pre else None
        post = match.group("post")
        self.post = int(match.group("post_short") or match.group("post_number") or 0) if post else None
        self.dev = int(match.group("dev_number") or 0) if match.group("dev") else None
        local = match.group("local")
        self.local = re.split(r"[-_.]", local.lower()) if local else None

    def key(self, local=True):
        """A tuple that orders versions; without the local part when asked."""
        return _key(self.epoch, self.release, self.pre, self.post, self.dev, self.local if local else None)

    def base(self):
        """Epoch, release without trailing zeros, and pre-release: what a version shares with its post-releases."""
        return self.key()[:2], self.pre


def _key(epoch, release, pre, post, dev, local=None):
    while len(release) > 1 and release[-1] == 0:
        release = release[:-1]
    if pre is not None:
        pre_key = (0, *pre)
    elif post is None and dev is not None:
        pre_key = (-1,)
    else:
        pre_key = (1,)
    post_key = (-1,) if post is None else (0, post)
    dev_key = (1,) if dev is None else (0, dev)
    local_key: tuple[object, ...] = (0,)
    if local is not None:
        local_key = (1, *[(1, int(part), "") if part.isdigit() else (0, 0, part) for part in local])
    return (epoch, release, pre_key, post_key, dev_key, local_key)


def satisfies(version, specifiers):
    """Whether `version` satisfies all comma-separated `specifiers` ("" is satisfied by any).

    An installed pre-release is judged on its merits, as `SpecifierSet.contains(..., prereleases=True)` does.

    Raises:
        Failure: Either is not of PEP 440's form (kind `bad-version`).
    """
    found = Version(version)
    # All are read before any is judged: nonsense is nonsense, also behind one that does not hold.
    wanted = [_read(part) for part in specifiers.split(",") if part.strip()]
    return all(_holds(found, version.strip(), operator, text) for operator, text in wanted)


def _read(part):
    """(operator, version text) of one specifier; which forms each operator takes is PEP 440's rule."""
    match = _SPECIFIER.fullmatch(part)
    if match is None:
        raise _nonsense(part)
    operator, text = match.groups()
    if operator == "===":
        return operator, text
    if operator in ("==", "!=") and text.endswith(".*"):
        if re.fullmatch(r"v?(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*", text[:-2], re.IGNORECASE | re.ASCII) is None:
            raise _nonsense(part)
        return operator, text
    wanted = Version(text)
    if wanted.local is not None and operator not in ("==", "!="):
        raise _nonsense(part)
    if operator == "~=" and len(wanted.release) < 2:
        raise _nonsense(part)
    return operator, text


def _nonsense(part):
    return Failure(
        "%r is not a version specifier" % part.strip(),
        kind="bad-version",
        hint="write it as in PEP 440, such as >=0.5.9,<0.6 or ==0.5.*",
        exit_code=EXIT_USAGE,
    )


def _holds(found, text, operator, wanted_text):
    if operator == "===":
        return text.lower() == wanted_text.lower()
    if operator in ("==", "!=") and wanted_text.endswith(".*"):
        equal = _has_prefix(found, Version(wanted_text[:-2]))
        return equal if operator == "==" else not equal
    wanted = Version(wanted_text)
    if operator in ("==", "!="):
        equal = found.key(local=wanted.local is not None) == wanted.key()
        return equal if operator == "==" else not equal
    if operator == "~=":
        series = ".".join(str(part) for part in wanted.release[:-1])
        return found.key(local=False) >= wanted.key() and _has_prefix(found, Version("%d!%s" % (wanted.epoch, series)))
    if operator == "<=":
        return found.key(local=False) <= wanted.key()
    if operator == ">=":
        return found.key(local=False) >= wanted.key()
    first, pre, post, dev = (wanted.epoch, wanted.release), wanted.pre, wanted.post, wanted.dev
    if operator == "<":
        # `<1.0` does not admit 1.0's own pre-releases unless it names one.
        return found.key() < (wanted.key() if pre or dev is not None else _key(*first, pre, post, 0))
    if dev is not None:
        return found.key() >= _key(*first, pre, post, dev + 1)
    if post is not None:
        return found.key() >= _key(*first, pre, post + 1, 0)
    # `>1.0` admits neither 1.0.post1 nor 1.0+local.
    return found.key() > wanted.key() and found.base() != wanted.base()


def _has_prefix(found, wanted):
    """`==1.2.*`: the same epoch, and the release begins so."""
    length = len(wanted.release)
    padded = found.release + (0,) * (length - len(found.release))
    return found.epoch == wanted.epoch and padded[:length] == wanted.release
