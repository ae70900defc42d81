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
    re.IGNORECASE,
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
        release = self.release
        while len(release) > 1 and release[-1] == 0:
            release = release[:-1]
        if self.pre is not None:
            pre = (0,) + self.pre
        elif self.post is None and self.dev is not None:
            pre = (-1,)
        else:
            pre = (1,)
        post = (-1,) if self.post is None else (0, self.post)
        dev = (1,) if self.dev is None else (0, self.dev)
        tail = ()
        if local and self.local is not None:
            tail = tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in self.local)
        return (self.epoch, release, pre, post, dev, (0,) if not tail else (1,) + tail)

    def is_prerelease(self):
        """Whether it is a pre-release or a development release."""
        return self.pre is not None or self.dev is not None

    def base(self):
        """(epoch, release without trailing zeros)."""
        return self.key()[:2]


def satisfies(version, specifiers):
    """Whether `version` satisfies all comma-separated `specifiers` ("" is satisfied by any).

    An installed pre-release is judged on its merits, as `SpecifierSet.contains(..., prereleases=True)` does.

    Raises:
        Failure: Either is not of PEP 440's form (kind `bad-version`).
    """
    found = Version(version)
    for part in specifiers.split(","):
        if not part.strip():
            continue
        match = _SPECIFIER.fullmatch(part)
        if match is None:
            raise Failure("%r is not a version specifier" % part, kind="bad-version", exit_code=EXIT_USAGE)
        if not _holds(found, version, match.group(1), match.group(2)):
            return False
    return True


def _holds(found, text, operator, wanted_text):
    if operator == "===":
        return text.strip().lower() == wanted_text.lower()
    if operator in ("==", "!=") and wanted_text.endswith(".*"):
        equal = _has_prefix(found, Version(wanted_text[:-2]))
        return equal if operator == "==" else not equal
    wanted = Version(wanted_text)
    if operator in ("==", "!="):
        equal = found.key(local=wanted.local is not None) == wanted.key()
        return equal if operator == "==" else not equal
    if operator == "~=":
        shortened = Version("%d!%s" % (wanted.epoch, ".".join(str(part) for part in wanted.release[:-1])))
        return found.key(local=False) >= wanted.key(local=False) and _has_prefix(found, shortened)
    if operator == "<=":
        return found.key(local=False) <= wanted.key()
    if operator == ">=":
        return found.key(local=False) >= wanted.key()
    if operator == "<":
        if not found.key() < wanted.key():
            return False
        # `<1.0` does not admit 1.0's own pre-releases unless it names one.
        return wanted.is_prerelease() or not (found.is_prerelease() and found.base() == wanted.base())
    if not found.key() > wanted.key():
        return False
    # `>1.0` admits neither 1.0.post1 nor 1.0+local unless it names a post-release.
    if wanted.post is None and found.post is not None and found.base() == wanted.base():
        return False
    return not (found.local is not None and found.base() == wanted.base())


def _has_prefix(found, wanted):
    """`==1.2.*`: same epoch and the release begins so; pre, post and dev parts of `wanted` count when written."""
    if found.epoch != wanted.epoch:
        return False
    length = len(wanted.release)
    padded = found.release + (0,) * (length - len(found.release))
    if padded[:length] != wanted.release:
        return False
    if wanted.pre is None and wanted.post is None and wanted.dev is None:
        return True
    return found.key(local=False) == wanted.key(local=False)
