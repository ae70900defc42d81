"""Freeing GPUs: whose a holder is, what is ended, what is proven afterwards, and what is never taken for clean."""

import os
import signal
import subprocess
import sys

import pytest
from launch_host import until

from deployctl.agent import gpu, lock, processes, shm

# A server whose rank holds the card under a title of its own, as SGLang's schedulers do, in a session of its own.
TITLED = """
import subprocess, sys, time
rank = "import setproctitle, time; f = open({device!r}); setproctitle.setproctitle('sglang::scheduler_TP0'); "
rank += "print('up', flush=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-u", "-c", rank], start_new_session={session})
time.sleep(300)
"""


def with_card(host, monkeypatch):
    """Give a launch host a device file and a nvidia-smi."""
    (host.root / "dev").mkdir()
    device = host.root / "dev" / "nvidia0"
    device.write_text("")
    tools = host.root / "bin"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase "$1" in *apps*) ;; *) echo "0, NVIDIA H200, 4, 143771";; esac\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return str(device)


def titled(host):
    """The rank of the server, once it has its title."""

    def found():
        return [p for p in processes.snapshot().values() if p.command == "sglang::scheduler_TP0" and is_ours(host, p)]

    return until(found, "the rank")[0]


def is_ours(host, process):
    known = host.state.read_json("machine")
    with open(f"/proc/{process.pid}/environ", "rb") as source:
        return known is not None and known["id"].encode() in source.read()


def test_an_orphan_that_wrote_over_its_environment_is_still_ours(host, monkeypatch):
    """A process title is written over the environment that the kernel shows, and with it our mark, unless told not to.

    Without that the rank of a dead launcher would be a stranger's: it would neither be stopped nor cleaned away.
    """
    device = with_card(host, monkeypatch)
    host.launch("a", argv=host.script(TITLED.format(device=device, session=True)), wait=False)
    until(lambda: "up" in host.log().read_text(), "the rank")
    rank = titled(host)
    pid, start = host.server()
    os.kill(pid, signal.SIGKILL)
    until(lambda: not processes.alive(pid, start), "the end of the launcher")
    holders = host.ask("status")["holders"]
    assert [(rank.pid, 1)] == [(holder["pid"], holder["attempt"]) for holder in holders]
    result = host.ask("clean")
    assert ("clean", [rank.pid]) == (result["status"], [entry["pid"] for entry in result["ended"]])


def test_the_ranks_of_a_living_server_are_not_foreign(host, monkeypatch):
    """Also those that carry no mark: they are of its session, or were started by what is."""
    device = with_card(host, monkeypatch)
    script = f"""
        import subprocess, sys, time
        hold = "f = open({device!r}); print('up', flush=True); import time; time.sleep(300)"
        subprocess.Popen([sys.executable, "-u", "-c", hold], env={{}})
        subprocess.Popen([sys.executable, "-u", "-c", hold], env={{}}, start_new_session=True)
        time.sleep(300)
    """
    host.launch("a", argv=host.script(script), wait=False)
    until(lambda: host.log().read_text().count("up") == 2, "the ranks")
    pid, start = host.server()
    assert [1, 1] == [holder["attempt"] for holder in host.ask("status")["holders"]]
    result = host.ask("clean")
    assert ("clean", []) == (result["status"], result["ended"])
    assert [(1, pid)] == [(entry["attempt"], entry["pid"]) for entry in result["kept"]]
    assert processes.alive(pid, start)
    everything = host.ask("clean", all=True)
    assert 3 == len(everything["ended"])
    assert "stopped" == host.attempt()["verdict"]["state"]
    assert not processes.alive(pid, start)
    assert [] == host.ask("status")["holders"]


