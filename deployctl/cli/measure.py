"""The commands that measure and compare."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployctl.cli.session import AttemptNumber, AttemptTag, Config, Debug, Hosts, Json, Session, Verbose, duration_s

if TYPE_CHECKING:
    from deployctl.domain.inventory import Profile
    from deployctl.domain.report import Report
    from deployctl.workflows.run import Run

Sweep = Annotated[
    str | None,
    typer.Option("--sweep", help="Requests at once, level by level (default 1,2,4,8,16,32,64).", metavar="N,N,..."),
]
Prompts = Annotated[
    str | None,
    typer.Option("--prompts", help="coding (default), agentic, or a JSONL file of prompts.", metavar="SET"),
]
AndBench = Annotated[bool, typer.Option("--bench", help="Then measure it; --sweep and --prompts say how.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the program."""
    app.command(epilog="Example: deployctl bench --sweep 1,2,4,8 --prompts agentic")(bench)
    app.command(epilog="Example: deployctl compare t0_base t1_eagle; deployctl compare 3 gpu-2:7 --patch-diff")(compare)
    app.command(epilog="Example: deployctl report --host pair --attempts 3,5-9 -o week12.html")(report)


def bench(
    hosts: Hosts = None,
    attempt: AttemptNumber = None,
    log_tag: AttemptTag = None,
    sweep: Sweep = None,
    prompts: Prompts = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Tokens of every answer (256).")] = None,
    requests_per_level: Annotated[
        int | None, typer.Option("--requests-per-level", help="Instead of 4 for each place, 16 at least.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Decides the prompts' order (1).")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", parser=duration_s, metavar="DURATION", help="Of each level (10m).")
    ] = None,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Measure the running server level by level: throughput, TTFT, TPOT, accept length. Levels so far are kept."""
    with Session("bench", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.domain.bench import request_of
        from deployctl.workflows import bench as workflow

        request = request_of(
            sweep=sweep,
            prompts=prompts,
            root=session.inventory.root,
            max_tokens=max_tokens,
            requests_per_level=requests_per_level,
            seed=seed,
            timeout_s=timeout,
        )
        session.finish(workflow.bench(session.run(), session.hosts, request, attempt=attempt, log_tag=log_tag))


def compare(
    names: Annotated[
        list[str], typer.Argument(help="Attempts by number or log tag, or HOST:NUMBER, HOST:TAG.", metavar="A B [C...]")
    ],
    hosts: Hosts = None,
    patch_diff: Annotated[
        bool, typer.Option("--patch-diff", help="Also the diff between the files that they ran.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="A line for each attempt and concurrency.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Set attempts side by side: throughput and latency by concurrency, settings that differ, load phases."""
    with Session("compare", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.domain.compare import parse_names
        from deployctl.errors import UsageError
        from deployctl.render import compare as render
        from deployctl.render.terminal import neutral, out, say
        from deployctl.workflows import compare as workflow

        if as_csv and (as_json or patch_diff):
            raise UsageError("--csv goes neither with --json nor with --patch-diff", hint="deployctl compare --help")
        wanted = parse_names(names)
        asked = workflow.hosts_of(session.inventory, wanted, hosts or [])
        report, result = workflow.compare(session.run(asked), wanted, asked, patch_diff=patch_diff)
        if result is None or as_json:
            session.finish(report)
        elif as_csv:
            out(result.as_csv().rstrip("\n"))
            for text in (*result.warnings, *result.next_commands):
                say(neutral(text))
        else:
            for line in render.lines(report.extra):
                out(line)


def report(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the page.", metavar="FILE")] = Path(
        "report.html"
    ),
    hosts: Hosts = None,
    attempts: Annotated[
        str | None,
        typer.Option("--attempts", help="These alone: numbers, ranges, log tags, HOST:NUMBER.", metavar="3,5-9"),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Then open it in the browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report of deployctl.")] = False,
    config: Config = None,
    as_json: Json = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page of all attempts: throughput curves, crashes, load phases, patches. It needs no network."""
    with Session("report", hosts=hosts, config=config, as_json=as_json, verbose=verbose, debug=debug) as session:
        from deployctl.cli import show_report

        show_report.show(session, output, attempts, hosts or (), force=force, opened=opened)


def after_launch(
    session: Session, profile: "Profile", *, wanted: bool, wait: bool, sweep: str | None, prompts: str | None
) -> "Callable[[Run, Report], Report]":
    """What `launch --bench` does with the report of its launch; checked before anything is launched.

    Args:
        session: The command's.
        profile: What is launched.
        wanted, sweep, prompts: The options; one that says how asks for it, too.
        wait: Whether the launch is followed to ready.

    Raises:
        UsageError: The sweep or the prompts are wrong, or nobody waits for the server.
    """
    from deployctl.domain.bench import request_of
    from deployctl.errors import UsageError
    from deployctl.workflows import bench as workflow

    if not (wanted or sweep or prompts):
        return lambda _run, report: report
    if not wait:
        raise UsageError("--bench needs a server that is ready, --no-wait does not wait for it", hint="deployctl bench")
    request = request_of(sweep=sweep, prompts=prompts, root=session.inventory.root)
    hosts = session.hosts
    return lambda run, report: workflow.after_launch(run, hosts, report, request, nodes=profile.nodes)
