"""What a lossy KV cache does to the text: a kv offer beside another, paired, item by item.

Teacher-forced (measure), in free text (generation), in what is found again in long contexts
(recall) and in questions with an answer (tasks; lm_eval_model for those of others).

A plugin whose offer is lossy may say what it is held to here, by the names of limits.toml:

    class Int4(Paged):
        lossless = False
        quality: ClassVar[Mapping[str, float]] = {"mean_kl": 2e-2, "top1": 0.9}

What it does not name stays as limits.toml has it. `held_to` is of the conformance suite alone.
"""
