"""Variants of the Hopper kernel side by side: other choices in csrc/hopper/config.h, a library for each.

Prints TFLOP/s of every variant and rival on every shape, launches interleaved as in bench_attention.py, and
for some shapes the rate and clock of back-to-back launches. --library adds the product of another version
with the same C interface on every shape, --tiles the product with other query tiles and parts of the keys at
head dim 64.

    python scripts/tune_hopper.py --variants d128short_base d128short_n64 --sustained 1
    python scripts/tune_hopper.py --variants d128_base d64_base --library before=FILE/libvideoattn.so
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_attention as bench

from videoattn.kernels import abi, accuracy, library, native

Choice = bool | int


# Configurations and their key tiles.
TILES = {
    "D128N128": 128,
    "D128N128Short": 128,
    "D64N112": 112,
    "D64N96": 96,
    "D64N96Short": 96,
    "D64N64Short": 64,
}


@dataclass(frozen=True)
class Variant:
    """A configuration of `csrc/hopper/config.h` and what it chooses instead; `why` it may pay."""

    config: str  # one of TILES
    choices: dict[str, Choice]
    why: str

    @property
    def tile(self) -> int:
        """Keys of a tile."""
        return int(self.choices.get("kTileN", TILES[self.config]))

    @property
    def head_dim(self) -> int:
        return 128 if self.config.startswith("D128") else 64

    @property
    def kernel(self) -> str:
        """Its kernel's symbol without the element type."""
        return _kernel(self.head_dim, self.tile, self.config)

    def write(self, folder: Path) -> Path:
        """A copy of csrc with these choices, under `folder`."""
        root = folder / "csrc"
        shutil.copytree(library.SOURCES, root)
        header = root / "hopper" / "config.h"
        header.write_text(self.choose(header.read_text()))
        source = root / "hopper" / "attention.cu"
        name = _kernel(self.head_dim, TILES[self.config], self.config)
        source.write_text(re.sub(rf"\b{name}_(?=bf16|fp16)", f"{self.kernel}_", source.read_text()))
        return root

    def choose(self, text: str) -> str:
        """config.h with the choices written into the configuration's struct.  Raises SystemExit."""
        found = re.search(rf"struct {self.config}Choices : \w+ {{\n(.*?)}};", text, re.DOTALL)
        if found is None:
            raise SystemExit(f"config.h has no {self.config}Choices")
        lines = found[1].splitlines()
        for name, value in self.choices.items():
            kind = re.search(rf"static constexpr (\w+) {name} =", text)
            if kind is None:
                raise SystemExit(f"config.h offers no choice {name}")
            lines = [line for line in lines if f" {name} =" not in line]
            lines.append(f"    static constexpr {kind[1]} {name} = {str(value).lower()};")
        return text[: found.start(1)] + "\n".join(lines) + "\n" + text[found.end(1) :]


def _kernel(head_dim: int, tile: int, config: str) -> str:
    return f"videoattn_hopper_d{head_dim}_n{tile}" + ("_short" if config.endswith("Short") else "")


def d128(why: str, **choices: Choice) -> Variant:
    return Variant("D128N128", choices, why)


def d64(why: str, **choices: Choice) -> Variant:
    return Variant("D64N112", choices, why)


def d128short(why: str, **choices: Choice) -> Variant:
    return Variant("D128N128Short", choices, why)


def d64short(why: str, **choices: Choice) -> Variant:
    return Variant("D64N96Short", choices, why)


VARIANTS: dict[str, Variant] = {
    "d128_base": d128("the product"),
    "d128_two_query_buffers": d128("the next tile's queries come earlier: no gain", kQueryBuffers=2),
    "d128_queries_in_smem": d128("lost", kQInRegisters=False),
    "d128_no_turns": d128("lost", kTurns=False),
    "d64_base": d64("the product"),
    "d64_stages4": d64("two more buffers hide L2 latency: the same", kStages=4),
    "d64_n80_queries": d64("queries in registers, room for 80 keys: lost", kTileN=80, kQInRegisters=True),
    "d64_no_turns": d64("lost", kTurns=False),
    "d128short_base": d128short("the product"),
    "d128short_queries_in_registers": d128short("less shared-memory traffic", kQInRegisters=True),
    "d128short_one_query_buffer": d128short("what the second is worth", kQueryBuffers=1),
    "d128short_no_turns": d128short("steps are few, tiles are short", kTurns=False),
    "d128short_n64": d128short("half a tile less padding", kTileN=64, kStages=4),
    "d64short_base": d64short("the product"),
    "d64short_one_query_buffer": d64short("what the second is worth", kQueryBuffers=1),
    "d64short_no_turns": d64short("steps are few, tiles are short", kTurns=False),
    "d64short_two_consumers": d64short(
        "two blocks of 144 keys, queries in registers: lost but for few queries",
        kConsumers=2,
        kTileN=144,
        kStages=2,
        kQInRegisters=True,
    ),
}
SHAPES = {
    "d128": [
        "self 12288",
        "self 6144",
        "text 12288x1024",
        "text 28160x1024",
        "self 28160",
        "self 5525 ragged",
    ],
    "d128short": ["text 12288x256", "text 12288x128"],
    "d64": [
        "D64 self 6144",
        "D64 self 14080",
        "video to audio 259x12288",
        "audio text 259x1024",
        "1,32,259,2048,64",
        "1,32,259,3072,64",
    ],
    "d64short": ["audio to video 12288x259", "1,32,12288,240,64", "1,32,12288,126,64", "audio self 259"],
}
SHAPE_NAMES = [name for names in SHAPES.values() for name in names]
SUSTAINED = {"self 28160", "text 12288x1024", "D64 self 14080"}