def test_what_starts_while_the_old_ones_end_is_ended_too(gpus):
    """A dying orphan's last act is to start another holder."""
    marker = lock.machine_identity(gpus.state) + ":7"
    script = f"""
import os, signal, subprocess, sys, time
hold = "f = open({str(gpus.device)!r}); import time; time.sleep(300)"
f = open({str(gpus.device)!r})
def again(*_):
    subprocess.Popen([sys.executable, "-c", hold], start_new_session=True)
    os._exit(0)
signal.signal(signal.SIGTERM, again)
print(1, flush=True)
time.sleep(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=dict(os.environ, DEPLOYCTL_ATTEMPT=marker),
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        child.stdout.readline()
        result = gpus.ask()
    assert ("clean", 2) == (result["status"], len(result["ended"]))
    assert [] == processes.marked(marker)


@pytest.mark.parametrize(
    ("argv0", "spared"),
    [
        ("/usr/bin/nvidia-persistenced", True),
        ("/usr/lib/xorg/Xorg", True),
        ("nv-hostengine", True),
        ("dcgm-exporter", True),
        ("nvidia-cuda-mps-server", True),
        ("python train.py --out /data/Xorg", False),
        ("/opt/nvidia-smi-clone/run", False),
        ("my-nv-hostengine", False),
    ],
)
def test_daemons_are_known_by_their_own_name(gpus, argv0, spared):
    """Not by a word among their arguments: that would spare anybody who knows the word."""
    child = gpus.holder(argv0=argv0)
    result = gpus.ask(all=True)
    assert spared == (child.poll() is None)
    assert ([child.pid] if spared else []) == [entry["pid"] for entry in result["spared"]]


def test_a_hanging_tool_is_cut_off_with_its_children(gpus):
    """A wrapper's child would go on holding the driver; the GPUs are not called clean; nothing is launched on them."""
    gpus.host["limits"]["tool_s"] = 0.3
    gpus.tool("nvidia-smi", f"echo $$ > {gpus.root}/group; sleep 300; true")
    result = gpus.ask()
    assert (10, "gpu-unknown") == (result["exit"], result["error"]["kind"])
    assert "nvidia-smi gave no answer within 0.3 s" in result["error"]["message"]
    group = int((gpus.root / "group").read_text())
    until(lambda: not [p for p in processes.snapshot().values() if p.pgid == group], "the end of the tool")


def test_a_tool_that_is_missing_is_never_read_as_clean(gpus):
    """Devices without nvidia-smi: freed, and said not to be verified."""
    gpus.without("nvidia-smi", "fuser")
    result = gpus.ask()
    assert ("unverified", 10, "gpu-unverified") == (result["status"], result["exit"], result["error"]["kind"])
    assert "nvidia-smi is not installed" in result["error"]["message"]
    assert "fuser is not installed: only /proc was read" == result["tools"]["fuser"]


def test_a_host_without_gpus_is_clean_and_said_to_have_none(gpus):
    """Even without any tool."""
    gpus.device.unlink()
    gpus.without("nvidia-smi", "fuser")
    result = gpus.ask()
    assert ("clean", 0, []) == (result["status"], result["exit"], result["devices"])
    assert any("no GPU devices" in str(event.get("text")) for event in gpus.wire.events)
    assert "clean" == gpus.ask(all=True)["status"]


def test_fuser_that_fails_is_not_believed(gpus):
    """Its silence would mean that nobody holds a card."""
    child = gpus.holder()
    gpus.tool("fuser", "echo 'Specified filename /dev/nvidia0 does not exist.' >&2; exit 1")
    result = gpus.ask()
    assert [child.pid] == [entry["pid"] for entry in result["foreign"]]
    assert "fuser failed (exit status 1): Specified filename" in result["tools"]["fuser"]


def test_fusers_odd_output(gpus):
    """Pids on stdout, names and letters on stderr, complaints in between."""
    child = gpus.holder()
    gpus.tool(
        "fuser",
        f"echo '/dev/nvidia0:' >&2; printf ' {child.pid}'; echo m >&2; echo 'Cannot stat file /proc/1/fd/9' >&2",
    )
    result = gpus.ask()
    assert [child.pid] == [entry["pid"] for entry in result["foreign"]]
    assert "ok" == result["tools"]["fuser"]


def test_other_clients_of_the_driver_are_not_waited_for(gpus):
    """A container's pids mean nothing here: only those that we ended must go from the driver's list."""
    child = gpus.holder(lock.machine_identity(gpus.state) + ":7")
    gpus.smi("0, NVIDIA H200, 600, 143771", clients=f"{2**22 + 5}, 500\\n")
    result = gpus.ask()
    assert ("clean", [child.pid]) == (result["status"], [entry["pid"] for entry in result["ended"]])
    child = gpus.holder(lock.machine_identity(gpus.state) + ":8")
    gpus.smi("0, NVIDIA H200, 600, 143771", clients=f"{child.pid}, 500\\n")
    result = gpus.ask()
    assert f"the driver still lists pid {child.pid}" == result["error"]["message"]


