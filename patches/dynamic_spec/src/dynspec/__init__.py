"""Dynamic speculation: no drafting while many requests decode together.

EAGLE speculation pays while the GPU waits for memory, with few requests in the batch. With many it costs throughput:
every drafted token that the target rejects was computed for nothing. With `--speculative-disable-batch-threshold T` a
worker drafts for batches up to T requests and decodes larger ones plainly.

While speculation is off the engine's own worker code runs on a draft tree that holds nothing but its root: the token
that every request has pending. Verifying it accepts the root and samples one token from the target, which is plain
decoding, and all that verify() does besides (KV slots, grammar, penalties, logprobs, finishing, aborts) stays the
engine's. What depends on the number of tokens a request brings to a step (attention backends freeze it, CUDA graphs
are captured for it) exists a second time, for one token, and is swapped in for the length of such a step.

    arguments      the flags, and what is refused at start
    policy         when speculation is off
    engine         names that differ between engine versions
    root_tree      the tree that holds only its root
    one_token      attention for one token a request
    resources      building the second set, and swapping it in
    deferred       the draft model's upkeep, hidden behind the target's forward
    root_verify    the cheap verify() of a root-only tree
    worker_v1      EAGLEWorker
    worker_v2      EAGLEWorkerV2, the overlap worker
    known_lengths  v2: what lets the overlap scheduler run ahead while speculation is off

Importing this package imports none of them: server_args.py, which every command of the engine loads, needs only
`arguments`.
"""
