"""hosts.yaml: defaults merged, selections, arguments, and errors with their place."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployctl.domain import hosts_yaml, inventory
from deployctl.errors import ConfigError, UsageError

PROJECT = Path(__file__).resolve().parents[2]
TEXT = """\
defaults:
  user: root
  python: ~/ml-env/bin/python3
  limits: {connect: 5s, tries: 2, tool: 2500ms}
hosts:
  gpu-1: {address: 10.0.0.1}
  gpu-2: {address: 10.0.0.2, port: 2222, jump: bastion, user: ann, host_keys: accept-new}
  v6: {address: "2001:db8::1"}
  here: {connection: local, gpu: {clean: all}, package: vllm}
groups:
  default: [gpu-2, gpu-1]
  pair: [gpu-1, gpu-2]
profiles:
  eagle3:
    default: true
    command: ["{python}", -m, sglang.launch_server]
    args: {model-path: /m, port: 30000, trust-remote-code: true, off: false, none: ~, cuda-graph-bs: [1, 2], json: '{"a": 1}'}
    env: {A: "0", B: 1, C: ~}
    smoke: {prompt: hi, max_tokens: 8, expect: "a+", burst: 4, model: m}
  other:
    command: python3 -m vllm.entrypoints.openai.api_server --port 8000
    ready: {url: "http://127.0.0.1:8001/health", timeout: 2m}
    smoke: false
    nodes: 2
    cwd: /srv
"""


def load(tmp_path: Path, text: str = TEXT) -> inventory.Inventory:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    return hosts_yaml.load(path)


def error(tmp_path: Path, text: str) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.message.partition("hosts.yaml:")[2], caught.value.hint


def test_the_shipped_inventory():
    """The file in the project is valid and names the article's host, profiles and models."""
    shipped = hosts_yaml.load(PROJECT / "hosts.yaml")
    (host,) = shipped.select(["10.1.230.174"])
    assert (host.user, host.python) == ("root", "~/ml-env/bin/python3")
    assert shipped.profile(None).name == "eagle3"
    assert "/data/eagle3/output_100k_sglang/4" in shipped.profile(None).argv
    assert shipped.profile("baseline").argv[:3] == ("{python}", "-m", "sglang.launch_server")


def test_defaults_are_merged_and_unwritten_ssh_options_stay_open(tmp_path):
    """A host is complete; only what ssh_config would decide stays None."""
    found = load(tmp_path)
    first, second = found.hosts["gpu-1"], found.hosts["gpu-2"]
    assert (first.user, first.port, first.jump) == ("root", None, None)
    assert (second.user, second.port, second.jump, second.host_keys) == ("ann", 2222, "bastion", "accept-new")
    assert first.limits.connect_s == 5
    assert first.limits.connect_tries == 2
    assert first.as_request()["limits"]["tool_s"] == 2.5
    assert first.limits.burst_s == 120
    assert found.hosts["here"].gpu.clean == "all"
    assert found.hosts["here"].address == "here"
    assert first.as_request()["limits"]["gpu_memory_s"] == 120
    assert first.as_request()["gpu"] == {"devices": "/dev/nvidia[0-9]*", "clean": "ours"}
    assert found.root == tmp_path


def test_profiles(tmp_path):
    """Arguments as they were written; engine, port, ready URL found."""
    found = load(tmp_path)
    eagle = found.profile(None)
    assert eagle.argv == (
        *("{python}", "-m", "sglang.launch_server", "--model-path", "/m", "--port", "30000", "--trust-remote-code"),
        *("--cuda-graph-bs", "1", "2", "--json", '{"a": 1}'),
    )
    assert dict(eagle.env) == {"A": "0", "B": "1", "C": ""}
    assert (eagle.engine, eagle.port, eagle.ready_url) == ("sglang", 30000, "http://127.0.0.1:30000/health")
    assert eagle.smoke.as_request() == {"prompt": "hi", "max_tokens": 8, "expect": "a+", "burst": 4, "model": "m"}
    other = found.profile("other")
    assert (other.engine, other.port, other.ready_timeout_s, other.smoke) == ("openai", 8000, 120, None)
    assert (other.nodes, other.cwd) == (2, "/srv")
    assert inventory.port_of(["--port=1", "--port", "x", "--port"]) == 1


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["gpu-1", "gpu-2"]),
        (["pair"], ["gpu-1", "gpu-2"]),
        (["gpu-2,gpu-1", "gpu-1"], ["gpu-1", "gpu-2"]),
        ([" gpu-1\r"], ["gpu-1"]),
        (["10.0.0.1"], ["gpu-1"]),
        (["2001:db8::1"], ["v6"]),
        (["[2001:db8::1]:22"], ["v6"]),
        (["10.0.0.2:2222"], ["gpu-2"]),
        (["bob@10.9.9.9:2200"], ["bob@10.9.9.9:2200"]),
        (["new.example.org"], ["new.example.org"]),
    ],
)
def test_selection(tmp_path, words, names):
    """Names, groups, addresses, commas and repeats; in inventory order, each once."""
    assert [host.name for host in load(tmp_path).select(words)] == names


