"""`dcp-jax convert`: a Hugging Face directory as an Orbax one, which restores onto any mesh."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import Positional

from dcp_jax.cli.engine import aliases


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write a Hugging Face checkpoint as an Orbax one, as it would lie on the devices.

    Quantised weights stay quantised. The whole model is held at once: on the host without
    accelerators, else on the devices that --tp names.
    """

    source: Positional[Path]
    """Hugging Face directory."""
    target: Positional[Path]
    """Directory to make."""
    tp: Annotated[int, aliases("--tp-size", "--tensor-parallel-size", "-tp")] = 1
    """Devices to hold it on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights that are not quantised; float32 dequantises those that are."""
    quantization: Annotated[Literal["none", "fp8"], aliases("-q")] = "none"
    """fp8: quantise the projections of an unquantised checkpoint to FP8 blocks."""

    def run(self, console: Console) -> None:
        """Load and save."""
        import jax.numpy as jnp

        from dcp_jax.config import ModelConfig
        from dcp_jax.devices import ensure_devices
        from dcp_jax.functional import load_params, with_quantization
        from dcp_jax.mesh import check_sizes, make_mesh
        from dcp_jax.model import Model
        from dcp_jax.weights.orbax import is_orbax, refuse_existing, save_orbax

        check_sizes(self.tp, 1)
        cfg = ModelConfig.from_hf(self.source)
        if is_orbax(self.source):
            raise ValueError(
                f"{self.source} is an Orbax directory already: give a Hugging Face one."
            )
        refuse_existing(self.target)
        dtype = cfg.dtype if self.dtype == "auto" else self.dtype
        cfg = with_quantization(cfg, self.quantization, dtype=dtype)
        ensure_devices(self.tp)
        model = Model(
            cfg, make_mesh(self.tp), jnp.dtype(dtype), with_mtp=cfg.num_nextn_predict_layers > 0
        )
        save_orbax(self.target, load_params(self.source, model, progress=True), self.source)
        console.print(f"wrote {self.target}", highlight=False)


COMMANDS = {"convert": Convert}
