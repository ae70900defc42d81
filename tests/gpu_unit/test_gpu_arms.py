"""The servers that are compared, as deployctl's own reader of hosts.yaml sees them."""

import json
from collections import Counter

import pytest

from deployctl.domain.hosts_yaml import load
from tests.gpu import __main__ as program
from tests.gpu import arms


def test_every_arm_has_ports_of_its_own_below_the_ephemeral_range():
    """They all run at once; outgoing connections must not take a port before its server does."""
    made = arms.profiles("/models", "triton", rehearsal=False)
    ports = [profile["args"][name] for profile in made.values() for name in ("port", "nccl-port")]
    assert {1} == set(Counter(ports).values())
    assert max(ports) < 32768


def test_dynamic_arms_differ_from_their_plain_ones_by_the_flag_alone():
    """Whatever else differed would be measured as well."""
    known = arms.all_arms()
    for worker in ("v1", "v2"):
        for pair in ("a", "b"):
            plain, dynamic = known[f"{pair}-{worker}"], known[f"{pair}-{worker}-dynamic"]
            assert {**plain.args, **arms.DYNAMIC} == dict(dynamic.args)
            assert not plain.dynamic
            assert dynamic.dynamic


@pytest.mark.parametrize("rehearsal", [True, False])
def test_hosts_yaml_is_accepted(tmp_path, rehearsal):
    """deployctl refuses unknown keys and words that YAML reads as something else."""
    path = tmp_path / "hosts.yaml"
    hosts = {
        "hosts": {"gpu": {"connection": "local"}},
        "groups": {"default": ["gpu"]},
        "profiles": arms.profiles("/models", "triton", rehearsal=rehearsal),
    }
    path.write_text(json.dumps(hosts))
    inventory = load(path)
    assert set(arms.all_arms()) == set(inventory.profiles)


def test_every_stage_names_arms_that_there_are():
    """A grammar's arms exist only where a grammar library does."""
    known = set(arms.all_arms())
    for stage in program.STAGES.values():
        assert {key for key in stage.NEEDS if not key.endswith("-grammar")} <= known


def test_every_stage_is_in_one_group_and_unknown_ones_are_refused():
    """The groups say what runs together."""
    assert sorted(program.STAGES) == sorted(name for group in program.GROUPS for name in group)
    with pytest.raises(SystemExit):
        program.parse(["--stages", "speed,sped"])
