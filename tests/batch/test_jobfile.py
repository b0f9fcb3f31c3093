"""Job files: what they mean, and that each broken one says what is wrong with it, all of it at once."""

import codecs
import json

import pytest
from PIL import Image

from tests.batch.batch_cli import app
from videoattn.batch.plan import plan
from videoattn.batch.problems import JobFileError
from videoattn.render.errors import UsageError


@pytest.fixture
def file(tmp_path, ltx_folder):
    """Write a job file; MODEL stands for a tiny LTX-Video folder."""

    def write(name, text):
        path = tmp_path / name
        if isinstance(text, str):
            text = text.replace("MODEL", str(ltx_folder)).encode()
        path.write_bytes(text)
        return path

    return write


def settings(planned, *names):
    return [tuple(getattr(each.job, name) for name in names) for each in planned]


CSV = """\
prompt,seed,width,height,num_frames,num_inference_steps,model,name
"a red ball, rolling",1,64,64,9,2,MODEL,first shot

a blue ball,2,96,64,,,MODEL,
"""


def test_csv(file):
    first, second = plan(file("jobs.csv", CSV))
    assert (first.job.prompt, first.job.seed, first.job.width) == ("a red ball, rolling", 1, 64)
    assert (first.name, first.place.row, first.place.line) == ("first shot", 1, 2)
    assert (second.job.num_frames, second.job.num_inference_steps) == (161, 50)
    assert second.name == f"a-blue-ball-seed2-{second.hash[:8]}"
    assert second.place.line == 4


def test_csv_as_spreadsheets_write_it(file):
    text = '\ufeffprompt;seeds;model\r\n"one\r\nball; red";1..2;MODEL\r\na square;3;MODEL\r\n'
    jobs = plan(file("jobs.csv", text))
    assert settings(jobs, "prompt", "seed") == [
        ("one\nball; red", 1),
        ("one\nball; red", 2),
        ("a square", 3),
    ]
    assert [job.place.line for job in jobs] == [2, 2, 4]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_as_spreadsheets_write_it(file, encoding):
    text = "prompt\tseeds\tmodel\r\nun carré, rouge\t1..2\tMODEL\r\n".replace("MODEL", plan_model(file))
    content = text.encode(encoding)
    jobs = plan(file("jobs.csv", content if encoding == "utf-16" else codecs.BOM_UTF16_BE + content))
    assert settings(jobs, "prompt", "seed") == [("un carré, rouge", 1), ("un carré, rouge", 2)]


def test_jsonl_with_defaults(file):
    lines = [
        {"defaults": {"model": "MODEL", "width": 64, "height": 64, "num_frames": 9, "seeds": "1..2"}},
        {"prompt": "a ball"},
        {"prompt": ["x", "y"], "seed": 9, "width": 96},
    ]
    jobs = plan(file("jobs.jsonl", "\n\n".join(map(json.dumps, lines))))
    found = settings(jobs, "prompt", "seed", "width")
    assert found == [("a ball", 1, 64), ("a ball", 2, 64), ("x", 9, 96), ("y", 9, 96)]
    assert jobs[2].place.line == 5


YAML = """\
# a batch
defaults: {model: MODEL, width: 64, height: 64, num_frames: 9, frame_rate: 24000/1001}
jobs:
  - prompt: a red ball
    seeds: 1..3
    name: ball
  - prompt: [one, two]
    guidance_scale: [1, 3]
    zip: [prompt, guidance_scale]
    name: pair
"""


def test_yaml_and_names_of_sweeps(file):
    jobs = plan(file("jobs.yaml", YAML))
    assert [job.name for job in jobs] == ["ball-seed1", "ball-seed2", "ball-seed3", "pair-1", "pair-2"]
    assert settings(jobs[3:], "prompt", "guidance_scale") == [("one", 1.0), ("two", 3.0)]
    assert str(jobs[0].job.frame_rate) == "24000/1001"
    assert jobs[3].place.line == 7


def test_options_are_defaults_for_rows(file):
    path = file("jobs.yaml", "- {prompt: a, seed: 4}\n- {prompt: b, width: 96}\n")
    model = plan_model(file)
    jobs = plan(path, defaults={"model": model, "width": 64, "height": 64, "num_frames": 9, "seeds": "1..2"})
    assert settings(jobs, "prompt", "seed", "width") == [("a", 4, 64), ("b", 1, 96), ("b", 2, 96)]


def plan_model(file):
    return file("model.txt", "MODEL").read_text()


