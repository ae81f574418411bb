"""Model types in which no encoding can be put in place of the model's own, and why."""

from __future__ import annotations

from hf_posenc.family import rule_out

rule_out(
    "its state-space layers keep order in a recurrent state, which holds no positions to replace",
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba"),
    "zamba2",
)
rule_out(
    "some or all of its layers attend linearly, through a recurrent state that keeps order by itself",
    *("bailing_hybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma"),
    *("rwkv", "xlstm"),
)
rule_out(
    "its scores multiply content with relative positions inside its own attention, which cannot be left out",
    *("cpmant", "deberta", "deberta-v2", "funnel", "inkling_text", "prophetnet", "xlnet"),
)
rule_out(
    "its attention is sparse: which keys a query sees is computed from positions in a kernel of its own",
    *("big_bird", "bigbird_pegasus", "led", "longformer", "pegasus_x"),
)
rule_out(
    "it approximates attention with landmarks, samples or hashes, so that no score of one query and one key exists",
    *("mra", "nystromformer", "perceiver", "reformer", "yoso"),
)
rule_out("it has no attention whose queries and keys could be told their positions", "fnet")
rule_out("some of its layers are convolutions, which keep order by themselves", "convbert", "lfm2", "lfm2_moe")
rule_out(
    "its queries are scaled by their positions inside its own attention, beside the rotation",
    "llama4_text",
    "ministral3",
)
rule_out("it adds the row and the column of a table, which no encoding of a sequence replaces", "tapas")
