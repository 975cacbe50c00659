"""Mutants of models that are divided into the stages of a pipeline."""

from __future__ import annotations

from .mutant import PackageMutant

HOME = "parallel/test_stages.py::"

MUTANTS: tuple[PackageMutant, ...] = (
    PackageMutant(
        "the slowest stage takes longer than it has to",
        "parallel/pipeline_parallel/choose_splits.py",
        "(max(heaviest, sums[end] - sums[begin]), [*counts, end - begin])",
        "(heaviest + sums[end] - sums[begin], [*counts, end - begin])",
        ("parallel/test_splits.py",),
    ),
    PackageMutant(
        "of equally fast splits one is taken whose largest stage does not fit",
        "parallel/pipeline_parallel/choose_splits.py",
        "return _minimize_heaviest(numels, numels, costs, bound, stages)[1]",
        "return _minimize_heaviest(costs, numels, costs, bound, stages)[1]",
        ("parallel/test_splits.py",),
    ),
    PackageMutant(
        "a stage is given activation functions alone",
        "parallel/pipeline_parallel/choose_splits.py",
        " and held[end] > held[begin]",
        "",
        ("parallel/test_splits.py",),
    ),
    PackageMutant(
        "the embedding's elements weigh like those of a head",
        "parallel/pipeline_parallel/divide.py",
        "lookups = nn.Embedding, nn.EmbeddingBag",
        "lookups = (nn.EmbeddingBag,)",
        (f"{HOME}test_embeddings_cost_nothing_and_heads_do",),
    ),
    PackageMutant(
        "a later stage computes its first block on nothing",
        "parallel/pipeline_parallel/transformers_stages.py",
        "self._begin.given = hidden",
        "self._begin.given = _make_placeholder(hidden, 1)",
        (f"{HOME}test_a_transformers_model_is_divided_anywhere",),
    ),
    PackageMutant(
        "positions on later stages are those of a slice of the sequence",
        "parallel/pipeline_parallel/transformers_stages.py",
        "return found[2] if first < begin <= last else 1",
        "return 1",
        (f"{HOME}test_over_tensor_ranks[msp-llama]",),
    ),
    PackageMutant(
        "ranks keep the blocks of all stages",
        "parallel/pipeline_parallel/transformers_stages.py",
        "        self._argument = argument\n\n    def forward(self, *args: Any, **options: Any) -> Any:\n"
        "        return _get_first_argument(args, options, self._argument)\n",
        "        self._argument = argument\n        self._block = block\n\n"
        "    def forward(self, *args: Any, **options: Any) -> Any:\n"
        "        return _get_first_argument(args, options, self._argument)\n",
        (f"{HOME}test_blocks_of_other_ranks_are_let_go",),
    ),
    PackageMutant(
        "dropout beside the blocks stays on in evaluation",
        "parallel/pipeline_parallel/transformers_stages.py",
        "        self._model.train(mode)\n",
        "        pass\n",
        (f"{HOME}test_modes_reach_what_a_stage_has_beside_its_blocks",),
    ),
    PackageMutant(
        "a tied embedding is in another unit on the first rank than on the last",
        "parallel/pipeline_parallel/divide.py",
        "(home.names if name in self.tied else [name])",
        "[name]",
        (f"{HOME}test_a_tied_embedding_is_in_the_root_unit_of_both_ends",),
    ),
    PackageMutant(
        "both ends of a pipeline follow their own gradients of a tied embedding, and drift apart",
        "parallel/pipeline_parallel/divide.py",
        "relate_parameter(division.model.get_parameter(name), PIPE, Relation.SUMMED)",
        "pass",
        (f"{HOME}test_a_tied_embedding_is_in_the_root_unit_of_both_ends",),
    ),
    PackageMutant(
        "stages have the buffers of blocks elsewhere, which no rank keeps up",
        "parallel/pipeline_parallel/divide.py",
        "        if not absent:  # share the table",
        "        if True:  # share the table",
        (f"{HOME}test_buffers_of_blocks_are_on_their_stage",),
    ),
    PackageMutant(
        "ties that no rank can keep are trained apart",
        "parallel/pipeline_parallel/divide.py",
        "if len(where) > 1 and where != [0, ranks - 1]:",
        "if len(where) > 1 and where[0] != 0:",
        (f"{HOME}test_models_that_cannot_be_divided",),
    ),
)
