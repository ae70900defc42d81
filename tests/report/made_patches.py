"""Four versions of a patch of two files, in the manner of `patches/dynamic_spec`, and their diffs."""

import difflib
import hashlib

BASE = {
    "srt/speculative/eagle_worker.py": """\
class EAGLEWorker(TpModelWorker):
    def __init__(self, server_args: ServerArgs, gpu_id: int, tp_rank: int):
        self.server_args = server_args
        self.topk = server_args.speculative_eagle_topk
        self.speculative_num_steps = server_args.speculative_num_steps
        self.device = server_args.device

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            logits_output, next_token_ids, seq_lens_cpu = self.forward_target_extend(batch)
            with self.draft_tp_context(self.draft_model_runner.tp_group):
                self.forward_draft_extend(batch, logits_output.hidden_states, next_token_ids, seq_lens_cpu)
            return GenerationBatchResult(logits_output=logits_output, next_token_ids=next_token_ids)
        spec_info = self.draft(batch)
        logits_output, verify_output, model_worker_batch, _ = self.verify(batch, spec_info)
        if verify_output.draft_input.verified_id.shape[0] > 0:
            self.forward_draft_extend_after_decode(batch)
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=verify_output.verified_id,
            num_accepted_tokens=sum(verify_output.accept_length_per_req_cpu),
        )
""",
    "srt/server_args.py": """\
@dataclasses.dataclass
class ServerArgs:
    speculative_algorithm: Optional[str] = None
    speculative_num_steps: Optional[int] = None
    speculative_eagle_topk: Optional[int] = None

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser):
        parser.add_argument("--speculative-algorithm", type=str, choices=["EAGLE", "EAGLE3", "NGRAM"])
        parser.add_argument("--speculative-num-steps", type=int)
""",
}
_ARGUMENT = '        parser.add_argument("--speculative-disable-batch-threshold", type=int, default=0)\n'
_BODIES = {
    1: [
        "        if 0 < self.server_args.speculative_disable_batch_threshold < len(batch.reqs):",
        "            model_worker_batch = batch.get_model_worker_batch()",
        "            result = self.target_worker.forward_batch_generation(model_worker_batch)",
        "            return result",
    ],
    2: [
        "        if 0 < self.server_args.speculative_disable_batch_threshold < len(batch.reqs):",
        "            out_cache_loc, _ = alloc_token_slots(batch.tree_cache, len(batch.reqs))",
        "            batch.out_cache_loc = out_cache_loc",
        "            return self.target_worker.forward_batch_generation(batch.get_model_worker_batch())",
    ],
    3: [
        "        if 0 < self.server_args.speculative_disable_batch_threshold < len(batch.reqs):",
        "            batch.spec_info = EagleDraftInput.create_idle_input(self.device, self.topk)",
        "            batch.seq_lens.add_(1)",
        "            return self.decode_one_token(batch)",
    ],
    4: [
        "        if self.policy.speculation_is_off(len(batch.reqs)):",
        "            # One token for each request: the tree is its root alone.",
        "            spec_info = self.root_tree(batch)",
        "            logits_output, verify_output, _, _ = self.verify(batch, spec_info)",
        "            return self.result_of(logits_output, verify_output)",
    ],
}


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def patched(version):
    """The two files as a version leaves them."""
    files = dict(BASE)
    if version:
        path = "srt/speculative/eagle_worker.py"
        anchor = "        spec_info = self.draft(batch)\n"
        files[path] = BASE[path].replace(anchor, "\n".join(_BODIES[version]) + "\n" + anchor)
        files["srt/server_args.py"] = BASE["srt/server_args.py"] + _ARGUMENT
    return files


def unified(before, after):
    text = ""
    for path in sorted(after):
        text += "".join(
            difflib.unified_diff(
                before[path].splitlines(keepends=True), after[path].splitlines(keepends=True), f"a/{path}", f"b/{path}"
            )
        )
    return text