def test_images_are_relative_to_the_job_file_and_hashed_by_content(file, tmp_path):
    (tmp_path / "pictures").mkdir()
    picture = tmp_path / "pictures" / "a.png"
    Image.new("RGB", (64, 64), "red").save(picture)
    path = file("jobs.yaml", "- {prompt: a, image: pictures/a.png, model: MODEL, width: 64, height: 64}\n")
    (first,) = plan(path)
    assert first.job.image == str(picture)
    picture.rename(picture.with_name("b.png"))
    moved = file("moved.yaml", path.read_text().replace("a.png", "b.png"))
    (second,) = plan(moved)
    assert second.hash == first.hash
    Image.new("RGB", (64, 64), "blue").save(picture.with_name("b.png"))
    assert plan(moved)[0].hash != first.hash


def test_jobs_are_grouped_by_model_and_shape(file, ltx2_folder):
    text = f"""
- {{prompt: a, model: MODEL, width: 64, height: 64}}
- {{prompt: b, model: {ltx2_folder}, width: 64, height: 64}}
- {{prompt: c, model: MODEL, width: 96, height: 64}}
- {{prompt: d, model: MODEL, width: 64, height: 64}}
- {{prompt: e, model: {ltx2_folder}, width: 64, height: 64}}
"""
    assert "".join(job.job.prompt for job in plan(file("jobs.yaml", text))) == "adcbe"


def test_repeated_jobs_are_rendered_once_and_said(file):
    said = []
    path = file("jobs.yaml", "- {prompt: a, model: MODEL}\n- {prompt: a, seed: 0, model: MODEL}\n")
    assert len(plan(path, warn=said.append)) == 1
    assert any("row 2 repeats row 1" in text for text in said)


