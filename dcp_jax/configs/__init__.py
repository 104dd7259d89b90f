"""The `config.json` of released models, by name: what `plan` and `check-config` take for a model.

DeepSeek-V3.2 and GLM-5.2 (GLM-5.3 has the same sizes) are the released files' values that matter
here; GLM-5 (GLM-5.1) has the defaults of Hugging Face's class, to which GLM-5.1's file is equal.
"""

import json
from importlib import resources
from typing import Any

NAMES = ("deepseek-v3.2", "glm-5", "glm-5.2")


def named_config(name: str) -> dict[str, Any]:
    """The `config.json` of a released model, ready for `ModelConfig.from_hf`.

    Raises:
        ValueError: no such name; the message lists those there are.
    """
    if name not in NAMES:
        raise ValueError(
            f"{name!r} is no released model known by name: use one of {', '.join(NAMES)}, or a "
            "checkpoint directory."
        )
    return json.loads((resources.files(__package__) / f"{name}.json").read_text(encoding="utf-8"))
