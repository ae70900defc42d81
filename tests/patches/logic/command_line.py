"""v4's flags in the engine's own argument parser, and its check in ServerArgs.check_server_args()."""

import argparse
from types import SimpleNamespace

from sglang.srt.server_args import ServerArgs


def parse(*flags):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    found = parser.parse_args(["--model-path", "m", *flags])
    return found.speculative_disable_batch_threshold, found.speculative_resume_batch_threshold


def check_the_flags_parse():
    """None unless given."""
    assert parse() == (None, None)
    flags = ["--speculative-disable-batch-threshold", "8", "--speculative-resume-batch-threshold", "6"]
    assert parse(*flags) == (8, 6)


def check_the_launcher_refuses():
    """Before anything is loaded, with a text that names the flag."""
    args = SimpleNamespace(
        speculative_disable_batch_threshold=8,
        speculative_resume_batch_threshold=9,
        speculative_algorithm="NGRAM",
        pp_size=1,
        device="cpu",
        max_running_requests=None,
    )
    try:
        ServerArgs.check_server_args(args)
    except ValueError as error:
        text = str(error)
    assert text.startswith("--speculative-disable-batch-threshold does not work with: ")
    for part in ("NGRAM", "limit 8 with resume 9", "--device cpu"):
        assert part in text