GOOD = "prompt,model\na ball,MODEL\n"
BROKEN = [
    (
        "latin1.csv",
        'prompt,seed\r\n"a\r\nball",1\r\nun carré,2\r\n'.encode("latin-1"),
        ["latin1.csv: line 4 is not UTF-8: save it as 'CSV UTF-8'"],
    ),
    (
        "latin1.yaml",
        "- {prompt: a}\n- {prompt: carré}\n".encode("latin-1"),
        ["latin1.yaml: line 2 is not UTF-8: save it as 'UTF-8'"],
    ),
    ("nobom.csv", GOOD.encode("utf-16-le"), ["nobom.csv: line 1 is not UTF-8: save it as 'CSV UTF-8'"]),
    ("half.tsv", GOOD.encode("utf-16")[:-1], ["half.tsv: line 2 is not UTF-16: save it as 'CSV UTF-8'"]),
    ("bell.yaml", "- {prompt: a}\n- {prompt: b\a}\n", ["bell.yaml:2: not well-formed YAML: U+0007 is in it"]),
    (
        "comma.csv",
        "prompt;guidance_scale;frame_rate\na;4,5;23,976\n",
        [
            "row 1, column guidance_scale: '4,5': input should be a valid number, unable to parse string as "
            "a number: write 4.5",
            "row 1, column frame_rate: '23,976' is no frame rate: give a number or a fraction such as "
            "24000/1001: write 23.976",
        ],
    ),
    ("jobs.txt", GOOD, ["a job file ends in .csv"]),
    ("empty.csv", "", ["holds no jobs"]),
    ("header.csv", "prompt,model\n", ["holds no jobs"]),
    (
        "typo.csv",
        "promt,model\na,MODEL\n",
        ["typo.csv:1, column promt: no such column; did you mean prompt?"],
    ),
    (
        "alien.csv",
        "prompt,zzzz\na,1\n",
        ["column zzzz: no such column; the columns are prompt, negative_prompt"],
    ),
    ("twice.csv", "prompt,seed,seed\na,1,2\n", ["column seed: the column is there twice"]),
    ("unnamed.csv", "prompt,\na,1\n", ["a column has no name"]),
    ("cells.csv", "prompt,seed\na, b,1\n", ["row 1: 3 cells for 2 columns"]),
    ("quote.csv", 'prompt,seed\n"a,1\n', ["not well-formed CSV"]),
    (
        "int.csv",
        "prompt,num_frames\na,many\n",
        ["row 1, column num_frames: 'many': input should be a valid integer"],
    ),
    (
        "range.csv",
        "prompt,seed\na,-1\n",
        ["row 1, column seed: '-1': input should be greater than or equal to 0"],
    ),
    (
        "literal.csv",
        "prompt,recipe,offload\na,two-stage,cpu\n",
        [
            "column recipe: 'two-stage': input should be 'one-stage' or 'distilled'",
            "'none', 'model' or 'group'",
        ],
    ),
    (
        "kernel.csv",
        "prompt,attention\na,flash5\n",
        ["column attention: unknown attention kernel 'flash5': choose from"],
    ),
    (
        "kind.csv",
        "prompt,attention\na,video=sdpa\n",
        ["unknown kind of attention call 'video': choose from video_self"],
    ),
    ("rate.csv", "prompt,frame_rate\na,fast\n", ["column frame_rate: 'fast' is no frame rate"]),
    ("seeds.csv", "prompt,seeds\na,8..1\n", ["row 1, column seeds: '8..1': a range goes up"]),
    ("both.csv", "prompt,seed,seeds\na,1,1..2\n", ["column seeds: give seed or seeds, not both"]),
    (
        "size.csv",
        "prompt,model,width\na,MODEL,100\n",
        ["row 1, column width: this model cannot make width 100: use 96 or 128"],
    ),
    (
        "frames.csv",
        "prompt,model,num_frames\na,MODEL,10\n",
        ["column num_frames: this model cannot make num_frames 10: use 9 or 17"],
    ),
    ("prompt.csv", "prompt,model,seed\n,MODEL,1\n", ["row 1, column prompt: there is no prompt"]),
    ("model.csv", "prompt,model\na,no such model\n", ["row 1, column model: unknown model 'no such model'"]),
    (
        "pickle.csv",
        "prompt,model\na,weights.ckpt\n",
        ["column model: cannot load weights.ckpt: weights must be safetensors"],
    ),
    ("image.csv", "prompt,model,image\na,MODEL,gone.png\n", ["column image: no such image"]),
    (
        "foreign.csv",
        "prompt,model,recipe\na,MODEL,distilled\n",
        ["column recipe: the distilled recipe is for LTX-2.x"],
    ),
    ("name.csv", "prompt,model,name\na,MODEL,../up\n", ["column name: '../up' cannot name an output"]),
    (
        "names.csv",
        "prompt,model,name\na,MODEL,x\nb,MODEL,X\n",
        ["row 2, column name: 'X' is the name of row 1 too"],
    ),
    (
        "bool.csv",
        "prompt,model,allow_offload\na,MODEL,maybe\n",
        ["column allow_offload: 'maybe' is neither true nor false"],
    ),
    ("line.jsonl", '{"prompt": "a"\n', ["line.jsonl:1: not JSON"]),
    ("list.jsonl", "[1, 2]\n", ["list.jsonl:1: a line is an object"]),
    ("key.jsonl", '{"prompt": "a", "prompt": "b"}\n', ["the column prompt is there twice"]),
    ("indent.yaml", "jobs:\n  - prompt: a\n   seed: 1\n", ["indent.yaml:3: not well-formed YAML"]),
    ("scalar.yaml", "jobs: 3\n", ["column jobs: jobs is a list"]),
    ("text.yaml", "just text\n", ["a job file is a list of jobs"]),
    (
        "top.yaml",
        "job: []\njobs: [{prompt: a, model: MODEL}]\n",
        ["top.yaml:1, column job: the top level has"],
    ),
    ("item.yaml", "- a ball\n", ["row 1: a job is a mapping"]),
    ("dup.yaml", "- {prompt: a, prompt: b, model: MODEL}\n", ["column prompt: the column is there twice"]),
    ("named.yaml", "defaults: {name: x}\njobs: [{prompt: a, model: MODEL}]\n", ["a name belongs to one job"]),
    (
        "zip.yaml",
        "- {prompt: [a, b], seeds: 1..3, zip: [prompt, seed], model: MODEL}\n",
        ["prompt has 2, seed has 3"],
    ),
    ("type.yaml", "- {prompt: no, model: MODEL}\n", ["column prompt: False: input should be a valid string"]),
]