def test_memory_that_nobody_here_holds_names_whom_the_driver_knows(gpus):
    """So that one knows where to look."""
    gpus.smi("0, NVIDIA H200, 141000, 143771", clients="4711, 140000\\n")
    result = gpus.ask()
    assert 10 == result["exit"]
    assert result["error"]["message"].endswith("; nvidia-smi names pid 4711")
    assert result["error"]["message"].startswith("GPU 0 still 141000 MiB after ")


def test_memory_that_the_card_does_not_tell(gpus):
    """Cards that share the host's memory say [N/A]."""
    gpus.smi("0, NVIDIA GB10, [N/A], [N/A]")
    result = gpus.ask()
    assert "clean" == result["status"]
    assert [{"index": 0, "name": "NVIDIA GB10", "used_mib": None, "total_mib": None}] == result["gpus"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("", "named no GPU"),
        ("Unable to determine the device handle for GPU0000:01:00.0: GPU is lost.", "GPU is lost"),
        ("0, NVIDIA H200, [Unknown Error], [Unknown Error]", "[Unknown Error]"),
        ("0, NVIDIA H200, 4, 143771\\nUnable to determine the device handle for GPU0000:02:00.0", "0000:02:00.0"),
        ("\\001\\377,\\200", "nvidia-smi said"),
    ],
)
def test_an_answer_that_is_none_is_not_read_as_clean(gpus, answer, told):
    """Exit status 0 with nothing, with a lost card, with an error for a figure, with noise."""
    gpus.smi(answer)
    result = gpus.ask()
    assert ("failed", 10, "gpu-unknown") == (result["status"], result["exit"], result["error"]["kind"])
    assert told in result["error"]["message"]


@pytest.mark.parametrize("stream", ["1", "2"])
def test_a_tool_that_never_stops_talking(gpus, stream):
    """It is cut off at a bound of bytes, long before its time limit, and not believed."""
    gpus.tool("nvidia-smi", f"exec yes '0, NVIDIA H200, 4, 143000' >&{stream}")
    result = gpus.ask()
    assert (10, "gpu-unknown") == (result["exit"], result["error"]["kind"])
    assert "printed more than 1048576 bytes" in result["error"]["message"]


def test_a_silent_fuser_is_not_the_only_witness(gpus):
    """It exits as for `nobody`, while /proc shows who has the device open."""
    child = gpus.holder()
    gpus.tool("fuser", "exit 1")
    result = gpus.ask()
    assert [child.pid] == [entry["pid"] for entry in result["foreign"]]


def test_a_tool_that_leaves_its_output_open_is_cut_off(gpus):
    """It closes its output and lives on: its status never comes."""
    gpus.host["limits"]["tool_s"] = 0.5
    gpus.tool("nvidia-smi", "exec >&- 2>&-; sleep 60")
    result = gpus.ask()
    assert "gave no answer within 0.5 s" in result["error"]["message"]


def test_ctrl_c_while_waiting_for_memory(gpus):
    """Ends the wait at once, as an interrupt and not as a verdict."""
    gpus.smi("0, NVIDIA H200, 141000, 143771")
    gpus.host["limits"]["gpu_memory_s"] = 300
    seen = []

    def on_event(wire, event):
        seen.append(event)
        if str(event.get("text")).startswith("waiting: GPU 0 still 141000 MiB"):
            wire.cancelled.set()

    result = gpus.ask(on_event=on_event)
    assert (130, "interrupted") == (result["exit"], result["error"]["kind"])


