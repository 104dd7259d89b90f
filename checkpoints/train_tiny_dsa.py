"""Train `checkpoints/tiny-dsa`: `make train-tiny` runs all of it in order.

    python checkpoints/train_tiny_dsa.py corpus CORPUS.npz --archives .data
    python checkpoints/train_tiny_dsa.py train --dir STATE --corpus CORPUS.npz --seconds 540
    python checkpoints/train_tiny_dsa.py evaluate --dir STATE --corpus CORPUS.npz
    python checkpoints/train_tiny_dsa.py export --dir STATE checkpoints/tiny-dsa
    python checkpoints/train_tiny_dsa.py report --dir STATE --corpus CORPUS.npz checkpoints/tiny-dsa

`train` goes on from the state in its directory; run it again until it says that all is done (exit
status 3 says that some is left). One GPU; nothing but jax, flax and numpy is needed to train.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

logger = logging.getLogger("train_tiny_dsa")

EVALUATION_FILE = "evaluation.json"
LEFT = 3  # exit status of `train`: time was up


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except ValueError as error:
        logger.error("error: %s", error)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    corpus = commands.add_parser("corpus", help="collect the text")
    corpus.add_argument("out", type=Path)
    corpus.add_argument("--archives", type=Path, default=Path(".data"), help="where pip put them")
    corpus.set_defaults(run=_corpus)

    def add(name: str, run, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary)
        command.add_argument("--dir", type=Path, required=True, help="of the training state")
        command.set_defaults(run=run)
        return command

    def on_device(command: argparse.ArgumentParser) -> None:
        command.add_argument("--corpus", type=Path, required=True, help="what `corpus` wrote")
        command.add_argument("--cache", type=Path, help="directory of compiled programs")
        command.add_argument("--seconds", type=float, default=float("inf"), help="stop after")
        command.add_argument("--attention", choices=("auto", "xla", "cudnn"), default="auto")
        command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")

    train = add("train", _train, "train, or go on training")
    on_device(train)
    train.add_argument("--workers", type=int, default=8, help="processes that make batches")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument(
        "--steps", nargs="*", default=[], metavar="STAGE=N", help="other step counts"
    )
    evaluate = add("evaluate", _evaluate, "measure; writes evaluation.json into the directory")
    on_device(evaluate)
    evaluate.add_argument("--trials", type=int, default=100, help="prompts per cell")
    export = add("export", _export, "write the checkpoint")
    export.add_argument("out", type=Path)
    report = add("report", _report, "write the checkpoint's README and plots")
    report.add_argument("out", type=Path)
    report.add_argument("--corpus", type=Path, required=True)
    report.add_argument("--device", required=True, help="what it was trained on, in words")
    return parser


def _corpus(args: argparse.Namespace) -> None:
    from tiny_training.corpus import build_corpus

    corpus = build_corpus(args.archives)
    corpus.save(args.out)
    logger.info("%s bytes of text, %s held out", f"{len(corpus.train):,}", len(corpus.held_out))


def _train(args: argparse.Namespace) -> int:
    from tiny_training.stages import STAGES, with_steps

    changes = {}
    for change in args.steps:
        name, _, count = change.partition("=")
        if not count.isdigit():
            raise ValueError(f"--steps {change!r} is not STAGE=N: write, say, long=1000.")
        changes[name] = int(count)
    stages = with_steps(STAGES, changes)
    attention = _prepare(args)
    from tiny_training.config import model_config
    from tiny_training.corpus import Corpus
    from tiny_training.loop import train

    done = train(
        args.dir,
        Corpus.load(args.corpus).train,
        model_config(),
        stages,
        seed=args.seed,
        workers=args.workers,
        seconds=args.seconds,
        attention=attention,
        dtype=args.dtype,
    )
    logger.info("training is done" if done else "time is up: run it again to go on")
    return 0 if done else LEFT


def _evaluate(args: argparse.Namespace) -> None:
    attention = _prepare(args)
    from tiny_training.config import model_config
    from tiny_training.corpus import Corpus
    from tiny_training.evaluate import Evaluator, evaluate

    evaluator = Evaluator(
        _load(args.dir)[0],
        model_config(),
        Corpus.load(args.corpus).held_out,
        attention=attention,
        dtype=args.dtype,
    )
    results = evaluate(evaluator, trials=args.trials, seconds=args.seconds)
    (args.dir / EVALUATION_FILE).write_text(json.dumps(results, indent=1) + "\n")


def _export(args: argparse.Namespace) -> None:
    from tiny_training.config import model_config
    from tiny_training.export import export

    logger.info("wrote %s", export(_load(args.dir)[0], model_config(), args.out))


def _report(args: argparse.Namespace) -> None:
    from tiny_training.corpus import LICENCES, Corpus
    from tiny_training.loop import LOG_FILE
    from tiny_training.optimiser import parameter_count
    from tiny_training.report import read_log, report

    params, progress = _load(args.dir)
    path = report(
        args.out,
        read_log(args.dir / LOG_FILE),
        json.loads((args.dir / EVALUATION_FILE).read_text()),
        device=args.device,
        sources=Corpus.load(args.corpus).sources,
        licences=LICENCES,
        seconds=progress["seconds"],
        parameters=parameter_count(params),
    )
    logger.info("wrote %s", path)


def _prepare(args: argparse.Namespace) -> str:
    """Set up jax; returns the implementation of attention."""
    import jax
    import jax.numpy as jnp

    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    from tiny_training.attention import pick_implementation

    attention = pick_implementation(args.attention, jnp.dtype(args.dtype))
    logger.info("%s, attention by %s", jax.devices()[0].device_kind, attention)
    return attention


def _load(directory: Path) -> tuple[dict, dict]:
    """Parameters and progress of a training state."""
    from tiny_training.config import model_config
    from tiny_training.model import init_params
    from tiny_training.optimiser import init_state
    from tiny_training.state import load_state

    found = load_state(directory, init_state(init_params(model_config(), 0)))
    if found is None:
        raise ValueError(f"{directory} has no training state: run `train` first.")
    return found[0].params, found[1]


if __name__ == "__main__":
    sys.exit(main())