# The other family's kernels would take most of a variant's compile time.
NO_BLACKWELL = """#include "../common/launch.h"
namespace videoattn {
KernelList blackwell_kernels() { return {nullptr, 0}; }
}  // namespace videoattn
"""


def build(name: str) -> ctypes.CDLL:
    """The variant's library."""
    with tempfile.TemporaryDirectory() as folder:
        root = VARIANTS[name].write(Path(folder))
        (root / "blackwell" / "attention.cu").write_text(NO_BLACKWELL)
        return abi.declare(ctypes.CDLL(str(library.build(sources=root))))


def launch(variant: ctypes.CDLL, q, k, v, *, splits: int = 0, **options) -> torch.Tensor:
    """The variant's output; `options` go to the C call.  Raises RuntimeError with the library's reason."""
    out = torch.empty_like(q)
    made = native.fill_call(
        q,
        k,
        v,
        out,
        arch=90,
        num_sms=native.num_sms(q.device.index),
        stream=torch.cuda.current_stream().cuda_stream,
        splits=splits,
        **{"scale": q.shape[-1] ** -0.5, **options},
    )
    count = variant.videoattn_workspace_bytes(ctypes.byref(made))
    workspace = torch.empty(count, dtype=torch.uint8, device=q.device) if count else None
    made.workspace = None if workspace is None else workspace.data_ptr()
    text = ctypes.create_string_buffer(abi.MESSAGE_BYTES)
    if variant.videoattn_attention(ctypes.byref(made), text, abi.MESSAGE_BYTES) != abi.OK:
        raise RuntimeError(text.value.decode())
    return out


def other(text: str) -> tuple[str, ctypes.CDLL]:
    """Name and library of `NAME=FILE`.  Raises argparse.ArgumentTypeError."""
    name, _, file = text.partition("=")
    try:
        if name and Path(file).is_file():
            built = abi.declare(ctypes.CDLL(str(Path(file).resolve())))
            if json.loads(built.videoattn_build_info())["api_version"] == abi.VERSION:
                return name, built
    except (OSError, AttributeError):  # no library, or another one
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is not NAME=FILE with a library of this C interface there")


def tile(text: str) -> tuple[str, dict[str, int]]:
    """The text and the call's options of `ROWSxPARTS`.  Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not ROWSxPARTS, as 128x1")
    return text, {"rows": int(found[1]), "splits": int(found[2])}


def arm(variant: ctypes.CDLL, **options: int) -> bench.Arm:
    """The variant as a function of q, k and v."""
    return lambda q, k, v: launch(variant, q, k, v, **options)


def tune(
    shape: bench.Shape, arms: dict[str, bench.Arm], options: argparse.Namespace, power: bench.PowerLog
) -> dict:
    """Rates of all arms on one shape; an arm that fails or errs is left out and named."""
    inputs = bench.make_inputs(shape, torch.bfloat16, torch.cuda.get_device_properties(0).L2_cache_size)
    running = {}
    for name, function in arms.items():
        try:
            out = function(*inputs[0])
            torch.cuda.synchronize()
        except Exception as error:  # a row of the table, not the end
            print(f"    {name} did not run: {str(error)[:120]}")
            continue
        two = [x[:, :, :2] for x in inputs[0]]
        errors = accuracy.compare(out[:, :, :2], None, *two, scale=shape.head_dim**-0.5)
        if errors.passed:
            running[name] = function
        else:
            print(f"    {name} is NOT accurate: {errors}")
    times = bench.burst(running, inputs, options.rounds, 0)
    row: dict = {name: {"tflops": shape.flops / statistics.median(t) / 1e12} for name, t in times.items()}
    print(shape.name, " ".join(f"{name}:{row[name]['tflops']:.0f}" for name in row), flush=True)
    if options.sustained > 0 and shape.name in SUSTAINED:
        for name, function in running.items():

            def run(i: int, function=function):
                return function(*inputs[i % len(inputs)])

            row[name]["sustained"] = bench.sustained_block(run, options.sustained, shape.flops, power)
        cells = [
            f"{name}:{row[name]['sustained']['tflops']:.0f}@{row[name]['sustained']['sm_clock_mhz']:.0f}MHz"
            for name in running
        ]
        print("    sustained", " ".join(cells), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--library", type=other, action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--tiles", type=tile, nargs="*", default=[], metavar="ROWSxPARTS")
    parser.add_argument("--shapes", nargs="+", default=SHAPE_NAMES, choices=SHAPE_NAMES, metavar="SHAPE")
    parser.add_argument("--arms", nargs="*", default=["flash3", "flash4", "cudnn"], choices=list(bench.ARMS))
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--sustained", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument("--build", action="store_true", help="only compile into the cache; needs no GPU")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]  # the DSL under flash4 reads the command line
    if not options.build and not torch.cuda.is_available():
        print("tune_hopper needs an NVIDIA GPU", file=sys.stderr)
        return 1
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = dict(zip(options.variants, pool.map(build, options.variants), strict=True))
    if options.build:
        print(f"{len(built)} variants in {library.cache_root() / 'library'}")
        return 0
    power = bench.PowerLog()
    report = {}
    with torch.no_grad():
        for family, names in SHAPES.items():
            arms = {name: arm(lib) for name, lib in built.items() if name.startswith(f"{family}_")}
            arms |= {name: arm(lib) for name, lib in options.library}
            if family.startswith("d64"):
                arms |= {name: arm(library.load(), **choice) for name, choice in options.tiles}
            if not arms:
                continue
            arms |= {name: bench.ARMS[name] for name in options.arms}
            for name in (name for name in names if name in options.shapes):
                report[name] = tune(bench.BY_NAME.get(name) or bench.parse_shape(name), arms, options, power)
                torch.cuda.empty_cache()
    power.stop()
    if options.json is not None:
        bench.write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
