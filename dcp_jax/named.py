"""Models by name: the checkpoints that come with the package.

In a checkout they lie under `checkpoints/`; a wheel has them inside the package.
"""

from pathlib import Path

NAMES = ("tiny-dsa",)

_PACKAGE = Path(__file__).parent
_PLACES = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


def find_model(model: str | Path) -> Path:
    """The directory of a checkpoint, given by its path or by its name.

    A directory that exists wins over a name.

    Args:
        model: path, or one of `NAMES`.

    Raises:
        ValueError: neither a checkpoint nor a name, or a model that this installation lacks.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if str(model) not in NAMES:
        raise ValueError(
            f"{model} holds no config.json: give a checkpoint directory, or the name of a model "
            f"in the box ({', '.join(NAMES)})."
        )
    for place in _PLACES:
        if (place / path / "config.json").is_file():
            return place / path
    raise ValueError(
        f"{model} is a model in the box ({', '.join(NAMES)}), but this installation has none of "
        f"its files under {_PLACES[-1]}: take a checkout or a wheel that does, or give a "
        "checkpoint directory."
    )
