"""The target model: words in a fixed order that depends on the prompt."""

from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

VOCABULARY = (
    "Paris is the capital of France and its largest city where people meet talk read or walk along quiet streets under "
    "old trees while bridges museums markets gardens theatres cafes bookshops stations schools libraries towers "
    "fountains squares boats bakeries with many visitors every season make days there full long bright lively"
).split()


class ModelRunner:
    """Runs forward passes, by graph where one fits."""

    def __init__(self, server_args):
        self.server_args = server_args
        self.graph_runner = None

    def init_cuda_graphs(self):
        """Without graphs every pass is eager, and takes the inputs as they are."""
        if self.server_args.disable_cuda_graph:
            return
        width = self.server_args.speculative_num_draft_tokens if self.server_args.speculative_algorithm else 1
        self.graph_runner = CudaGraphRunner(self, width)

    def forward(self, forward_batch):
        """One pass over the batch.

        Returns:
            The next tokens of each request in order, as many as the batch may accept for it.
        """
        if forward_batch.forward_mode == "decode" and self.can_run_cuda_graph(forward_batch):
            return self.graph_runner.replay(forward_batch)
        return self.compute(forward_batch, forward_batch.input_ids)

    def can_run_cuda_graph(self, forward_batch):
        return self.graph_runner is not None and self.graph_runner.can_run(forward_batch)

    def compute(self, forward_batch, input_ids):
        rows = []
        for req in forward_batch.reqs:
            at = req.seed + len(req.output_ids)
            rows.append([(at + ahead) % len(VOCABULARY) for ahead in range(8)])
        return rows

    def decode(self, token_ids):
        """Token ids as text."""
        return "".join(" " + VOCABULARY[token] for token in token_ids)


class TpModelWorker:
    """A rank's worker for the target model."""

    def __init__(self, server_args):
        self.server_args = server_args
        self.model_runner = ModelRunner(server_args)

    def forward_batch_generation(self, batch):
        return self.model_runner.forward(batch)
