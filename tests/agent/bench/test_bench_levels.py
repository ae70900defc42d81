"""Levels that are measured: what is sent, what is recorded, and what is said."""


def test_a_sweep_is_measured_and_recorded(host):
    """Every level sends what it should, all of it comes back, and the record on disk is the one that is reported."""
    assert host.launch("a")["status"] == "ready"
    result = host.bench((1, 2, 4))
    assert (result["status"], result["exit"], result["error"]) == ("complete", 0, None)
    assert result["bench"] == host.record()
    assert [(1, 6, 6), (2, 6, 6), (4, 6, 6)] == [
        (level["concurrency"], level["sent"], level["completed"]) for level in result["bench"]["levels"]
    ]