@pytest.mark.parametrize(("name", "text", "messages"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_broken_files_say_what_is_wrong(file, capsys, name, text, messages):
    path = file(name, text)
    with pytest.raises(UsageError) as error:
        plan(path)
    for message in messages:
        assert message in str(error.value)
    assert all("\n" not in str(problem) for problem in getattr(error.value, "problems", []))
    assert app([str(path), "-o", str(path.parent / "out")], result_action="return_value") == 2
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("videoattn: ") for line in said)
    for message in messages:
        assert any(message in line for line in said)
    assert not (path.parent / "out").exists()


def test_latin_1_and_missing_files(tmp_path):
    (tmp_path / "a.csv").write_bytes("prompt\né\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"a\.csv: line 2 is not UTF-8: save it as 'CSV UTF-8'$"):
        plan(tmp_path / "a.csv")
    with pytest.raises(UsageError, match="no such job file"):
        plan(tmp_path / "b.csv")


def test_all_problems_come_at_once_in_the_order_of_the_file(file):
    text = (
        "prompt,seed,recipe,model,width\n"
        "a,-1,both,MODEL,64\n"
        "b,1,,MODEL,100\n"
        "c,1,,MODEL,64\n"
        "d,x,,nowhere at all,64\n"
    )
    with pytest.raises(JobFileError) as error:
        plan(file("many.csv", text))
    found = [(problem.place.row, problem.column) for problem in error.value.problems]
    assert sorted(found[:2]) == [(1, "recipe"), (1, "seed")]
    assert found[2:] == [(2, "width"), (4, "seed")]


MISSPELT = "promt,steps,cfg,FPS,modle,wdth,sed,zzzz,seeds"
CELLS = [
    ("a", "many", "4,5", "24", "MODEL", "64", "x", "y", "1..2"),
    ("b", "8", "3", "fast", "MODEL", "100", "", "", ""),
    ("c", "8", "3", "24", "MODEL", "64", "", "", ""),
    ("c", "8", "3", "24", "MODEL", "64", "", "", ""),
]
MEANT = {
    "promt": "prompt",
    "steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "FPS": "frame_rate",
    "modle": "model",
    "wdth": "width",
    "sed": "seed",
}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".yaml"])
def test_cells_under_misspelt_columns_are_checked_too(file, suffix):
    rows = [
        {name: cell for name, cell in zip(MISSPELT.split(","), cells, strict=True) if cell} for cells in CELLS
    ]
    if suffix == ".csv":
        lines = [MISSPELT, *(",".join(f'"{cell}"' for cell in cells) for cells in CELLS)]
        text = "\n".join(lines) + "\n"
    else:
        text = "\n".join(map(json.dumps, rows)) if suffix == ".jsonl" else json.dumps(rows)
    said = []
    with pytest.raises(JobFileError) as error:
        plan(file(f"jobs{suffix}", text), warn=said.append)
    found = [(each.place.row, each.column, each.message) for each in error.value.problems]
    asked = {column: message for _, column, message in found if "no such column" in message}
    assert asked.keys() == {*MEANT, "zzzz"}
    assert all(asked[given].endswith(f"did you mean {name}?") for given, name in MEANT.items())
    assert [each[:2] for each in found if "no such column" not in each[2]] == [
        (1, "num_inference_steps"),
        (1, "guidance_scale"),
        (2, "frame_rate"),
    ]
    assert said == []


def test_what_is_wrong_with_the_values_of_defaults_is_said_with_their_columns(file):
    text = "defaults: {frames: 10, name: x, model: MODEL}\njobs: [{prompt: a, seed: -1}, {prompt: b}]\n"
    with pytest.raises(JobFileError) as error:
        plan(file("jobs.yaml", text))
    found = {(each.place.row, each.column) for each in error.value.problems}
    assert found == {(None, "frames"), (None, "name"), (1, "seed"), (2, "num_frames")}


@pytest.mark.parametrize(
    ("column", "meant"),
    [
        *(
            ("steps", "num_inference_steps"),
            ("Steps ", "num_inference_steps"),
            ("stpes", "num_inference_steps"),
        ),
        *(("frames", "num_frames"), ("fps", "frame_rate"), ("framerate", "frame_rate")),
        *(("cfg", "guidance_scale"), ("guidance", "guidance_scale"), ("CFG scale", "guidance_scale")),
        *(
            ("Negative Prompt", "negative_prompt"),
            ("promt", "prompt"),
            ("seads", "seeds"),
            ("heigth", "height"),
        ),
    ],
)
def test_the_column_that_is_meant(file, column, meant):
    with pytest.raises(JobFileError, match=f"no such column; did you mean {meant}\\?"):
        plan(file("jobs.jsonl", json.dumps({column: "1", "model": "MODEL"})))


def test_one_problem_of_a_sweep_is_said_once(file):
    with pytest.raises(JobFileError) as error:
        plan(file("sweep.yaml", "- {prompt: a, seeds: 1..50, width: 100, model: MODEL}\n"))
    assert len(error.value.problems) == 1
