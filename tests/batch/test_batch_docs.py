"""The job files of docs/batch.md mean what it says, and render."""

import inspect
import re
from pathlib import Path

import av
import jsonschema
import pytest
import yaml
from PIL import Image

from videoattn.batch.command import batch
from videoattn.batch.plan import plan
from videoattn.batch.schema import schema
from videoattn.render.run import Renderer

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "batch.md").read_text()
EXAMPLES = dict(re.findall(r"^```\w+ (shots\.\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
SMALL = {"width": 64, "height": 64}
NAMES = {
    "shots.csv": ["circle-seed1", "circle-seed2", "square"],
    "shots.jsonl": [
        "a-large-red-circle-moving-right-seed1",
        "a-small-blue-square-seed1",
        "a-small-blue-square-seed2",
    ],
    "shots.yaml": [
        *("circle-seed1", "circle-seed2"),
        *("crossed-1", "crossed-2", "crossed-3", "crossed-4"),
        *("zipped-1", "zipped-2", "moving-on"),
    ],
}


@pytest.fixture(scope="module")
def renderer():
    renderer = Renderer(device="cpu", local_files_only=True)
    yield renderer
    renderer.close()


@pytest.fixture
def planned(tmp_path):
    """The jobs of one example, planned as with --width 64 --height 64."""
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (64, 64), "red").save(tmp_path / "pictures" / "first-frame.png")

    def make(name):
        (tmp_path / name).write_text(EXAMPLES[name])
        return plan(tmp_path / name, defaults=SMALL, local_files_only=True)

    return make


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_render(tmp_path, renderer, planned, name):
    jobs = planned(name)
    assert [re.sub(r"-[0-9a-f]{8}$", "", job.name) for job in jobs] == NAMES[name]
    for job in jobs:
        renderer.render(job.prepared, output=tmp_path / f"{job.name}.mp4")
        with av.open(str(tmp_path / f"{job.name}.mp4")) as clip:
            assert len(list(clip.decode(video=0))) == 9


def test_what_the_yaml_example_says_of_itself(planned):
    jobs = {each.name: each.job for each in planned("shots.yaml")}
    square, star = "a small blue square", "a small green star"
    crossed = [(jobs[f"crossed-{n}"].prompt, jobs[f"crossed-{n}"].guidance_scale) for n in range(1, 5)]
    assert crossed == [(square, 1), (square, 3), (star, 1), (star, 3)]
    zipped = [(jobs[f"zipped-{n}"].prompt, jobs[f"zipped-{n}"].seed) for n in (1, 2)]
    assert zipped == [(square, 11), (star, 12)]
    jsonschema.validate(yaml.safe_load(EXAMPLES["shots.yaml"]), schema())


def test_the_page_names_every_option():
    for option in inspect.signature(batch).parameters.keys() - {"jobs", "settings", "output"}:
        name = option.replace("_", "-")
        assert f"--{name}" in PAGE or f"--no-{name}" in PAGE, option
