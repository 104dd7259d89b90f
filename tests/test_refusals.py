"""What is known and not supported: every entry of the table, and every flag that there is."""

import ast
import dataclasses
import inspect
import types
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from dcp_jax import cli, llm
from dcp_jax.cli.parse import flags
from dcp_jax.engine.options import option_problems
from dcp_jax.engine.sampling_params import SamplingParams
from dcp_jax.policy import Parallelism, PrefillBatch, PrefillPath, PrefillPolicy, choose_path
from dcp_jax.refusals import check_keywords, find_unsupported, keyword, supported
from dcp_jax.refusals_table import TABLE, Refusal

ENTRIES = [pytest.param(entry, id=entry.flags[0]) for entry in TABLE]
PROBES = (
    *("true", "2", "4", "EAGLE", "nvfp4", "float16", "fi_a2a", "prefill", "modelopt_fp4"),
    *("/a/path", "false"),
)


@pytest.fixture
def run(capsys):
    """Runs the command line: (exit code, lines of stderr)."""

    def call(*args):
        try:
            cli.main(list(args))
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err.splitlines()

    return call


@pytest.fixture(scope="module")
def commands() -> dict[str, type]:
    """The commands of `dcp-jax` by name."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "parse", lambda table, args, **_: found.update(table) or Nothing())
        cli.main([])
    return found


class Nothing:
    def run(self, console):
        """A command that does nothing."""


def refused_value(entry: Refusal) -> str:
    return next(value for value in PROBES if entry.applies(value.lower()))


def arguments(entry: Refusal, flag: str) -> list[str]:
    value = refused_value(entry)
    if entry.takes == "none":
        return [flag if value == "true" else flag.replace("--", "--no-", 1)]
    return [flag, value]


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_is_refused_by_each_spelling(entry: Refusal):
    for flag in entry.flags:
        given = arguments(entry, flag)
        argv = ["generate", "P3", *given, "--tp", "8", "--dcp-size=4"]
        (message,) = find_unsupported(argv)
        assert message.startswith(f"DCP: {'='.join(given)} is not supported")
        assert f": {entry.mechanism}. Use {entry.fix}" in message
        assert message.endswith((entry.alternative or entry.fix) + ".")
        for names, clause in ((("--tp",), "--tp=8"), (("--dcp-size",), "--dcp-size=4")):
            assert (clause in message) == (names[0] in entry.beside)
        assert supported(argv) == ["generate", "P3", "--tp", "8", "--dcp-size=4"]
        joined = ["generate", "=".join(given).replace("-", "_").replace("__", "--", 1)]
        assert given[0][:2] != "--" or len(find_unsupported(joined)) == 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_entry_is_refused_as_a_keyword(entry: Refusal):
    value = refused_value(entry)
    value = {"true": True, "false": False, "2": 2}.get(value, value)
    with pytest.raises(ValueError, match="is not supported") as error:
        check_keywords({keyword(entry.flags[0]): value})
    assert f"{keyword(entry.flags[0])}={value!r}" in str(error.value)
    assert entry.fix in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--dcp-kv-cache-interleave-size", "1"],
        ["--cp-kv-cache-interleave-size=1"],
        ["--enable-prefix-caching"],
        ["--enable-mixed-chunk"],
        ["--enable-lora=False"],
        ["--speculative-eagle-topk", "1"],
        ["--nnodes", "1", "--node-rank", "0"],
        ["--pp-size", "1", "--dp-size", "1", "--ep", "1"],
        ["--disaggregation-mode", "null"],
        ["--attention-backend", "auto"],
        ["--cpu-offload-gb", "0"],
    ],
    ids=" ".join,
)
def test_what_asks_for_nothing_special_is_accepted(argv: list[str]):
    assert find_unsupported(["generate", *argv]) == []
    assert supported(["generate", *argv, "--tp", "2"]) == ["generate", "--tp", "2"]


def test_our_own_flags_keep_their_values():
    argv = ["generate", "P3", "--kv-cache-dtype", "fp8", "--dcp-comm-backend=a2a", "--", "--host"]
    assert find_unsupported(argv) == []
    assert supported(argv) == argv
    known = ["plan", "--dcp-replicate-q-proj"]
    assert find_unsupported(known) != []
    assert find_unsupported(known, {"--dcp-replicate-q-proj"}) == []
    assert supported(known, {"--dcp-replicate-q-proj"}) == known
    assert len(find_unsupported(["--node-rank", "-1"])) == 1
    assert supported(["--lora-paths", "a", "b", "--tp", "2"]) == ["--tp", "2"]


def test_all_problems_at_once(run):
    wrong = ["--enable-lora", "--kv-cache-dtype", "nvfp4", "--speculative-config.method", "mtp"]
    wrong += ["--tp", "4", "--dcp-size", "3", "--page-size", "0", "--mem-fraction-static", "2"]
    code, lines = run("generate", "no-such-directory", *wrong, "--prompt-ids", "1")
    assert code == 2
    expected = ("--enable-lora is", "nvfp4 is", "method=mtp is", "page_size=0", "dcp_size=3", "2.0")
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith("dcp-jax: ")
        assert part in line


def test_refusals_come_before_what_the_parser_says(run):
    code, lines = run("generate", "P3", "--enable-lora", "--no-such-flag")
    assert code == 2
    assert lines[0].startswith("dcp-jax: DCP: --enable-lora is not supported")
    assert any("no-such-flag" in line for line in lines[1:])


def test_refusals_start_no_backend(run, monkeypatch):
    monkeypatch.setattr(llm, "LLM", None)
    monkeypatch.setattr("jax.devices", None)
    code, lines = run("generate", "P3", "--tp", "4", "--dcp-size", "3", "--enable-lora")
    assert (code, len(lines)) == (2, 2)


def test_keywords():
    check_keywords({})
    check_keywords({"enable_lora": False, "pipeline_parallel_size": 1, "speculative_config": None})
    with pytest.raises(TypeError, match="'dcpsize': did you mean 'dcp_size'?"):
        check_keywords({"dcpsize": 2}, accepted=["tp", "dcp_size"])
    with pytest.raises(TypeError, match="'xyz'"):
        check_keywords({"xyz": 2, "enable_lora": True})
    asked = {"speculative_config": {"method": "mtp"}, "pipeline_parallel_size": 2}
    with pytest.raises(ValueError, match="with tp=8: every rank runs every layer") as error:
        check_keywords(asked, {"tp": 8, "dcp_size": 4})
    assert "speculative_config={'method': 'mtp'}" in str(error.value)
    assert len(str(error.value).splitlines()) == 2


def test_sizes_are_one_list_with_the_other_options():
    engine = cli.EngineArgs(tp=4, dcp_size=3, page_size=0)
    options = {n: getattr(engine, n) for n in inspect.signature(option_problems).parameters}
    problems = option_problems(**{**options, "kernels": None})
    assert [problem.split("=")[0] for problem in problems] == ["page_size", "dcp_size"]


def test_the_table_and_our_flags_do_not_overlap(commands):
    """A flag that a command has is refused for values only, and never for one that it allows."""
    names = [flag for entry in TABLE for flag in entry.flags]
    assert len(names) == len(set(names))
    own = flags(cli.Generate)
    for entry in TABLE:
        for flag in set(entry.flags) & set(own):
            assert entry.ours, f"{flag} exists now: take it out of the table"
            kind = get_type_hints(cli.EngineArgs)[own[flag][-1]]
            assert not [value for value in get_args(kind) if entry.applies(value)]
        assert not entry.ours or set(entry.flags) & set(own)


def test_every_flag_is_read_by_something(commands):
    """No option is parsed and then forgotten, on any command."""
    sources = [
        p.read_text(encoding="utf-8") for p in Path(cli.__file__).parent.parent.rglob("*.py")
    ]
    read_somewhere = {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    for name, command in commands.items():
        for flag, path in flags(command).items():
            owner = command
            for field in path:
                own = inspect.getsource(owner)
                used = f"self.{field}" in own or "dataclasses.fields(self)" in own
                assert used or (owner is not command and field in read_somewhere), f"{name} {flag}"
                owner = get_type_hints(owner)[field]
    wanted = {field.name for field in dataclasses.fields(cli.SamplingArgs)}
    assert wanted <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_engine_flag_reaches_the_engine(monkeypatch, golden):
    """Each field of `EngineArgs` is an argument of `LLM`, under its own value, and read there."""
    values = {
        **{"model": None, "model_path": golden("p3").path, "tp": 4, "dcp_size": 2},
        **{"dtype": "float32", "kv_cache_dtype": "fp8", "dcp_comm": "ag_rs", "kernels": "xla"},
        **{"index_cache": "replicated", "max_model_len": 123, "max_running_requests": 5},
        **{"chunked_prefill_size": 77, "page_size": 3, "mem_fraction_static": 0.25},
        **{"max_total_tokens": 999, "prefill": PrefillPolicy(owned_prefill_ratio=7.0)},
        **{
            "max_queued_requests": 7,
            "decode_steps": 2,
            "disable_radix_cache": True,
            "compilation_cache_dir": Path("x"),
        },
    }
    assert set(values) == {field.name for field in dataclasses.fields(cli.EngineArgs)}
    constructor = llm.LLM.__init__
    got = {}

    def fake(model, **kwargs):
        got.update(kwargs, model=model)
        return types.SimpleNamespace(padding={})

    monkeypatch.setattr(llm, "LLM", fake)
    cli.EngineArgs(**values).load([[1, 2, 3]], generate=1)
    assert values.pop("disable_radix_cache") is not got["enable_prefix_caching"]
    assert set(got) <= set(inspect.signature(constructor).parameters)
    renamed = {"prefill": "prefill_policy", "model_path": "model"}
    for name, value in values.items():
        assert value is None or got[renamed.get(name, name)] == value
    body = ast.parse("class A:\n" + inspect.getsource(constructor))
    read = {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
    assert set(got) <= read


def test_every_threshold_decides_something():
    batch, group = PrefillBatch((64,), (4,)), Parallelism(2, gathered_heads=8, index_topk=64)
    for changes, path in (
        ({}, PrefillPath.GATHERED),
        ({"owned_prefill_ratio": 1.0}, PrefillPath.OWNED),
        ({"split_indexer_min_kv": 66}, PrefillPath.GATHERED_SPLIT_INDEXER),
        ({"allow_dense_beyond_topk": True}, PrefillPath.MHA_ONE_SHOT),
        (
            {"allow_dense_beyond_topk": True, "dense_attn_kv_len_threshold": 67},
            PrefillPath.GATHERED,
        ),
        ({"force": "owned"}, PrefillPath.OWNED),
    ):
        assert choose_path(PrefillPolicy(**changes), batch, group) is path


def test_prompt_and_sampling_flags_are_used(monkeypatch, run):
    """`generate` passes what it is given on to `LLM.generate`."""
    calls = []

    class Fake:
        def default_sampling_params(self):
            return SamplingParams()

        def generate(self, prompts, params):
            calls.append((prompts, params))
            return []

    monkeypatch.setattr(cli.EngineArgs, "load", lambda self, prompts, **_: Fake())
    argv = ["--prompt", "a", "--prompt-ids", "1 2", "--max-tokens", "3", "--ignore-eos"]
    argv += ["--temperature", "0.5", "--seed", "7", "--stop", "x", "--n", "2"]
    assert run("generate", "P3", *argv)[0] == 0
    ((prompts, params),) = calls
    assert prompts == ["a", [1, 2]]
    assert (params.max_tokens, params.ignore_eos, params.temperature) == (3, True, 0.5)
    assert (params.seed, list(params.stop), params.n) == (7, ["x"], 2)
