"""The playbook `ab` from its first step to the server that stays, over a real sshd, against the stand-in engine."""

import json
import shutil

import pytest
from rig import PROJECT, Rig

PROMPTS = "".join(json.dumps({"prompt": f"Write a function number {number} that sorts"}) + "\n" for number in range(5))
TWO_PROFILES = """
  baseline:
    command: ["{{python}}", -m, sglang.launch_server]
    args:
      model-path: /models/stand-in
      port: {port}
      max-running-requests: 64
      standin-load: "0.2"
      standin-step-ms: "{step_ms}"
    ready: {{url: "http://127.0.0.1:{port}/health", timeout: 40s}}
    smoke: {{prompt: "The capital of France is", max_tokens: 16}}
"""


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path, load_s=0.2) as rig:
        (rig.work / "own.jsonl").write_text(PROMPTS)
        yield rig


def with_baseline(rig, step_ms):
    hosts = rig.work / "hosts.yaml"
    hosts.write_text(hosts.read_text() + TWO_PROFILES.format(port=rig.server_port, step_ms=step_ms).lstrip("\n"))
    (rig.work / "playbooks").mkdir(exist_ok=True)
    shutil.copy(PROJECT / "playbooks" / "ab.yaml", rig.work / "playbooks")


def play_ab(rig, *settings):
    words = ["patch=dynamic_spec/v3", "tag=t7", "sweep=2,4", "prompts=own.jsonl", "max_tokens=8", *settings]
    return rig.json("play", "ab", *(part for word in words for part in ("--set", word)))


def test_ab_keeps_the_patched_one_that_is_better(rig):
    """It runs already: nothing is started again, and the playbook says why it stays."""
    with_baseline(rig, 100)
    value = play_ab(rig)
    steps = value["hosts"]["10.1.230.174"]["steps"]
    assert value["exit_code"] == 0, [(step["step"], step["exit"], step["error"]) for step in steps]
    kept = steps[-1]["kept"]
    assert "kept" == steps[-1]["status"], kept
    assert ("t7-patched", True, None, 4) == tuple(kept[k] for k in ("label", "running", "relaunched_as", "concurrency"))
    assert kept["reason"].startswith("t7-patched is ")
    assert ["t7-base", "t7-patched"] == [side["label"] for side in steps[-1]["comparison"]["attempts"]]
    status = rig.host("status")
    assert ("t7-patched", ["dynamic_spec/v3"]) == (status["server"]["log_tag"], status["patches"])


def test_ab_brings_the_baseline_back_where_that_is_better(rig):
    """Its release is put back, its profile started again and smoke tested; its numbers are shown."""
    with_baseline(rig, 1)
    hosts = rig.work / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace("speculative-num-draft-tokens: 16", 'standin-step-ms: "100"'))
    value = play_ab(rig)
    steps = value["hosts"]["10.1.230.174"]["steps"]
    assert value["exit_code"] == 0, [(step["step"], step["exit"], step["error"]) for step in steps]
    last = steps[-1]
    assert ("ready", "t7-base-r1", "t7-base") == (last["status"], last["log_tag"], last["kept"]["label"])
    assert ("t7-base-r1", False) == (last["kept"]["relaunched_as"], last["kept"]["running"])
    assert ("rolled_back", 0) == (last["rollback"]["status"], last["rollback"]["release"])
    assert last["smoke"]["ok"]
    status = rig.host("status")
    assert ("t7-base-r1", []) == (status["server"]["log_tag"], status["patches"])


def test_ab_leaves_the_baseline_serving_where_the_patched_one_crashes(rig):
    """The crash decides, not a comparison: back to base, and the baseline serves again."""
    with_baseline(rig, 1)
    hosts = rig.work / "hosts.yaml"
    hosts.write_text(hosts.read_text().replace("      speculative-num-draft-tokens: 16", "      enforce-eager: true"))
    value = play_ab(rig)
    assert 6 == value["exit_code"]
    status = rig.host("status")
    assert ("t7-base-r1", "ready", []) == (status["server"]["log_tag"], status["server"]["state"], status["patches"])
