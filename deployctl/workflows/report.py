"""Gathers what hosts know of their attempts for a report, and puts the report where it was asked for."""

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deployctl.domain.dossier import Wanted, chosen
from deployctl.domain.inventory import Host, Inventory
from deployctl.domain.report import HostReport, Report
from deployctl.errors import DeployError, UsageError
from deployctl.workflows.run import Run

_PATIENCE_S = 5.0
_LOOKED_AT_BYTES = 4096


def hosts_of(inventory: Inventory, wanted: Sequence[Wanted] | None, selectors: Sequence[str]) -> tuple[Host, ...]:
    """Who is asked: whom --host or the default group means, and every host that stands before a wanted attempt.

    The former only where an attempt is wanted without a host, or they were named.

    Raises:
        UsageError: A name is no host.
    """
    named = [host for entry in wanted or () if entry.host for host in inventory.select([entry.host])]
    anywhere = wanted is None or bool(selectors) or any(entry.host is None for entry in wanted)
    asked = inventory.select(selectors) if anywhere else ()
    return tuple({host.name: host for host in (*asked, *named)}.values())


def gather(
    run: Run, hosts: Sequence[Host], wanted: Sequence[Wanted] | None
) -> tuple[Report, dict[str, Mapping[str, Any]]]:
    """Ask every host for its dossier.

    Args:
        run: The run.
        hosts: The hosts.
        wanted: Which attempts; None for all.

    Returns:
        The hosts' own outcomes, and the dossier of each that answered, with the wanted attempts alone.

    Raises:
        UsageError: An entry of `wanted` means no attempt, and every host that it may mean has answered.
    """

    def one(host: Host) -> HostReport:
        return HostReport.from_result(
            host.name, run.ask_patiently(host, "dossier", {"attempts": None}, for_s=_PATIENCE_S)
        )

    told = run.each(hosts, one, command="report", detaches=True)
    answered = {host.name: host.fields for host in told.hosts if host.exit_code == 0}
    silent = {host.name for host in told.hosts} - answered.keys()
    if wanted is not None and silent:
        # What a host that could not be asked may know is not called unknown.
        wanted = [entry for entry in wanted if _is_known(entry, answered) or not _may_be_on(entry, silent)]
    dossiers = chosen(answered, wanted)
    shown = [_counted(host, dossiers[host.name]) if host.name in dossiers else host for host in told.hosts]
    return Report(command="report", hosts=tuple(shown), interrupted=told.interrupted), dossiers


def _is_known(entry: Wanted, answered: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(entry.means(host, one) for host, dossier in answered.items() for one in dossier["attempts"])


def _may_be_on(entry: Wanted, hosts: set[str]) -> bool:
    return entry.host is None or entry.host in hosts


def _counted(host: HostReport, dossier: Mapping[str, Any]) -> HostReport:
    """A host's own result: not its whole dossier, but how much of it the report shows."""
    fields = {
        "attempts": len(dossier["attempts"]),
        "crashes": sum(1 for one in dossier["attempts"] if one["crash"]),
        "benches": sum(len(one["benches"]) for one in dossier["attempts"]),
        "releases": sum(1 for one in dossier["releases"] if one["number"]),
        "problems": dossier["problems"],
    }
    return HostReport(name=host.name, status="ok", fields=fields, where=host.where)


def check_target(target: Path, mark: str, *, force: bool) -> None:
    """Whether a report may be written there, before any host is asked.

    Args:
        target: The file.
        mark: What a report of ours has near its beginning.
        force: Whether another file may be replaced.

    Raises:
        UsageError: It is no place for a file, or another one's file stands there.
    """
    try:
        found = os.stat(target)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}", hint="-o names a file") from error
    if found is None:
        folder = Path(os.path.realpath(target)).parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {target}: there is no folder {folder}", hint=f"mkdir -p {folder}")
    elif stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{target} is a folder", hint=f"-o {target / 'report.html'}")
    elif not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{target} is no regular file", hint="-o names a file")
    elif not force and found.st_size and not _is_ours(target, mark):
        raise UsageError(
            f"{target} is there and is no report of deployctl", hint="another name with -o, or --force to replace it"
        )


def _is_ours(target: Path, mark: str) -> bool:
    try:
        with open(target, "rb") as file:
            return mark.encode() in file.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {target}: {error.strerror}", hint="another name with -o") from error


def write(target: Path, content: str) -> int:
    """Put the report in its place in one step: whoever reads the file sees the earlier one or this one, whole.

    Returns:
        Its size in bytes.

    Raises:
        DeployError: It cannot be written there; what was there stays.
    """
    place = Path(os.path.realpath(target))  # a link is kept, what it leads to is replaced
    encoded = content.encode("utf-8")
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{place.name[:100]}-", dir=place.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(place))
        os.replace(temporary, place)
    except BaseException as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DeployError(f"cannot write {target}: {error.strerror}", hint="another place with -o") from error
        raise
    return len(encoded)


def _mode_of(place: Path) -> int:
    """The mode of the file that is replaced, else what the umask leaves of a new one."""
    try:
        return stat.S_IMODE(place.stat().st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
