"""What is timed, on the devices: weights, caches and inputs, and the programs over them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from dcp_jax.bench.cases import Case, Shape, pool_pages, shape_of
from dcp_jax.bench.memory import check_fits, check_rows, device_bytes, param_bytes, step_bytes
from dcp_jax.bench.options import PrefillOptions, TimedLayer
from dcp_jax.bench.programs import (
    LayerGraph,
    Program,
    compile_program,
    sampled_scores,
    trace_layer,
    trace_step,
)
from dcp_jax.bench.random_weights import random_cache, random_params
from dcp_jax.bench.records import Setup
from dcp_jax.cache.pool import CacheSpec
from dcp_jax.dcp.step import Batch, StepOptions
from dcp_jax.devices import ensure_devices
from dcp_jax.engine.paths import parallelism, path_options
from dcp_jax.functional import load_params
from dcp_jax.layers.indexer import Selection
from dcp_jax.mesh import make_mesh
from dcp_jax.model import Model
from dcp_jax.plan import Layout
from dcp_jax.policy import PrefillPath

Variant = tuple[PrefillPath, int | None]
Inputs = tuple[Batch, Float[Array, "B T d"]]


class Subject:
    """Holds weights and caches (replaced by every run), and each program once compiled.

    Raises:
        ValueError: what cannot run here, before weights or caches are made.
    """

    def __init__(self, options: PrefillOptions):
        self.options = options
        self.cfg = options.timed_config()
        for case in options.cases:
            if case.keys > self.cfg.max_position_embeddings:
                raise ValueError(
                    f"prefix {case.prefix} + extend {case.extend} is beyond the model's "
                    f"max_position_embeddings={self.cfg.max_position_embeddings}: give less."
                )
        ensure_devices(options.tp)
        dtype = jnp.dtype(options.resolved_dtype())
        self.model = Model(self.cfg, make_mesh(options.tp, options.dcp_size), dtype)
        self.group = parallelism(self.model)
        self.graphs = {t.kind: LayerGraph(self.model, t) for t in options.timed_layers()}
        pages = pool_pages(options.cases, options.page_size, options.dcp_size)
        check_rows(options.cases, pages * options.page_size * self.cfg.num_hidden_layers)
        self.spec = CacheSpec.of(
            self.cfg,
            pages=pages,
            page_size=options.page_size,
            dcp_size=options.dcp_size,
            kv_dtype=options.resolved_kv_dtype(),
            index_replicated=options.index_cache == "replicated",
        )
        self._programs: dict[tuple, Program] = {}
        self._check_memory()
        self._make_arrays()

    @property
    def setup(self) -> Setup:
        """What records say of all this."""
        options = self.options
        return Setup(
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            model=options.name,
            weights="random" if options.random_weights else "checkpoint",
            timed_layers=self.cfg.num_hidden_layers,
            tp=options.tp,
            dcp_size=options.dcp_size,
            gathered_heads=self.group.gathered_heads,
            index_topk=self.cfg.index_topk,
            dtype=options.resolved_dtype(),
            kv_cache_dtype=options.resolved_kv_dtype(),
            index_cache=options.index_cache,
            dcp_comm=options.dcp_comm,
            page_size=options.page_size,
        )

    def _check_memory(self) -> None:
        options, model = self.options, self.model
        layout = Layout(
            tp=options.tp,
            dcp_size=options.dcp_size,
            page_size=options.page_size,
            weights=options.resolved_dtype(),  # type: ignore[arg-type]
            kv_dtype=options.resolved_kv_dtype(),  # type: ignore[arg-type]
            index_replicated=self.spec.index_replicated,
            dcp_comm=options.dcp_comm,  # type: ignore[arg-type]
        )
        whole = "step" in options.parts or not options.random_weights
        held = [model.param_defs] if whole else []
        held += [graph.defs for graph in self.graphs.values()] if options.random_weights else []
        shapes = [self.shape(case) for case in options.cases]
        check_fits(
            options.cases,
            sum(param_bytes(defs, model.mesh) for defs in held),
            self.spec,
            step_bytes(self.cfg, layout, shapes, options.variants()),
            device_bytes(model.mesh),
        )

    def _make_arrays(self) -> None:
        options, mesh = self.options, self.model.mesh
        self.cache = random_cache(self.spec, mesh, options.seed)
        if not options.random_weights:
            self.params = load_params(str(options.model), self.model, progress=options.progress)
            layers = self.params["layers"]
            self.layer_params = {k: layers[str(g.timed.number)] for k, g in self.graphs.items()}
            return
        whole = self.model.param_defs if "step" in options.parts else {}
        self.params = random_params(whole, mesh, options.seed)
        self.layer_params = {
            kind: random_params(graph.defs, mesh, options.seed + 1 + i)
            for i, (kind, graph) in enumerate(self.graphs.items())
        }

    def shape(self, case: Case) -> Shape:
        """The bucket of a case."""
        options = self.options
        return shape_of(case, options.page_size, options.dcp_size, self.spec.pages)

    def inputs(self, case: Case) -> Inputs:
        """The batch, its pages dealt in random order, and the input of a layer."""
        options, model, shape = self.options, self.model, self.shape(case)
        rng = np.random.default_rng(options.seed)
        each = pool_pages([case], options.page_size, options.dcp_size) // case.batch
        table = np.full((shape.rows, shape.pages), -1, np.int32)
        dealt = rng.permutation(self.spec.pages)[: case.batch * each]
        table[: case.batch, :each] = dealt.reshape(case.batch, each)
        real = np.arange(shape.rows) < case.batch
        batch = Batch(
            tokens=rng.integers(0, self.cfg.vocab_size, (shape.rows, shape.tokens), np.int32),
            starts=np.where(real, case.prefix, 0).astype(np.int32),
            lengths=np.where(real, case.extend, 0).astype(np.int32),
            page_table=table,
        )
        whole = NamedSharding(model.mesh, PartitionSpec())
        size = (shape.rows, shape.tokens, self.cfg.hidden_size)
        draw = jax.jit(lambda key: jax.random.normal(key, size, model.dtype), out_shardings=whole)
        return jax.device_put(batch, whole), draw(jax.random.key(options.seed))

    def program(
        self,
        case: Case,
        part: str,
        timed: TimedLayer | None,
        variant: Variant,
        inputs: Inputs,
        selection,
    ) -> Program:
        """The compiled program of a part (`timed` is None for a step); cases share buckets."""
        path, chunk = variant
        how = path_options(path, case.tokens.prefixes)
        key = (part, timed, variant, self.shape(case), how["with_prefix"])
        if key in self._programs:
            return self._programs[key]
        options = self.options
        opts = StepOptions(
            page_size=options.page_size,
            **how,
            dcp_comm=options.dcp_comm,  # type: ignore[arg-type]
            index_cache=options.index_cache,  # type: ignore[arg-type]
            gather_chunk_tokens=chunk or StepOptions.gather_chunk_tokens,
            return_hidden=part == "step",
        )
        if timed is None:
            given = self.model, self.params, self.cache, inputs[0]
            traced = trace_step(*given, spec=self.spec, opts=opts)
        else:
            traced = trace_layer(
                self.graphs[timed.kind],
                part,
                self.layer_params[timed.kind],
                self.cache,
                inputs[0],
                inputs[1],
                selection,
                spec=self.spec,
                opts=opts,
            )
        self._programs[key] = compile_program(traced, self.model)
        return self._programs[key]

    def runner(
        self,
        program: Program,
        timed: TimedLayer | None,
        inputs: Inputs,
        selection: Selection | None,
    ) -> Callable[[], Any]:
        """Runs a program once, waits for it, keeps the new caches and returns the rest."""

        def run():
            if timed is None:
                given = self.params, self.cache, inputs[0]
            else:
                given = self.layer_params[timed.kind], self.cache, *inputs, selection
            out, self.cache = program.run(*given)
            return jax.block_until_ready(out)

        return run

    def scores(self, timed: TimedLayer, inputs: Inputs, tokens: np.ndarray) -> np.ndarray:
        """Index scores [B, t, S] of some query tokens, whose batch was run before."""
        found = sampled_scores(
            self.graphs[timed.kind],
            self.layer_params[timed.kind],
            self.cache,
            inputs[0],
            inputs[1],
            jnp.asarray(tokens, jnp.int32),
            spec=self.spec,
            opts=StepOptions(page_size=self.options.page_size),
        )
        return np.asarray(found)
