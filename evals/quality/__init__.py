"""What a lossy KV cache does to the text: a kv offer beside another, teacher-forced and paired.

A plugin whose offer is lossy may say what it is held to here, by the names of limits.toml:

    class Int4(Paged):
        lossless = False
        quality: ClassVar[Mapping[str, float]] = {"mean_kl": 2e-2, "top1": 0.9}

What it does not name stays as limits.toml has it. `held_to` is of the conformance suite alone.
"""
