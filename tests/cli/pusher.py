"""A client that asks for one transaction and tells on stdout where the agent pauses: `pusher.py OPERATION PATCH ARGS`."""

import json
import os
import sys
from pathlib import Path

from deployctl.domain import hosts_yaml, patch
from deployctl.workflows.run import Run

operation, reference, extra = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
hosts = hosts_yaml.load(Path(os.environ["DEPLOYCTL_CONFIG"]))
args = dict(extra, transaction="the-one")
blobs = {}
if operation == "push":
    chosen = patch.load(reference, hosts.root)
    args["patch"] = chosen.as_request()
    blobs["patch"] = chosen.content


def show(_host: str, event: object) -> None:
    if event["event"] == "paused":
        print("paused", flush=True)


result = Run(hosts, command=operation, on_event=show).ask(hosts.select([])[0], operation, args, blobs=blobs)
print("done", result["status"], flush=True)
os._exit(0)
