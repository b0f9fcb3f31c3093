"""Train the demo model: `t5` (a CPU is enough), then `vae`, then `dit`, then `export`.

`unpack` turns shipped weights into a folder from which `vae` and `dit` go on. `losses` prints where the
loss of shipped weights lies.

Each stage can be cut into pieces of `--minutes`; run the same command again to go on. With several GPUs
start the `vae` and `dit` stages with torchrun. Every stage logs to FOLDER/log.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=("t5", "vae", "dit", "export", "unpack", "losses"))
    parser.add_argument("--folder", type=Path, help="folder for checkpoints and the log")
    parser.add_argument("--minutes", type=float, help="length of this piece")
    parser.add_argument("--total-minutes", type=float, help="length of the whole stage (default: --minutes)")
    parser.add_argument("--batch-size", type=int, help="clips a step in each process")
    parser.add_argument("--peak", type=float, help="highest learning rate")
    parser.add_argument("--pool-size", type=int, default=32768, help="encoded clips each process keeps")
    parser.add_argument("--evaluate-every", type=float, default=120.0, help="seconds between checks of `dit`")
    parser.add_argument("--check", type=int, default=128, help="clips a check of `vae` or `dit` takes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--two-shapes", type=float, help="share of `dit`'s clips with two shapes")
    parser.add_argument(
        "--hard-share",
        type=float,
        default=0.0,
        help="share of `dit`'s clips whose scenes are as frequent as they are difficult",
    )
    parser.add_argument(
        "--decay-from", type=float, default=0.55, help="part of `dit`'s time after which the rate falls"
    )
    parser.add_argument("--until", type=float, help="`dit`: train till then, seconds since 1970")
    parser.add_argument(
        "--weights",
        type=Path,
        help="pipeline folder of `export`, `unpack` and `losses` (default: the package's own)",
    )
    arguments = parser.parse_args()
    if arguments.stage == "losses":
        from videoattn.demo.training.losses import losses

        print(losses(arguments.weights, device=arguments.device, seed=arguments.seed))
        return
    if arguments.folder is None:
        parser.error(f"{arguments.stage} needs --folder")
    minutes = (
        arguments.minutes
        or {"t5": 5.0, "vae": 8.0, "dit": 14.0, "export": 0.0, "unpack": 0.0}[arguments.stage]
    )
    total = arguments.total_minutes or minutes
    chosen = {"batch_size": arguments.batch_size, "peak": arguments.peak}
    options = {name: value for name, value in chosen.items() if value is not None}

    if arguments.stage == "t5":
        from videoattn.demo.training import text

        options.pop("peak", None)
        text.train(arguments.folder, minutes, device=arguments.device, seed=arguments.seed, **options)
    elif arguments.stage == "vae":
        from videoattn.demo.training import vae

        options |= {"device": arguments.device, "seed": arguments.seed, "check": arguments.check}
        vae.train(arguments.folder, minutes, total, **options)
    elif arguments.stage == "dit":
        from videoattn.demo.training import dit

        options |= {"device": arguments.device, "seed": arguments.seed, "check": arguments.check}
        options |= {"pool_size": arguments.pool_size, "until": arguments.until}
        options |= {"hard_share": arguments.hard_share, "decay_from": arguments.decay_from}
        if arguments.two_shapes is not None:
            options["two_shapes"] = arguments.two_shapes
        dit.train(arguments.folder, minutes, total, evaluate_every=arguments.evaluate_every, **options)
    elif arguments.stage == "unpack":
        from videoattn.demo.model import weights_path
        from videoattn.demo.training.export import unpack

        unpack(arguments.weights or weights_path(), arguments.folder)
    else:
        from videoattn.demo.model import WEIGHTS
        from videoattn.demo.training.export import export

        export(arguments.folder, arguments.weights or WEIGHTS)


if __name__ == "__main__":
    main()
