"""What users of SGLang, vLLM and LMDeploy may ask for and this package cannot do: one table.

An entry says when a flag asks for it, why it cannot work here and what to do instead. A value that
asks for what is done anyway (interleave size 1, one node, no speculation) is accepted. Take a flag
out of the table in the change that implements it. Plain Python: no jax.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Predicate = Callable[[str], bool]  # of the value as lower-case text; a bare switch is "true"


def asked(value: str) -> bool:
    """The feature is switched on, or given any value but "nothing"."""
    return value not in ("false", "none", "null", "", "0", "0.0", "{}", "[]", "off")


def other_than(*accepted: str) -> Predicate:
    """Any value but these."""
    return lambda value: value not in accepted


def one_of(*refused: str) -> Predicate:
    """Exactly these values."""
    return lambda value: value in refused


@dataclass(frozen=True)
class Refusal:
    """One thing that is known and not supported.

    Attributes:
        flags: every spelling, the way a command line writes it; keyword arguments follow from them.
        mechanism: why, in one clause.
        fix: what to do, after "Use".
        applies: whether a value asks for it.
        alternative: another way, after "or".
        takes: values after the flag: "one", "many", or "none" for a switch.
        beside: names of another option whose value belongs into the sentence, if it is given.
        ours: the flag is our own and only the value is refused.
    """

    flags: tuple[str, ...]
    mechanism: str
    fix: str
    applies: Predicate = asked
    alternative: str = ""
    takes: Literal["none", "one", "many"] = "one"
    beside: tuple[str, ...] = ()
    ours: bool = False


DCP_SIZE = ("--dcp-size", "--decode-context-parallel-size", "--dcp", "-dcp")
TP_SIZE = ("--tp", "--tp-size", "--tensor-parallel-size", "-tp")
_SPECULATION = ("--speculative-algorithm", "--speculative-algo")
_LEAVE_OUT = "the command without it"

TABLE: tuple[Refusal, ...] = (
    # Layout of the caches.
    Refusal(
        ("--dcp-kv-cache-interleave-size", "--cp-kv-cache-interleave-size"),
        "token p lives on rank p % dcp_size, so runs of consecutive tokens on one rank do not "
        "exist",
        "an interleave size of 1",
        other_than("1", "none"),
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--enable-prefix-caching", "--enable-radix-cache"),
        "prompts that begin alike share pages unless that is switched off",
        "--disable-radix-cache",
        one_of("false"),
        takes="none",
    ),
    Refusal(
        ("--enable-hisparse", "--hisparse-config"),
        "it moves rows of the latent cache to the host by their global slot, and a rank knows "
        "only the rows it owns",
        _LEAVE_OUT,
        alternative="raise --dcp-size to hold more tokens on the devices",
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--enable-unified-memory", "--enable-unified-memory-pool"),
        "latent and index rows have pools of their own, whose sizes are fixed when the engine "
        "starts",
        "--max-total-tokens",
        takes="none",
        alternative="--mem-fraction-static to size both together",
    ),
    Refusal(
        ("--enable-hierarchical-cache", "--kv-offloading-size", "--kv-offloading-backend"),
        "no host tier exists, and a host page would have to keep the latent and index rows of "
        "every rank together",
        _LEAVE_OUT,
        alternative="raise --dcp-size to hold more tokens on the devices",
    ),
    Refusal(
        (
            *(
                "--hicache-ratio",
                "--hicache-size",
                "--hicache-write-policy",
                "--hicache-io-backend",
            ),
            *("--hicache-mem-layout", "--hicache-storage-backend"),
        ),
        "it configures a host tier, and none exists",
        _LEAVE_OUT,
    ),
    Refusal(
        ("--cpu-offload-gb", "--swap-space"),
        "weights and caches stay on the devices",
        _LEAVE_OUT,
        alternative="raise --tp, or --dcp-size",
    ),
    Refusal(
        ("--kv-transfer-config", "--enable-lmcache", "--kv-events-config"),
        "an external KV connector stores pages by one id for all ranks, and a page here has "
        "different tokens on each rank",
        _LEAVE_OUT,
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--disaggregation-mode", "--role"),
        "the prefill side would have to send each rank its own rows of both caches, and no "
        "transfer of caches exists",
        "one engine for prefill and decode",
        other_than("null", "none", "hybrid"),
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--disaggregation-transfer-backend", "--disaggregation-ib-device", "--migration-backend"),
        "it configures prefill/decode disaggregation, and prefill and decode share one engine",
        _LEAVE_OUT,
    ),
    # Number formats.
    Refusal(
        ("--kv-cache-dtype",),
        "rows of the caches are float32, bfloat16, or e4m3 with float32 scales",
        "fp8_e4m3",
        one_of(
            *("nvfp4", "fp4_e2m1", "fp4", "int8", "int4", "fp8_e5m2", "fp8_ds_mla", "fp8_inc"),
            *("float16", "fp16", "half", "turbo_quant"),
        ),
        alternative="bf16",
        beside=DCP_SIZE,
        ours=True,
    ),
    Refusal(
        ("--quant-policy",),
        "the dtype of the caches has a name here",
        "--kv-cache-dtype fp8_e4m3",
        alternative="--kv-cache-dtype bf16",
    ),
    Refusal(
        ("--quantization", "-q", "--quantization-param-path", "--torchao-config"),
        "weights are float32 or bfloat16, and quantised checkpoints (block fp8, NVFP4, AWQ, GPTQ) "
        "are not read",
        "the bfloat16 checkpoint without the flag",
    ),
    Refusal(
        ("--dtype",),
        "weights and activations are float32 or bfloat16",
        "bfloat16",
        one_of("float16", "half", "fp16", "float"),
        alternative="float32",
        ours=True,
    ),
    # Exchanges and parallelism.
    Refusal(
        ("--dcp-comm-backend", "--dcp-comm"),
        "the exchanges are XLA collectives; there is no kernel that writes into the memory of "
        "other ranks",
        "a2a",
        one_of("fi_a2a", "oneshot"),
        alternative="ag_rs",
        beside=DCP_SIZE,
        ours=True,
    ),
    Refusal(
        ("--dcp-replicate-q-proj",),
        "the query projection is sharded over all --tp ranks and its heads are gathered",
        _LEAVE_OUT,
        takes="none",
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--prefill-context-parallel-size", "--attn-cp-size", "--cp", "-pcp"),
        "a prompt's new tokens are on every rank, and splitting them would need an exchange of "
        "queries that does not exist",
        "1, and --chunked-prefill-size to bound a step",
        other_than("1", "none"),
        beside=DCP_SIZE,
    ),
    Refusal(
        (
            *("--enable-prefill-context-parallel", "--enable-dsa-prefill-context-parallel"),
            "--enable-nsa-prefill-context-parallel",
        ),
        "a prompt's new tokens are on every rank, and splitting them would need an exchange of "
        "queries that does not exist",
        "--chunked-prefill-size to bound a step",
        takes="none",
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--enable-dp-attention",),
        "attention data parallelism splits the tensor-parallel group into attention groups, and a "
        "DCP group would reach across them",
        "--tp for weights and --dcp-size for the caches",
        takes="none",
        beside=DCP_SIZE,
        alternative="one process per attention group",
    ),
    Refusal(
        ("--dp-size", "--dp", "--data-parallel-size", "-dp"),
        "an engine is one tensor-parallel group and has one scheduler",
        "1, and one process per replica",
        other_than("1", "none"),
        beside=TP_SIZE,
    ),
    Refusal(
        ("--ep-size", "--ep", "--expert-parallel-size"),
        "every rank holds a slice of all experts",
        "1, and --tp to spread the experts",
        other_than("1", "none"),
        beside=TP_SIZE,
    ),
    Refusal(
        ("--enable-expert-parallel", "--enable-eplb"),
        "every rank holds a slice of all experts",
        "--tp to spread the experts",
        takes="none",
        beside=TP_SIZE,
    ),
    Refusal(
        ("--moe-a2a-backend", "--moe-runner-backend", "--all2all-backend"),
        "experts are computed by XLA and no tokens move between ranks for them",
        _LEAVE_OUT,
        other_than("none", "auto"),
    ),
    Refusal(
        ("--pp-size", "--pp", "--pipeline-parallel-size", "-pp"),
        "every rank runs every layer",
        "1, and --tp to spread the weights",
        other_than("1", "none"),
        beside=TP_SIZE,
    ),
    Refusal(
        ("--nnodes",),
        "the engine drives the devices of one process, and a DCP group that spans hosts would "
        "wait for the network twice per layer",
        "1",
        other_than("1", "none"),
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--node-rank", "--dist-init-addr", "--nccl-init-addr", "--master-addr", "--master-port"),
        "it joins hosts, and the engine drives the devices of one process",
        "one host",
    ),
    Refusal(
        ("--headless",),
        "it joins hosts, and the engine drives the devices of one process",
        "one host",
        takes="none",
    ),
    Refusal(
        ("--distributed-executor-backend",),
        "the engine drives all its devices from one process",
        _LEAVE_OUT,
        other_than("none", "uni"),
    ),
    # Speculative decoding.
    Refusal(
        _SPECULATION,
        "nothing drafts tokens yet, neither the model's own MTP layer nor a draft model",
        _LEAVE_OUT,
        beside=DCP_SIZE,
    ),
    Refusal(
        ("--speculative-eagle-topk",),
        "a tree of drafts has several tokens at one position, and a position has one owner and "
        "one row",
        "1",
        other_than("1", "none"),
        beside=_SPECULATION,
    ),
    Refusal(
        (
            *("--speculative-config", "--speculative-draft-model-path", "--speculative-num-steps"),
            *("--speculative-num-draft-tokens", "--speculative-draft-model-quantization"),
            *("--speculative-token-map", "--speculative-attention-mode"),
        ),
        "it configures speculative decoding, and nothing drafts tokens yet",
        _LEAVE_OUT,
        beside=_SPECULATION,
    ),
    # Prefill and kernels.
    Refusal(
        (
            *("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"),
            *("--dsa-prefill-backend", "--dsa-decode-backend"),
            *("--nsa-prefill-backend", "--nsa-decode-backend", "--sampling-backend"),
        ),
        "one option names the implementation of every op",
        "--kernels",
        other_than("auto", "none"),
    ),
    Refusal(
        ("--enforce-eager", "--disable-cuda-graph"),
        "a step is one compiled program, and XLA decides what becomes a graph",
        _LEAVE_OUT,
        takes="none",
    ),
    Refusal(
        ("--cuda-graph-max-bs", "--cuda-graph-bs", "--compilation-config"),
        "a step is one compiled program, and XLA decides what becomes a graph",
        "--max-running-requests to bound the batch",
        takes="many",
    ),
    Refusal(
        ("--enable-mixed-chunk",),
        "chunks of prompts are always read between decode steps",
        "--chunked-prefill-size to bound them",
        one_of("false"),
        takes="none",
    ),
    Refusal(
        ("--enable-two-batch-overlap", "--enable-dbo"),
        "a step launches one batch after the other on all ranks",
        _LEAVE_OUT,
        takes="none",
    ),
    # Models and adapters.
    Refusal(
        ("--enable-lora",),
        "the absorbed projections hold no place for low-rank updates, which differ per request",
        "a checkpoint with the adapter merged into it",
        takes="none",
    ),
    Refusal(
        ("--lora-paths", "--lora-modules", "--adapters", "--max-loras-per-batch", "--max-loras"),
        "the absorbed projections hold no place for low-rank updates, which differ per request",
        "a checkpoint with the adapter merged into it",
        takes="many",
    ),
    Refusal(
        ("--tokenizer-path", "--tokenizer"),
        "the tokenizer is read from the checkpoint's directory",
        "a directory with both",
        alternative="--prompt-ids",
    ),
    Refusal(
        ("--load-format", "--revision", "--download-dir"),
        "weights are read from a local directory whose format shows by itself",
        "a directory with safetensors or an Orbax checkpoint",
        other_than("auto", "safetensors", "none"),
    ),
    Refusal(
        ("--trust-remote-code",),
        "no code of a checkpoint is ever run",
        _LEAVE_OUT,
        takes="none",
    ),
    # Serving.
    Refusal(
        ("--host", "--port", "--server-name", "--server-port", "--served-model-name", "--api-key"),
        "nothing serves HTTP yet",
        "`dcp-jax generate`",
        alternative="`LLM` in Python",
    ),
    Refusal(
        ("--enable-metrics", "--enable-auto-tool-choice"),
        "nothing serves HTTP yet",
        "`dcp-jax generate`",
        takes="none",
        alternative="`LLM` in Python",
    ),
    Refusal(
        ("--tool-call-parser", "--reasoning-parser"),
        "answers are returned as the model wrote them",
        _LEAVE_OUT,
    ),
    Refusal(
        ("--random-seed",),
        "every request draws from a seed of its own",
        "--seed",
        applies=other_than("none"),
        alternative="`LLM(seed=...)` in Python",
    ),
    Refusal(
        ("--log-level",),
        "the command line logs warnings and errors",
        "`logging` in Python",
    ),
)