def test_an_address_on_the_command_line_wins(tmp_path):
    """`user@addr:port` over hosts.yaml, with the other settings of that host or the defaults."""
    found = load(tmp_path)
    (host,) = found.select(["bob@gpu-1:23"])
    assert (host.user, host.port, host.address) == ("bob", 23, "10.0.0.1")
    (host,) = found.select(["bob@10.0.0.1"])
    assert (host.name, host.user) == ("gpu-1", "bob")
    (host,) = found.select(["[::1]:22922"])
    assert (host.address, host.port, host.user, host.python) == ("::1", 22922, "root", "~/ml-env/bin/python3")


@pytest.mark.parametrize(
    ("word", "text", "hint"),
    [
        ("gpu-3", "unknown host 'gpu-3'", "did you mean 'gpu-2' or 'gpu-1'?"),
        ("zzzzzzzz", "unknown host 'zzzzzzzz'", "hosts: gpu-1, gpu-2, v6, here, default, pair"),
        ("-oProxyCommand=x", "host '-oProxyCommand=x' begins with a dash", ""),
        ("a b", "'a b' is neither a host of the inventory nor an address", ""),
        ("h:0", "'h:0': port '0' is not a number from 1 to 65535", ""),
        ("h:", "'h:' has no port after its colon", ""),
        ("[::1", "'[::1' is not an address", "IPv6 with a port is written [::1]:22"),
        ("[::1]:", "'[::1]:' has no port after its colon", ""),
        ("1:2:zz", "'1:2:zz' is not an address", "IPv6 with a port is written [::1]:22"),
        ("@10.0.0.9", "'@10.0.0.9' has no user before its @", ""),
    ],
)
def test_selections_that_are_refused(tmp_path, word, text, hint):
    """Refused before anything is contacted, with the nearest names."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path).select([word])
    assert (caught.value.message, caught.value.hint) == (text, hint)


@pytest.mark.parametrize("words", [[""], [","], [" "], ["gpu-1", ""], [" , ,"]])
def test_an_empty_selection_is_no_selection(tmp_path, words):
    """--host "$HOST" with an unset variable does not mean the default group, nor fewer hosts than were named."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path).select(words)
    assert "--host is empty" == caught.value.message
    assert "gpu-1" in caught.value.hint


def test_no_default_to_mean(tmp_path):
    """Without a group `default` the only host is meant; with several one must be named."""
    one = load(tmp_path, "hosts: {a: {address: h}}\n")
    assert [host.name for host in one.select([])] == ["a"]
    two = load(tmp_path, "hosts: {a: {address: h}, b: {address: i}}\n")
    with pytest.raises(UsageError, match="no --host given"):
        two.select([])
    with pytest.raises(UsageError, match="no default profile"):
        two.profile(None)


