"""Every ladder step and branch compiles for its architecture, fits an SM and spills only where it says."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from videoattn.kernels import library
from videoattn.kernels.ptxas import Resources, compile_ptx, compile_report, parse_report, source_closure

pytestmark = pytest.mark.slow

LADDER = library.SOURCES / "ladder"
TABLE = json.loads((LADDER / "steps.json").read_text())
BUILDS = [(entry, arch) for entry in TABLE["steps"] + TABLE["branches"] for arch in entry["arch"]]
MAX_SMEM = 232448  # bytes of shared memory one CTA can have
SPILLS = {"v19_load_reduce-sm_103a"}  # what it teaches
# ptxas spills these for B300 only; the README says what was tried.
SPILLS |= {f"{step}-sm_103a" for step in ("16_split_row_sum", "17_phase_bits", "18_l2_promotion")}
STACKLESS = {"17_phase_bits", "18_l2_promotion"}


def name(build):
    return f"{build[0]['name']}-{build[1]}"


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Resources]]:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        made = pool.map(lambda build: compile_report(LADDER / build[0]["source"], build[1]), BUILDS)
        return {name(build): report for build, report in zip(BUILDS, made, strict=True)}


@pytest.mark.parametrize("build", BUILDS, ids=name)
def test_compiles_within_budget(build, reports):
    entry, arch = build
    resources = reports[name(build)][entry["kernel"]]
    assert list(reports[name(build)]) == [entry["kernel"]]
    assert resources.spills == (name(build) in SPILLS)
    assert resources.registers * entry["block"] <= 65536
    assert entry["dynamic_smem"] + resources.static_smem <= MAX_SMEM
    if entry["name"] in STACKLESS and arch == "sm_100a":
        assert resources.stack == 0


@pytest.mark.parametrize("build", BUILDS, ids=name)
def test_table_matches_the_kernel(build):
    """The launch table names each parameter of the kernel in order, and the block it was built for."""
    entry, arch = build
    ptx = compile_ptx(LADDER / entry["source"], arch).read_text()
    signature = re.search(rf"\.entry {entry['kernel']}\((.*?)\)(.*?)\{{", ptx, re.DOTALL)
    assert signature
    kinds = ["map" if "[128]" in p else p.split()[1] for p in signature[1].strip().split(",\n")]
    expected = {"out": ".u64", "q_len": ".u32", "kv_len": ".u32", "work_items": ".u32"}
    kinds = [re.sub(r"\.s32", ".u32", re.sub(r"\.b64", ".u64", kind)) for kind in kinds]
    assert kinds == [expected.get(arg, "map") for arg in entry["args"]]
    assert [arg for arg in entry["args"] if arg in entry["maps"]] == list(entry["maps"])
    assert f".maxntid {entry['block']}" in signature[2]
    if entry["persistent"]:
        assert "%nctaid.x" in ptx


@pytest.mark.parametrize("entry", TABLE["steps"] + TABLE["branches"], ids=lambda entry: entry["name"])
def test_boxes_fill_whole_tiles(entry):
    width = {"none": 16, "128B": 128}
    for spec in entry["maps"].values():
        columns, rows = spec["box"]
        assert columns * 2 == width[spec["swizzle"]]
        assert rows == (128 if spec["tensor"] == "q" else entry["kv_rows_per_tile"])


def test_steps_17_and_18_are_one_kernel():
    """Step 18 changes the tensor maps only, so its code must be step 17's, instruction for instruction."""

    def instructions(entry):
        text = compile_ptx(LADDER / entry["source"]).read_text()
        lines = (line.strip().split("//")[0] for line in text.splitlines())
        return [re.sub(r"_ZZ\w+E", "_ZZ", line) for line in lines if line.endswith(";") and line[0] != "."]

    steps = {entry["name"]: entry for entry in TABLE["steps"]}
    seventeen, eighteen = steps["17_phase_bits"], steps["18_l2_promotion"]
    code = [
        re.sub(r"ladder_1[78]_\w+_param", "param", "\n".join(instructions(e))) for e in (seventeen, eighteen)
    ]
    assert code[0].count("tcgen05.mma") >= 32
    assert code[0] == code[1]
    assert seventeen["maps"] != eighteen["maps"]


def test_the_build_cache_follows_includes(tmp_path):
    header, source = tmp_path / "factor.cuh", tmp_path / "kernel.cu"
    header.write_text("constexpr int kFactor = 2;\n")
    source.write_text(
        '#include "factor.cuh"\nextern "C" __global__ void scale(int* x) { x[threadIdx.x] *= kFactor; }\n'
    )
    assert source_closure(source) == [source, header]
    first = compile_ptx(source)
    assert compile_ptx(source) == first
    header.write_text("constexpr int kFactor = 3;\n")
    assert compile_ptx(source) != first


def test_a_broken_kernel_is_named(tmp_path):
    source = tmp_path / "broken.cu"
    source.write_text('extern "C" __global__ void broken() { undefined_function(); }\n')
    with pytest.raises(library.BuildError, match="undefined_function"):
        compile_ptx(source)


def test_parse_report_reads_spills():
    text = (
        "ptxas info    : Compiling entry function 'k' for 'sm_100a'\n"
        "ptxas info    : Function properties for k\n"
        "    40 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 40 bytes cumulative stack size, 3072 bytes smem"
    )
    report = parse_report(text)["k"]
    assert report == Resources(128, 40, 20, 24, 3072, 1)
    assert report.spills
