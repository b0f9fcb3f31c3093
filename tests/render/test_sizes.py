import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import pipelines
from videoattn.render.errors import UsageError
from videoattn.render.sizes import Grid
from videoattn.render.sources import Source, describe

GRIDS = st.builds(Grid, st.sampled_from([32, 64]), st.sampled_from([4, 8]))


@given(GRIDS, st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 500))
def test_the_named_sizes_are_legal_and_nearest(grid, width, height, num_frames):
    try:
        grid.check(width, height, num_frames)
    except UsageError as error:
        for name, value, step, offset in (
            ("width", width, grid.pixels, 0),
            ("height", height, grid.pixels, 0),
            ("num_frames", num_frames, grid.frames, 1),
        ):
            found = re.search(rf"{name} {value}: use ([\d or]+)", str(error))
            legal = (value - offset) % step == 0
            assert legal == (found is None)
            for near in map(int, re.findall(r"\d+", found.group(1)) if found else []):
                assert near > 0
                assert (near - offset) % step == 0
                assert abs(near - value) < step
    else:
        assert width % grid.pixels == 0
        assert height % grid.pixels == 0
        assert (num_frames - 1) % grid.frames == 0


def test_a_frame_count_that_diffusers_floors_is_refused():
    grid = Grid(32, 8)
    frames = pipelines.call_ltx(pipelines.ltx_pipeline(), num_frames=20)
    assert frames.shape[1] == 17
    with pytest.raises(UsageError, match="num_frames 20: use 17 or 25"):
        grid.check(128, 96, 20)


def test_two_stages_need_sizes_that_halve():
    with pytest.raises(UsageError, match="height 96: use 64 or 128"):
        Grid(32, 8).halved_first().check(128, 96, 17)


@pytest.mark.parametrize("folder", ["ltx_folder", "ltx2_folder", "ltx20_folder", "ltx25_folder"])
def test_configs_tell_what_the_loaded_pipeline_does(folder, request):
    from diffusers import DiffusionPipeline

    path = request.getfixturevalue(folder)
    info = describe(Source("tiny", path))
    pipe = DiffusionPipeline.from_pretrained(path)
    assert info.grid.pixels == pipe.vae_spatial_compression_ratio
    assert info.grid.frames == pipe.vae_temporal_compression_ratio
    assert info.layers == len(pipe.transformer.transformer_blocks)
    assert info.sound == hasattr(pipe, "vocoder")
    generations = {"ltx_folder": "0.9", "ltx2_folder": "2.3", "ltx20_folder": "2.0", "ltx25_folder": "2.5"}
    assert info.generation == generations[folder]