def test_profile_names(tmp_path):
    """Nearest names for a profile; the only one needs no `default`."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path).profile("eagle")
    assert caught.value.hint == "did you mean 'eagle3'?"
    only = load(tmp_path, "hosts: {a: {}}\nprofiles: {p: {command: x --port 1}}\n")
    assert only.profile(None).name == "p"
    assert only.profile(None).engine == "openai"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hosts: {}\n", "1 no hosts"),
        ("hosts: {a: {prot: 1}}\n", "1 hosts.a.prot: unknown key"),
        ("hosts:\n  a: {port: 99999}\n", "2 hosts.a.port: should be from 1 to 65535, not 99999"),
        ("hosts:\n  -a: {}\n", "2 hosts.-a: '-a' is not a usable name"),
        ("hosts: {a: {address: 'h:22'}}\n", "1 hosts.a.address: has a port"),
        ("hosts: {a: {connection: telnet}}\n", "1 hosts.a.connection: should be ssh or local, not 'telnet'"),
        ("hosts: {a: {package: a-b}}\n", "1 hosts.a.package: 'a-b' is not the name of a package"),
        ("hosts: {a: {python: -x}}\n", "1 hosts.a.python: '-x' is not usable here"),
        ("hosts: {a: {limits: {conect: 1s}}}\n", "1 hosts.a.limits.conect: unknown key"),
        ("hosts: {a: {}}\ngroups: {g: [b]}\n", "2 groups.g[0]: unknown host 'b'"),
        ("hosts: {a: {}}\ngroups: {a: [a]}\n", "2 groups.a: a host has the same name"),
        ("hosts: {a: {}}\nprofiles: {p/q: {command: x}}\n", "2 profiles.p/q: profile names are"),
        ("hosts: {a: {}}\nprofiles: {p: {}}\n", "2 profiles.p: has no command"),
        ("hosts: {a: {}}\nprofiles: {p: {command: []}}\n", "2 profiles.p.command: is empty"),
        ('hosts: {a: {}}\nprofiles: {p: {command: "x \'y"}}\n', "2 profiles.p.command: cannot be split into words"),
        ("hosts: {a: {}}\nprofiles: {p: {command: x}}\n", "2 profiles.p: no port in args and no ready.url"),
        (
            "hosts: {a: {}}\nprofiles: {p: {command: x, ready: {url: 'ftp://h'}}}\n",
            "2 profiles.p.ready.url: 'ftp://h' is not",
        ),
        (
            "hosts: {a: {}}\nprofiles: {p: {command: x, args: {--port: 1}}}\n",
            "2 profiles.p.args.--port: '--port' is not the name",
        ),
        (
            "hosts: {a: {}}\nprofiles: {p: {command: x, args: {port: {a: 1}}}}\n",
            "2 profiles.p.args.port: should be a value or a list",
        ),
        (
            "hosts: {a: {}}\nprofiles: {p: {command: x --port 1, env: {1A: x}}}\n",
            "2 profiles.p.env.1A: '1A' is not the name",
        ),
        (
            "hosts: {a: {}}\nprofiles: {p: {command: x --port 1, smoke: {expect: '('}}}\n",
            "2 profiles.p.smoke.expect: not a regular",
        ),
        (
            "hosts: {a: {}}\nprofiles:\n  p: {command: x --port 1, default: true}\n  q: {command: x --port 1, default: true}\n",
            "4 profiles.q: a second profile with `default: true`",
        ),
    ],
)
def test_errors_name_their_place(tmp_path, text, expected):
    """File, line, key path, and what is wrong."""
    assert error(tmp_path, text)[0].startswith(expected)


def test_finding_the_file(tmp_path, monkeypatch):
    """--config, the variable, this folder, a parent; else how to make one."""
    (tmp_path / "hosts.yaml").write_text(TEXT)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert hosts_yaml.find_config(None, {}, deep) == tmp_path / "hosts.yaml"
    assert hosts_yaml.find_config(str(tmp_path / "hosts.yaml"), {}, Path("/")) == tmp_path / "hosts.yaml"
    variable = {hosts_yaml.CONFIG_VARIABLE: str(tmp_path / "hosts.yaml")}
    assert hosts_yaml.find_config(None, variable, Path("/")) == tmp_path / "hosts.yaml"
    for explicit, environment in (("/nope", {}), (None, {hosts_yaml.CONFIG_VARIABLE: "/nope"}), (None, {})):
        with pytest.raises(UsageError) as caught:
            hosts_yaml.find_config(explicit, environment, Path("/nonexistent"))
        assert "deployctl init" in caught.value.hint
    monkeypatch.chdir(tmp_path)
    assert hosts_yaml.load(Path("hosts.yaml")).path == Path("hosts.yaml")


@given(st.text(max_size=40))
def test_any_word_is_an_address_or_a_usage_error(word):
    """Addresses are parsed or refused, never half understood."""
    try:
        _, address, port = inventory.parse_address(word)
    except UsageError:
        return
    assert address
    assert port is None or 0 < port < 65536