def test_another_users_processes_cannot_be_seen_and_that_is_said(gpus, monkeypatch):
    """Without root a foreign holder is invisible: its absence proves nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tools: dict = {}
    gpu.holders(gpus.context("clean"), tools)
    assert "without root only the processes of this user can be seen" == tools["/proc"]


def dead_launcher(gpus, number=1, at=0.0):
    """A dead attempt; the pid of its server."""
    child = subprocess.Popen(["true"])
    child.wait()
    spec = {"attempt": number, "log_tag": "a", "profile": "p", "log": "/nowhere", "patches": [], "at": at}
    spec.update(marker=f"x:{number}", machine=processes.machine_id(), boot_id=processes.boot_id())
    gpus.state.write_json(spec, "attempts", number, "spec.json")
    run = {"pid": child.pid, "start": 1, "boot_id": processes.boot_id()}
    gpus.state.write_json(run, "attempts", number, "run.json")
    return child.pid


def test_a_number_in_a_name_is_no_proof(gpus):
    """People keep models in /dev/shm; only names of a form that an engine gives, with a dead pid of ours, go."""
    pid = dead_launcher(gpus)
    names = [f"sgl_shm_mm_{pid}_x", f"torch_{pid}_17_0", f"cuda.shm.0.{pid:x}.1"]
    kept = [
        f"model-{pid}.safetensors",
        f"keepme_{pid}",
        f"torch_{pid + 1}_17_0",
        "nccl-AbCdEf",
        "psm_1234abcd",
        "torch_x",
    ]
    for name in names + kept:
        (gpus.root / "shm" / name).write_text("x")
    (gpus.root / "shm" / f"sgl_shm_mm_{pid}_folder").mkdir()
    assert sorted(names) == gpus.ask()["shm_removed"]
    assert sorted([*kept, f"sgl_shm_mm_{pid}_folder"]) == sorted(os.listdir(gpus.root / "shm"))


def test_what_is_older_than_the_attempt_or_still_open_is_left(gpus):
    """The pid may have been somebody else's before; a survivor may still need it."""
    pid = dead_launcher(gpus, at=2**40)
    old = gpus.root / "shm" / f"torch_{pid}_1_0"
    old.write_text("x")
    pid = dead_launcher(gpus, 2)
    used = gpus.root / "shm" / f"torch_{pid}_2_0"
    used.write_text("x")
    with used.open():
        assert [] == gpus.ask()["shm_removed"]
    assert [used.name] == gpus.ask()["shm_removed"]
    assert old.exists()


def test_anothers_file_stays(gpus):
    """Whatever its name is."""
    pid = dead_launcher(gpus)
    path = gpus.root / "shm" / f"torch_{pid}_1_0"
    path.write_text("x")
    os.chown(path, 1234, 1234)
    assert [] == gpus.ask()["shm_removed"]
    assert path.exists()


def test_nameless_leftovers_go_when_we_saw_who_had_them(gpus):
    """NCCL's and Python's names bear no pid: they are ours when the orphan that we ended had them mapped or open."""
    folder = gpus.root / "shm"
    for name in ("nccl-AbCdEf", "psm_1234abcd", "nccl-others", "weights.bin"):
        (folder / name).write_bytes(b"x" * 4096)
    script = f"""
import mmap, time
with open({str(folder / "nccl-AbCdEf")!r}, "r+b") as f:
    mapped = mmap.mmap(f.fileno(), 0)
held = open({str(folder / "psm_1234abcd")!r})
weights = open({str(folder / "weights.bin")!r})
print(1, flush=True)
time.sleep(300)
"""
    marker = lock.machine_identity(gpus.state) + ":7"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=dict(os.environ, DEPLOYCTL_ATTEMPT=marker), stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        result = gpus.ask()
    assert ["nccl-AbCdEf", "psm_1234abcd"] == result["shm_removed"]
    assert ["nccl-others", "weights.bin"] == sorted(os.listdir(folder))


def test_a_file_that_goes_meanwhile(gpus):
    """Is nobody's trouble."""
    assert not shm._is_of(str(gpus.root), "torch_9999999_0", {9999999: 0.0})
    assert not shm._remove(str(gpus.root / "nothing"))
    assert set() == shm.in_use_by(gpus.context("clean"), [2**22 + 5])


def test_stop_removes_what_its_ranks_had_open(host):
    """By stop as by clean."""
    name = host.root / "shm" / "nccl-AbCdEf"
    name.write_text("x")
    host.launch(
        "a",
        argv=host.script(f"import time\nf = open({str(name)!r})\nprint('up', flush=True)\ntime.sleep(300)"),
        wait=False,
    )
    until(lambda: "up" in host.log().read_text(), "the server")
    assert "stopped" == host.ask("stop")["status"]
    assert not name.exists()


def test_the_asking_process_is_nobodys_server(gpus, monkeypatch):
    """A shell that inherited a mark, and we in it, are neither orphans nor ended."""
    marker = lock.machine_identity(gpus.state) + ":7"
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from deployctl.agent import gpu, processes\nfrom deployctl.agent.state import State\n"
        "print(json.dumps([len(processes.marked(sys.argv[2])), len(gpu.ours(State(sys.argv[3])))]))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(gpu.__file__)))
    done = subprocess.run(
        [sys.executable, "-c", code, root, marker, gpus.state.root],
        env=dict(os.environ, DEPLOYCTL_ATTEMPT=marker),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[0, 0]\n" == done.stdout, done.stderr
