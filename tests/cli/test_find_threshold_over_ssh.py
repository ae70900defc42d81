"""The playbook `find-threshold` from its first step to the command it names, over a real sshd, on the stand-in engine."""

import json
import shlex
import shutil

import pytest
from rig import PROJECT, Rig

PROMPTS = "".join(json.dumps({"prompt": f"Write a function number {number} that sorts"}) + "\n" for number in range(5))
BASELINE = """
  baseline:
    command: ["{{python}}", -m, sglang.launch_server]
    args:
      model-path: /models/stand-in
      port: {port}
      standin-load: "0.2"
      standin-step-ms: "60"
    ready: {{url: "http://127.0.0.1:{port}/health", timeout: 40s}}
    smoke: {{prompt: "The capital of France is", max_tokens: 16}}
"""
# The stand-in drafts for nothing. On a GPU drafting costs more the more requests there are: 8 ms for each here.
COSTS = (
    ('MARK = "v3"', 'MARK = "v4"'),
    ("\nfrom sglang.srt.utils import log\n", "\nfrom sglang.srt.utils import log\nimport time\n"),
    (
        "                return self.forward_root_only(batch)\n",
        "                return self.forward_root_only(batch)\n            time.sleep(0.008 * batch.batch_size())\n",
    ),
    ('NEW_FIELD = "', r'NEW_FIELD = "    speculative_resume_batch_threshold: Optional[int] = None\n" "'),
    (
        'NEW_OPTION = """\\\n',
        'NEW_OPTION = """\\\n        parser.add_argument("--speculative-resume-batch-threshold", type=int)\n',
    ),
)


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path, load_s=0.2) as rig:
        (rig.work / "own.jsonl").write_text(PROMPTS)
        hosts = rig.work / "hosts.yaml"
        text = hosts.read_text().replace('standin-load: "0.2"', 'standin-load: "0.2"\n      standin-step-ms: "60"')
        hosts.write_text(text + BASELINE.format(port=rig.server_port).lstrip("\n"))
        (rig.work / "playbooks").mkdir(exist_ok=True)
        shutil.copy(PROJECT / "playbooks" / "find-threshold.yaml", rig.work / "playbooks")
        series = rig.work / "patches" / "dynamic_spec"
        source = (series / "v3.py").read_text()
        for old, new in COSTS:
            assert 1 == source.count(old), old
            source = source.replace(old, new)
        (series / "v4.py").write_text(source)
        yield rig


def play(rig, *settings):
    words = ["tag=t9", "sweep=1,16", "prompts=own.jsonl", "max_tokens=8", *settings]
    return rig.json("play", "find-threshold", *(part for word in words for part in ("--set", word)))


def test_the_threshold_is_found_and_its_command_serves_with_it(rig):
    """Three servers are measured, the two that tell are compared, and the command that is named can be typed."""
    value = play(rig)
    steps = value["hosts"]["10.1.230.174"]["steps"]
    assert 0 == value["exit_code"], [step for step in steps if step["exit"]]
    compared = steps[-1]["comparison"]
    assert ["t9-base", "t9-off", "t9-spec"] == [side["label"] for side in compared["attempts"]]
    assert [64, 64, 64] == [side["bench"]["settings"]["max_running_requests"] for side in compared["attempts"]]
    found = compared["threshold"]
    assert ("t9-spec", "threshold") == (found["attempt"], found["verdict"]), found
    assert 1 <= found["limit"] < 16
    assert [(1, "t9-off", True), (16, "t9-off", False)] == [
        (one["concurrency"], one["against"], one["ratio"] > 1) for one in found["levels"]
    ]
    assert [] == [text for text in compared["warnings"] if text.startswith("threshold:")]
    program, *command = shlex.split(found["next"])
    assert ("deployctl", "launch") == (program, command[0])
    assert ["--max-running-requests", "64"] == command[command.index("--") + 1 :][:2]
    done = rig.run(*command)
    assert 0 == done.returncode, done.stderr
    server = rig.host("status")["server"]
    assert ("t9-spec-r1", "ready") == (server["log_tag"], server["state"])
    shown = rig.run("compare", "t9-base", "t9-spec")
    assert 0 == shown.returncode, shown.stderr
    assert "threshold: speculation (t9-spec) pays up to about" in shown.stdout
    assert f"  use --speculative-disable-batch-threshold {limit_in(shown.stdout)} " in shown.stdout
    assert "warning: threshold: t9-base has no speculation at all" in shown.stdout


def limit_in(text):
    """The number after "pays up to about"."""
    return int(text.split("pays up to about ")[1].split()[0])


def test_a_server_that_does_not_come_up_ends_the_search(rig):
    """Nothing is advised, and the baseline serves again on the pristine engine."""
    value = play(rig, "off=-1")  # refused by the patched engine when it starts
    assert 0 != value["exit_code"]
    steps = value["hosts"]["10.1.230.174"]["steps"]
    assert not any("comparison" in step for step in steps)
    status = rig.host("status")
    assert ("t9-base-r1", "ready", []) == (status["server"]["log_tag"], status["server"]["state"], status["patches"])
