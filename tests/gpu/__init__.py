"""The shipped patches on a real GPU, driven through deployctl: `make test-gpu`, or `python -m tests.gpu --help`.

Needs one NVIDIA GPU, SGLang 0.5.12 and what it imports, and deployctl's dependencies in the interpreter that runs it.
Nothing is downloaded: the models are made here, and only loopback is talked to.

    __main__      options, and the order of the stages
    session       one run: deadline, deployctl with a hosts.yaml of its own, results that are kept as they come
    models        the synthetic target and draft
    arms          the servers that are compared
    servers       launched by deployctl; those that are not being measured are stopped with SIGSTOP
    load          requests and their loads
    decode_log    what the server says of its decode steps
    statistics    are two samples of one distribution
    trace         a profiler's trace in numbers
    verdicts      what must hold
    tables        results as Markdown
    plot          results as a picture (needs matplotlib; by hand: python -m tests.gpu.plot)
    stages/       what is measured
"""
